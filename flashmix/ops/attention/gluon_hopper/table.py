"""Tiles of the Hopper kernels: one frozen table by phase and head dims. No tuning at run time."""

from __future__ import annotations

from flashmix.ops.attention.triton_gpu.table import AttentionConfig

ROWS = 64  # of a warpgroup
Rows = dict[tuple[int, int], AttentionConfig]
# By the most channels of q and k, and of v, that a row serves (the first that fits is taken): queries and keys of a tile, warps that
# compute, stages of the rings of keys and values.
FORWARD: Rows = {
    (64, 64): AttentionConfig(192, 128, 12, 3),
    (128, 128): AttentionConfig(128, 128, 8, 2),
    (192, 128): AttentionConfig(128, 128, 8, 2),
    (192, 192): AttentionConfig(128, 64, 8, 3),
    (256, 256): AttentionConfig(128, 64, 8, 2),
}
BACKWARD: Rows = {(64, 64): AttentionConfig(128, 128, 8, 2), (192, 192): AttentionConfig(64, 128, 8, 2)}
# of dV alone
VALUES: Rows = {(192, 192): AttentionConfig(64, 128, 8, 3)}
# of dK and dV without dQ
WIDE: Rows = {(256, 256): AttentionConfig(64, 64, 8, 2)}
# of dQ alone
QUERIES: Rows = {(128, 128): AttentionConfig(128, 128, 8, 2), (256, 256): AttentionConfig(128, 64, 8, 2)}
# with ALiBi or a forget gate, which keep more a row
BIASED = {
    "forward": FORWARD | {(64, 64): AttentionConfig(128, 128, 8, 2)},
    "queries": {(256, 256): AttentionConfig(128, 64, 8, 2)},
}
PHASES = {"forward": FORWARD, "backward": BACKWARD, "values": VALUES, "wide": WIDE, "queries": QUERIES}
# In the pass over causal keys query heads 7, 15, 23, ... go from their first keys.
HEADS_OF_BOTH_WAYS = 8
# Registers a thread by the number of groups that compute: at the start of a kernel, of those groups, of the warps that only copy. The first
# group has what the others leave: with 24 for copies it would have 168, where ptxas orders its instructions in another way, and groups
# that take turns at unequal speeds lose 7 % (docs/lab_notes.md).
REGISTERS = {2: (168, 240, 24), 3: (128, 160, 32)}


def config_for(phase: str, dim_qk: int, dim_v: int, biased: bool) -> AttentionConfig:
    """The table's row for these head dims; `biased`: with ALiBi or a forget gate."""
    table = BIASED[phase] if biased and phase in BIASED else PHASES[phase]
    return next(row for (most_qk, most_v), row in table.items() if dim_qk <= most_qk and dim_v <= most_v)


def takes_llvm_passes(phase: str, channels: int, featured: bool) -> bool:
    """Whether a kernel has LLVM's passes (`flashmix/gpu/passes.py`): all but forwards of up to 64 channels and, above 192, the two passes
    backward, which spill with them. `featured` ones, with gates, slopes or a softcap, are slower without them or were not timed.
    """
    if featured:
        return True
    return channels > 64 if phase == "forward" else phase not in ("queries", "wide") or channels <= 192
