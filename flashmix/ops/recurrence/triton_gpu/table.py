"""The frozen table of tiles: chosen by head dimensions, gate, dtype and the card's shared memory, never by trying at run time.

`benchmarks/recurrence_gpu.py --table` measures the alternatives and prints what belongs here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashmix.gpu import device as gpu
from flashmix.gpu.sizes import cdiv, padded
from flashmix.ops.recurrence.call import Rule
from flashmix.ops.recurrence.triton_gpu.adapter import Gate, Problem

# Left alone, ptxas takes 32 registers in the largest float32 kernels and spills the rest: 18.1 ms instead of 4.2.
_ALL_REGISTERS = {"maxnreg": 255}


@dataclass(frozen=True)
class Tiles:
    """`C` tokens a chunk; of each kernel its tile of keys (`BK`) or values (`BV`), warps and pipeline stages. `maps` is the state pass
    that makes the maps of segments: without queries and outputs there is room for one stage more.
    """

    C: int
    gate: dict[str, int]
    scores: dict[str, int]
    state: dict[str, int]
    maps: dict[str, int]
    state_backward: dict[str, int]
    output: dict[str, int]
    pairs: dict[str, int]
    join: dict[str, int]
    segments: int
    precision: str
    segment_precision: str
    inverse_precision: str


def tiles(problem: Problem, segments: int | None = None) -> Tiles:
    """The entry of a problem, or with their `segments` of problems of one kind, whatever their lengths."""
    wide = problem.dtype == torch.float32
    K = padded(problem.K)
    V = padded(problem.V)
    channel = problem.gate is Gate.CHANNEL
    dplr = problem.rule is Rule.DPLR
    target = gpu.target(problem.device)
    small = target.shared_memory < 160 * 1024
    hopper = target.capability >= (9, 0)  # or newer: operands in shared memory, more registers for the rest
    if wide:
        precision = _float32_precision()
        state_backward = {"BK": K, "BV": 8 if K <= 64 else 16, "num_warps": 4, "STAGES": 1, **_ALL_REGISTERS}
        state = state_backward | ({"BV": 8} if channel and not dplr else {})
        return Tiles(
            C=32,
            gate={"BK": min(K, 32), "num_warps": 4},
            scores={"BK": min(K, 32), "num_warps": 4, "num_stages": 1},
            state=state,
            maps=state,
            state_backward=state_backward,
            output=_float32_output(K, V, dplr and not channel),
            pairs={"BK": min(K, 32), "BV": min(V, 32), "num_warps": 4, "STAGES": 1},
            join=_join(problem, K),
            segments=_segments(problem, 32, state["BV"]) if segments is None else segments,
            precision=precision,
            segment_precision=precision,
            inverse_precision=precision,
        )
    BV = min(V, 64 if K <= 128 else 32)
    segments = _segments(problem, 64, BV) if segments is None else segments
    stages = 1 if small or (dplr and K > 128 and not hopper) else 2
    return Tiles(
        C=64,
        gate={"BK": 32, "num_warps": 4},
        scores=_scores(K, channel, dplr, hopper, 128 if segments > 1 else 64),
        state={"BK": K, **_state(K, V, BV, hopper and problem.rule is Rule.TIED and not channel), "STAGES": stages},
        maps={
            "BK": K,
            "BV": BV,
            "num_warps": 4,
            "STAGES": 3 if hopper and K <= 128 and not channel and not dplr else stages,
        },
        state_backward={"BK": K, "BV": BV if hopper or not dplr else min(BV, 32), "num_warps": 4, "STAGES": stages},
        output=_output(K, V, channel, dplr, small, hopper),
        pairs={"BK": 32 if hopper and not dplr else 16, "BV": min(V, 64), "num_warps": 4 if hopper else 8, "STAGES": 1},
        join=_join(problem, K),
        segments=segments,
        precision="ieee",
        segment_precision="tf32" if problem.dtype == torch.bfloat16 else "tf32x3",
        inverse_precision="fp16",
    )


def _scores(K: int, channel: bool, dplr: bool, hopper: bool, BK: int) -> dict[str, int]:
    """With one decay a token a limit on registers lets a third program into a multiprocessor, for 100 bytes of spills; `BK` channels at
    a time are 64, but 128 for sequences in segments (0.093 ms instead of 0.099 with few heads, 0.87 instead of 0.80 with many).
    """
    if channel:
        return {"BK": min(K, 32 if hopper else 16), "num_warps": 8 if dplr else 4, "num_stages": 1}
    limit = {"maxnreg": 168} if hopper else {}
    return {"BK": min(K, BK if hopper else 64), "num_warps": 4, "num_stages": 1, **limit}


def _state(K: int, V: int, BV: int, hopper: bool) -> dict[str, int]:
    """Of wide heads with one key and one decay a token there is room for more values, on twice the warps (2.16 ms instead of 2.43)."""
    if hopper and K > 128:
        return {"BV": min(V, 64), "num_warps": 8}
    return {"BV": BV, "num_warps": 4}


def _output(K: int, V: int, channel: bool, dplr: bool, small: bool, hopper: bool) -> dict[str, int]:
    """All values in one tile where there is room for them: they are read once for all keys. With few values more keys (0.37 ms instead
    of 0.42 with 64 of both), of wide heads half the values, more keys and twice the warps (3.3 instead of 5.0 ms with 256 of both).
    """
    if hopper and not channel and not dplr:
        if V <= 64:
            return {"BK": min(K, 64), "BV": V, "num_warps": 4, "STAGES": 1}
        if K > 128 and V > 128:
            return {"BK": 64, "BV": 128, "num_warps": 8, "STAGES": 1}
    BV = min(V, 32 if dplr else 64) if small else V if V <= 128 else 64
    return {"BK": 32 if channel else min(K, 32), "BV": BV, "num_warps": 4, "STAGES": 1}


def _float32_output(K: int, V: int, many: bool) -> dict[str, int]:
    """With as many products a pair of tiles as DPLR has, half a tile and twice the warps (0.45 ms instead of 2.13), up to 64 keys."""
    if many and K <= 64:
        return {"BK": min(K, 32), "BV": min(V, 16), "num_warps": 8, "STAGES": 1}
    return {"BK": min(K, 32), "BV": min(V, 32), "num_warps": 4, "STAGES": 1, **(_ALL_REGISTERS if many else {})}


def _join(problem: Problem, K: int) -> dict[str, int]:
    """All of a map in one tile, `[K, K]` in float32, or where it would not fit some of its columns."""
    some = 16 if problem.dtype == torch.float32 else 64
    return {"BK": K, "BN": some if K > 128 and problem.rule is not Rule.LINEAR else K, "BV": 16, "num_warps": 4}


def _segments(problem: Problem, C: int, BV: int) -> int:
    """Into how many segments the state pass cuts each sequence: many for long ones with few heads.

    A segmented pass does the work about twice, and rounds differently. So it is chosen by the length and the heads of one
    sequence alone, whatever else is in the batch, and not for packed ones, whose lengths only the device knows.
    """
    chunks = cdiv(problem.tokens, C)
    programs = problem.value_heads * cdiv(problem.V, BV)
    if problem.packed or chunks < 128 or programs > 64:
        return 1
    return min(256 // programs, chunks // 32)


def _float32_precision() -> str:
    """What `torch.set_float32_matmul_precision` asks for, in Triton's words."""
    return {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}[torch.get_float32_matmul_precision()]
