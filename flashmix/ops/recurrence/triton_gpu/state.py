"""The `state` phase with the `output` of the forward: the one serial pass over the chunks of a sequence.

    R = V + ~a S   (raw rules: A_ak V + ~a S)          e = T R                                  (5.1), (5.2)
    o = ~q S + A_qk V + A_qb e                         S <- e^{G_C} S + ^k^T V + ^b^T e         (1.8), (5.3)

A program holds `BV` columns of the state of one (sequence, value head), transposed, `S^T [BV, BK]`: every product has it or a
thing made of it on the left, which stays in registers. Backward from the end, with `dS` in its place:

    de = A_qb^T dO + ^b dS'      dR = T^T de      dv = A_qk^T dO + A_ak^T dR + ^k dS'           (5.4), (5.5), (6.3)
    dS = e^{G_C} dS' + ~q^T dO + ~a^T dR                                                        (5.7)
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.layout import sequence_chunks
from flashmix.ops.recurrence.triton_gpu.tiles import (
    AK,
    DPLR,
    INV,
    LINEAR,
    QB,
    QK,
    TIED,
    chunk_tile,
    chunk_vector,
    load_rows,
    state_tile,
    store_rows,
)  # fmt: skip


@triton.jit
def load_factor(factors, chunk, head, slot: tl.constexpr, HV: tl.constexpr, CHANNEL: tl.constexpr, C: tl.constexpr):
    """The factors of the chunk's rows or columns, [1, C]; with a decay a channel the keys have them already."""
    if CHANNEL:
        return tl.full([1, C], 1.0, tl.float32)
    else:
        return tl.load(chunk_vector(factors, chunk, head, slot, HV, 4, C))[None, :]


@triton.jit
def load_total(total, chunk, head, k, HV: tl.constexpr, K: tl.constexpr, CHANNEL: tl.constexpr):
    """What the whole chunk leaves of the state: a number, or [1, BK]."""
    if CHANNEL:
        return tl.load(total + (chunk * HV + head) * K + k, mask=k < K, other=0.0)[None, :]
    else:
        return tl.load(total + chunk * HV + head)


@triton.jit
def saved_tile(x, chunk, head, v, k, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Pointers to a tile `[len(v), len(k)]` of `[chunks, HV, V, K]`."""
    return x + (chunk * HV + head).to(tl.int64) * (V * K) + v[:, None] * K + k[None, :]


@triton.jit
def segment_span(segment, segments, chunks):
    """First and end of the chunks of a segment; the last ones may be short or empty."""
    size = (chunks + segments - 1) // segments
    return tl.minimum(segment * size, chunks), tl.minimum((segment + 1) * size, chunks)


@triton.jit
def map_tile(maps, index, rows, k, K: tl.constexpr, V: tl.constexpr, DIAGONAL: tl.constexpr):
    """Pointers to a tile `[len(rows), len(k)]` of map `index` of `[..., V + K, K]`: N^T, under it M^T (7.1); of one that is
    DIAGONAL, `[..., V + 1, K]`, under N^T its diagonal.
    """
    SIZE: tl.constexpr = (V + 1) * K if DIAGONAL else (V + K) * K
    return maps + index.to(tl.int64) * SIZE + rows[:, None] * K + k[None, :]


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT", "SEGMENTS"])
def state_forward_kernel(
    xq, xa, yk, yb, v, A, factors, total, S0, cu, offsets, o, e, states, S_end, starts, maps, T, NT, SEGMENTS,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    SLOTS: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUTPUT writes `o`; SAVE writes `e` and the state that each chunk starts from.

    A sequence may be cut into SEGMENTS. With `maps`, each is worked on from nothing: N^T from a zero state, and in further
    programs M^T, the same without values from the identity; of a rule without corrected writes M is DIAGONAL, the whole decay,
    and made along with N. With `starts`, each begins at the state that is its own.
    """
    MAPS: tl.constexpr = maps is not None
    DIAGONAL: tl.constexpr = RULE == LINEAR
    NV: tl.constexpr = (V + BV - 1) // BV
    NB: tl.constexpr = NV + (K + BV - 1) // BV if MAPS and not DIAGONAL else NV
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    SHARED: tl.constexpr = RULE == TIED and not CHANNEL  # a and b are one tensor, the rest is in the factors
    DT: tl.constexpr = v.dtype.element_ty
    block = tl.program_id(0) % NB
    segment = (tl.program_id(0) // NB) % SEGMENTS
    row = tl.program_id(0) // (NB * SEGMENTS)  # of sequences x heads
    head = row % HV
    n = row // HV
    vs = block * BV + tl.arange(0, BV)
    ks = tl.arange(0, BK)
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    start, length, chunk0, chunks = sequence_chunks(cu, offsets, n, T, NT, C, PACKED)
    begin, end = segment_span(segment, SEGMENTS, chunks)
    S = tl.zeros([BV, BK], tl.float32)
    whole = tl.full([1, BK], 1.0, tl.float32)
    if MAPS:
        if block >= NV:
            rows = vs - NV * BV
            S = tl.where(rows[:, None] == ks[None, :], 1.0, 0.0)
            vs += V  # no value is there
    elif starts is not None:
        S = tl.load(saved_tile(starts, row.to(tl.int64) * SEGMENTS, segment, vs, ks, 1, K, V), mask=inside, other=0.0)
    elif S0 is not None:
        S = tl.load(state_tile(S0, row, vs, ks, K, V), mask=inside, other=0.0)
    for i in tl.range(begin, end, num_stages=STAGES):
        chunk = chunk0 + i
        first = start + i * C
        count = tl.minimum(length - i * C, C)
        Sb = S.to(DT)
        if SAVE:
            tl.store(saved_tile(states, chunk, head, vs, ks, HV, K, V), Sb, mask=inside)
        V_T = tl.trans(load_rows(v, first, count, head, HV, V, vs, C))  # [BV, C]
        decay = load_total(total, chunk, head, ks, HV, K, CHANNEL)
        if RULE != LINEAR:
            if SHARED:
                b = load_rows(yb, first, count, head // (HV // HB), HB, K, ks, C)  # [C, BK]
                a = tl.trans(b)
            else:
                a = tl.trans(load_rows(xa, first, count, head // (HV // HA), HA, K, ks, C))  # [BK, C]
            R = tl.dot(Sb, a, input_precision=PRECISION) * load_factor(factors, chunk, head, 1, HV, CHANNEL, C)
            if RULE == DPLR:
                R += tl.dot(
                    V_T, tl.trans(tl.load(chunk_tile(A, chunk, head, AK, HV, SLOTS, C))), input_precision=PRECISION
                )
            else:
                R += V_T
            inv = tl.trans(tl.load(chunk_tile(A, chunk, head, INV, HV, SLOTS, C)))  # [C, C]
            e_T = tl.dot(R.to(DT), inv, input_precision=PRECISION)  # [BV, C]
            if SAVE:
                store_rows(e, tl.trans(e_T), first, count, head, HV, V, vs, C)
        if OUTPUT:
            q = tl.trans(load_rows(xq, first, count, head // (HV // HQ), HQ, K, ks, C))  # [BK, C]
            o_T = tl.dot(Sb, q, input_precision=PRECISION) * load_factor(factors, chunk, head, 0, HV, CHANNEL, C)
            if RAW:
                qk = tl.trans(tl.load(chunk_tile(A, chunk, head, 0 if RULE == LINEAR else QK, HV, SLOTS, C)))
                o_T = tl.dot(V_T, qk, o_T, input_precision=PRECISION)
            if RULE != LINEAR:
                qb = tl.trans(tl.load(chunk_tile(A, chunk, head, QB, HV, SLOTS, C)))
                o_T = tl.dot(e_T.to(DT), qb, o_T, input_precision=PRECISION)
            store_rows(o, tl.trans(o_T.to(DT)), first, count, head, HV, V, vs, C)
        S *= decay
        if MAPS and DIAGONAL:
            whole *= decay
        if RAW:
            k = load_rows(yk, first, count, head // (HV // HK), HK, K, ks, C)  # [C, BK]
            w = (V_T * load_factor(factors, chunk, head, 2, HV, CHANNEL, C)).to(DT)
            S = tl.dot(w, k, S, input_precision=PRECISION)
        if RULE != LINEAR:
            if not SHARED:
                b = load_rows(yb, first, count, head // (HV // HB), HB, K, ks, C)  # [C, BK]
            w = (e_T * load_factor(factors, chunk, head, 3, HV, CHANNEL, C)).to(DT)
            S = tl.dot(w, b, S, input_precision=PRECISION)
    if MAPS:
        rows = block * BV + tl.arange(0, BV)
        rows = tl.where(block < NV, rows, rows - NV * BV + V)
        fits = tl.where(block < NV, rows < V, rows < V + K)
        index = row.to(tl.int64) * SEGMENTS + segment
        at = map_tile(maps, index, rows, ks, K, V, DIAGONAL)
        tl.store(at, S, mask=fits[:, None] & (ks < K)[None, :])
        if DIAGONAL:
            at = map_tile(maps, index, V + tl.arange(0, 1), ks, K, V, DIAGONAL)
            tl.store(at, whole, mask=(ks < K)[None, :] & (block == 0))
    elif S_end is not None:
        tl.store(state_tile(S_end, row, vs, ks, K, V), S, mask=inside & (segment == SEGMENTS - 1))
    if OUTPUT and PACKED:
        if row // HV == tl.num_programs(0) // (NB * HV) - 1:  # rows past the last sequence
            for past in range(start + length, T, C):
                store_rows(o, tl.zeros([C, BV], DT), past, tl.minimum(T - past, C), head, HV, V, vs, C)


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT", "SEGMENTS"])
def state_backward_kernel(
    xq, xa, yk, yb, A, factors, total, do, dS_end, cu, offsets, dstates, de, dv, dS0, starts, ends, T, NT, SEGMENTS,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    SLOTS: tl.constexpr, SAVE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SAVE writes `de` (dR), `dv` of raw rules, and the gradient of the state that each chunk leaves.

    With `ends`, each of the SEGMENTS is worked on from nothing, and what it sends back is written there, transposed. With
    `starts`, each begins at the gradient that reaches it from behind.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    SHARED: tl.constexpr = RULE == TIED and not CHANNEL  # a and b are one tensor, the rest is in the factors
    DT: tl.constexpr = do.dtype.element_ty
    vs = (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    segment = (tl.program_id(0) // NV) % SEGMENTS
    row = tl.program_id(0) // (NV * SEGMENTS)  # of sequences x heads
    head = row % HV
    n = row // HV
    ks = tl.arange(0, BK)
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    start, length, chunk0, chunks = sequence_chunks(cu, offsets, n, T, NT, C, PACKED)
    begin, end = segment_span(segment, SEGMENTS, chunks)
    own = row.to(tl.int64) * SEGMENTS
    dS = tl.zeros([BV, BK], tl.float32)
    if starts is not None:
        dS = tl.load(saved_tile(starts, own, segment, vs, ks, 1, K, V), mask=inside, other=0.0)
    elif ends is None and dS_end is not None:
        dS = tl.load(state_tile(dS_end, row, vs, ks, K, V), mask=inside, other=0.0)
    for back in tl.range(0, end - begin, num_stages=STAGES):
        i = end - 1 - back
        chunk = chunk0 + i
        first = start + i * C
        count = tl.minimum(length - i * C, C)
        dSb = dS.to(DT)
        if SAVE:
            tl.store(saved_tile(dstates, chunk, head, vs, ks, HV, K, V), dSb, mask=inside)
        dO_T = tl.trans(load_rows(do, first, count, head, HV, V, vs, C))  # [BV, C]
        q = load_rows(xq, first, count, head // (HV // HQ), HQ, K, ks, C)  # [C, BK]
        decay = load_total(total, chunk, head, ks, HV, K, CHANNEL)
        if RULE != LINEAR:
            b = load_rows(yb, first, count, head // (HV // HB), HB, K, ks, C)  # [C, BK]
            d = tl.dot(dSb, tl.trans(b), input_precision=PRECISION) * load_factor(
                factors, chunk, head, 3, HV, CHANNEL, C
            )
            qb = tl.load(chunk_tile(A, chunk, head, QB, HV, SLOTS, C))  # [C, C]
            d = tl.dot(dO_T, qb, d, input_precision=PRECISION)
            inv = tl.load(chunk_tile(A, chunk, head, INV, HV, SLOTS, C))
            dR = tl.dot(d.to(DT), inv, input_precision=PRECISION)  # [BV, C]
            if SAVE:
                store_rows(de, tl.trans(dR.to(DT)), first, count, head, HV, V, vs, C)
        if RAW and SAVE:
            k = tl.trans(load_rows(yk, first, count, head // (HV // HK), HK, K, ks, C))  # [BK, C]
            w = tl.dot(dSb, k, input_precision=PRECISION) * load_factor(factors, chunk, head, 2, HV, CHANNEL, C)
            qk = tl.load(chunk_tile(A, chunk, head, 0 if RULE == LINEAR else QK, HV, SLOTS, C))
            w = tl.dot(dO_T, qk, w, input_precision=PRECISION)
            if RULE == DPLR:
                w = tl.dot(
                    dR.to(DT), tl.load(chunk_tile(A, chunk, head, AK, HV, SLOTS, C)), w, input_precision=PRECISION
                )
            store_rows(dv, tl.trans(w.to(DT)), first, count, head, HV, V, vs, C)
        dS *= decay
        z = (dO_T * load_factor(factors, chunk, head, 0, HV, CHANNEL, C)).to(DT)
        dS = tl.dot(z, q, dS, input_precision=PRECISION)
        if RULE != LINEAR:
            if SHARED:
                a = b
            else:
                a = load_rows(xa, first, count, head // (HV // HA), HA, K, ks, C)  # [C, BK]
            z = (dR * load_factor(factors, chunk, head, 1, HV, CHANNEL, C)).to(DT)
            dS = tl.dot(z, a, dS, input_precision=PRECISION)
    if ends is not None:
        tl.store(saved_tile(ends, own, segment, vs, ks, 1, K, V), dS, mask=inside)
    elif dS0 is not None:
        tl.store(state_tile(dS0, row, vs, ks, K, V), dS, mask=inside & (segment == 0))
