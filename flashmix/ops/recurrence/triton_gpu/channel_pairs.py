"""Pairs of a per-channel decay that `channel_output.py` leaves, in passes (`pairs_of_pass`): their gradients are added to what is there.

dx = dA[u, l] (Y[l] lower)        dX[u] += upper dx          dy = dA[u, l]^T (X[u] upper)        dY[l] += lower dy        (3.4)

With 16-bit inputs: only the rows that do not reach back to the chunk's start. With float32 inputs: all rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.decay import (
    all_reach_the_start,
    channel_sums,
    column_factor,
    factor,
    load_anchor,
    load_reach,
    needed_passes,
    pairs_of_pass,
    row_sums,
)
from flashmix.ops.recurrence.triton_gpu.gradients import load_beta, store_key_gradients
from flashmix.ops.recurrence.triton_gpu.keys import load_float_keys
from flashmix.ops.recurrence.triton_gpu.pairs import add_near, load_values, near, pair_gradients, split_near
from flashmix.ops.recurrence.triton_gpu.tiles import append, chunk_place, replaced, store_rows, zeros


@triton.jit
def pass_gradients(gradients, dA, keys, sums, anchor, seen, S: tl.constexpr):
    """Adds to dX and dY, [C, BK] each, the pairs `seen` of one pass, whose decay is cut in two at the anchor."""
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    PAIRS: tl.constexpr = len(S.ROW)
    DT: tl.constexpr = dA[0].dtype
    dX, dY = gradients
    X, Y = keys
    G, before, _ = sums
    column = column_factor(anchor - G, S)  # [C, BK]
    to_rows = zeros(ROWS, S.C, S.BK)
    to_columns = zeros(COLUMNS, S.C, S.BK)
    rows = ()  # [C, BK] each
    decayed_X = ()
    for r in tl.static_range(ROWS):
        rows = append(rows, factor(row_sums(G, before, r, S) - anchor))
        decayed_X = append(decayed_X, (X[r] * rows[r]).to(DT))
    for p in tl.static_range(PAIRS):
        y = (Y[S.COLUMN[p]] * column).to(DT)
        A = tl.where(seen, dA[p], 0.0)
        to_row = tl.dot(A, y, to_rows[S.ROW[p]], input_precision=S.PRECISION)
        to_column = tl.dot(tl.trans(A), decayed_X[S.ROW[p]], to_columns[S.COLUMN[p]], input_precision=S.PRECISION)
        to_rows = replaced(to_rows, S.ROW[p], to_row)
        to_columns = replaced(to_columns, S.COLUMN[p], to_column)
    for r in tl.static_range(ROWS):
        dX = replaced(dX, r, dX[r] + rows[r] * to_rows[r])
    for c in tl.static_range(COLUMNS):
        dY = replaced(dY, c, dY[c] + column * to_columns[c])
    return dX, dY


@triton.jit
def pairs_decay_gradient(X, Y, dX, dY, S: tl.constexpr):
    """The decay's gradient by way of pairs, [C, BK]: x dX of rows less y dY of columns, summed over later tokens (2.7)."""
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    inclusive = tl.full([S.C, S.BK], 0.0, tl.float32)
    exclusive = tl.full([S.C, S.BK], 0.0, tl.float32)
    for r in tl.static_range(ROWS):
        if S.ROWS[r].EXCLUSIVE:
            exclusive += X[r] * dX[r]
        else:
            inclusive += X[r] * dX[r]
        if r == 0:
            for c in tl.static_range(COLUMNS):
                inclusive -= Y[c] * dY[c]
    return tl.cumsum(inclusive + exclusive, 0, reverse=True) - exclusive


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def channel_pairs_backward_kernel(x, values, out, where, n, S: tl.constexpr):
    """One program per (chunk, value head)."""
    at = chunk_place(tl.program_id(0) // S.HV, tl.program_id(0) % S.HV, where, n, S)
    if at.count == 0:
        return
    tl.static_assert(S.REACH % S.BK == 0, "a tile's channels must have one reach")
    if not S.EXACT:
        if all_reach_the_start(x.reach, at, S):
            return
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    PAIRS: tl.constexpr = len(S.ROW)
    DT: tl.constexpr = x.rows[0].dtype.element_ty
    dA = pair_gradients(values, load_values(values, at, tl.arange(0, S.BV), S), at, S)  # [C, C] each
    same = ()  # the pairs (i, i) of the query and each column, [C, 1]
    for c in tl.static_range(COLUMNS):
        dA = replaced(dA, c, dA[c] * n.scale)
        same = append(same, near(dA[c], False, S)[0])
    if S.EXACT:
        dA, by_row, by_column = split_near(dA, S)
    for p in tl.static_range(PAIRS):
        dA = replaced(dA, p, dA[p].to(DT))
    beta = load_beta(x, at, S)  # [C]
    dbeta = tl.full([S.C], 0.0, tl.float32)
    for k0 in tl.range(0, S.K, S.BK, num_stages=S.STAGES):
        reach = load_reach(x.reach, at, k0 // S.REACH, S)  # [C]
        needed = needed_passes(reach, S)
        if not S.EXACT:
            needed &= (1 << (S.LEVELS + 1)) - 1
        if needed != 0:
            ks = k0 + tl.arange(0, S.BK)
            X, Y = load_float_keys(x, 1.0, at, ks, S)  # [C, BK] each
            sums = channel_sums(x.decay, at, ks, S)
            dX = zeros(ROWS, S.C, S.BK)
            dY = zeros(COLUMNS, S.C, S.BK)
            for index in tl.range(0, S.LEVELS + 2, num_stages=1):
                if (needed >> index) & 1 == 1:
                    seen, middle = pairs_of_pass(reach, index, S)
                    anchor = load_anchor(x.decay, middle, at, ks, S)  # [C, BK]
                    dX, dY = pass_gradients((dX, dY), dA, (X, Y), sums, anchor, seen, S)
            if out.decay is not None:
                store_rows(out.decay, pairs_decay_gradient(X, Y, dX, dY, S), at, S.K, ks, S, True)
            if S.EXACT:
                dX, dY = add_near((dX, dY), (X, Y), by_row, by_column, x, at, ks, S)
            elif S.ROWS[0].DIAGONAL:
                own = (reach < S.LEVELS)[:, None]
                for c in tl.static_range(COLUMNS):
                    once = tl.where(own, same[c], 0.0)
                    dX = replaced(dX, 0, dX[0] + once * Y[c])
                    dY = replaced(dY, c, dY[c] + once * X[0])
            k = -X[1] if S.TIED else Y[0]
            dbeta += store_key_gradients(out, (dX, dY), k, beta, at, ks, S, True)
    if S.TIED:
        store_rows(out.beta, dbeta[:, None], at, 1, tl.arange(0, 1), S, True)
