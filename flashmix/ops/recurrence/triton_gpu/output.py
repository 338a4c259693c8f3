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
from flashmix.ops.recurrence.triton_gpu.channel_output import channel_tile, seen_pair_gradients
from flashmix.ops.recurrence.triton_gpu.decay import factor, load_sums, pair_decay, row_sums
from flashmix.ops.recurrence.triton_gpu.gradients import (
    carried_product,
    decay_gradient,
    load_beta,
    load_state,
    state_product,
    store_key_gradients,
)
from flashmix.ops.recurrence.triton_gpu.keys import load_input_keys
from flashmix.ops.recurrence.triton_gpu.pairs import (
    add_near,
    load_values,
    pair_gradients,
    pairs_across,
    split_near,
    through_memory,
)
from flashmix.ops.recurrence.triton_gpu.tiles import append, chunk_place, replaced, store_numbers, zero_vectors, zeros


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


@triton.jit
def row_gradients(values, dZ, dA, keys, row_factors, state, at, k, S: tl.constexpr):
    """dX = e^{G_e} dZ S^T + dA Y, [C, BK] each, and the sums of x dX over channels, [C] each."""
    ROWS: tl.constexpr = len(S.ROWS)
    PAIRS: tl.constexpr = len(S.ROW)
    X, Y = keys
    dX = ()
    shares = ()
    for r in tl.static_range(ROWS):
        d = state_product(values.dz[r], dZ[r], values.states, state, at, k, S) * row_factors[r][:, None]
        dX = append(dX, d)
        shares = append(shares, tl.sum(X[r] * d, 1))
    for p in tl.static_range(PAIRS):
        dX = replaced(dX, S.ROW[p], tl.dot(dA[p], Y[S.COLUMN[p]], dX[S.ROW[p]], input_precision=S.PRECISION))
    if not S.EXACT:  # with the pairs, of which the columns are taken off again
        for r in tl.static_range(ROWS):
            shares = replaced(shares, r, tl.sum(X[r] * dX[r], 1))
    return dX, shares


@triton.jit
def token_tile(x, values, whole, dA, decays, sums, out, at, k, S: tl.constexpr):
    """The gradients of the channels `k`, with at most one decay per token: writes those of keys, adds to the sums of the others."""
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    PAIRS: tl.constexpr = len(S.ROW)
    dZ, W = whole
    row_factors, column_factor, by_row, by_column, beta = decays
    inclusive, exclusive, written, dbeta, carried, across = sums
    X, Y, tied_k = load_input_keys(x, beta, at, k, S)  # [C, BK] each
    state = load_state(values.states, at, tl.arange(0, S.BV), k, S)  # [BV, BK]
    dstate = load_state(values.dstates, at, tl.arange(0, S.BV), k, S)  # [BV, BK]
    if S.DECAY != "none":
        carried += tl.sum(carried_product(values, state, dstate, at, k, S), 0)
    dX, shares = row_gradients(values, dZ, dA, (X, Y), row_factors, state, at, k, S)
    for r in tl.static_range(ROWS):
        if S.ROWS[r].EXCLUSIVE:
            exclusive += shares[r]
        else:
            inclusive += shares[r]
    dY = ()  # e^{G_C - G} W dS'^T + dA^T X
    for c in tl.static_range(COLUMNS):
        d = state_product(values.w[c], W[c], values.dstates, dstate, at, k, S) * column_factor
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
    gradients = add_near((dX, dY), (X, Y), by_row, by_column, x, at, k, S)
    dbeta += store_key_gradients(out, gradients, tied_k, beta, at, k, S)
    return inclusive, exclusive, written, dbeta, carried, across


@triton.jit
def store_token_decay(out, sums, last, at, S: tl.constexpr):
    """Writes the gradient of at most one decay per token."""
    ROWS: tl.constexpr = len(S.ROWS)
    inclusive, exclusive, written, _, carried, across = sums
    dg = decay_gradient(inclusive, exclusive, written, at.count, S) + carried * factor(last)
    if S.EXACT:
        for r in tl.static_range(ROWS):
            dg += pairs_across(across[r], r, S)
    store_numbers(out.decay, dg, at, S)


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def output_backward_kernel(scores, x, values, out, where, n, S: tl.constexpr):
    """One program per (chunk, value head).

    With at most one decay per token its factors are part of dA, else they multiply keys (`channel_output.py`); float32 then leaves
    all pairs to `channel_pairs.py`.
    """
    at = chunk_place(tl.program_id(0) // S.HV, tl.program_id(0) % S.HV, where, n, S)
    if at.count == 0:
        return
    ROWS: tl.constexpr = len(S.ROWS)
    whole = load_values(values, at, tl.arange(0, S.BV), S)  # [C, BV] each
    if S.DECAY == "channel":
        dA = ()
        if not S.EXACT:
            dA = seen_pair_gradients(pair_gradients(values, whole, at, S), S)
            dA = through_memory(out.dA, dA, at, S)
        beta = load_beta(x, at, S)  # [C]
        dbeta = tl.full([S.C], 0.0, tl.float32)
        for k0 in tl.range(0, S.K, S.BK, num_stages=S.STAGES):
            inputs = (scores, x, values, whole, n.scale)
            dbeta += channel_tile(inputs, dA, beta, out, at, k0, S)
    else:
        dA = pair_gradients(values, whole, at, S)
        G, before, last = load_sums(x.decay, at, S)  # [C], [C], []
        row_factors = ()  # [C] each
        for r in tl.static_range(ROWS):
            row_factor = factor(row_sums(G, before, r, S))
            row_factors = append(row_factors, n.scale * row_factor if r == 0 else row_factor)
        column_factor = factor(last - G)[:, None]  # [C, 1]
        beta = load_beta(x, at, S)  # [C]
        dA, by_row, by_column = split_near(decayed_pair_gradients(dA, G, before, n.scale, S), S)
        dA = through_memory(out.dA, dA, at, S)
        decays = (row_factors, column_factor, by_row, by_column, beta)
        inclusive, exclusive, written, dbeta = zero_vectors(4, S.C)
        across = zeros(ROWS, S.C, S.C)  # x_i . y_j dA_ij of each row, with float32 inputs
        sums = (inclusive, exclusive, written, dbeta, tl.full([], 0.0, tl.float32), across)
        for k0 in tl.range(0, S.K, S.BK, num_stages=S.STAGES):
            sums = token_tile(x, values, whole, dA, decays, sums, out, at, k=k0 + tl.arange(0, S.BK), S=S)
        dbeta = sums[3]
        if out.decay is not None:
            store_token_decay(out, sums, last, at, S)
    if S.TIED:
        store_numbers(out.beta, dbeta, at, S)
