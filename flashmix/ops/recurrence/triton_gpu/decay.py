"""Decays as tiles: sums of log decays from the start of each chunk, factors made of them, and the passes of a per-channel decay.

    G_i = g_1 + ... + g_i        to base 2                                                              (2.1)

Each exponent is the difference of two such sums, never above 0. With at most one number per token, `load_sums` makes the sums where
they are needed. Those of a per-channel decay are made once, by the kernel here, with how far back each row may reach in one pass
(of a decay of the value axis with the decayed values too, of which the forward makes no pairs):
`e^{G_i - G_j}` as `e^{G_i - G_s} e^{G_s - G_j}` with one s for all pairs of a block, the token before it, needs the second factor, above 1,
in range. That is decided row by row, from its own and earlier decays. The gradient of the decay is part of `output`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import chunk_place, load_rows, store_rows

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# How far back rows reach in one pass over pairs: to the chunk's start, or that of a block of 2^NEAR tokens, or not at all.
NEAR: tl.constexpr = tl.constexpr(4)
NEAR_TOKENS: tl.constexpr = tl.constexpr(16)


@triton.jit
def to_base_2(g, S: tl.constexpr):
    """A log decay to base 2, at least -160, where a factor is 0 in float32 (so that differences of sums stay finite).

    Sums are float32, with float32 inputs (EXACT) float64: differences of sums are exponents.
    """
    SUM: tl.constexpr = tl.float64 if S.EXACT else tl.float32
    return tl.maximum(g.to(SUM) * tl.full([], LOG2E, SUM), -160.0)  # a bare constant would be rounded to float32


@triton.jit
def factor(exponent):
    """2^exponent in float32; an exponent that rounding took above 0 counts as 0.

    float64 exponents are exact. float32 uses the hardware's exp2 (relative error 2^-22); with equal decays this error has one sign
    and accumulates.
    """
    return tl.exp2(tl.minimum(exponent, 0.0)).to(tl.float32)


@triton.jit
def load_sums(g, at, S: tl.constexpr):
    """With at most one decay per token: G_i, [C], the same without the token's own decay, and the chunk's whole sum."""
    t = tl.arange(0, S.C)
    mask = t < at.count
    if S.DECAY == "none":  # constants, so that the compiler sees factors of 1
        zero = tl.full([S.C], 0.0, tl.float32)
        return zero, zero, tl.full([], 0.0, tl.float32)
    else:
        if S.DECAY == "head":
            own = tl.where(mask, to_base_2(tl.load(g + at.head), S), 0.0)
        else:
            ptr = g + (at.first + t) * S.HV + at.head
            own = tl.where(mask, to_base_2(tl.load(ptr, mask=mask, other=0.0), S), 0.0)  # [C]
        G = tl.cumsum(own, 0)
        return G, G - own, tl.sum(own, 0)


@triton.jit
def row_sums(G, before, ROW: tl.constexpr, S: tl.constexpr):
    """The sums that a row key reads with: without its own token's decay if it is exclusive."""
    if S.ROWS[ROW].EXCLUSIVE:
        return before
    else:
        return G


@triton.jit
def pair_decay(rows, columns, ROW: tl.constexpr, S: tl.constexpr):
    """E_ij = 2^(rows_i - columns_j) for j <= i, j < i for a row key that does not read its own token, else 0: [C, C]."""
    i = tl.arange(0, S.C)[:, None]
    j = tl.arange(0, S.C)[None, :]
    seen = (i >= j) if S.ROWS[ROW].DIAGONAL else (i > j)
    return tl.where(seen, factor(rows[:, None] - columns[None, :]), 0.0)


@triton.jit
def channel_sums(G, at, d, S: tl.constexpr):
    """Channels `d` of the chunk's sums of decays: G_i, [C, d], the same of the token before, and of the whole chunk, [d]."""
    own = load_rows(G, at, S.HV, S.K, d, S)  # [C, d]
    before = load_rows(G, at, S.HV, S.K, d, S, -1)  # [C, d]
    last = tl.load(G + (at.first + at.count - 1) * (S.HV * S.K) + at.head * S.K + d, mask=d < S.K, other=0.0)  # [d]
    return own, before, last


@triton.jit
def load_reach(reach, at, block, S: tl.constexpr):
    """How far back the rows of a chunk reach in a block of channels, [C]."""
    BLOCKS: tl.constexpr = (S.K + S.REACH - 1) // S.REACH
    return tl.load(reach + ((at.chunk.to(tl.int64) * S.HV + at.head) * BLOCKS + block) * S.C + tl.arange(0, S.C))


@triton.jit
def all_reach_the_start(reach, at, S: tl.constexpr):
    """Whether all rows of a chunk reach back to its start in all channels."""
    COUNT: tl.constexpr = (S.K + S.REACH - 1) // S.REACH * S.C
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    n = tl.arange(0, PADDED)
    ptr = reach + (at.chunk.to(tl.int64) * S.HV + at.head) * COUNT + n
    found = tl.load(ptr, mask=n < COUNT, other=S.LEVELS)  # [PADDED]
    return tl.min(found, 0) == S.LEVELS


@triton.jit
def needed_passes(reach, S: tl.constexpr):
    """A bit for each pass that some row of the chunk needs, of LEVELS + 2; see `pairs_of_pass`."""
    least = tl.min(reach, 0)
    near = tl.max((reach == NEAR).to(tl.int32), 0)
    whole = tl.max((reach == S.LEVELS).to(tl.int32), 0)
    halves = tl.where(least == 0, NEAR_TOKENS - 1, 0)
    halves |= tl.where(least < S.LEVELS, ((1 << S.LEVELS) - NEAR_TOKENS) << 1, 0)
    return halves | (near << NEAR) | (whole << (S.LEVELS + 1))


@triton.jit
def pairs_of_pass(reach, index, S: tl.constexpr):
    """Which pairs a pass is for, [C, C], and for each token the anchor at which their decay is cut in two, [C], -1: the start.

    Row i meets the columns of its own block of 2^reach tokens from the block's start, in one pass; the farther ones block by
    block, where the upper half of a block of 2^(level + 1) tokens meets its lower half, from the last token of that (2.3).
    """
    own = (index == NEAR) | (index == S.LEVELS + 1)
    level = tl.where(index > NEAR, index - 1, index)
    size = level + tl.where(own, 0, 1)
    shift = tl.where(own, 0, level)
    t = tl.arange(0, S.C)
    middle = ((t >> size) << size) - 1 + tl.where(own, 0, 1 << level)
    fits = tl.where(own, reach == level, reach <= level)
    i = t[:, None]
    j = t[None, :]
    return (i >> size == j >> size) & (i >> shift > j >> shift) & fits[:, None], middle


@triton.jit
def load_anchor(G, middle, at, d, S: tl.constexpr):
    """The sums of decays of the tokens `middle`, [C, d]."""
    offset = (at.first + middle)[:, None] * (S.HV * S.K) + at.head * S.K + d[None, :]
    return tl.load(G + offset, mask=((middle >= 0) & (middle < at.count))[:, None] & (d < S.K)[None, :], other=0.0)


@triton.jit
def column_factor(exponent, S: tl.constexpr):
    """2^exponent of a column key from its token to the anchor: above 1 where the anchor is before it, and then no row that
    it meets has decayed by more than 2^LIMIT from there.
    """
    return tl.exp2(tl.minimum(exponent, S.LIMIT * 1.0)).to(tl.float32)


@triton.jit
def reach_of(own, sums, S: tl.constexpr):
    """Of each row, [C], the largest of these within which no channel decays by more than 2^LIMIT from the block's start to it:
    LEVELS (the chunk), NEAR (its block of 2^NEAR tokens), 0 (itself).
    """
    BLOCK: tl.constexpr = NEAR_TOKENS
    BLOCKS: tl.constexpr = S.C // BLOCK
    t = tl.arange(0, S.C)
    start = tl.where((t % BLOCK == 0)[:, None], sums - own, 0.0)
    start = tl.sum(tl.reshape(start, [BLOCKS, BLOCK, S.BK]), 1)[:, None, :]
    start = tl.reshape(tl.broadcast_to(start, [BLOCKS, BLOCK, S.BK]), [S.C, S.BK])
    near = tl.max(start - sums, 1) <= S.LIMIT
    return tl.where(tl.max(-sums, 1) <= S.LIMIT, S.LEVELS, tl.where(near, NEAR, 0))


@triton.jit(do_not_specialize=["n"])
def decay_sums_kernel(g, G, reach, keys, where, n, S: tl.constexpr):
    """G `[B, T, HV, K]`, reach `[chunks, HV, blocks of channels, C]`, and where they are given the decayed `keys`.

    One program per (chunk, value head, BK channels).
    """
    BLOCKS: tl.constexpr = (S.K + S.BK - 1) // S.BK
    program = tl.program_id(0) // BLOCKS
    d = (tl.program_id(0) % BLOCKS) * S.BK + tl.arange(0, S.BK)
    at = chunk_place(program // S.HV, program % S.HV, where, n, S)
    if at.count > 0:
        own = to_base_2(load_rows(g, at, S.HV, S.K, d, S), S)  # [C, BK]
        sums = tl.cumsum(own, 0)
        store_rows(G, sums, at, S.K, d, S)
        tl.store(reach + tl.program_id(0).to(tl.int64) * S.C + tl.arange(0, S.C), reach_of(own, sums, S))
        if keys is not None:
            final = tl.arange(0, S.C) == at.count - 1
            last = tl.sum(tl.where(final[:, None], sums, 0.0), 0)  # [BK]
            y = load_rows(keys.y, at, S.HV, S.K, d, S).to(tl.float32)  # [C, BK]
            store_rows(keys.decayed, y * factor(last[None, :] - sums), at, S.K, d, S)
            tl.store(keys.total + (at.chunk.to(tl.int64) * S.HV + at.head) * S.K + d, factor(last), mask=d < S.K)
