"""The backward of `output` and `scores`: gradients of keys, decay and beta of one chunk, when those of the states are there.

    dA = dZ W^T      d~X = dZ S^T      d^Y = W dS'^T                                                     (6.1), (6.2)
    dX_i = sum_j dA_ij e^{G_e(i) - G_j} y_j + e^{G_e(i)} d~x_i       dY likewise                          (3.3), (6.4)

with `dZ` = dO for the rows q and dR for the rows a, `W` = v for the columns k and e for the columns b. The decay of token t has
part in every pair j < t <= i (t <= i - 1 for rows that read before their decay), in every row i >= t, every column j < t and in
the carried state: the sums (2.5), taken over just those; beside 16-bit operands the pairs as rows less columns. Pairs that no
decay lies between are worked on apart, lest they cancel in its gradient only up to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.pairs import (
    all_pair_gradients,
    load_values,
    neighbours,
    pairs_across,
    span,
    through_memory,
)
from flashmix.ops.recurrence.triton_gpu.scores import load_keys
from flashmix.ops.recurrence.triton_gpu.state import saved_tile
from flashmix.ops.recurrence.triton_gpu.tiles import (
    DPLR,
    LINEAR,
    NO_GATE,
    TIED,
    UNTIED,
    factor,
    load_numbers,
    load_rows,
    load_sums,
    pair_decay,
    store_rows,
)  # fmt: skip


@triton.jit
def load_states(states, chunk, head, ks, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Channels `ks` of a chunk's saved state where one tile holds it, [BV, len(ks)]."""
    d = tl.arange(0, BV)
    inside = (d < V)[:, None] & (ks < K)[None, :]
    return tl.load(saved_tile(states, chunk, head, d, ks, HV, K, V), mask=inside, other=0.0)


@triton.jit
def state_product(
    x, x_tile, states, S, chunk, first, count, head, ks, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x S^T of the channels `ks`, [C, BK] (6.2); `x_tile` and `S` are the whole of it where BV holds all values."""
    if BV >= V:
        return tl.dot(x_tile, S, input_precision=PRECISION)
    else:
        product = tl.zeros([C, BK], tl.float32)
        for v0 in tl.range(0, V, BV):
            d = v0 + tl.arange(0, BV)
            inside = (d < V)[:, None] & (ks < K)[None, :]
            part = tl.load(saved_tile(states, chunk, head, d, ks, HV, K, V), mask=inside, other=0.0)
            rows = load_rows(x, first, count, head, HV, V, d, C)
            product = tl.dot(rows, part, product, input_precision=PRECISION)
        return product


@triton.jit
def carried_product(
    states, dstates, S, dS, chunk, head, ks, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """sum_v S dS' of the channels `ks`, [BK]: what the whole chunk's decay multiplies."""
    if BV >= V:
        return tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
    else:
        total = tl.zeros([BK], tl.float32)
        for v0 in tl.range(0, V, BV):
            d = v0 + tl.arange(0, BV)
            inside = (d < V)[:, None] & (ks < K)[None, :]
            S_part = tl.load(saved_tile(states, chunk, head, d, ks, HV, K, V), mask=inside, other=0.0)
            dS_part = tl.load(saved_tile(dstates, chunk, head, d, ks, HV, K, V), mask=inside, other=0.0)
            total += tl.sum(S_part.to(tl.float32) * dS_part.to(tl.float32), 0)
        return total


@triton.jit
def decay_gradient(inclusive, exclusive, written, count, C: tl.constexpr):
    """Of x dX of rows that read after and before their decay, less y dY of pairs, and of y dY by way of the state: along the
    first axis, the sum over i >= t, over i > t, and over j < t (2.7).
    """
    t = tl.arange(0, C)
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
def store_key_gradients(
    dq, da, dk, db, yk, strength, dq_out, da_out, dk_out, db_out, first, count, head, ks,
    HV: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr, ADD: tl.constexpr = False,
):  # fmt: skip
    """Writes the gradients of the operands, or ADDs to those that are there; a tied rule has a = -k and b = beta k (6.5).
    Returns that of beta, [C].
    """
    dbeta = tl.zeros([C], tl.float32)
    store_rows(dq_out, dq, first, count, head, HV, K, ks, C, ADD)
    if RULE == TIED:
        dbeta = tl.sum(yk * db, 1)
        dk = strength[:, None] * db - da
    elif RULE != LINEAR:
        store_rows(da_out, da, first, count, head, HV, K, ks, C, ADD)
        store_rows(db_out, db, first, count, head, HV, K, ks, C, ADD)
    if RULE != UNTIED:
        store_rows(dk_out, dk, first, count, head, HV, K, ks, C, ADD)
    return dbeta


@triton.jit
def add_neighbours(
    dq, da, dk, db, xq, yk, yb, near_q, near_a, q, k, a, b, beta, scale, first, count, head, ks,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr,
    RULE: tl.constexpr, READ_BEFORE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The share of the pairs that no decay lies between; `near_q`, `near_a`: of the columns k by row and column, then of b."""
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    if READ_BEFORE or RULE == UNTIED or RULE == DPLR:
        _, _, yk_1, yb_1 = load_keys(
            q, k, a, b, beta, scale, first, count, head, ks, HV, HQ, HK, HA, HB, K, RULE, C, -1
        )
        xq_1, xa_1, _, _ = load_keys(q, k, a, b, beta, scale, first, count, head, ks, HV, HQ, HK, HA, HB, K, RULE, C, 1)
    if READ_BEFORE:
        yk = yk_1
        yb = yb_1
        xq = xq_1
    if RAW:
        dq += near_q[0] * yk
        dk += near_q[1] * xq
    if RULE != LINEAR:
        dq += near_q[2] * yb
        db += near_q[3] * xq
    if RULE == UNTIED or RULE == DPLR:
        da += near_a[2] * yb_1
        db += near_a[3] * xa_1
        if RULE == DPLR:
            da += near_a[0] * yk_1
            dk += near_a[1] * xa_1
    return dq, da, dk, db


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT"])
def output_backward_kernel(
    q, k, a, b, v, g, beta, e, do, de, states, dstates, table, dA, dq_out, da_out, dk_out, db_out, dg_out, dbeta_out,
    scale, T, NT,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, GATE: tl.constexpr, READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr, SLOTS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head); at most one decay a token."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count == 0:
        return
    chunk = chunk.to(tl.int64)
    DT: tl.constexpr = q.dtype.element_ty
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    A_EXCLUSIVE: tl.constexpr = RULE != TIED
    values = load_values(v, e, do, de, first, count, head, tl.arange(0, BV), HV, V, RULE, C)
    qk, qb, ak, ab = all_pair_gradients(v, e, do, de, values, first, count, head, HV, V, RULE, C, BV, PRECISION)
    G, before, last = load_sums(g, first, count, head, GATE, HV, C, EXACT)
    sums_q = before if READ_BEFORE else G
    sums_a = before if A_EXCLUSIVE else G
    decay_to_q = scale * factor(sums_q)
    decay_to_a = factor(sums_a)
    column = factor(last - G)[:, None]
    strength = tl.full([C], 1.0, tl.float32)
    if RULE == TIED:
        strength = load_numbers(beta, first, count, head, HV, C)
    decay = pair_decay(sums_q, G, READ_BEFORE, C)
    decay_a = decay
    if RULE != LINEAR:
        if READ_BEFORE == A_EXCLUSIVE:
            decay_a = tl.where(span(False, C), decay, 0.0)
        else:
            decay_a = pair_decay(sums_a, G, True, C)
    qk *= scale * decay
    qb *= scale * decay
    ak *= decay_a
    ab *= decay_a
    near_q, near_a = neighbours(qk, qb, ak, ab, READ_BEFORE, A_EXCLUSIVE, C)
    qk = tl.where(span(READ_BEFORE, C), qk, 0.0)
    qb = tl.where(span(READ_BEFORE, C), qb, 0.0)
    if A_EXCLUSIVE:
        ak = tl.where(span(True, C), ak, 0.0)
        ab = tl.where(span(True, C), ab, 0.0)
    qk, qb, ak, ab = through_memory(dA, chunk, head, qk, qb, ak, ab, HV, RULE, SLOTS, C)
    dO, dR, w, ew = values
    inclusive = tl.zeros([C], tl.float32)
    exclusive = tl.zeros([C], tl.float32)
    written = tl.zeros([C], tl.float32)
    dbeta = tl.zeros([C], tl.float32)
    carried = 0.0
    W_q = tl.zeros([C, C], tl.float32)
    W_a = tl.zeros([C, C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        ks = k0 + tl.arange(0, BK)
        xq = load_rows(q, first, count, head // (HV // HQ), HQ, K, ks, C)  # [C, BK]
        xa = xq
        yk = xq
        yb = xq
        if RULE != UNTIED:
            yk = load_rows(k, first, count, head // (HV // HK), HK, K, ks, C)
        if RULE == TIED:
            xa = -yk
            yb = (yk * strength[:, None]).to(DT)
        elif RULE != LINEAR:
            xa = load_rows(a, first, count, head // (HV // HA), HA, K, ks, C)
            yb = load_rows(b, first, count, head // (HV // HB), HB, K, ks, C)
        S = load_states(states, chunk, head, ks, HV, K, V, BV)
        dS = load_states(dstates, chunk, head, ks, HV, K, V, BV)
        if GATE != NO_GATE:
            carried += tl.sum(carried_product(states, dstates, S, dS, chunk, head, ks, HV, K, V, BK, BV), 0)
        dq = state_product(do, dO, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
        dq *= decay_to_q[:, None]
        da = tl.zeros([C, BK], tl.float32)
        dk = tl.zeros([C, BK], tl.float32)
        db = tl.zeros([C, BK], tl.float32)
        rows_q = tl.sum(xq * dq, 1)
        if RULE != LINEAR:
            da = state_product(de, dR, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            da *= decay_to_a[:, None]
            rows_a = tl.sum(xa * da, 1)
        if RAW:
            dq = tl.dot(qk, yk, dq, input_precision=PRECISION)
        if RULE != LINEAR:
            dq = tl.dot(qb, yb, dq, input_precision=PRECISION)
            da = tl.dot(ab, yb, da, input_precision=PRECISION)
            if RULE == DPLR:
                da = tl.dot(ak, yk, da, input_precision=PRECISION)
        if not EXACT:  # with the pairs, of which the columns are taken off again
            rows_q = tl.sum(xq * dq, 1)
            if RULE != LINEAR:
                rows_a = tl.sum(xa * da, 1)
        if READ_BEFORE:
            exclusive += rows_q
        else:
            inclusive += rows_q
        if RULE != LINEAR:
            if A_EXCLUSIVE:
                exclusive += rows_a
            else:
                inclusive += rows_a
        if RAW:
            dk = state_product(v, w, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            dk *= column
            written += tl.sum(yk * dk, 1)
            pairs = tl.dot(tl.trans(qk), xq, input_precision=PRECISION)
            if RULE == DPLR:
                pairs = tl.dot(tl.trans(ak), xa, pairs, input_precision=PRECISION)
            if not EXACT:
                inclusive -= tl.sum(yk * pairs, 1)
            dk += pairs
        if RULE != LINEAR:
            db = state_product(e, ew, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            db *= column
            written += tl.sum(yb * db, 1)
            pairs = tl.dot(tl.trans(qb), xq, input_precision=PRECISION)
            pairs = tl.dot(tl.trans(ab), xa, pairs, input_precision=PRECISION)
            if not EXACT:
                inclusive -= tl.sum(yb * pairs, 1)
            db += pairs
        if EXACT:
            if RAW:
                W_q += tl.dot(xq, tl.trans(yk), input_precision=PRECISION) * qk
            if RULE != LINEAR:
                W_q += tl.dot(xq, tl.trans(yb), input_precision=PRECISION) * qb
                W_a += tl.dot(xa, tl.trans(yb), input_precision=PRECISION) * ab
            if RULE == DPLR:
                W_a += tl.dot(xa, tl.trans(yk), input_precision=PRECISION) * ak
        dq, da, dk, db = add_neighbours(
            dq, da, dk, db, xq, yk, yb, near_q, near_a, q, k, a, b, beta, 1.0, first, count, head, ks,
            HV, HQ, HK, HA, HB, K, RULE, READ_BEFORE, C,
        )  # fmt: skip
        dbeta += store_key_gradients(
            dq, da, dk, db, yk, strength, dq_out, da_out, dk_out, db_out, first, count, head, ks, HV, K, RULE, C
        )
    t = tl.arange(0, C)
    at = (first + t) * HV + head
    if dg_out is not None:
        dg = decay_gradient(inclusive, exclusive, written, count, C) + carried * factor(last)
        if EXACT:
            dg += pairs_across(W_q, READ_BEFORE, C)
            if RULE != LINEAR:
                dg += pairs_across(W_a, A_EXCLUSIVE, C)
        tl.store(dg_out + at, dg.to(dg_out.dtype.element_ty), mask=t < count)
    if RULE == TIED:
        tl.store(dbeta_out + at, dbeta.to(dbeta_out.dtype.element_ty), mask=t < count)
