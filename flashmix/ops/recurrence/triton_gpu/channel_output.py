"""The backward of `output` and `scores` for a decay a channel: as `output.py`, with the pairs in passes (`pairs_of_pass`).

dx = dA[u, l] (Y[l] lower)        dX[u] += upper dx          dy = dA[u, l]^T (X[u] upper)        dY[l] += lower dy        (3.4)

Beside 16-bit operands this is for the chunks that `decayed_output.py` leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.decayed_output import chunk_reaches
from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.output import (
    add_neighbours,
    carried_product,
    decay_gradient,
    load_states,
    state_product,
    store_key_gradients,
)
from flashmix.ops.recurrence.triton_gpu.pairs import all_pair_gradients, load_values, near, neighbours, span
from flashmix.ops.recurrence.triton_gpu.scores import channel_sums, load_keys, load_reach
from flashmix.ops.recurrence.triton_gpu.tiles import (
    DPLR,
    LINEAR,
    TIED,
    column_factor,
    factor,
    load_anchor,
    load_numbers,
    needed_passes,
    pairs_of_pass,
    store_rows,
)


@triton.jit(do_not_specialize=["T", "NT"])
def channel_output_backward_kernel(
    q, k, a, b, v, G, reach, beta, e, do, de, states, dstates, table, dq_out, da_out, dk_out, db_out, dg_out, dbeta_out,
    scale, T, NT,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REACH: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head); one decay a channel, in passes over pairs (3.4)."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count == 0:
        return
    tl.static_assert(REACH % BK == 0, "a tile's channels must have one reach")
    NK: tl.constexpr = (K + REACH - 1) // REACH
    if not EXACT:
        if chunk_reaches(reach, chunk, head, HV, NK, C, LEVELS):
            return
    chunk = chunk.to(tl.int64)
    DT: tl.constexpr = q.dtype.element_ty
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    A_EXCLUSIVE: tl.constexpr = RULE != TIED
    values = load_values(v, e, do, de, first, count, head, tl.arange(0, BV), HV, V, RULE, C)
    qk, qb, ak, ab = all_pair_gradients(v, e, do, de, values, first, count, head, HV, V, RULE, C, BV, PRECISION)
    dO, dR, w, ew = values
    qk *= scale
    qb *= scale
    if EXACT:
        near_q, near_a = neighbours(qk, qb, ak, ab, READ_BEFORE, A_EXCLUSIVE, C)
        qk = tl.where(span(READ_BEFORE, C), qk, 0.0)
        qb = tl.where(span(READ_BEFORE, C), qb, 0.0)
        ak = tl.where(span(A_EXCLUSIVE, C), ak, 0.0)
        ab = tl.where(span(A_EXCLUSIVE, C), ab, 0.0)
    else:
        qk_same = near(qk, False, C)[0]
        qb_same = near(qb, False, C)[0]
    qk = qk.to(DT)
    qb = qb.to(DT)
    ak = ak.to(DT)
    ab = ab.to(DT)
    strength = tl.full([C], 1.0, tl.float32)
    if RULE == TIED:
        strength = load_numbers(beta, first, count, head, HV, C)
    t = tl.arange(0, C)
    dbeta = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        ks = k0 + tl.arange(0, BK)
        xq, xa, yk, yb = load_keys(q, k, a, b, beta, 1.0, first, count, head, ks, HV, HQ, HK, HA, HB, K, RULE, C)
        sums, before, last = channel_sums(G, first, count, head, HV, K, ks, C)
        rows_q = before if READ_BEFORE else sums
        rows_a = before if A_EXCLUSIVE else sums
        column = factor(last[None, :] - sums)  # [C, BK]
        S = load_states(states, chunk, head, ks, HV, K, V, BV)
        dS = load_states(dstates, chunk, head, ks, HV, K, V, BV)
        carried = carried_product(states, dstates, S, dS, chunk, head, ks, HV, K, V, BK, BV)
        dq = state_product(do, dO, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
        da = tl.zeros([C, BK], tl.float32)
        dk = tl.zeros([C, BK], tl.float32)
        db = tl.zeros([C, BK], tl.float32)
        dq *= scale * factor(rows_q)
        pairs_k = tl.zeros([C, BK], tl.float32)
        pairs_b = tl.zeros([C, BK], tl.float32)
        columns = tl.zeros([C, BK], tl.float32)
        if RAW:
            dk = (
                state_product(v, w, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION) * column
            )
            columns += yk * dk
        if RULE != LINEAR:
            da = state_product(de, dR, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            da *= factor(rows_a)
            db = (
                state_product(e, ew, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
                * column
            )
            columns += yb * db
        reaches = load_reach(reach, chunk, head, k0 // REACH, HV, NK, C)
        needed = needed_passes(reaches, LEVELS)
        for p in tl.range(0, LEVELS + 2, num_stages=1):
            if (needed >> p) & 1 == 1:
                seen, middle = pairs_of_pass(reaches, p, C, LEVELS)
                anchor = load_anchor(G, middle, first, count, head, HV, K, ks, C)
                row = factor(rows_q - anchor)  # [C, BK]
                column_to = column_factor(anchor - sums, LIMIT)
                rq = (xq * row).to(DT)
                if RAW:
                    P = tl.where(seen, qk, 0.0)
                    ck = (yk * column_to).to(DT)
                    to_q = tl.dot(P, ck, input_precision=PRECISION)
                    to_k = tl.dot(tl.trans(P), rq, input_precision=PRECISION)
                if RULE != LINEAR:
                    row_a = factor(rows_a - anchor)
                    ra = (xa * row_a).to(DT)
                    cb = (yb * column_to).to(DT)
                    P = tl.where(seen, qb, 0.0)
                    if RAW:
                        to_q = tl.dot(P, cb, to_q, input_precision=PRECISION)
                    else:
                        to_q = tl.dot(P, cb, input_precision=PRECISION)
                    to_b = tl.dot(tl.trans(P), rq, input_precision=PRECISION)
                    P = tl.where(seen, ab, 0.0)
                    to_a = tl.dot(P, cb, input_precision=PRECISION)
                    to_b = tl.dot(tl.trans(P), ra, to_b, input_precision=PRECISION)
                    if RULE == DPLR:
                        P = tl.where(seen, ak, 0.0)
                        to_a = tl.dot(P, ck, to_a, input_precision=PRECISION)
                        to_k = tl.dot(tl.trans(P), ra, to_k, input_precision=PRECISION)
                    da += row_a * to_a
                    pairs_b += column_to * to_b
                dq += row * to_q
                if RAW:
                    pairs_k += column_to * to_k
        rows = tl.zeros([C, BK], tl.float32)
        exclusive = tl.zeros([C, BK], tl.float32)
        if READ_BEFORE:
            exclusive += xq * dq
        else:
            rows += xq * dq
        if RAW:
            rows -= yk * pairs_k
            dk += pairs_k
        if RULE != LINEAR:
            rows -= yb * pairs_b
            db += pairs_b
            if A_EXCLUSIVE:
                exclusive += xa * da
            else:
                rows += xa * da
        if dg_out is not None:
            dg = decay_gradient(rows, exclusive, columns, count, C) + (carried * factor(last))[None, :]
            store_rows(dg_out, dg, first, count, head, HV, K, ks, C)
        if EXACT:
            dq, da, dk, db = add_neighbours(
                dq, da, dk, db, xq, yk, yb, near_q, near_a, q, k, a, b, beta, 1.0, first, count, head, ks,
                HV, HQ, HK, HA, HB, K, RULE, READ_BEFORE, C,
            )  # fmt: skip
        elif not READ_BEFORE:
            if RAW:
                dq += qk_same * yk
                dk += qk_same * xq
            if RULE != LINEAR:
                dq += qb_same * yb
                db += qb_same * xq
        if RULE == TIED:
            yk = -xa
        dbeta += store_key_gradients(
            dq, da, dk, db, yk, strength, dq_out, da_out, dk_out, db_out, first, count, head, ks, HV, K, RULE, C
        )
    if RULE == TIED:
        tl.store(dbeta_out + (first + t) * HV + head, dbeta.to(dbeta_out.dtype.element_ty), mask=t < count)
