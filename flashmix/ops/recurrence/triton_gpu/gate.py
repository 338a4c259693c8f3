"""The `gate` phase of a decay a channel: sums of log decays from the start of each chunk, which all other phases read.

    G_i = g_1 + ... + g_i        to base 2                                                              (2.1)

With them, how far back a row may reach in one pass: `e^{G_i - G_j}` as `e^{G_i - G_s} e^{G_s - G_j}` with one s for all pairs of
a block, the token before it, needs the second factor, above 1, in range. That is decided row by row, from its own and earlier
decays. The other gates have one number a token: the phases that need its sums make them. The gate's gradient is part of `output`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.tiles import NEAR, NEAR_TOKENS, load_rows, store_rows, to_base_2


@triton.jit
def reach_of(own, sums, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr, LIMIT: tl.constexpr):
    """Of each row, [C], the largest of these within which no channel decays by more than 2^LIMIT from the block's start to it:
    LEVELS (the chunk), NEAR (its block of 2^NEAR tokens), 0 (itself).
    """
    BLOCK: tl.constexpr = NEAR_TOKENS
    t = tl.arange(0, C)
    start = tl.where((t % BLOCK == 0)[:, None], sums - own, 0.0)
    start = tl.sum(tl.reshape(start, [C // BLOCK, BLOCK, BK]), 1)[:, None, :]
    start = tl.reshape(tl.broadcast_to(start, [C // BLOCK, BLOCK, BK]), [C, BK])
    near = tl.max(start - sums, 1) <= LIMIT
    return tl.where(tl.max(-sums, 1) <= LIMIT, LEVELS, tl.where(near, NEAR, 0))


@triton.jit(do_not_specialize=["T", "NT"])
def gate_forward_kernel(
    g, table, G, reach, T, NT, HV: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, BK channels); `reach` is `[chunks, HV, blocks of channels, C]`."""
    NK: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // (HV * NK)
    head = (tl.program_id(0) // NK) % HV
    d = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count > 0:
        own = to_base_2(load_rows(g, first, count, head, HV, K, d, C), EXACT)  # [C, BK]
        sums = tl.cumsum(own, 0)
        store_rows(G, sums, first, count, head, HV, K, d, C)
        tl.store(reach + tl.program_id(0).to(tl.int64) * C + tl.arange(0, C), reach_of(own, sums, C, BK, LEVELS, LIMIT))
