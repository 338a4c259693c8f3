"""The backward of `output` and `scores` for a decay a channel, of chunks whose rows all reach back to the chunk's start.

There one anchor serves all pairs, and the row keys as the state phase has them, `~x = e^G x`, serve for pairs too:

    e^{G_i - G_j} x_i y_j = ~x_i (e^{-G_j} y_j)
    dX = e^G (dZ S^T + dA (e^{-G} Y))        dY = e^{G_C - G} W dS'^T + e^{-G} dA^T ~X                (3.3), (6.2)

and `x dx`, of which a decay's gradient is made, is `~x` times the bracket. The other chunks are left to `channel_output.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.output import (
    carried_product,
    load_states,
    state_product,
)
from flashmix.ops.recurrence.triton_gpu.pairs import all_pair_gradients, load_values, through_memory
from flashmix.ops.recurrence.triton_gpu.scores import channel_sums
from flashmix.ops.recurrence.triton_gpu.tiles import (
    DPLR,
    LINEAR,
    TIED,
    UNTIED,
    factor,
    load_numbers,
    load_rows,
    store_rows,
)


@triton.jit
def chunk_reaches(reach, chunk, head, HV: tl.constexpr, NK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr):
    """Whether all rows of a chunk reach back to its start in all channels."""
    PADDED: tl.constexpr = triton.next_power_of_2(NK * C)
    n = tl.arange(0, PADDED)
    at = reach + (chunk.to(tl.int64) * HV + head) * (NK * C) + n
    return tl.min(tl.load(at, mask=n < NK * C, other=LEVELS), 0) == LEVELS


@triton.jit(do_not_specialize=["T", "NT"])
def decayed_output_backward_kernel(
    xq, xa, k, b, G, reach, beta, v, e, do, de, states, dstates, table, dA,
    dq_out, da_out, dk_out, db_out, dg_out, dbeta_out, scale, T, NT,
    HV: tl.constexpr, HK: tl.constexpr, HB: tl.constexpr, K: tl.constexpr, V: tl.constexpr, REACH: tl.constexpr,
    RULE: tl.constexpr, READ_BEFORE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head); `xq, xa` are the decayed row keys, the query with its scale."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count == 0:
        return
    if not chunk_reaches(reach, chunk, head, HV, (K + REACH - 1) // REACH, C, LEVELS):
        return
    chunk = chunk.to(tl.int64)
    DT: tl.constexpr = do.dtype.element_ty
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    values = load_values(v, e, do, de, first, count, head, tl.arange(0, BV), HV, V, RULE, C)
    qk, qb, ak, ab = all_pair_gradients(v, e, do, de, values, first, count, head, HV, V, RULE, C, BV, PRECISION)
    dO, dR, w, ew = values
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
        out = tl.exp2(-sums).to(tl.float32)
        column = factor(last[None, :] - sums)
        S = load_states(states, chunk, head, ks, HV, K, V, BV)
        dS = load_states(dstates, chunk, head, ks, HV, K, V, BV)
        carried = carried_product(states, dstates, S, dS, chunk, head, ks, HV, K, V, BK, BV)
        x = load_rows(xq, first, count, head, HV, K, ks, C)  # [C, BK]
        if RULE != UNTIED:
            y = load_rows(k, first, count, head // (HV // HK), HK, K, ks, C)
        if RAW:
            yo = (y * out).to(DT)
            d = tl.dot(qk, yo, input_precision=PRECISION)
            if RULE == DPLR:
                d_a = tl.dot(ak, yo, input_precision=PRECISION)
        if RULE != LINEAR:
            if RULE == TIED:
                z = (y * strength).to(DT)
            else:
                z = load_rows(b, first, count, head // (HV // HB), HB, K, ks, C)
            zo = (z * out).to(DT)
            if RULE == DPLR:
                d = tl.dot(qb, zo, d, input_precision=PRECISION)
                d_a = tl.dot(ab, zo, d_a, input_precision=PRECISION)
            else:
                d = tl.dot(qb, zo, input_precision=PRECISION)
                d_a = tl.dot(ab, zo, input_precision=PRECISION)
        d += state_product(do, dO, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
        rows = x * d
        store_rows(dq_out, d * (scale * factor(before if READ_BEFORE else sums)), first, count, head, HV, K, ks, C)
        exclusive = tl.zeros([C, BK], tl.float32)
        if READ_BEFORE:
            exclusive = rows
        if RULE != LINEAR:
            xr = load_rows(xa, first, count, head, HV, K, ks, C)
            d_a += state_product(de, dR, states, S, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            rows += xr * d_a
            if RULE == TIED:
                d_a *= factor(sums)
            else:
                exclusive += xr * d_a
                store_rows(da_out, d_a * factor(before), first, count, head, HV, K, ks, C)
        written = tl.zeros([C, BK], tl.float32)
        if RAW:
            d = state_product(v, w, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            pairs = tl.dot(tl.trans(qk), x, input_precision=PRECISION)
            if RULE == DPLR:
                pairs = tl.dot(tl.trans(ak), xr, pairs, input_precision=PRECISION)
            d *= column
            written += y * d
            rows -= yo * pairs
            store_rows(dk_out, d + pairs * out, first, count, head, HV, K, ks, C)
        if RULE != LINEAR:
            d = state_product(e, ew, dstates, dS, chunk, first, count, head, ks, HV, K, V, C, BK, BV, PRECISION)
            pairs = tl.dot(tl.trans(qb), x, input_precision=PRECISION)
            pairs = tl.dot(tl.trans(ab), xr, pairs, input_precision=PRECISION)
            d *= column
            written += z * d
            rows -= zo * pairs
            d += pairs * out
            if RULE == TIED:
                dbeta += tl.sum(y * d, 1)
                store_rows(dk_out, strength * d - d_a, first, count, head, HV, K, ks, C)
            else:
                store_rows(db_out, d, first, count, head, HV, K, ks, C)
        if dg_out is not None:
            dg = tl.cumsum(rows - written, 0, reverse=True) - exclusive + tl.sum(written, 0)[None, :]
            store_rows(dg_out, dg + (carried * factor(last))[None, :], first, count, head, HV, K, ks, C)
    if RULE == TIED:
        t = tl.arange(0, C)
        tl.store(dbeta_out + (first + t) * HV + head, dbeta.to(dbeta_out.dtype.element_ty), mask=t < count)
