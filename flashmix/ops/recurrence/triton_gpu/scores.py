"""The `scores` phase, with the inverse of `transform`: all pairs of tokens of a chunk, and the factors of its decay.

    A_ij = x_i . y_j e^{G_e(i) - G_j}            for row keys x = q, a and column keys y = k, b         (3.1)
    T = (I - A_ab)^-1                                                                                   (4.2)

beta and the scale of the query are part of the tiles and factors that are written, so that the state phase knows neither. With at
most one decay per token the factors of rows and columns are `[chunks, HV, rows + columns, C]`; with a per-channel decay the keys
themselves are written, decayed: `e^G x` and `e^{G_C - G} y`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.correlated import find_long_rows, long_place
from flashmix.ops.recurrence.triton_gpu.decay import (
    channel_sums,
    column_factor,
    factor,
    load_anchor,
    load_reach,
    load_sums,
    needed_passes,
    pair_decay,
    pairs_of_pass,
    row_sums,
)
from flashmix.ops.recurrence.triton_gpu.keys import load_float_keys, load_keys
from flashmix.ops.recurrence.triton_gpu.tiles import (
    chunk_place,
    factor_vector,
    inverse,
    load_numbers,
    pair_tile,
    replaced,
    store_rows,
    zero_vectors,
    zeros,
)


@triton.jit
def store_pairs(out, A, at, S: tl.constexpr):
    """Writes the tiles of pairs; of ab, which stands after the pairs of q, the inverse."""
    PAIRS: tl.constexpr = len(S.ROW)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    DT: tl.constexpr = out.A.dtype.element_ty
    for p in tl.static_range(PAIRS):
        if p != COLUMNS:
            tl.store(pair_tile(out.A, at, p, S), A[p].to(DT))
    if PAIRS > COLUMNS:  # last, when the others need no registers
        if out.long is not None:
            tl.store(long_place(out, at, S), find_long_rows(A[COLUMNS], S))
        tl.store(pair_tile(out.A, at, COLUMNS, S), inverse(A[COLUMNS], S).to(DT))


@triton.jit
def products(x, A, d, at, S: tl.constexpr):
    """A += X Y^T over the channels `d`, as they are."""
    PAIRS: tl.constexpr = len(S.ROW)
    X, Y = load_keys(x, at, d, S)  # [C, BK] each
    for p in tl.static_range(PAIRS):
        row = X[S.ROW[p]]
        column = tl.trans(Y[S.COLUMN[p]])
        A = replaced(A, p, tl.dot(row, column, A[p], input_precision=S.PRECISION))
    return A


@triton.jit
def decayed_pairs(x, out, A, scale, at, S: tl.constexpr):
    """A e^{G_e(i) - G_j} with at most one decay per token; writes the factors of rows and columns."""
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    PAIRS: tl.constexpr = len(S.ROW)
    G, before, last = load_sums(x.decay, at, S)  # [C], [C], []
    column = factor(last - G)  # [C]
    for r in tl.static_range(ROWS):
        sums = row_sums(G, before, r, S)
        if r == 0:
            decay = scale * pair_decay(sums, G, r, S)  # [C, C]
            tl.store(out.total + at.chunk.to(tl.int64) * S.HV + at.head, factor(last))
            row = scale * factor(sums)  # [C]
        else:
            row = factor(sums)
            decay = pair_decay(sums, G, r, S)
            if S.TIED:
                beta = load_numbers(x.beta, at, S)  # [C]
                A = replaced(A, 0, A[0] * beta[None, :])
                decay *= -beta[None, :]
                row = -row
                column *= beta
        tl.store(factor_vector(out.factors, at, r, S), row)
        if r == ROWS - 1:
            for c in tl.static_range(COLUMNS):
                tl.store(factor_vector(out.factors, at, ROWS + c, S), column)
        for p in tl.static_range(PAIRS):
            if S.ROW[p] == r:
                A = replaced(A, p, A[p] * decay)
    return A


@triton.jit
def store_decayed_keys(out, X, Y, sums, at, d, S: tl.constexpr):
    """Writes the decayed keys of the channels `d`, and the chunk's whole decay; `sums` as `channel_sums` gives them."""
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    G, before, last = sums
    tl.store(out.total + (at.chunk.to(tl.int64) * S.HV + at.head) * S.K + d, factor(last), mask=d < S.K)
    column = factor(last[None, :] - G)  # [C, d]
    for r in tl.static_range(ROWS):
        store_rows(out.rows[r], X[r] * factor(row_sums(G, before, r, S)), at, S.K, d, S)
    for c in tl.static_range(COLUMNS):
        store_rows(out.columns[c], Y[c] * column, at, S.K, d, S)


@triton.jit
def channel_products(x, A, keys, sums, reach, d, at, S: tl.constexpr):
    """A += x_i . y_j e^{G_e(i) - G_j} over the channels `d`, in passes over pairs; without the pairs (i, i)."""
    PAIRS: tl.constexpr = len(S.ROW)
    DT: tl.constexpr = x.rows[0].dtype.element_ty
    X, Y = keys
    G, before, _ = sums
    needed = needed_passes(reach, S)
    for index in tl.range(0, S.LEVELS + 2, num_stages=1):
        if (needed >> index) & 1 == 1:
            seen, middle = pairs_of_pass(reach, index, S)
            anchor = load_anchor(x.decay, middle, at, d, S)  # [C, d]
            column = column_factor(anchor - G, S)
            for p in tl.static_range(PAIRS):
                row = (X[S.ROW[p]] * factor(row_sums(G, before, S.ROW[p], S) - anchor)).to(DT)  # [C, d]
                y = tl.trans((Y[S.COLUMN[p]] * column).to(DT))  # [d, C]
                part = tl.dot(row, y, input_precision=S.PRECISION)
                A = replaced(A, p, A[p] + tl.where(seen, part, 0.0))
    return A


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def scores_forward_kernel(x, out, where, n, S: tl.constexpr):
    """One program per (chunk, value head). A per-channel decay is part of the sums over channels, any other multiplies them."""
    at = chunk_place(tl.program_id(0) // S.HV, tl.program_id(0) % S.HV, where, n, S)
    if at.count == 0:
        return
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    A = zeros(len(S.ROW), S.C, S.C)
    own = zero_vectors(COLUMNS, S.C)  # q_i . y_i of each column
    for k0 in tl.range(0, S.K, S.BK, num_stages=1):
        d = k0 + tl.arange(0, S.BK)
        if S.DECAY == "channel":
            tl.static_assert(S.REACH % S.BK == 0, "a tile's channels must have one reach")
            X, Y = load_float_keys(x, n.scale, at, d, S)  # [C, BK] each
            sums = channel_sums(x.decay, at, d, S)
            store_decayed_keys(out, X, Y, sums, at, d, S)
            for c in tl.static_range(COLUMNS):
                own = replaced(own, c, own[c] + tl.sum(X[0] * Y[c], 1))
            A = channel_products(x, A, (X, Y), sums, load_reach(x.reach, at, k0 // S.REACH, S), d, at, S)  # [C, C] each
        else:
            A = products(x, A, d, at, S)
    if S.DECAY == "channel":
        if S.ROWS[0].DIAGONAL:
            diagonal = tl.arange(0, S.C)[:, None] == tl.arange(0, S.C)[None, :]
            for c in tl.static_range(COLUMNS):  # the pairs of q come first
                A = replaced(A, c, A[c] + tl.where(diagonal, own[c][:, None], 0.0))
    else:
        A = decayed_pairs(x, out, A, n.scale, at, S)
    store_pairs(out, A, at, S)
