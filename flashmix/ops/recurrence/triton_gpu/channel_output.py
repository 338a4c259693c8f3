"""The backward of `output` and `scores` for a per-channel decay: by way of the states, and of the pairs whose row reaches back to
the chunk's start.

There one anchor serves all pairs, and the row keys as the state phase has them, `~x = e^G x`, serve for pairs too:

    e^{G_i - G_j} x_i y_j = ~x_i (e^{-G_j} y_j)
    dX = e^G (dZ S^T + dA (e^{-G} Y))        dY = e^{G_C - G} W dS'^T + e^{-G} dA^T ~X                (3.3), (6.2)

and `x dx`, of which a decay's gradient is made, is `~x` times the bracket. The other pairs, with float32 inputs all, are added by
`channel_pairs.py`: which they are is decided row by row, so no row's sums depend on what comes after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.decay import channel_sums, column_factor, factor, load_reach, row_sums
from flashmix.ops.recurrence.triton_gpu.gradients import carried_product, decay_gradient, load_state, state_product
from flashmix.ops.recurrence.triton_gpu.keys import load_column_keys
from flashmix.ops.recurrence.triton_gpu.tiles import append, load_rows, replaced, store_rows, zeros


@triton.jit
def seen_pair_gradients(dA, S: tl.constexpr):
    """dA of the pairs that a row sees: up to its own token, or those before."""
    PAIRS: tl.constexpr = len(S.ROW)
    i = tl.arange(0, S.C)[:, None]
    j = tl.arange(0, S.C)[None, :]
    for p in tl.static_range(PAIRS):
        seen = (i >= j) if S.ROWS[S.ROW[p]].DIAGONAL else (i > j)
        dA = replaced(dA, p, tl.where(seen, dA[p], 0.0))
    return dA


@triton.jit
def one_pass_gradients(dA, X, Y, reaches, S: tl.constexpr):
    """dA Y by row, and dA^T X by column, of the rows that reach back to the start, [C, BK] each."""
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    PAIRS: tl.constexpr = len(S.ROW)
    to_rows = zeros(ROWS, S.C, S.BK)
    to_columns = zeros(COLUMNS, S.C, S.BK)
    for p in tl.static_range(PAIRS):
        own = tl.where(reaches, X[S.ROW[p]], 0.0)
        to_row = tl.dot(dA[p], Y[S.COLUMN[p]], to_rows[S.ROW[p]], input_precision=S.PRECISION)
        to_column = tl.dot(tl.trans(dA[p]), own, to_columns[S.COLUMN[p]], input_precision=S.PRECISION)
        to_rows = replaced(to_rows, S.ROW[p], to_row)
        to_columns = replaced(to_columns, S.COLUMN[p], to_column)
    return to_rows, to_columns


@triton.jit
def store_row_gradients(out, X, dX, sums, scale, at, k, S: tl.constexpr):
    """Writes e^{G_e} dX; returns it for the row -k of a TIED rule, and ~x dX of rows that read after and before their decay."""
    ROWS: tl.constexpr = len(S.ROWS)
    G, before = sums
    inclusive = tl.full([S.C, S.BK], 0.0, tl.float32)
    exclusive = tl.full([S.C, S.BK], 0.0, tl.float32)
    for r in tl.static_range(ROWS):
        share = X[r] * dX[r]
        if S.ROWS[r].EXCLUSIVE:
            exclusive = share if r == 0 else exclusive + share
        else:
            inclusive = share if r == 0 else inclusive + share
        row = factor(row_sums(G, before, r, S))
        if r == 0:
            store_rows(out.rows[r], dX[r] * (scale * row), at, S.K, k, S)
        elif S.TIED:
            dX = replaced(dX, r, dX[r] * row)
        else:
            store_rows(out.rows[r], dX[r] * row, at, S.K, k, S)
    return dX, inclusive, exclusive


@triton.jit
def channel_tile(inputs, dA, beta, out, at, k0, S: tl.constexpr):
    """The gradients of BK channels with a per-channel decay: writes those of keys and decay, returns that of beta, [C].

    The rows of `scores` are decayed, the query with its scale. No pairs if EXACT.
    """
    tl.static_assert(S.REACH % S.BK == 0, "a tile's channels must have one reach")
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    scores, x, values, whole, scale = inputs
    dZ, W = whole
    DT: tl.constexpr = dZ[0].dtype
    beta = beta[:, None]
    dbeta = tl.full([S.C], 0.0, tl.float32)
    ks = k0 + tl.arange(0, S.BK)
    G, before, last = channel_sums(x.decay, at, ks, S)  # [C, BK]
    column = factor(last[None, :] - G)
    state = load_state(values.states, at, tl.arange(0, S.BV), ks, S)  # [BV, BK]
    dstate = load_state(values.dstates, at, tl.arange(0, S.BV), ks, S)  # [BV, BK]
    carried = carried_product(values, state, dstate, at, ks, S)
    X = append((), load_rows(scores.rows[0], at, S.HV, S.K, ks, S))  # [C, BK] each
    Y = load_column_keys(x.columns, at, ks, S)  # [C, BK] each
    k = Y[0]
    if S.TIED:
        Y = ((k * beta).to(DT),)
    dX = ()
    for r in tl.static_range(ROWS):
        if r > 0:  # row by row, which spills less
            X = append(X, load_rows(scores.rows[r], at, S.HV, S.K, ks, S))  # [C, BK]
        dX = append(dX, state_product(values.dz[r], dZ[r], values.states, state, at, ks, S))
    if not S.EXACT:
        back = column_factor(-G, S)
        Y_back = ()
        for c in tl.static_range(COLUMNS):
            Y_back = append(Y_back, (Y[c] * back).to(DT))
        reaches = (load_reach(x.reach, at, k0 // S.REACH, S) == S.LEVELS)[:, None]  # [C, 1]
        to_rows, to_columns = one_pass_gradients(dA, X, Y_back, reaches, S)
        for r in tl.static_range(ROWS):
            dX = replaced(dX, r, dX[r] + tl.where(reaches, to_rows[r], 0.0))
    dX, inclusive, exclusive = store_row_gradients(out, X, dX, (G, before), scale, at, ks, S)
    written = tl.full([S.C, S.BK], 0.0, tl.float32)
    for c in tl.static_range(COLUMNS):
        d = state_product(values.w[c], W[c], values.dstates, dstate, at, ks, S) * column
        written += Y[c] * d
        if not S.EXACT:
            inclusive -= Y_back[c] * to_columns[c]
            d += to_columns[c] * back
        if S.TIED:
            dbeta += tl.sum(k * d, 1)
            store_rows(out.columns[c], beta * d - dX[ROWS - 1], at, S.K, ks, S)
        else:
            store_rows(out.columns[c], d, at, S.K, ks, S)
    if out.decay is not None:
        if S.EXACT:
            dg = decay_gradient(inclusive, exclusive, written, at.count, S)
        else:
            dg = tl.cumsum(inclusive + exclusive - written, 0, reverse=True) - exclusive + tl.sum(written, 0)[None, :]
        store_rows(out.decay, dg + (carried * factor(last))[None, :], at, S.K, ks, S)
    return dbeta
