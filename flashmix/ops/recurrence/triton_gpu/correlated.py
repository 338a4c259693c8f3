"""The rows of T = (I - A_ab)^-1 that float32 has no room for, of float32 inputs with correlated keys (docs/chunk_algorithm.md, section 4).

Where a row of A_ab is long, because many earlier keys of the chunk point its token's way and are written with a strength near 2, the
rounding of A_ab and of T to float32 costs more than a token loop's roundings do. Such rows are made again in float64, from the keys, kept
as the sum of two float32 numbers, and multiplied in float64, by state kernels of their own: the others would spill registers. A sequence
without a long row pays for launches of programs that have nothing to do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.decay import (
    channel_sums,
    load_anchor,
    load_reach,
    load_sums,
    needed_passes,
    pairs_of_pass,
    row_sums,
)
from flashmix.ops.recurrence.triton_gpu.tiles import chunk_place, inverse, load_numbers, load_rows, pair_tile

LONG: tl.constexpr = tl.constexpr(
    3.0
)  # the sum of squares of a row of A_ab; parallel keys have it from a second token on at a strength of 2


@triton.jit
def find_long_rows(A, S: tl.constexpr):
    """A bit for each row of A_ab, [C, C], that is long."""
    tl.static_assert(S.C <= 32, "a chunk's rows must have a bit each")
    return tl.sum(tl.where(tl.sum(A * A, 1) > LONG, 1 << tl.arange(0, S.C), 0), 0)


@triton.jit
def long_place(scores, at, S: tl.constexpr):
    """Pointer to the bits of a chunk's long rows, of `[chunks, HV]`."""
    return scores.long + (at.chunk.to(tl.int64) * S.HV + at.head)


@triton.jit
def load_long(scores, at, S: tl.constexpr):
    """The bits of a chunk's long rows; 0 in kernels that leave such chunks to others."""
    if S.LONG == 2:
        return tl.load(long_place(scores, at, S))  # []
    else:
        return 0


@triton.jit
def is_left_out(scores, chunk, count, head, S: tl.constexpr):
    """Whether a pass over `count` chunks from `chunk` is another kernel's: LONG 1 takes those without a long row, 2 the others."""
    n = tl.arange(0, 128)
    found = tl.full([128], 0, tl.int32)
    for c in tl.range(0, count, 128):
        offset = (chunk + c + n).to(tl.int64) * S.HV + head
        found |= tl.load(scores.long + offset, mask=c + n < count, other=0)  # [128]
    return (tl.max((found != 0).to(tl.int32), 0) > 0) != (S.LONG == 2)


@triton.jit
def is_long(bits, S: tl.constexpr):
    """Which rows of T the bits name, [1, C]."""
    return ((bits >> tl.arange(0, S.C)) & 1 == 1)[None, :]


@triton.jit
def add_product(x, y, out, bits, S: tl.constexpr):
    """out + x y, over the tokens of x [., C] and y [C, .]; those of long rows in float64, since sums over parallel keys round one way."""
    if S.LONG != 2:
        return tl.dot(x, y, out, input_precision=S.PRECISION)
    else:
        long = is_long(bits, S)
        out = tl.dot(tl.where(long, 0.0, x), y, out, input_precision=S.PRECISION)
        if bits != 0:
            exact = tl.dot(tl.where(long, x, 0.0).to(tl.float64), y.to(tl.float64), input_precision="ieee")
            out = (out.to(tl.float64) + exact).to(tl.float32)
        return out


@triton.jit
def low_tile(scores, at, S: tl.constexpr):
    """Pointers to what long rows of T are besides its tile of pairs, of `[chunks, HV, C, C]`."""
    t = tl.arange(0, S.C)
    base = (at.chunk.to(tl.int64) * S.HV + at.head) * (S.C * S.C)
    return scores.low + base + t[:, None] * S.C + t[None, :]


@triton.jit
def load_long_rows(scores, long, at, S: tl.constexpr):
    """T in float64, [C, C]; rows that are not long are 0."""
    PLACE: tl.constexpr = len(S.COLUMN_HEADS)
    rows = tl.trans(long)  # [C, 1]
    T = tl.load(pair_tile(scores.A, at, PLACE, S)).to(tl.float64)  # [C, C]
    low = tl.load(low_tile(scores, at, S), mask=rows & (tl.arange(0, S.C) >= 0)[None, :], other=0.0)  # [C, C]
    return tl.where(rows, T + low.to(tl.float64), 0.0)


@triton.jit
def settled(x):
    """`x` [C] itself, by a sum over one number: where a float64 product's operand follows from 16-bit ones, Triton takes a layout that such
    products lack, and does not look behind a sum.
    """
    return tl.sum(x[:, None], 1)  # [C]


@triton.jit
def correction_keys(x, at, d, S: tl.constexpr):
    """Channels `d` of a and b in float64, [C, d] each."""
    COLUMN: tl.constexpr = len(S.COLUMN_HEADS) - 1
    a = load_rows(x.rows[1], at, S.ROW_HEADS[1], S.K, d, S).to(tl.float64)  # [C, d]
    if S.TIED:
        beta = settled(load_numbers(x.beta, at, S).to(tl.float64))  # [C]
        return -a, a * beta[:, None]
    else:
        b = load_rows(x.columns[COLUMN], at, S.COLUMN_HEADS[COLUMN], S.K, d, S)  # [C, d]
        return a, b.to(tl.float64)


@triton.jit
def channel_decayed_pairs(x, A, a, b, at, k0, S: tl.constexpr):
    """A += a_i . b_j e^{G_e(i) - G_j} over the channels from `k0`, in the passes of the scores, in float64."""
    d = k0 + tl.arange(0, S.BK)
    G, before, _ = channel_sums(x.decay, at, d, S)  # [C, BK] each
    rows = row_sums(G, before, 1, S)
    reach = load_reach(x.reach, at, k0 // S.REACH, S)  # [C]
    needed = needed_passes(reach, S)
    for index in tl.range(0, S.LEVELS + 2, num_stages=1):
        if (needed >> index) & 1 == 1:
            seen, middle = pairs_of_pass(reach, index, S)
            anchor = load_anchor(x.decay, middle, at, d, S)  # [C, BK]
            row = a * tl.exp2(tl.minimum(rows - anchor, 0.0))
            column = tl.trans(b * tl.exp2(tl.minimum(anchor - G, S.LIMIT * 1.0)))
            A += tl.where(seen, tl.dot(row, column, input_precision="ieee"), 0.0)
    return A


@triton.jit
def exact_correction_pairs(x, at, S: tl.constexpr):
    """A_ab in float64, [C, C]."""
    C: tl.constexpr = S.C
    A = tl.full([C, C], 0.0, tl.float64)
    for k0 in tl.range(0, S.K, S.BK, num_stages=1):
        a, b = correction_keys(x, at, k0 + tl.arange(0, S.BK), S)  # [C, BK] each
        if S.DECAY == "channel":
            A = channel_decayed_pairs(x, A, a, b, at, k0, S)
        else:
            A += tl.dot(a, tl.trans(b), input_precision="ieee")
    if S.DECAY != "channel":
        G, before, _ = load_sums(x.decay, at, S)  # [C]
        decay = tl.exp2(tl.minimum(settled(row_sums(G, before, 1, S))[:, None] - G[None, :], 0.0))  # [C, C]
        A = tl.where(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], A * decay, 0.0)
    return A


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def long_rows_kernel(x, out, where, n, S: tl.constexpr):
    """One program per (chunk, value head): its long rows of T anew, the high part in the tile of pairs, the rest in `out.low`."""
    PLACE: tl.constexpr = len(S.COLUMN_HEADS)
    at = chunk_place(tl.program_id(0) // S.HV, tl.program_id(0) % S.HV, where, n, S)
    if at.count > 0:
        bits = tl.load(long_place(out, at, S))  # []
        if bits != 0:
            T = inverse(exact_correction_pairs(x, at, S), S)
            high = T.to(tl.float32)
            mask = tl.trans(is_long(bits, S)) & (tl.arange(0, S.C) >= 0)[None, :]
            tl.store(pair_tile(out.A, at, PLACE, S), high, mask=mask)
            tl.store(low_tile(out, at, S), (T - high.to(tl.float64)).to(tl.float32), mask=mask)
