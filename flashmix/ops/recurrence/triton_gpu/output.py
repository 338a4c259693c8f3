"""The backward of `output` and `scores`: gradients of keys, decay and beta of one chunk, when those of the states are there.

    dA = dZ W^T      d~X = dZ S^T      d^Y = W dS'^T                                                     (6.1), (6.2)
    dX_i = sum_j dA_ij e^{G_e(i) - G_j} y_j + e^{G_e(i)} d~x_i       dY likewise                          (3.3), (6.4)

with `dZ` = dO for the rows q and dR for the rows a, `W` = v for the columns k and nu for the columns b. The decay of token t has
part in every pair j < t <= i (t <= i - 1 for rows that read before their decay), in every row i >= t, every column j < t and in
the carried state: the sums (2.5), taken over just those. With 16-bit inputs the decay's gradient of pairs is row sums less column
sums. Pairs that no decay lies between are excluded, because their terms would cancel only up to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.decay import factor, load_sums, pair_decay, row_sums
from flashmix.ops.recurrence.triton_gpu.keys import load_input_keys
from flashmix.ops.recurrence.triton_gpu.pairs import (
    add_near,
    load_values,
    pair_gradients,
    pairs_across,
    split_near,
    through_memory,
)
from flashmix.ops.recurrence.triton_gpu.tiles import (
    append,
    chunk_place,
    load_numbers,
    load_rows,
    replaced,
    saved_tile,
    store_numbers,
    store_rows,
    zero_vectors,
    zeros,
)


@triton.jit
def load_state(states, at, v, k, S: tl.constexpr):
    """Channels `v` and `k` of a chunk's saved state, [v, k]."""
    mask = (v < S.V)[:, None] & (k < S.K)[None, :]
    return tl.load(saved_tile(states, at.chunk.to(tl.int64) * S.HV + at.head, v, k, S), mask=mask, other=0.0)


@triton.jit
def state_product(x, x_tile, states, state, at, k, S: tl.constexpr):
    """x S^T of the channels `k`, [C, BK] (6.2); `x_tile` and `state` are the whole of it where BV holds all values."""
    if S.BV >= S.V:
        return tl.dot(x_tile, state, input_precision=S.PRECISION)
    else:
        found = tl.full([S.C, S.BK], 0.0, tl.float32)
        for v0 in tl.range(0, S.V, S.BV):
            v = v0 + tl.arange(0, S.BV)
            part = load_state(states, at, v, k, S)  # [BV, BK]
            rows = load_rows(x, at, S.HV, S.V, v, S)  # [C, BV]
            found = tl.dot(rows, part, found, input_precision=S.PRECISION)
        return found


@triton.jit
def carried_product(x, state, dstate, at, k, S: tl.constexpr):
    """sum_v S dS' of the channels `k`, [BK]: what the decay of the whole chunk multiplies."""
    if S.BV >= S.V:
        return tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
    else:
        total = tl.full([S.BK], 0.0, tl.float32)
        for v0 in tl.range(0, S.V, S.BV):
            v = v0 + tl.arange(0, S.BV)
            state_part = load_state(x.states, at, v, k, S)  # [BV, BK]
            dstate_part = load_state(x.dstates, at, v, k, S)  # [BV, BK]
            total += tl.sum(state_part.to(tl.float32) * dstate_part.to(tl.float32), 0)
        return total


@triton.jit
def decay_gradient(inclusive, exclusive, written, count, S: tl.constexpr):
    """The gradient of the decay along the first axis (2.7): of x dX of rows that read after (inclusive) or before (exclusive) their
    decay, less y dY of pairs, the sums over i >= t and i > t; of y dY by way of the state (written) the sum over j < t.
    """
    t = tl.arange(0, S.C)
    first = t > 0
    last = t < count - 1
    if len(written.shape) == 2:
        first = first[:, None]
        last = last[:, None]
    exclusive = tl.where(first, exclusive, 0.0)  # no decay precedes the first token's read
    written = tl.where(last, written, 0.0)  # nor follows the last token's write
    after = tl.cumsum(inclusive + exclusive, 0, reverse=True) - exclusive
    return after + tl.cumsum(written, 0) - written


@triton.jit
def store_key_gradients(out, gradients, k, beta, at, d, S: tl.constexpr, ADD: tl.constexpr = False):
    """Writes dX and dY, or ADDs them to what is there; returns the gradient of beta, [C].

    A TIED rule has a = -k and b = beta k (6.5).
    """
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    dX, dY = gradients
    dbeta = tl.full([S.C], 0.0, tl.float32)
    store_rows(out.rows[0], dX[0], at, S.K, d, S, ADD)
    if S.TIED:
        dbeta = tl.sum(k * dY[0], 1)
        store_rows(out.columns[0], beta[:, None] * dY[0] - dX[1], at, S.K, d, S, ADD)
    else:
        for r in tl.static_range(1, ROWS):
            store_rows(out.rows[r], dX[r], at, S.K, d, S, ADD)
        for c in tl.static_range(COLUMNS):
            store_rows(out.columns[c], dY[c], at, S.K, d, S, ADD)
    return dbeta


@triton.jit
def decayed_pair_gradients(dA, G, before, scale, S: tl.constexpr):
    """dA e^{G_e(i) - G_j}, of the query with its scale."""
    PAIRS: tl.constexpr = len(S.ROW)
    for p in tl.static_range(PAIRS):
        decay = pair_decay(row_sums(G, before, S.ROW[p], S), G, S.ROW[p], S)  # [C, C]
        if S.ROW[p] == 0:
            decay = scale * decay
        dA = replaced(dA, p, dA[p] * decay)
    return dA


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def output_backward_kernel(x, values, out, where, n, S: tl.constexpr):
    """One program per (chunk, value head); at most one decay per token."""
    at = chunk_place(tl.program_id(0) // S.HV, tl.program_id(0) % S.HV, where, n, S)
    if at.count == 0:
        return
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    PAIRS: tl.constexpr = len(S.ROW)
    dZ, W = load_values(values, at, tl.arange(0, S.BV), S)
    dA = pair_gradients(values, (dZ, W), at, S)
    G, before, last = load_sums(x.decay, at, S)
    row_factors = ()  # [C] each
    for r in tl.static_range(ROWS):
        row_factor = factor(row_sums(G, before, r, S))
        row_factors = append(row_factors, (n.scale * row_factor) if r == 0 else row_factor)
    column_factor = factor(last - G)[:, None]  # [C, 1]
    beta = tl.full([S.C], 1.0, tl.float32)
    if S.TIED:
        beta = load_numbers(x.beta, at, S)
    dA, neighbours = split_near(decayed_pair_gradients(dA, G, before, n.scale, S), S)
    dA = through_memory(out.dA, dA, at, S)
    inclusive, exclusive, written, dbeta = zero_vectors(4, S.C)
    carried = 0.0
    across = zeros(ROWS, S.C, S.C)  # x_i . y_j dA_ij of each row, with float32 inputs
    for k0 in tl.range(0, S.K, S.BK, num_stages=S.STAGES):
        ks = k0 + tl.arange(0, S.BK)
        X, Y, k = load_input_keys(x, beta, at, ks, S)  # [C, BK] each
        state = load_state(values.states, at, tl.arange(0, S.BV), ks, S)  # [BV, BK]
        dstate = load_state(values.dstates, at, tl.arange(0, S.BV), ks, S)  # [BV, BK]
        if S.DECAY != "none":
            carried += tl.sum(carried_product(values, state, dstate, at, ks, S), 0)
        dX = ()  # e^{G_e} dZ S^T, then with the pairs: dA Y
        shares = ()
        for r in tl.static_range(ROWS):
            d = state_product(values.dz[r], dZ[r], values.states, state, at, ks, S) * row_factors[r][:, None]
            dX = append(dX, d)
            shares = append(shares, tl.sum(X[r] * d, 1))
        for p in tl.static_range(PAIRS):
            dX = replaced(dX, S.ROW[p], tl.dot(dA[p], Y[S.COLUMN[p]], dX[S.ROW[p]], input_precision=S.PRECISION))
        for r in tl.static_range(ROWS):
            # unless EXACT with the pairs, of which the columns are taken off again
            share = shares[r] if S.EXACT else tl.sum(X[r] * dX[r], 1)
            if S.ROWS[r].EXCLUSIVE:
                exclusive += share
            else:
                inclusive += share
        dY = ()  # e^{G_C - G} W dS'^T + dA^T X
        for c in tl.static_range(COLUMNS):
            d = state_product(values.w[c], W[c], values.dstates, dstate, at, ks, S) * column_factor
            written += tl.sum(Y[c] * d, 1)
            by_pairs = tl.full([S.C, S.BK], 0.0, tl.float32)
            for p in tl.static_range(PAIRS):
                if S.COLUMN[p] == c:
                    by_pairs = tl.dot(tl.trans(dA[p]), X[S.ROW[p]], by_pairs, input_precision=S.PRECISION)
            if not S.EXACT:
                inclusive -= tl.sum(Y[c] * by_pairs, 1)
            dY = append(dY, d + by_pairs)
        if S.EXACT:
            for p in tl.static_range(PAIRS):
                xy = tl.dot(X[S.ROW[p]], tl.trans(Y[S.COLUMN[p]]), input_precision=S.PRECISION)
                across = replaced(across, S.ROW[p], across[S.ROW[p]] + xy * dA[p])
        gradients = add_near((dX, dY), (X, Y), neighbours, x, at, ks, S)
        dbeta += store_key_gradients(out, gradients, k, beta, at, ks, S)
    if out.decay is not None:
        dg = decay_gradient(inclusive, exclusive, written, at.count, S) + carried * factor(last)
        if S.EXACT:
            for r in tl.static_range(ROWS):
                dg += pairs_across(across[r], r, S)
        store_numbers(out.decay, dg, at, S)
    if S.TIED:
        store_numbers(out.beta, dbeta, at, S)
