"""The gradients of the pairs of a chunk's tokens, dA = dZ W^T (6.1), and those of them that no decay lies between."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.keys import float_columns, float_rows, load_column_keys, load_row_keys
from flashmix.ops.recurrence.triton_gpu.tiles import append, load_rows, pair_tile, replaced, zeros


@triton.jit
def load_values(x, at, v, S: tl.constexpr):
    """Channels `v` of dZ (dO and dR, by row) and W (v and nu, by column) of a chunk, [C, v] each."""
    ROWS: tl.constexpr = len(x.dz)
    COLUMNS: tl.constexpr = len(x.w)
    dZ = ()
    W = ()
    for r in tl.static_range(ROWS):
        dZ = append(dZ, load_rows(x.dz[r], at, S.HV, S.V, v, S))  # [C, v]
    for c in tl.static_range(COLUMNS):
        W = append(W, load_rows(x.w[c], at, S.HV, S.V, v, S))  # [C, v]
    return dZ, W


@triton.jit
def add_pair_gradients(dA, values, S: tl.constexpr):
    """Adds dZ W^T to dA of each pair, [C, C] (6.1)."""
    PAIRS: tl.constexpr = len(S.ROW)
    dZ, W = values
    for p in tl.static_range(PAIRS):
        w = tl.trans(W[S.COLUMN[p]])
        dA = replaced(dA, p, tl.dot(dZ[S.ROW[p]], w, dA[p], input_precision=S.PRECISION))
    return dA


@triton.jit
def pair_gradients(x, values, at, S: tl.constexpr):
    """dA of the pairs, over all channels of the values; `values` are those where one tile holds them."""
    dA = zeros(len(S.ROW), S.C, S.C)
    if S.BV >= S.V:
        dA = add_pair_gradients(dA, values, S)
    else:
        for v0 in tl.range(0, S.V, S.BV):
            dA = add_pair_gradients(dA, load_values(x, at, v0 + tl.arange(0, S.BV), S), S)  # [C, C] each
    return dA


@triton.jit
def pairs_across(W, ROW: tl.constexpr, S: tl.constexpr):
    """y_t = sum of W_ij over the pairs whose factor holds the decay of t, j < t <= i (t < i if the row is exclusive): [C]."""
    i = tl.arange(0, S.C)[:, None]
    t = tl.arange(0, S.C)[None, :]
    seen = (i > t) if S.ROWS[ROW].EXCLUSIVE else (i >= t)
    return tl.sum(tl.where(seen, tl.cumsum(W, 1) - W, 0.0), 0)


@triton.jit
def decays_between(A, ROW: tl.constexpr, S: tl.constexpr):
    """The pairs (i, j), [C, C], that some decay lies between, others 0: those must not reach its gradient, not even to cancel."""
    i = tl.arange(0, S.C)[:, None]
    j = tl.arange(0, S.C)[None, :]
    return tl.where((i - 1 > j) if S.ROWS[ROW].EXCLUSIVE else (i > j), A, 0.0)


@triton.jit
def near(A, EXCLUSIVE: tl.constexpr, S: tl.constexpr):
    """The pairs that no decay lies between, by row and by column, [C, 1] each: (i, i), or (i, i - 1) if EXCLUSIVE."""
    i = tl.arange(0, S.C)[:, None]
    j = tl.arange(0, S.C)[None, :]
    pairs = tl.where((i - 1 == j) if EXCLUSIVE else (i == j), A, 0.0)
    return tl.sum(pairs, 1)[:, None], tl.sum(pairs, 0)[:, None]


@triton.jit
def split_near(dA, S: tl.constexpr):
    """dA without the pairs that no decay lies between, and `near` of each pair: by row and by column, [C, 1] each."""
    PAIRS: tl.constexpr = len(S.ROW)
    by_row = ()
    by_column = ()
    for p in tl.static_range(PAIRS):
        rows, columns = near(dA[p], S.ROWS[S.ROW[p]].EXCLUSIVE, S)
        by_row = append(by_row, rows)
        by_column = append(by_column, columns)
        if S.ROWS[S.ROW[p]].EXCLUSIVE or S.ROWS[S.ROW[p]].DIAGONAL:  # else a decay lies between all pairs
            dA = replaced(dA, p, decays_between(dA[p], S.ROW[p], S))
    return dA, by_row, by_column


@triton.jit
def add_near(gradients, keys, by_row, by_column, x, at, d, S: tl.constexpr):
    """Adds the share of the pairs that no decay lies between to dX and dY, [C, d] each."""
    PAIRS: tl.constexpr = len(S.ROW)
    LAST: tl.constexpr = len(S.ROWS) - 1
    dX, dY = gradients
    X, Y = keys
    if S.ROWS[0].EXCLUSIVE or S.ROWS[LAST].EXCLUSIVE:
        previous_Y = float_columns(load_column_keys(x.columns, at, d, S, -1), x.beta, at, S, -1)  # [C, d] each
        next_X = float_rows(load_row_keys(x.rows, at, d, S, 1), 1.0, S)  # [C, d] each
    for p in tl.static_range(PAIRS):
        if S.ROWS[S.ROW[p]].EXCLUSIVE:
            dX = replaced(dX, S.ROW[p], dX[S.ROW[p]] + by_row[p] * previous_Y[S.COLUMN[p]])
            dY = replaced(dY, S.COLUMN[p], dY[S.COLUMN[p]] + by_column[p] * next_X[S.ROW[p]])
        elif S.ROWS[S.ROW[p]].DIAGONAL:
            dX = replaced(dX, S.ROW[p], dX[S.ROW[p]] + by_row[p] * Y[S.COLUMN[p]])
            dY = replaced(dY, S.COLUMN[p], dY[S.COLUMN[p]] + by_column[p] * X[S.ROW[p]])
    return dX, dY


@triton.jit
def through_memory(dA_out, dA, at, S: tl.constexpr):
    """dA in the dtype of the inputs, of a corrected rule by a round trip through global memory: so Triton keeps a tile in shared
    memory for both products, dA and dA^T, instead of two copies in registers.
    """
    PAIRS: tl.constexpr = len(S.ROW)
    DT: tl.constexpr = dA_out.dtype.element_ty
    found = ()
    if PAIRS == 1:
        found = append(found, dA[0].to(DT))
    else:
        for p in tl.static_range(PAIRS):
            tl.store(pair_tile(dA_out, at, p, S), dA[p].to(DT))
        tl.debug_barrier()
        for p in tl.static_range(PAIRS):
            found = append(found, tl.load(pair_tile(dA_out, at, p, S)))  # [C, C]
    return found
