"""Which tiles a call takes: one frozen table, by phase, padded head dim, dtype and the GPU's shared memory. No tuning at run time.

`benchmarks/attention.py --tune` measures candidates and prints the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmix.gpu import device as gpu


class AttentionConfig(NamedTuple):
    """Queries and keys of a tile, warps, stages of the loop over whole tiles; with a bias of scores the most registers a thread."""

    BM: int
    BN: int
    warps: int
    stages: int
    registers: int | None = None  # at 168 a third program of 4 warps runs on a multiprocessor


SEPARATE_CHANNELS = 128
Rows = dict[str, dict[int, tuple[int, ...]]]
# By phase, then the most channels a row of the table serves (the first that fits is taken): BM, BN, warps, stages.
HOPPER: Rows = {
    "forward": {
        64: (64, 128, 4, 2, 168),
        96: (128, 64, 4, 3),
        128: (64, 64, 4, 3),
        192: (128, 64, 8, 3),
        256: (128, 64, 8, 2),
        512: (64, 32, 8, 1),
    },
    "keys": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2)},
    "keys alone": {192: (64, 128, 8, 2), 256: (64, 64, 4, 2)},
    "values": {192: (64, 128, 8, 2), 256: (64, 128, 8, 2)},
    "queries": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 192: (128, 64, 8, 2), 256: (64, 64, 4, 2)},
}
# With a forget gate, which keeps more a row, passes over keys by fewer queries at a time spill less and are faster.
HOPPER_GATED: Rows = {
    "keys": {64: (128, 64, 4, 2), 128: (32, 64, 4, 2)},
    "keys alone": {192: (32, 64, 4, 2), 256: (32, 128, 8, 2)},
}
# Not measured on a card: what compiles with the fewest spills.
BLACKWELL: Rows = HOPPER | {
    "keys": {64: (64, 64, 8, 1), 128: (64, 64, 8, 1)},
    "keys alone": {192: (64, 64, 8, 1), 256: (64, 64, 8, 1)},
    "values": {192: (64, 64, 8, 1), 256: (64, 64, 8, 1)},
    "queries": {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 64, 4, 2)},
}
# 163 KiB of shared memory and the matrix instructions of Ampere
AMPERE: Rows = {
    "forward": {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 192: (64, 32, 4, 2), 256: (64, 32, 4, 2), 512: (64, 16, 8, 1)},
    "keys": {64: (32, 64, 4, 2), 128: (32, 64, 4, 2), 192: (32, 64, 8, 2), 256: (32, 64, 8, 1)},
    "queries": {64: (64, 64, 4, 2), 128: (64, 64, 8, 1), 192: (64, 32, 8, 1), 256: (64, 32, 8, 1)},
}  # fmt: skip
# the same instructions with 99 KiB
SMALL: Rows = {
    "forward": {64: (128, 64, 4, 2), 128: (64, 32, 4, 2), 192: (64, 32, 4, 1), 256: (64, 32, 4, 1), 512: (32, 16, 4, 1)},
    "keys": {64: (32, 64, 4, 2), 128: (32, 64, 4, 1), 192: (16, 32, 4, 1), 256: (16, 32, 4, 1)},
    "queries": {64: (64, 32, 4, 2), 128: (64, 32, 4, 1), 192: (32, 16, 4, 1), 256: (32, 16, 4, 1)},
}  # fmt: skip
# float32 in full precision, on any GPU: multiplied by the ordinary units
FLOAT32: Rows = {
    "forward": {64: (32, 32, 4, 1), 128: (32, 32, 4, 1), 256: (32, 16, 8, 1), 512: (16, 16, 8, 1)},
    "keys": {64: (32, 32, 4, 1), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)},
    "queries": {64: (32, 32, 4, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
}


def phases_of_keys(channels: int, dtype: torch.dtype, target: gpu.Target) -> tuple[str, ...]:
    """The passes over keys: one for dK and dV, or one each, where both together do not fit into the registers."""
    hopper = dtype != torch.float32 and target.capability[0] >= 9 and target.shared_memory >= 160 * 1024
    return ("keys alone", "values") if hopper and channels > SEPARATE_CHANNELS else ("keys",)


def config_for(
    phase: str, channels: int, dtype: torch.dtype, target: gpu.Target, gated: bool = False
) -> AttentionConfig:
    """The table's row for a head of `channels` (the larger of q's and v's); `gated`: with a forget gate."""
    phase = "queries" if phase == "delta" else phase
    if dtype == torch.float32:
        table = FLOAT32
    elif target.shared_memory < 160 * 1024:
        table = SMALL
    else:
        table = AMPERE if target.capability[0] < 9 else HOPPER if target.capability[0] == 9 else BLACKWELL
        if gated and table is HOPPER:
            table = HOPPER | HOPPER_GATED
    return next(AttentionConfig(*config) for most, config in table[phase].items() if channels <= most)


def parts(channels: int) -> tuple[int, int]:
    """A head dim as one tile or two whose widths are powers of two: `(64, 16)` for 80, `(128, 64)` for 192."""
    for first, second in ((16, 0), (32, 0), (64, 0), (64, 16), (64, 32), (128, 0), (128, 64), (256, 0), (512, 0)):
        if channels <= first + second:
            return first, second
    raise AssertionError(f"no tile for {channels} channels")
