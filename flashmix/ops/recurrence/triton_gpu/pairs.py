"""The gradients of the pairs of a chunk's tokens, dA = dZ W^T (6.1), and those of them that no decay lies between."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import AB, AK, DPLR, LINEAR, QB, QK, chunk_tile, load_rows


@triton.jit
def load_values(
    v, e, do, de, first, count, head, d, HV: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Channels `d` of dO, dR, v, e of a chunk, [C, len(d)]; what a rule lacks is dO."""
    dO = load_rows(do, first, count, head, HV, V, d, C)
    dR = dO
    w = dO
    ew = dO
    if RULE != LINEAR:
        dR = load_rows(de, first, count, head, HV, V, d, C)
        ew = load_rows(e, first, count, head, HV, V, d, C)
    if RULE == LINEAR or RULE == DPLR:
        w = load_rows(v, first, count, head, HV, V, d, C)
    return dO, dR, w, ew


@triton.jit
def pair_gradients(values, qk, qb, ak, ab, RULE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds to dA of the pairs qk, qb, ak, ab, each [C, C] (6.1)."""
    dO, dR, w, ew = values
    if RULE == LINEAR or RULE == DPLR:
        qk = tl.dot(dO, tl.trans(w), qk, input_precision=PRECISION)
    if RULE != LINEAR:
        qb = tl.dot(dO, tl.trans(ew), qb, input_precision=PRECISION)
        ab = tl.dot(dR, tl.trans(ew), ab, input_precision=PRECISION)
    if RULE == DPLR:
        ak = tl.dot(dR, tl.trans(w), ak, input_precision=PRECISION)
    return qk, qb, ak, ab


@triton.jit
def all_pair_gradients(
    v, e, do, de, values, first, count, head, HV: tl.constexpr, V: tl.constexpr, RULE: tl.constexpr,
    C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dA of the pairs, over all channels of the values; `values` are those where they are one tile."""
    qk = tl.zeros([C, C], tl.float32)
    qb = tl.zeros([C, C], tl.float32)
    ak = tl.zeros([C, C], tl.float32)
    ab = tl.zeros([C, C], tl.float32)
    if BV >= V:
        qk, qb, ak, ab = pair_gradients(values, qk, qb, ak, ab, RULE, PRECISION)
    else:
        for v0 in tl.range(0, V, BV):
            part = load_values(v, e, do, de, first, count, head, v0 + tl.arange(0, BV), HV, V, RULE, C)
            qk, qb, ak, ab = pair_gradients(part, qk, qb, ak, ab, RULE, PRECISION)
    return qk, qb, ak, ab


@triton.jit
def pairs_across(W, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """y_t = sum of W_ij over the pairs whose factor holds the decay of t, j < t <= i (t < i if EXCLUSIVE): [C]."""
    i = tl.arange(0, C)[:, None]
    t = tl.arange(0, C)[None, :]
    seen = (i > t) if EXCLUSIVE else (i >= t)
    return tl.sum(tl.where(seen, tl.cumsum(W, 1) - W, 0.0), 0)


@triton.jit
def span(EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """Pairs (i, j), [C, C], that some decay lies between: those without must not reach its gradient, not even to cancel."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i - 1 > j) if EXCLUSIVE else (i > j)


@triton.jit
def near(P, EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """The pairs that no decay lies between, by row and by column, [C, 1] each: (i, i), or (i, i - 1) if EXCLUSIVE."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    pairs = tl.where((i - 1 == j) if EXCLUSIVE else (i == j), P, 0.0)
    return tl.sum(pairs, 1)[:, None], tl.sum(pairs, 0)[:, None]


@triton.jit
def neighbours(qk, qb, ak, ab, READ_BEFORE: tl.constexpr, A_EXCLUSIVE: tl.constexpr, C: tl.constexpr):
    """`near` of the rows q and of the rows a: of the columns k by row and by column, then of b."""
    qk_row, qk_column = near(qk, READ_BEFORE, C)
    qb_row, qb_column = near(qb, READ_BEFORE, C)
    ak_row, ak_column = near(ak, A_EXCLUSIVE, C)
    ab_row, ab_column = near(ab, A_EXCLUSIVE, C)
    return (qk_row, qk_column, qb_row, qb_column), (ak_row, ak_column, ab_row, ab_column)


@triton.jit
def through_memory(
    dA, chunk, head, qk, qb, ak, ab, HV: tl.constexpr, RULE: tl.constexpr, SLOTS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The pairs in the dtype of `dA`, those of a corrected rule written there and read again: what comes from memory is
    multiplied, itself and transposed, out of shared memory; what is in registers stays there, twice.
    """
    DT: tl.constexpr = dA.dtype.element_ty
    qk = qk.to(DT)
    qb = qb.to(DT)
    ak = ak.to(DT)
    ab = ab.to(DT)
    if RULE != LINEAR:
        tl.store(chunk_tile(dA, chunk, head, QB, HV, SLOTS, C), qb)
        tl.store(chunk_tile(dA, chunk, head, AB, HV, SLOTS, C), ab)
        if RULE == DPLR:
            tl.store(chunk_tile(dA, chunk, head, QK, HV, SLOTS, C), qk)
            tl.store(chunk_tile(dA, chunk, head, AK, HV, SLOTS, C), ak)
        tl.debug_barrier()
        qb = tl.load(chunk_tile(dA, chunk, head, QB, HV, SLOTS, C))
        ab = tl.load(chunk_tile(dA, chunk, head, AB, HV, SLOTS, C))
        if RULE == DPLR:
            qk = tl.load(chunk_tile(dA, chunk, head, QK, HV, SLOTS, C))
            ak = tl.load(chunk_tile(dA, chunk, head, AK, HV, SLOTS, C))
    return qk, qb, ak, ab
