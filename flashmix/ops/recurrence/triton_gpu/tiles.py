"""Tile functions that the phases share: loads and stores of token rows, decay factors, the inverse of a chunk.

A tile has `C` tokens; rows past the chunk's `count` and channels past the head's are zero, in the decay too: such a token
neither decays nor reads nor writes. Decays are summed from the chunk's start, to base 2, and each exponent is the difference of
two such sums, never above 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

# Rules and gates as kernels know them, in the order of their enums.
LINEAR: tl.constexpr = tl.constexpr(0)
TIED: tl.constexpr = tl.constexpr(1)
UNTIED: tl.constexpr = tl.constexpr(2)
DPLR: tl.constexpr = tl.constexpr(3)
HEAD: tl.constexpr = tl.constexpr(1)
TOKEN: tl.constexpr = tl.constexpr(2)
CHANNEL: tl.constexpr = tl.constexpr(3)
NO_GATE: tl.constexpr = tl.constexpr(0)
# Where the tiles of a chunk lie in `[chunks, HV, slots, C, C]`, and its factors in `[chunks, HV, 4, C]`.
QB: tl.constexpr = tl.constexpr(0)
INV: tl.constexpr = tl.constexpr(1)
AB: tl.constexpr = INV  # its gradient
QK: tl.constexpr = tl.constexpr(2)
AK: tl.constexpr = tl.constexpr(3)
# How far back rows reach in one pass over pairs: to the chunk's start, or that of a block of 2^NEAR tokens, or not at all.
NEAR: tl.constexpr = tl.constexpr(4)
NEAR_TOKENS: tl.constexpr = tl.constexpr(16)


@triton.jit
def load_rows(x, first, count, head, HEADS: tl.constexpr, D: tl.constexpr, d, C: tl.constexpr, SHIFT: tl.constexpr = 0):
    """Channels `d` of the tokens `first + SHIFT ...` of one head of `[tokens, HEADS, D]`: [C, len(d)]; outside the chunk 0."""
    t = tl.arange(0, C) + SHIFT
    at = (first + t)[:, None] * (HEADS * D) + head * D + d[None, :]
    return tl.load(x + at, mask=((t >= 0) & (t < count))[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(
    x, tile, first, count, head, HEADS: tl.constexpr, D: tl.constexpr, d, C: tl.constexpr, ADD: tl.constexpr = False
):
    """The counterpart of `load_rows`; ADDs the tile to what is there."""
    t = tl.arange(0, C)
    at = (first + t)[:, None] * (HEADS * D) + head * D + d[None, :]
    inside = (t < count)[:, None] & (d < D)[None, :]
    if ADD:
        tile += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(x, first, count, head, HEADS: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr = 0):
    """One number a token of `[tokens, HEADS]`, float32: [C]; outside the chunk 0."""
    t = tl.arange(0, C) + SHIFT
    return tl.load(x + (first + t) * HEADS + head, mask=(t >= 0) & (t < count), other=0.0).to(tl.float32)


@triton.jit
def to_base_2(g, EXACT: tl.constexpr):
    """A log decay to base 2, never below what makes a factor 0 in float32 (so that differences of sums stay finite).

    It is summed in float32, beside float32 operands (EXACT) in float64: differences of sums are exponents.
    """
    SUM: tl.constexpr = tl.float64 if EXACT else tl.float32
    return tl.maximum(g.to(SUM) * tl.full([], LOG2E, SUM), -160.0)  # a bare constant would be rounded to float32


@triton.jit
def load_sums(g, first, count, head, GATE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """For the gates with one number a token: G_i, [C], the same without the token's own decay, and the chunk's whole sum."""
    t = tl.arange(0, C)
    inside = t < count
    if GATE == NO_GATE:
        own = tl.zeros([C], tl.float32)
    elif GATE == HEAD:
        own = tl.where(inside, to_base_2(tl.load(g + head), EXACT), 0.0)
    else:
        own = tl.where(inside, to_base_2(tl.load(g + (first + t) * HEADS + head, mask=inside, other=0.0), EXACT), 0.0)
    G = tl.cumsum(own, 0)
    return G, G - own, tl.sum(own, 0)


@triton.jit
def factor(exponent):
    """2^exponent in float32; an exponent that rounding took above 0 is 0. Of a float64 exponent it is exact, else as the
    hardware's approximation has it (2^-22): equal decays of all tokens make its error one that adds up.
    """
    return tl.exp2(tl.minimum(exponent, 0.0)).to(tl.float32)


@triton.jit
def pair_decay(rows, columns, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """E_ij = 2^(rows_i - columns_j) for j <= i, j < i for rows that are EXCLUSIVE, else 0: [C, C]."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    seen = (i > j) if EXCLUSIVE else (i >= j)
    return tl.where(seen, factor(rows[:, None] - columns[None, :]), 0.0)


@triton.jit
def needed_passes(reach, LEVELS: tl.constexpr):
    """A bit for each pass that some row of the chunk needs, of LEVELS + 2; see `pairs_of_pass`."""
    least = tl.min(reach, 0)
    near = tl.max((reach == NEAR).to(tl.int32), 0)
    whole = tl.max((reach == LEVELS).to(tl.int32), 0)
    halves = tl.where(least == 0, NEAR_TOKENS - 1, 0)
    halves |= tl.where(least < LEVELS, ((1 << LEVELS) - NEAR_TOKENS) << 1, 0)
    return halves | (near << NEAR) | (whole << (LEVELS + 1))


@triton.jit
def pairs_of_pass(reach, p, C: tl.constexpr, LEVELS: tl.constexpr):
    """Which pairs pass `p` is for, [C, C], and for each token the one at which their decay is cut in two, [C], -1: the start.

    Row i meets the columns of its own block of 2^reach tokens from the block's start, in one pass; the farther ones block by
    block, where the upper half of a block of 2^(level + 1) tokens meets its lower half, from the last token of that (2.3).
    """
    own = (p == NEAR) | (p == LEVELS + 1)
    level = tl.where(p > NEAR, p - 1, p)
    size = level + tl.where(own, 0, 1)
    shift = tl.where(own, 0, level)
    t = tl.arange(0, C)
    middle = ((t >> size) << size) - 1 + tl.where(own, 0, 1 << level)
    fits = tl.where(own, reach == level, reach <= level)
    i = t[:, None]
    j = t[None, :]
    return (i >> size == j >> size) & (i >> shift > j >> shift) & fits[:, None], middle


@triton.jit
def load_anchor(G, middle, first, count, head, HV: tl.constexpr, K: tl.constexpr, d, C: tl.constexpr):
    """The sums of decays of the tokens `middle`, [C, len(d)]."""
    at = (first + middle)[:, None] * (HV * K) + head * K + d[None, :]
    return tl.load(G + at, mask=((middle >= 0) & (middle < count))[:, None] & (d < K)[None, :], other=0.0)


@triton.jit
def column_factor(exponent, LIMIT: tl.constexpr):
    """2^exponent of a column key from its token to the anchor: above 1 where the anchor is before it, and then no row that
    it meets has decayed by more than 2^LIMIT from there.
    """
    return tl.exp2(tl.minimum(exponent, LIMIT * 1.0)).to(tl.float32)


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x y of float32 tiles; PRECISION "fp16" rounds the operands to float16 (as precise as tf32, at half the traffic)."""
    if PRECISION == "fp16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16))
    else:
        return tl.dot(x, y, input_precision=PRECISION)


@triton.jit
def inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I - A)^-1 of a strictly lower triangular A, [C, C], float32 (4.4): inverses of blocks of h become those of 2h."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    D = tl.where(i == j, 1.0, 0.0) + tl.where((i // 2 == j // 2) & (i > j), A, 0.0)
    for level in tl.static_range(1, 6):
        if (1 << level) < C:
            below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level), A, 0.0)
            D += product(D, product(below, D, PRECISION), PRECISION)
    return D


@triton.jit
def chunk_tile(x, chunk, head, slot, HV: tl.constexpr, SLOTS: tl.constexpr, C: tl.constexpr):
    """Pointers to one `[C, C]` tile of `[chunks, HV, SLOTS, C, C]`."""
    t = tl.arange(0, C)
    base = ((chunk.to(tl.int64) * HV + head) * SLOTS + slot) * (C * C)
    return x + base + t[:, None] * C + t[None, :]


@triton.jit
def chunk_vector(x, chunk, head, slot, HV: tl.constexpr, SLOTS: tl.constexpr, C: tl.constexpr):
    """Pointers to one vector of `[chunks, HV, SLOTS, C]`."""
    return x + ((chunk.to(tl.int64) * HV + head) * SLOTS + slot) * C + tl.arange(0, C)


@triton.jit
def state_tile(x, index, v, k, K: tl.constexpr, V: tl.constexpr):
    """Pointers to a transposed tile `[len(v), len(k)]` of state `index` of `[..., K, V]`."""
    return x + index.to(tl.int64) * (K * V) + k[None, :] * V + v[:, None]
