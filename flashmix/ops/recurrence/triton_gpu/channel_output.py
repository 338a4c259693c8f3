"""The backward of `output` and `scores` for a decay a channel: by way of the states, and of the pairs those whose row reaches
back to the chunk's start.

There one anchor serves all pairs, and the row keys as the state phase has them, `~x = e^G x`, serve for pairs too:

    e^{G_i - G_j} x_i y_j = ~x_i (e^{-G_j} y_j)
    dX = e^G (dZ S^T + dA (e^{-G} Y))        dY = e^{G_C - G} W dS'^T + e^{-G} dA^T ~X                (3.3), (6.2)

and `x dx`, of which a decay's gradient is made, is `~x` times the bracket. The other pairs, beside float32 operands all, are
added by `channel_pairs.py`: which they are is decided row by row, so no row's sums depend on what comes after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.output import (
    carried_product,
    decay_gradient,
    load_states,
    state_product,
)
from flashmix.ops.recurrence.triton_gpu.pairs import all_pair_gradients, load_values, through_memory
from flashmix.ops.recurrence.triton_gpu.scores import channel_sums, load_reach
from flashmix.ops.recurrence.triton_gpu.tiles import (
    DPLR,
    LINEAR,
    TIED,
    UNTIED,
    column_factor,
    factor,
    load_numbers,
    load_rows,
    store_rows,
)


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT"])
def channel_output_backward_kernel(
    xq, xa, k, b, G, reach, beta, v, e, do, de, states, dstates, table, dA,
    dq_out, da_out, dk_out, db_out, dg_out, dbeta_out, scale, T, NT,
    HV: tl.constexpr, HK: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, V: tl.constexpr, REACH: tl.constexpr,
    RULE: tl.constexpr, READ_BEFORE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LIMIT: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head); `xq, xa` are the decayed row keys, the query with its scale. No pairs if EXACT."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count == 0:
        return
    tl.static_assert(REACH % BK == 0, "a tile's channels must have one reach")
    NK: tl.constexpr = (K + REACH - 1) // REACH
    chunk = chunk.to(tl.int64)
    DT: tl.constexpr = do.dtype.element_ty
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    values = load_values(v, e, do, de, first, count, head, tl.arange(0, BV), HV, V, RULE, C)
    dO, dR, w, ew = values
    if not EXACT:
        i = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
        qk, qb, ak, ab = all_pair_gradients(v, e, do, de, values, first, count, head, HV, V, RULE, C, BV, PRECISION)
        seen = (i > j) if READ_BEFORE else (i >= j)
        qk = tl.where(seen, qk, 0.0)
        qb = tl.where(seen, qb, 0.0)
        ak = tl.where(i > j, ak, 0.0)
        ab = tl.where(i > j, ab, 0.0)
        qk, qb, ak, ab = through_memory(dA, chunk, head, qk, qb, ak, ab, HV, RULE, SLOTS, C)
    if RULE == TIED:
        strength = load_numbers(beta, first, count, head, HV, C)[:, None]
        dbeta = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        ks = k0 + tl.arange(0, BK)
        sums, before, last = channel_sums(G, first, count, head, HV, K, ks, C)  # [C, BK]
        column = factor(last[None, :] - sums)
        S = load_states(states, chunk, head, ks, HV, K, V, BV)
        dS = load_states(dstates, chunk, head, ks, HV, K, V, BV)
        carried = carried_product(states, dstates, S, dS, chunk, head, ks, HV, K, V, BK, BV)
        x = load_rows(xq, first, count, head, HV, K, ks, C)  # [C, BK]
        if RULE != UNTIED:
            y = load_rows(k, first, count, head // (HV // HK), HK, K, ks, C)
        if RULE == TIED:
            z = (y * strength).to(DT)
        elif RULE != LINEAR:
            z = load_rows(b, first, count, head // (HV // HB), HB, K, ks, C)
        d = state_product(do, dO, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
        if RULE != LINEAR:
            xr = load_rows(xa, first, count, head, HV, K, ks, C)
            d_a = state_product(de, dR, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
        if not EXACT:
            out = column_factor(-sums, LIMIT)
            reaches = (load_reach(reach, chunk, head, k0 // REACH, HV, NK, C) == LEVELS)[:, None]
            own = tl.where(reaches, x, 0.0)
            if RAW:
                yo = (y * out).to(DT)
                to_q = tl.dot(qk, yo, input_precision=PRECISION)
                to_k = tl.dot(tl.trans(qk), own, input_precision=PRECISION)
            if RULE != LINEAR:
                zo = (z * out).to(DT)
                own_a = tl.where(reaches, xr, 0.0)
                to_a = tl.dot(ab, zo, input_precision=PRECISION)
                to_b = tl.dot(tl.trans(qb), own, input_precision=PRECISION)
                to_b = tl.dot(tl.trans(ab), own_a, to_b, input_precision=PRECISION)
                if RAW:
                    to_q = tl.dot(qb, zo, to_q, input_precision=PRECISION)
                    to_a = tl.dot(ak, yo, to_a, input_precision=PRECISION)
                    to_k = tl.dot(tl.trans(ak), own_a, to_k, input_precision=PRECISION)
                else:
                    to_q = tl.dot(qb, zo, input_precision=PRECISION)
                d_a += tl.where(reaches, to_a, 0.0)
            d += tl.where(reaches, to_q, 0.0)
        inclusive = x * d
        exclusive = tl.zeros([C, BK], tl.float32)
        if READ_BEFORE:
            exclusive = inclusive
            inclusive = tl.zeros([C, BK], tl.float32)
        store_rows(dq_out, d * (scale * factor(before if READ_BEFORE else sums)), first, count, head, HV, K, ks, C)
        if RULE == TIED:
            inclusive += xr * d_a
            d_a *= factor(sums)
        elif RULE != LINEAR:
            exclusive += xr * d_a
            store_rows(da_out, d_a * factor(before), first, count, head, HV, K, ks, C)
        written = tl.zeros([C, BK], tl.float32)
        if RAW:
            d = state_product(v, w, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            d *= column
            written += y * d
            if not EXACT:
                inclusive -= yo * to_k
                d += to_k * out
            store_rows(dk_out, d, first, count, head, HV, K, ks, C)
        if RULE != LINEAR:
            d = state_product(e, ew, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            d *= column
            written += z * d
            if not EXACT:
                inclusive -= zo * to_b
                d += to_b * out
            if RULE == TIED:
                dbeta += tl.sum(y * d, 1)
                store_rows(dk_out, strength * d - d_a, first, count, head, HV, K, ks, C)
            else:
                store_rows(db_out, d, first, count, head, HV, K, ks, C)
        if dg_out is not None:
            if EXACT:
                dg = decay_gradient(inclusive, exclusive, written, count, C)
            else:
                dg = (
                    tl.cumsum(inclusive + exclusive - written, 0, reverse=True)
                    - exclusive
                    + tl.sum(written, 0)[None, :]
                )
            store_rows(dg_out, dg + (carried * factor(last))[None, :], first, count, head, HV, K, ks, C)
    if RULE == TIED:
        t = tl.arange(0, C)
        tl.store(dbeta_out + (first + t) * HV + head, dbeta.to(dbeta_out.dtype.element_ty), mask=t < count)
