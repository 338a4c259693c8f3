"""Pairs of a decay a channel that `channel_output.py` leaves, in passes (`pairs_of_pass`): their gradients are added to what is there.

dx = dA[u, l] (Y[l] lower)        dX[u] += upper dx          dy = dA[u, l]^T (X[u] upper)        dY[l] += lower dy        (3.4)

Beside 16-bit operands these are the pairs of rows that do not reach back to the chunk's start, beside float32 all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.output import add_neighbours, store_key_gradients
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


@triton.jit
def chunk_reaches(reach, chunk, head, HV: tl.constexpr, NK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr):
    """Whether all rows of a chunk reach back to its start in all channels."""
    PADDED: tl.constexpr = triton.next_power_of_2(NK * C)
    n = tl.arange(0, PADDED)
    at = reach + (chunk.to(tl.int64) * HV + head) * (NK * C) + n
    return tl.min(tl.load(at, mask=n < NK * C, other=LEVELS), 0) == LEVELS


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT"])
def channel_pairs_backward_kernel(
    q, k, a, b, G, reach, beta, v, e, do, de, table, dq_out, da_out, dk_out, db_out, dg_out, dbeta_out, scale, T, NT,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, READ_BEFORE: tl.constexpr,
    PACKED: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REACH: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head)."""
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
    DT: tl.constexpr = q.dtype.element_ty
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    A_EXCLUSIVE: tl.constexpr = RULE != TIED
    values = load_values(v, e, do, de, first, count, head, tl.arange(0, BV), HV, V, RULE, C)
    qk, qb, ak, ab = all_pair_gradients(v, e, do, de, values, first, count, head, HV, V, RULE, C, BV, PRECISION)
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
    dbeta = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        reaches = load_reach(reach, chunk, head, k0 // REACH, HV, NK, C)
        needed = needed_passes(reaches, LEVELS)
        if not EXACT:
            needed &= (1 << (LEVELS + 1)) - 1
        if needed != 0:
            ks = k0 + tl.arange(0, BK)
            xq, xa, yk, yb = load_keys(q, k, a, b, beta, 1.0, first, count, head, ks, HV, HQ, HK, HA, HB, K, RULE, C)
            sums, before, _ = channel_sums(G, first, count, head, HV, K, ks, C)
            rows_q = before if READ_BEFORE else sums
            rows_a = before if A_EXCLUSIVE else sums
            dq = tl.zeros([C, BK], tl.float32)
            da = tl.zeros([C, BK], tl.float32)
            dk = tl.zeros([C, BK], tl.float32)
            db = tl.zeros([C, BK], tl.float32)
            for p in tl.range(0, LEVELS + 2, num_stages=1):
                if (needed >> p) & 1 == 1:
                    seen, middle = pairs_of_pass(reaches, p, C, LEVELS)
                    anchor = load_anchor(G, middle, first, count, head, HV, K, ks, C)
                    row = factor(rows_q - anchor)  # [C, BK]
                    column = column_factor(anchor - sums, LIMIT)
                    rq = (xq * row).to(DT)
                    if RAW:
                        P = tl.where(seen, qk, 0.0)
                        ck = (yk * column).to(DT)
                        to_q = tl.dot(P, ck, input_precision=PRECISION)
                        to_k = tl.dot(tl.trans(P), rq, input_precision=PRECISION)
                    if RULE != LINEAR:
                        row_a = factor(rows_a - anchor)
                        ra = (xa * row_a).to(DT)
                        cb = (yb * column).to(DT)
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
                        db += column * to_b
                    dq += row * to_q
                    if RAW:
                        dk += column * to_k
            if dg_out is not None:
                rows = tl.zeros([C, BK], tl.float32)
                exclusive = tl.zeros([C, BK], tl.float32)
                if READ_BEFORE:
                    exclusive += xq * dq
                else:
                    rows += xq * dq
                if RAW:
                    rows -= yk * dk
                if RULE != LINEAR:
                    rows -= yb * db
                    if A_EXCLUSIVE:
                        exclusive += xa * da
                    else:
                        rows += xa * da
                dg = tl.cumsum(rows + exclusive, 0, reverse=True) - exclusive
                store_rows(dg_out, dg, first, count, head, HV, K, ks, C, True)
            if EXACT:
                dq, da, dk, db = add_neighbours(
                    dq, da, dk, db, xq, yk, yb, near_q, near_a, q, k, a, b, beta, 1.0, first, count, head, ks,
                    HV, HQ, HK, HA, HB, K, RULE, READ_BEFORE, C,
                )  # fmt: skip
            elif not READ_BEFORE:
                own = (reaches < LEVELS)[:, None]
                if RAW:
                    same = tl.where(own, qk_same, 0.0)
                    dq += same * yk
                    dk += same * xq
                if RULE != LINEAR:
                    same = tl.where(own, qb_same, 0.0)
                    dq += same * yb
                    db += same * xq
            if RULE == TIED:
                yk = -xa
            dbeta += store_key_gradients(
                dq,
                da,
                dk,
                db,
                yk,
                strength,
                dq_out,
                da_out,
                dk_out,
                db_out,
                first,
                count,
                head,
                ks,
                HV,
                K,
                RULE,
                C,
                True,
            )
    if RULE == TIED:
        store_rows(dbeta_out, dbeta[:, None], first, count, head, HV, 1, tl.arange(0, 1), C, True)
