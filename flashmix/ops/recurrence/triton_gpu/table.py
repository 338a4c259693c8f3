"""Which tiles a call takes: one frozen table by kernel, head dims, rule, decay, dtype and the card. No tuning at run time.

`benchmarks/recurrence_gpu.py --table` measures the alternatives and prints what belongs here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule


class Tile(NamedTuple):
    """Channels of keys and of values at a time, warps, stages of the kernel's loop, and the most registers per thread."""

    BK: int
    BV: int = 0
    warps: int = 4
    stages: int = 1
    registers: int | None = None


class ChunkTiles(NamedTuple):
    """Tokens of a chunk, the tile of each kernel, the segments of a sequence and the precision of products.

    `maps` is the state pass that makes the maps of segments, `join` the pass that joins them (BK: columns of a map at a time), `enter` adds
    what a state that enters comes to in each. `values` is
    the output of a decay of the value axis, for which K and V are those of the transposed state: BK channels of values, BV of keys.
    """

    C: int
    decay: Tile
    scores: Tile
    state: Tile
    maps: Tile
    state_backward: Tile
    output: Tile
    pairs: Tile
    values: Tile
    join: Tile
    enter: Tile
    segments: int
    precision: str
    segment_precision: str
    inverse_precision: str


ALL = 256  # channels: a tile is never wider than the head
Rows = dict[str, dict[tuple[str, int, int], tuple[int, ...]]]
# By kernel: what a call must be (its rule, "channel" for a per-channel decay, "segments" for sequences in segments) and the most
# channels of keys and values that a row serves; the first row that fits is taken. Then BK, BV, warps, stages, registers.
HOPPER: Rows = {
    "decay": {("", ALL, ALL): (32,)},
    # With 168 registers a third program of 4 warps runs on a multiprocessor, at the cost of 16 to 112 bytes of spills. With few heads
    # (segments) 128 channels at a time take 0.093 ms instead of 0.099, with many heads 0.87 instead of 0.80.
    "scores": {
        ("channel dplr", ALL, ALL): (32, 0, 8), ("channel", ALL, ALL): (32, 0, 4),
        ("segments", ALL, ALL): (128, 0, 4, 1, 168), ("", ALL, ALL): (64, 0, 4, 1, 168),
    },
    # Of wide heads with one column key there is room for more values on twice the warps: 2.16 ms instead of 2.43.
    "state": {
        ("", 128, ALL): (ALL, 64, 4, 2), ("channel", ALL, ALL): (ALL, 32, 4, 2),
        ("tied", ALL, ALL): (ALL, 64, 8, 2), ("", ALL, ALL): (ALL, 32, 4, 2),
    },
    # Without queries and outputs there is room for one stage more.
    "maps": {
        ("channel", 128, ALL): (ALL, 64, 4, 2), ("dplr", 128, ALL): (ALL, 64, 4, 2),
        ("", 128, ALL): (ALL, 64, 4, 3), ("", ALL, ALL): (ALL, 32, 4, 2),
    },
    "state_backward": {("", 128, ALL): (ALL, 64, 4, 2), ("", ALL, ALL): (ALL, 32, 4, 2)},
    # All values in one tile where they fit: they are read once for all keys. With few values more keys (0.37 ms instead of 0.42), of
    # wide heads half the values, more keys and twice the warps (3.3 ms instead of 5.0).
    "output": {
        ("channel", ALL, 128): (32, 128), ("channel", ALL, ALL): (32, 64),
        ("dplr", ALL, 128): (32, 128), ("dplr", ALL, ALL): (32, 64),
        ("", ALL, 64): (64, 64), ("", ALL, 128): (32, 128), ("", 128, ALL): (32, 64), ("", ALL, ALL): (64, 128, 8),
    },
    "pairs": {("dplr", ALL, ALL): (16, 64), ("", ALL, ALL): (32, 64)},
    "values": {("", ALL, 128): (32, 128), ("", ALL, ALL): (32, 64)},
    # All of a map in one tile, [K, K] in float32, or where it would not fit some of its columns. With a map more on its way a
    # join of 16 segments of 8 heads of 128 channels takes 8 us less of 30.
    "join": {("linear", ALL, ALL): (ALL, 16, 4, 2), ("", 128, ALL): (ALL, 16, 4, 3), ("", ALL, ALL): (64, 16, 4, 2)},
    "enter": {("linear", ALL, ALL): (ALL, 64), ("", ALL, ALL): (32, 64, 8)},
}  # fmt: skip
# 163 KiB of shared memory and the matrix instructions of Ampere
AMPERE: Rows = HOPPER | {
    "scores": {("channel dplr", ALL, ALL): (16, 0, 8), ("channel", ALL, ALL): (16, 0, 4), ("", ALL, ALL): (64, 0, 4)},
    "state": {("", 128, ALL): (ALL, 64, 4, 2), ("dplr", ALL, ALL): (ALL, 32, 4, 1), ("", ALL, ALL): (ALL, 32, 4, 2)},
    "maps": {("", 128, ALL): (ALL, 64, 4, 2), ("dplr", ALL, ALL): (ALL, 32, 4, 1), ("", ALL, ALL): (ALL, 32, 4, 2)},
    "state_backward": {
        ("dplr", 128, ALL): (ALL, 32, 4, 2), ("dplr", ALL, ALL): (ALL, 32, 4, 1),
        ("", 128, ALL): (ALL, 64, 4, 2), ("", ALL, ALL): (ALL, 32, 4, 2),
    },
    "output": {("", ALL, 128): (32, 128), ("", ALL, ALL): (32, 64)},
    "pairs": {("", ALL, ALL): (16, 64, 8)},
    "join": {("linear", ALL, ALL): (ALL, 16, 4, 2), ("", 128, ALL): (ALL, 16, 4, 2), ("", ALL, ALL): (64, 16, 4, 2)},
}  # fmt: skip
# the same instructions with 99 KiB
SMALL: Rows = AMPERE | {
    "enter": {("linear", ALL, ALL): (ALL, 32), ("", ALL, ALL): (32, 32)},
    "state": {("", 128, ALL): (ALL, 64), ("", ALL, ALL): (ALL, 32)},
    "maps": {("", 128, ALL): (ALL, 64), ("", ALL, ALL): (ALL, 32)},
    "state_backward": {("dplr", ALL, ALL): (ALL, 32), ("", 128, ALL): (ALL, 64), ("", ALL, ALL): (ALL, 32)},
    "output": {("dplr", ALL, ALL): (32, 32), ("", ALL, ALL): (32, 64)},
}
# newer cards with 99 KiB
SMALL_BLACKWELL: Rows = HOPPER | {
    "enter": SMALL["enter"], "join": SMALL["join"],
    "state": {
        ("", 128, ALL): (ALL, 64), ("channel", ALL, ALL): (ALL, 32), ("tied", ALL, ALL): (ALL, 64, 8), ("", ALL, ALL): (ALL, 32),
    },
    "maps": {
        ("channel", 128, ALL): (ALL, 64), ("dplr", 128, ALL): (ALL, 64),
        ("", 128, ALL): (ALL, 64, 4, 3), ("", ALL, ALL): (ALL, 32),
    },
    "state_backward": {("", 128, ALL): (ALL, 64), ("", ALL, ALL): (ALL, 32)},
    "output": {
        ("dplr", ALL, ALL): (32, 32), ("channel", ALL, ALL): (32, 64),
        ("", ALL, 64): (64, 64), ("", 128, ALL): (32, 64), ("", ALL, 128): (32, 64), ("", ALL, ALL): (64, 128, 8),
    },
}  # fmt: skip
# float32, on any card. Left alone, ptxas takes 32 registers in the largest kernels and spills the rest: 18.1 ms instead of 4.2. With as
# many products per pair of tiles as DPLR has, half a tile and twice the warps up to 64 keys: 0.45 ms instead of 2.13.
FLOAT32: Rows = {
    "decay": {("", ALL, ALL): (32,)},
    "scores": {("", ALL, ALL): (32,)},
    "state": {
        ("channel dplr", 64, ALL): (ALL, 8, 4, 1, 255), ("channel dplr", ALL, ALL): (ALL, 16, 4, 1, 255),
        ("channel", ALL, ALL): (ALL, 8, 4, 1, 255), ("", 64, ALL): (ALL, 8, 4, 1, 255), ("", ALL, ALL): (ALL, 16, 4, 1, 255),
    },
    "state_backward": {("", 64, ALL): (ALL, 8, 4, 1, 255), ("", ALL, ALL): (ALL, 16, 4, 1, 255)},
    "output": {
        ("channel", ALL, ALL): (32, 32), ("dplr", 64, ALL): (32, 16, 8), ("dplr", ALL, ALL): (32, 32, 4, 1, 255),
        ("", ALL, ALL): (32, 32),
    },
    "pairs": {("", ALL, ALL): (32, 32)},
    "values": {("", ALL, ALL): (32, 32)},
    "join": {("linear", ALL, ALL): (ALL, 16, 4, 2), ("", 128, ALL): (ALL, 16, 4, 2), ("", ALL, ALL): (16, 16, 4, 2)},
    "enter": {("linear", ALL, ALL): (ALL, 16), ("", 128, ALL): (ALL, 16), ("", ALL, ALL): (16, 16)},
}  # fmt: skip
FLOAT32["maps"] = FLOAT32["state"]
# Triton's word for what `torch.set_float32_matmul_precision` asks for
FLOAT32_PRECISION = {"highest": "ieee", "high": "tf32x3", "medium": "tf32"}


class Kind(NamedTuple):
    """What tiles are chosen by."""

    rule: Rule
    decay: Decay
    K: int
    V: int
    dtype: torch.dtype
    target: gpu.Target


def kind_of(call: RecurrenceCall) -> Kind:
    return Kind(call.rule, call.decay, int(call.K), int(call.V), call.dtype, gpu.target(call.device))


@lru_cache(maxsize=1024)
def tiles(kind: Kind, segments: int, float32_precision: str) -> ChunkTiles:
    """The tiles of calls whose sequences are cut into so many segments."""
    own = {name: tile_for(name, kind, segments) for name in HOPPER}
    precision = FLOAT32_PRECISION[float32_precision]
    if kind.dtype == torch.float32:
        return ChunkTiles(
            32, **own, segments=segments, precision=precision, segment_precision=precision, inverse_precision=precision
        )
    joined = "tf32" if kind.dtype == torch.bfloat16 else "tf32x3"
    return ChunkTiles(
        64, **own, segments=segments, precision="ieee", segment_precision=joined, inverse_precision="fp16"
    )


@lru_cache(maxsize=4096)
def tile_for(kernel: str, kind: Kind, segments: int) -> Tile:
    """The table's row for a kernel, cut to the padded head dims."""
    words = {kind.rule.name.lower()}
    words |= {"channel"} if kind.decay is Decay.CHANNEL else set()
    words |= {"segments"} if segments > 1 else set()
    tile = next(
        Tile(*row)
        for (wanted, most_K, most_V), row in _table(kind)[kernel].items()
        if words.issuperset(wanted.split()) and kind.K <= most_K and kind.V <= most_V
    )
    # With 16-bit inputs the reach of rows is decided for 32 channels together: narrower heads are padded to them.
    reaches = "channel" in words and kind.dtype != torch.float32 and kernel in ("decay", "output", "pairs", "values")
    least = 32 if reaches else 16
    return tile._replace(BK=min(tile.BK, padded(kind.K, least)), BV=min(tile.BV, padded(kind.V)))


def _table(kind: Kind) -> Rows:
    if kind.dtype == torch.float32:
        return FLOAT32
    new = kind.target.capability >= (9, 0)  # operands in shared memory, more registers for the rest
    if kind.target.shared_memory < 160 * 1024:
        return SMALL_BLACKWELL if new else SMALL
    return HOPPER if new else AMPERE


def padded(channels: int, least: int = 16) -> int:
    """The tile that holds `channels`: a power of two."""
    return max(least, 1 << (channels - 1).bit_length())


def segments_of(call: RecurrenceCall, kind: Kind) -> int:
    """Into how many segments the state pass cuts each sequence: many for long ones with few heads.

    A segmented pass does the work about twice, and rounds differently. So it is chosen by the length and the heads of one
    sequence alone, whatever else is in the batch, and not for packed ones, whose lengths only the device knows.
    """
    chunks = cdiv(call.tokens, 32 if kind.dtype == torch.float32 else 64)
    if call.packed or chunks < 128:
        return 1
    programs = call.value_heads * cdiv(kind.V, tile_for("maps", kind, 1).BV)
    return 1 if programs > 64 else min(256 // programs, chunks // 32)
