"""The `scores` phase, with the inverse of `transform`: all pairs of tokens of a chunk, and the factors of its decay.

    A_ij = x_i . y_j e^{G_e(i) - G_j}            for row keys x = q, a and column keys y = k, b         (3.1)
    T = (I - A_ab)^-1                                                                                   (4.2)

A tied rule has a = -k and b = beta k. `beta` and the `scale` of the query are part of the tiles and factors that are written, so
that the state phase knows neither. With one decay a token the factors of rows and columns are `[chunks, HV, 4, C]` (q, a, k, b);
with one a channel the keys themselves are written, decayed: `e^G x` and `e^{G_C - G} y`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.tiles import (
    AK,
    DPLR,
    INV,
    LINEAR,
    QB,
    QK,
    TIED,
    UNTIED,
    chunk_tile,
    chunk_vector,
    column_factor,
    factor,
    inverse,
    load_anchor,
    load_numbers,
    load_rows,
    load_sums,
    needed_passes,
    pair_decay,
    pairs_of_pass,
    store_rows,
)  # fmt: skip


@triton.jit
def store_tiles(
    A, chunk, head, qk, qb, ak, ab, HV: tl.constexpr, RULE: tl.constexpr, SLOTS: tl.constexpr, C: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the pairs that a rule has, and of ab the inverse."""
    DT: tl.constexpr = A.dtype.element_ty
    if RULE == LINEAR:
        tl.store(chunk_tile(A, chunk, head, 0, HV, SLOTS, C), qk.to(DT))
    else:
        tl.store(chunk_tile(A, chunk, head, QB, HV, SLOTS, C), qb.to(DT))
        if RULE == DPLR:
            tl.store(chunk_tile(A, chunk, head, QK, HV, SLOTS, C), qk.to(DT))
            tl.store(chunk_tile(A, chunk, head, AK, HV, SLOTS, C), ak.to(DT))
        tl.store(chunk_tile(A, chunk, head, INV, HV, SLOTS, C), inverse(ab, C, INVERSE_PRECISION).to(DT))


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT"])
def scores_forward_kernel(
    q, k, a, b, g, beta, table, A, factors, total, scale, T, NT,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr,
    RULE: tl.constexpr, GATE: tl.constexpr, READ_BEFORE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head); at most one decay a token."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count == 0:
        return
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    qk = tl.zeros([C, C], tl.float32)
    qb = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=1):
        d = k0 + tl.arange(0, BK)
        xq = load_rows(q, first, count, head // (HV // HQ), HQ, K, d, C)  # [C, BK]
        if RULE != UNTIED:
            yk = load_rows(k, first, count, head // (HV // HK), HK, K, d, C)
        if RULE == TIED:
            qb = tl.dot(xq, tl.trans(yk), qb, input_precision=PRECISION)
            ab = tl.dot(yk, tl.trans(yk), ab, input_precision=PRECISION)
        elif RULE != LINEAR:
            xa = load_rows(a, first, count, head // (HV // HA), HA, K, d, C)
            yb = tl.trans(load_rows(b, first, count, head // (HV // HB), HB, K, d, C))
            qb = tl.dot(xq, yb, qb, input_precision=PRECISION)
            ab = tl.dot(xa, yb, ab, input_precision=PRECISION)
        if RAW:
            qk = tl.dot(xq, tl.trans(yk), qk, input_precision=PRECISION)
        if RULE == DPLR:
            ak = tl.dot(xa, tl.trans(yk), ak, input_precision=PRECISION)
    G, before, last = load_sums(g, first, count, head, GATE, HV, C, EXACT)
    rows_q = before if READ_BEFORE else G
    rows_a = G if RULE == TIED else before
    column = factor(last - G)
    decay = scale * pair_decay(rows_q, G, READ_BEFORE, C)
    tl.store(total + chunk.to(tl.int64) * HV + head, factor(last))
    tl.store(chunk_vector(factors, chunk, head, 0, HV, 4, C), scale * factor(rows_q))
    qk *= decay
    qb *= decay
    if RAW:
        tl.store(chunk_vector(factors, chunk, head, 2, HV, 4, C), column)
    if RULE != LINEAR:
        row = factor(rows_a)
        decay = pair_decay(rows_a, G, True, C)
        if RULE == TIED:
            strength = load_numbers(beta, first, count, head, HV, C)
            qb *= strength[None, :]
            decay *= -strength[None, :]
            row = -row
            column *= strength
        tl.store(chunk_vector(factors, chunk, head, 1, HV, 4, C), row)
        tl.store(chunk_vector(factors, chunk, head, 3, HV, 4, C), column)
        ak *= decay
        ab *= decay
    store_tiles(A, chunk, head, qk, qb, ak, ab, HV, RULE, SLOTS, C, INVERSE_PRECISION)


@triton.jit
def load_keys(
    q, k, a, b, beta, scale, first, count, head, d,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr,
    RULE: tl.constexpr, C: tl.constexpr, SHIFT: tl.constexpr = 0,
):  # fmt: skip
    """Channels `d` of the keys of a chunk, [C, len(d)] float32: scale q, a, k, b; what a rule lacks is q. SHIFT 1: the next token's."""
    xq = load_rows(q, first, count, head // (HV // HQ), HQ, K, d, C, SHIFT).to(tl.float32) * scale
    xa = xq
    yk = xq
    yb = xq
    if RULE != UNTIED:
        yk = load_rows(k, first, count, head // (HV // HK), HK, K, d, C, SHIFT).to(tl.float32)
    if RULE == TIED:
        xa = -yk
        yb = yk * load_numbers(beta, first, count, head, HV, C, SHIFT)[:, None]
    elif RULE != LINEAR:
        xa = load_rows(a, first, count, head // (HV // HA), HA, K, d, C, SHIFT).to(tl.float32)
        yb = load_rows(b, first, count, head // (HV // HB), HB, K, d, C, SHIFT).to(tl.float32)
    return xq, xa, yk, yb


@triton.jit
def channel_sums(G, first, count, head, HV: tl.constexpr, K: tl.constexpr, d, C: tl.constexpr):
    """Channels `d` of the chunk's sums of decays: G_i, [C, len(d)], the same of the token before, and of the chunk, [len(d)]."""
    own = load_rows(G, first, count, head, HV, K, d, C)
    before = load_rows(G, first, count, head, HV, K, d, C, -1)
    last = tl.load(G + (first + count - 1) * (HV * K) + head * K + d, mask=d < K, other=0.0)
    return own, before, last


@triton.jit
def load_reach(reach, chunk, head, block, HV: tl.constexpr, NK: tl.constexpr, C: tl.constexpr):
    """How far back the rows of a chunk reach in a block of channels, [C]."""
    return tl.load(reach + ((chunk.to(tl.int64) * HV + head) * NK + block) * C + tl.arange(0, C))


@with_sound_ptxas
@triton.jit(do_not_specialize=["T", "NT"])
def channel_scores_forward_kernel(
    q, k, a, b, G, reach, beta, table, A, xq_out, xa_out, yk_out, yb_out, total, scale, T, NT,
    HV: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, K: tl.constexpr,
    RULE: tl.constexpr, READ_BEFORE: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr,
    C: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr, REACH: tl.constexpr, LIMIT: tl.constexpr, PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head); one decay a channel, in passes over pairs."""
    chunk = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count == 0:
        return
    RAW: tl.constexpr = RULE == LINEAR or RULE == DPLR
    tl.static_assert(REACH % BK == 0, "a tile's channels must have one reach")
    NK: tl.constexpr = (K + REACH - 1) // REACH
    DT: tl.constexpr = q.dtype.element_ty
    qk = tl.zeros([C, C], tl.float32)
    qb = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    own_k = tl.zeros([C], tl.float32)
    own_b = tl.zeros([C], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=1):
        d = k0 + tl.arange(0, BK)
        xq, xa, yk, yb = load_keys(q, k, a, b, beta, scale, first, count, head, d, HV, HQ, HK, HA, HB, K, RULE, C)
        sums, before, last = channel_sums(G, first, count, head, HV, K, d, C)
        rows_q = before if READ_BEFORE else sums
        rows_a = sums if RULE == TIED else before
        column = factor(last[None, :] - sums)  # [C, BK]
        tl.store(total + (chunk.to(tl.int64) * HV + head) * K + d, factor(last), mask=d < K)
        store_rows(xq_out, xq * factor(rows_q), first, count, head, HV, K, d, C)
        if RAW:
            store_rows(yk_out, yk * column, first, count, head, HV, K, d, C)
            own_k += tl.sum(xq * yk, 1)
        if RULE != LINEAR:
            store_rows(xa_out, xa * factor(rows_a), first, count, head, HV, K, d, C)
            store_rows(yb_out, yb * column, first, count, head, HV, K, d, C)
            own_b += tl.sum(xq * yb, 1)
        reaches = load_reach(reach, chunk, head, k0 // REACH, HV, NK, C)
        needed = needed_passes(reaches, LEVELS)
        for p in tl.range(0, LEVELS + 2, num_stages=1):
            if (needed >> p) & 1 == 1:
                seen, middle = pairs_of_pass(reaches, p, C, LEVELS)
                anchor = load_anchor(G, middle, first, count, head, HV, K, d, C)
                rq = (xq * factor(rows_q - anchor)).to(DT)  # [C, BK]
                column = column_factor(anchor - sums, LIMIT)
                if RAW:
                    ck = tl.trans((yk * column).to(DT))
                    qk += tl.where(seen, tl.dot(rq, ck, input_precision=PRECISION), 0.0)
                if RULE != LINEAR:
                    cb = tl.trans((yb * column).to(DT))
                    qb += tl.where(seen, tl.dot(rq, cb, input_precision=PRECISION), 0.0)
                    ra = (xa * factor(rows_a - anchor)).to(DT)
                    ab += tl.where(seen, tl.dot(ra, cb, input_precision=PRECISION), 0.0)
                    if RULE == DPLR:
                        ak += tl.where(seen, tl.dot(ra, ck, input_precision=PRECISION), 0.0)
    if not READ_BEFORE:
        diagonal = tl.arange(0, C)[:, None] == tl.arange(0, C)[None, :]
        qk += tl.where(diagonal, own_k[:, None], 0.0)
        qb += tl.where(diagonal, own_b[:, None], 0.0)
    store_tiles(A, chunk, head, qk, qb, ak, ab, HV, RULE, SLOTS, C, INVERSE_PRECISION)
