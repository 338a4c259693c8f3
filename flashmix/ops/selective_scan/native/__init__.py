"""The selective scan in C, on a CPU: in float32, token after token, one sequence and block of channels per thread at a time.

It is part of the library of the recurrence in C, whose vectors and exponential it has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import Packing, check_boundaries
from flashmix.ops.selective_scan.call import CHUNK, SelectiveScanCall
from flashmix.ops.selective_scan.native.binding import NativeSelectiveScan, library

__all__ = ["backward", "forward", "keeps"]

LANES = 16  # as in recurrence.c
BLOCK = 128  # channels of a block, at most: their states stay in a cache
LEAST_WORK = 1 << 12  # channels of tokens for which a second thread pays


def forward(call: SelectiveScanCall, save: bool) -> tuple[Outputs, Outputs]:
    results = {"y": _empty(*call.u.shape), "state": _empty(call.sequences, *call.A.shape)}
    if save:
        results["kept"] = call.kept_states()
    _run("flashmix_selective", call, results, 2)
    return (results["y"].to(call.dtype), results["state"]), (results["kept"],) if save else ()


def keeps(call: SelectiveScanCall) -> Outputs:
    return (call.kept_states(),)


def backward(
    call: SelectiveScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    parts, (batch, tokens, groups, S) = _blocks(call)[1], call.B.shape
    results = {
        "du": _empty(*call.u.shape),
        "ddt": _empty(*call.u.shape),
        "dA": _empty(call.sequences, *call.A.shape),
        "dB": _empty(parts, batch, tokens, groups, S),
        "dC": _empty(parts, batch, tokens, groups, S),
    }
    if "initial_state" in wanted:
        results["d_initial_state"] = _empty(call.sequences, *call.A.shape)
    _run("flashmix_selective_backward", call, results, 4, kept=kept[0], d_y=grads[0], d_state=grads[1])
    found = {"u": results["du"], "dt": results["ddt"], "A": results["dA"].sum(0)}
    found |= {name: results[f"d{name}"].sum(0) for name in ("B", "C")}
    found = {name: d.to(getattr(call, name).dtype) for name, d in found.items()}
    return found | ({"initial_state": results["d_initial_state"]} if "initial_state" in wanted else {})


def _empty(*shape: int) -> Tensor:
    return torch.empty(size=shape, dtype=torch.float32, device="cpu")


def _blocks(call: SelectiveScanCall) -> tuple[int, int]:
    """Channels of a block, and blocks of a group: at least as many of all sequences as threads want."""
    width = call.u.shape[2] // max(call.groups, 1)
    wanted = -(-torch.get_num_threads() // max(call.sequences * call.groups, 1))
    block = max(LANES, min(BLOCK, -(-width // max(wanted, 1) // LANES) * LANES))
    return block, -(-width // block)


def _run(
    name: str, call: SelectiveScanCall, results: dict[str, Tensor], states: int, **operands: Tensor | None
) -> None:
    """One call of the library; `results` and `operands` by the names of `NativeSelectiveScan`.

    A thread's scratch has the numbers of a block's states so many times, and of a chunk of LANES channels.
    """
    (batch, tokens, channels), S = call.u.shape, call.A.shape[1]
    operands |= {n: getattr(call, n) for n in ("u", "dt", "A", "B", "C", "initial_state")}
    tensors = {n: t.to(torch.float32).contiguous() for n, t in operands.items() if t is not None} | results
    if call.packing is None:
        starts = torch.arange(batch + 1, device="cpu") * tokens
        chunks = torch.arange(batch + 1, device="cpu") * -(-tokens // CHUNK)
    else:
        packing = call.packing
        starts, chunks = packing.table(_run, lambda: _packed_starts(packing))
    threads = torch.get_num_threads() if batch * tokens * channels > LEAST_WORK else 1
    block, _ = _blocks(call)
    numbers = states * block * S + ((4 * CHUNK + 1) * S * LANES if states > 2 else 0)
    memory = _empty(threads * numbers)
    if not channels or not S:
        for t in results.values():
            t.zero_()
        return
    native = NativeSelectiveScan(
        sequences=call.sequences,
        channels=channels,
        states=S,
        groups=call.groups,
        block=block,
        threads=threads,
        scratch_numbers=numbers,
        starts=starts.data_ptr(),
        chunk_starts=chunks.data_ptr(),
        scratch=memory.data_ptr(),
        **{n: t.data_ptr() for n, t in tensors.items()},
    )
    getattr(library(), name)(ctypes.byref(native))


def _packed_starts(packing: Packing) -> tuple[Tensor, Tensor]:
    starts = packing.cu_seqlens.to(torch.int64)
    check_boundaries(starts.tolist(), packing.total)  # compiled, nothing has looked at them before
    chunks = torch.zeros_like(starts)
    chunks[1:] = ((starts.diff() + (CHUNK - 1)) // CHUNK).cumsum(0)
    return starts.clone(memory_format=torch.contiguous_format), chunks
