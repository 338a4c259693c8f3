"""Backward of softmax attention: every probability is computed again from its row's m and l, never kept.

    P = 2^(S - m) / l;  delta_i = do_i . o_i - dlse_i;  dV = P^T dO;  dS = P (dO V^T - delta);  dQ = scale dS K;  dK = scale dS^T Q

`rows` computes delta once. `keys` gives a program BN keys and walks over the queries that see them, in a fixed order through the
query heads that share them: dK, dV. `queries` gives a program BM queries and walks over their keys: dQ. The products `q k^T` and
`dO V^T` are made twice; in exchange nothing is added by two programs, and the same call gives the same bits.
Half precision takes `m + log2 l` as one number; in float32 that would cost digits where scores are large.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.attention.triton_gpu.launch import Call, aligned, descriptors, packed_blocks
from flashmix.ops.attention.triton_gpu.tiles import (
    LOG2_E,
    accumulated,
    biased,
    dropout_keeps,
    dropout_rows,
    find_place,
    find_sequence,
    keys_of_rows,
    load_decay,
    load_head,
    product,
    rows_of_keys,
    store_rows,
    tanh,
    visible,
)


@triton.jit(do_not_specialize=["tokens", "heads", "rows"])
def attention_backward_rows_kernel(
    o, d_o, d_lse, top, total, sink, level, share, delta, d_sink, tokens, heads, rows, DV: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """delta, what is taken off a row's scores, 1 / l and the sink's gradient, `[B, HQ, Tq]` each; o and dO `[B, Tq, HQ, V]`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, token = row % heads, row // heads
    batch, token = token // tokens, token % tokens
    columns = tl.arange(0, WIDTH)
    inside = row < rows
    mask = inside[:, None] & (columns < DV)[None, :]
    at = row[:, None] * DV + columns[None, :]
    found = tl.zeros([ROWS], tl.float32)
    if d_o is not None:
        mixed = tl.load(o + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, V]
        found = tl.sum(mixed * tl.load(d_o + at, mask=mask, other=0.0).to(tl.float32), 1)
    at = (batch * heads + head) * tokens + token
    if d_lse is not None:
        found -= tl.load(d_lse + at, mask=inside, other=0.0)
    m = tl.load(top + at, mask=inside, other=0.0)
    l = tl.load(total + at, mask=inside, other=1.0)
    found = tl.where(l == 0, 0.0, found)
    if EXACT:
        tl.store(level + at, m, mask=inside)
        tl.store(share + at, tl.where(l == 0, 0.0, 1.0 / tl.where(l == 0, 1.0, l)), mask=inside)
    else:
        tl.store(level + at, tl.where(l == 0, float("inf"), m + tl.log2(l)), mask=inside)
    tl.store(delta + at, found, mask=inside)
    if sink is not None:
        at_sink = tl.load(sink + head).to(tl.float32) * LOG2_E
        tl.store(d_sink + at, tl.where(l == 0, 0.0, -tl.exp2(at_sink - m) / l * found), mask=inside)


@triton.jit
def _probabilities(s, position, key, rows, decay_q, decay_k, numbers, MASK: tl.constexpr, C: tl.constexpr):
    """P of a tile from `q k^T`, and tanh(scores / softcap)."""
    tokens_k, scale, softcap, left, right, slope, _, _ = numbers
    level, share = rows
    squashed = s
    if C.RAW:
        x = s * scale - level
    else:
        if C.SOFTCAP:
            squashed = tanh(s * scale, C)
            x = squashed * softcap
        else:
            x = s * scale
        x = biased(x, position, key, slope, decay_q, decay_k, MASK, C) - level
    if MASK:
        x = tl.where(visible(position, key, tokens_k, left, right, C), x, -float("inf"))
    p = tl.exp2(x)
    if C.EXACT:
        p *= share
    return p, squashed


@triton.jit
def _d_scores(p, d_p, squashed, delta, keeps, keep_scale, C: tl.constexpr):
    """dS of the whole score, and of `scale q k^T`, from P and `dO V^T`."""
    if C.DROPOUT:
        d_p = tl.where(keeps, d_p * keep_scale, 0.0)
    d_s = p * (d_p - delta)
    if C.SOFTCAP:
        return d_s, d_s * (1.0 - squashed * squashed)
    else:
        return d_s, d_s


@triton.jit
def _walk_queries(state, low, high, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers,
                  MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Adds what the queries from `low` to `high` of one head give to `(dK, dK_2, dV, dV_2, sums of dS)` of BN keys."""
    d_k, d_k2, d_v, d_v2, sums = state
    q, q_desc, q_desc_2, stride_q = queries
    d_o, o_desc, o_desc_2, stride_o = flows
    level, share, delta, seed, head, first_row, shift, tokens_q, high_g, low_g, high_ref, low_ref = stats
    key, high_k, low_k = columns
    tokens_k = numbers[0]
    for start in tl.range(low, high, C.BM, num_stages=C.MASKED_STAGES if MASK else C.STAGES):
        index = start + tl.arange(0, C.BM)
        position = (index + shift)[None, :]
        inside = index < tokens_q
        # q, dO: [BM, K], [BM, V], in two parts
        q_1, q_2 = load_head(q, q_desc, q_desc_2, place, start, tokens_q, stride_q, C.D, 0, C.D1, C.D2, C.BM, MASK, C)
        s = product(k_1, k_2, q_1, q_2, C.D2, C)  # [BN, BM]
        at_rows = tl.load(level + index, mask=inside, other=float("inf"))[None, :]
        of_rows = at_rows
        if C.EXACT:
            of_rows = tl.load(share + index, mask=inside, other=0.0)[None, :]
        decay_q, decay_k = (0.0, 0.0), (0.0, 0.0)
        if C.DECAY:
            high_q, low_q = load_decay(high_g, low_g, index + shift, tokens_k)
            decay_k = (high_k, low_k)
            if MASK:
                decay_q = (high_q[None, :], low_q[None, :])
            else:
                decay_q = (((high_q - high_ref) + (low_q - low_ref))[None, :], 0.0)
                decay_k = ((high_ref - high_k) + (low_ref - low_k), 0.0)
        p, squashed = _probabilities(s, position, key, (at_rows, of_rows), decay_q, decay_k, numbers, MASK, C)
        o_1, o_2 = load_head(
            d_o, o_desc, o_desc_2, place, start, tokens_q, stride_o, C.DV, 0, C.V1, C.V2, C.BM, MASK, C
        )
        kept, keeps = p, 0
        if C.DROPOUT:
            keeps = dropout_keeps(dropout_rows(seed, head, first_row + index)[None, :], key, numbers[6])
            kept = tl.where(keeps, p, 0.0)
        kept = kept.to(o_1.dtype)
        d_v = accumulated(d_v, kept, o_1, C)
        if C.V2 > 0:
            d_v2 = accumulated(d_v2, kept, o_2, C)
        d_p = product(v_1, v_2, o_1, o_2, C.V2, C)
        found = tl.load(delta + index, mask=inside, other=0.0)[None, :]
        d_s, d_raw = _d_scores(p, d_p, squashed, found, keeps, numbers[7], C)
        if C.DECAY:
            sums += tl.sum(d_s, 1)
        d_raw = d_raw.to(q_1.dtype)
        d_k = accumulated(d_k, d_raw, q_1, C)
        if C.D2 > 0:
            d_k2 = accumulated(d_k2, d_raw, q_2, C)
    return d_k, d_k2, d_v, d_v2, sums


@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "heads", "group", "batches", "blocks", "at_once", "count", "left", "right",
                       "threshold", "sqb", "sqt", "sqh", "skb", "skt", "skh", "svb", "svt", "svh", "sob", "sot", "soh"]
)  # fmt: skip
def attention_backward_keys_kernel(
    q, k, v, d_o, q_desc, q_desc_2, o_desc, o_desc_2, d_k, d_v, level, share, delta, at_keys, slopes, decay, seed,
    cu_q, cu_k, table, sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sob, sot, soh,
    tokens_q, tokens_k, heads, group, batches, blocks, at_once, count,
    scale, softcap, left, right, threshold, keep_scale, d_scale, C: tl.constexpr,
):  # fmt: skip
    """dK `[B, Tk, H, K]` and dV `[B, Tk, H, V]` of BN keys; with a decay also the sums of dS over rows, `[B, HQ, Tk]`."""
    bh, block = find_place(tl.program_id(0), blocks, batches * heads, at_once)
    batch, head_k = bh // heads, bh % heads
    start_q, start_k, len_q, len_k = tokens_q * 0, tokens_k * 0, tokens_q, tokens_k
    if C.PACKED:
        start_k, len_k, start_q, len_q, block = find_sequence(block, cu_k, cu_q, table, count, tokens_k, tokens_q, C.BN)
    first = block * C.BN
    if first < 0 or first >= len_k:
        return
    heads_q = heads * group
    shift = len_k - len_q
    k += batch.to(tl.int64) * skb * C.UNIT + head_k.to(tl.int64) * skh * C.UNIT + start_k.to(tl.int64) * skt * C.UNIT
    v += batch.to(tl.int64) * svb * C.UNIT + head_k.to(tl.int64) * svh * C.UNIT + start_k.to(tl.int64) * svt * C.UNIT
    k_1, k_2 = load_head(k, None, None, None, first, len_k, skt * C.UNIT, C.D, 0, C.D1, C.D2, C.BN, True, C)  # [BN, K]
    v_1, v_2 = load_head(v, None, None, None, first, len_k, svt * C.UNIT, C.DV, 0, C.V1, C.V2, C.BN, True, C)  # [BN, V]
    index = first + tl.arange(0, C.BN)
    zeros = tl.full([C.BN], 0.0, tl.float32)
    d_k1, d_v1 = tl.full([C.BN, C.D1], 0.0, tl.float32), tl.full([C.BN, C.V1], 0.0, tl.float32)
    d_k2 = tl.full([C.BN, C.D2], 0.0, tl.float32) if C.D2 > 0 else zeros
    d_v2 = tl.full([C.BN, C.V2], 0.0, tl.float32) if C.V2 > 0 else zeros
    low, inner, outer, high = rows_of_keys(first, shift, len_q, left, right, C)
    for turn in range(group):
        head = head_k * group + turn
        row = (batch * heads_q + head).to(tl.int64)
        slope = 0.0
        if C.ALIBI:
            slope = tl.load(slopes + head).to(tl.float32) * LOG2_E
        numbers = (len_k, scale, softcap, left, right, slope, threshold, keep_scale)
        high_g, low_g, high_ref, low_ref, columns = decay, decay, 0.0, 0.0, (index[:, None], 0.0, 0.0)
        if C.DECAY:
            high_g = decay + row * tokens_k + start_k
            low_g = high_g + (batches * heads_q).to(tl.int64) * tokens_k
            high_k, low_k = load_decay(high_g, low_g, index, len_k)
            columns = (index[:, None], high_k[:, None], low_k[:, None])
            high_ref, low_ref = load_decay(high_g, low_g, first + C.BN - 1, len_k)
        at = row * tokens_q + start_q
        stats = (level + at, share + at if C.EXACT else share, delta + at, seed, head, batch * tokens_q + start_q, shift, len_q,
                 high_g, low_g, high_ref, low_ref)  # fmt: skip
        of_q = (
            q
            + batch.to(tl.int64) * sqb * C.UNIT
            + head.to(tl.int64) * sqh * C.UNIT
            + start_q.to(tl.int64) * sqt * C.UNIT
        )
        of_o = (
            d_o
            + batch.to(tl.int64) * sob * C.UNIT
            + head.to(tl.int64) * soh * C.UNIT
            + start_q.to(tl.int64) * sot * C.UNIT
        )
        queries, flows = (of_q, q_desc, q_desc_2, sqt * C.UNIT), (of_o, o_desc, o_desc_2, sot * C.UNIT)
        place = (batch, head, start_q)
        state = (d_k1, d_k2, d_v1, d_v2, zeros)
        if C.CAUSAL or C.RIGHT:
            end = tl.minimum(inner, high)
            state = _walk_queries(
                state, low, end, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers, True, C
            )
        state = _walk_queries(
            state, inner, outer, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers, False, C
        )
        state = _walk_queries(
            state, outer, high, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers, True, C
        )
        d_k1, d_k2, d_v1, d_v2, sums = state
        if C.DECAY:
            tl.store(at_keys + row * tokens_k + start_k + index, sums, mask=index < len_k)
    d_k += (batch.to(tl.int64) * tokens_k + start_k) * heads * C.D + head_k * C.D
    d_v += (batch.to(tl.int64) * tokens_k + start_k) * heads * C.DV + head_k * C.DV
    store_rows(d_k, d_k1 * d_scale, first, len_k, heads * C.D, C.D, 0, C.D1, C.BN)
    if C.D2 > 0:
        store_rows(d_k, d_k2 * d_scale, first, len_k, heads * C.D, C.D, C.D1, C.D2, C.BN)
    store_rows(d_v, d_v1 * keep_scale, first, len_k, heads * C.DV, C.DV, 0, C.V1, C.BN)
    if C.V2 > 0:
        store_rows(d_v, d_v2 * keep_scale, first, len_k, heads * C.DV, C.DV, C.V1, C.V2, C.BN)


@triton.jit
def _walk_keys(state, low, high, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers,
               MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Adds what the keys from `low` to `high` give to `(dQ, dQ_2, slopes' gradient, sums of dS)` of BM queries."""
    d_q, d_q2, d_slope, sums = state
    k, k_desc, k_desc_2, stride_k = keys
    v, v_desc, v_desc_2, stride_v = values
    position, level, share, delta, of_row = rows
    decay_q, high_g, low_g, decay_ref = gates
    tokens_k = numbers[0]
    row_bias = (0.0, 0.0)
    if C.DECAY:
        row_bias = ((decay_q[0] - decay_ref[0]) + (decay_q[1] - decay_ref[1]), 0.0)
    for start in tl.range(low, high, C.BN, num_stages=C.MASKED_STAGES if MASK else C.STAGES):
        # k, v: [BN, K], [BN, V], in two parts
        k_1, k_2 = load_head(k, k_desc, k_desc_2, place, start, tokens_k, stride_k, C.D, 0, C.D1, C.D2, C.BN, MASK, C)
        s = product(q_1, q_2, k_1, k_2, C.D2, C)
        key = start + tl.arange(0, C.BN)[None, :]
        of_row_here, decay_k = row_bias, (0.0, 0.0)
        if C.DECAY:
            high_k, low_k = load_decay(high_g, low_g, start + tl.arange(0, C.BN), tokens_k)
            if MASK:
                decay_k = (high_k[None, :], low_k[None, :])
                of_row_here = decay_q
            else:
                decay_k = (((decay_ref[0] - high_k) + (decay_ref[1] - low_k))[None, :], 0.0)
        p, squashed = _probabilities(s, position, key, (level, share), of_row_here, decay_k, numbers, MASK, C)
        v_1, v_2 = load_head(v, v_desc, v_desc_2, place, start, tokens_k, stride_v, C.DV, 0, C.V1, C.V2, C.BN, MASK, C)
        d_p = product(o_1, o_2, v_1, v_2, C.V2, C)
        keeps = 0
        if C.DROPOUT:
            keeps = dropout_keeps(of_row, key, numbers[6])
        d_s, d_raw = _d_scores(p, d_p, squashed, delta, keeps, numbers[7], C)
        if C.ALIBI:
            d_slope -= tl.sum(d_s * tl.abs(position.to(tl.float32) - key.to(tl.float32)), 1)
        if C.DECAY:
            sums += tl.sum(d_s, 1)
        d_raw = d_raw.to(k_1.dtype)
        d_q = accumulated(d_q, d_raw, k_1, C)
        if C.D2 > 0:
            d_q2 = accumulated(d_q2, d_raw, k_2, C)
    return d_q, d_q2, d_slope, sums


@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "heads_q", "group", "batches", "blocks", "at_once", "count", "left", "right",
                       "threshold", "sqb", "sqt", "sqh", "skb", "skt", "skh", "svb", "svt", "svh", "sob", "sot", "soh"]
)  # fmt: skip
def attention_backward_queries_kernel(
    q, k, v, d_o, k_desc, k_desc_2, v_desc, v_desc_2, d_q, level, share, delta, d_slopes, at_rows, slopes, decay, seed,
    cu_q, cu_k, table, sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sob, sot, soh,
    tokens_q, tokens_k, heads_q, group, batches, blocks, at_once, count,
    scale, softcap, left, right, threshold, keep_scale, d_scale, C: tl.constexpr,
):  # fmt: skip
    """dQ `[B, Tq, HQ, K]` of BM queries; the slopes' gradient and the sums of dS over keys a row, `[B, HQ, Tq]`."""
    bh, block = find_place(tl.program_id(0), blocks, batches * heads_q, at_once)
    batch, head = bh // heads_q, bh % heads_q
    start_q, start_k, len_q, len_k = tokens_q * 0, tokens_k * 0, tokens_q, tokens_k
    if C.CAUSAL:
        block = blocks - 1 - block  # the heaviest first
    if C.PACKED:
        start_q, len_q, start_k, len_k, block = find_sequence(block, cu_q, cu_k, table, count, tokens_q, tokens_k, C.BM)
    first = block * C.BM
    if first < 0 or first >= len_q:
        return
    head_k = head // group
    q += batch.to(tl.int64) * sqb * C.UNIT + head.to(tl.int64) * sqh * C.UNIT + start_q.to(tl.int64) * sqt * C.UNIT
    d_o += batch.to(tl.int64) * sob * C.UNIT + head.to(tl.int64) * soh * C.UNIT + start_q.to(tl.int64) * sot * C.UNIT
    k += batch.to(tl.int64) * skb * C.UNIT + head_k.to(tl.int64) * skh * C.UNIT + start_k.to(tl.int64) * skt * C.UNIT
    v += batch.to(tl.int64) * svb * C.UNIT + head_k.to(tl.int64) * svh * C.UNIT + start_k.to(tl.int64) * svt * C.UNIT
    q_1, q_2 = load_head(q, None, None, None, first, len_q, sqt * C.UNIT, C.D, 0, C.D1, C.D2, C.BM, True, C)  # [BM, K]
    o_1, o_2 = load_head(
        d_o, None, None, None, first, len_q, sot * C.UNIT, C.DV, 0, C.V1, C.V2, C.BM, True, C
    )  # [BM, V]
    index = first + tl.arange(0, C.BM)
    inside = index < len_q
    at = bh.to(tl.int64) * tokens_q + start_q + index
    at_row = tl.load(level + at, mask=inside, other=float("inf"))[:, None]
    of_row = at_row
    if C.EXACT:
        of_row = tl.load(share + at, mask=inside, other=0.0)[:, None]
    shift = len_k - len_q
    slope, hashes, gates = 0.0, 0, ((0.0, 0.0), decay, decay, (0.0, 0.0))
    if C.ALIBI:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2_E
    if C.DROPOUT:
        hashes = dropout_rows(seed, head, batch * tokens_q + start_q + index)[:, None]
    if C.DECAY:
        high_g = decay + bh.to(tl.int64) * tokens_k + start_k
        low_g = high_g + (batches * heads_q).to(tl.int64) * tokens_k
        high_q, low_q = load_decay(high_g, low_g, index + shift, len_k)
        gates = ((high_q[:, None], low_q[:, None]), high_g, low_g, load_decay(high_g, low_g, first + shift, len_k))
    found = tl.load(delta + at, mask=inside, other=0.0)[:, None]
    rows = ((index + shift)[:, None], at_row, of_row, found, hashes)
    numbers = (len_k, scale, softcap, left, right, slope, threshold, keep_scale)
    keys, values, place = (
        (k, k_desc, k_desc_2, skt * C.UNIT),
        (v, v_desc, v_desc_2, svt * C.UNIT),
        (batch, head_k, start_k),
    )
    zeros = tl.full([C.BM], 0.0, tl.float32)
    d_q1 = tl.full([C.BM, C.D1], 0.0, tl.float32)
    d_q2 = tl.full([C.BM, C.D2], 0.0, tl.float32) if C.D2 > 0 else zeros
    state = (d_q1, d_q2, zeros, zeros)
    low, inner, outer, high = keys_of_rows(first + shift, len_k, left, right, C)
    if C.LEFT:
        end = tl.minimum(inner, high)
        state = _walk_keys(state, low, end, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, True, C)
    state = _walk_keys(state, inner, outer, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, False, C)
    state = _walk_keys(state, outer, high, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, True, C)
    d_q1, d_q2, d_slope, sums = state
    d_q += (batch.to(tl.int64) * tokens_q + start_q) * heads_q * C.D + head * C.D
    store_rows(d_q, d_q1 * d_scale, first, len_q, heads_q * C.D, C.D, 0, C.D1, C.BM)
    if C.D2 > 0:
        store_rows(d_q, d_q2 * d_scale, first, len_q, heads_q * C.D, C.D, C.D1, C.D2, C.BM)
    if C.ALIBI:
        tl.store(d_slopes + at, d_slope, mask=inside)
    if C.DECAY:
        tl.store(at_rows + at, sums, mask=inside)


def attention_backward(
    x: Call, d_o: Tensor | None, d_lse: Tensor | None, o: Tensor, kept: list[Tensor], decay: Tensor | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of sink and slopes where given; with `decay` the sums of dS by row and by key."""
    q, v = x.q, x.v
    level, delta = (q.new_empty(x.rows, dtype=torch.float32) for _ in range(2))
    share, d_sink, d_slopes, at_rows = (
        q.new_empty(x.rows, dtype=torch.float32) if wanted else None
        for wanted in (q.dtype == torch.float32, x.sink is not None, x.slopes is not None, decay is not None)
    )
    d_lse = None if d_lse is None else d_lse.contiguous()
    rows = x.batch * x.heads_q * x.tokens_q
    if rows > 0:
        width = triton.next_power_of_2(v.shape[3])
        many = max(1, 4096 // width)
        attention_backward_rows_kernel[(triton.cdiv(rows, many),)](
            o, None if d_o is None else d_o.contiguous(), d_lse, *kept, x.sink, level, share, delta, d_sink,
            x.tokens_q, x.heads_q, rows, v.shape[3], width, many, share is not None, num_warps=4,
        )  # fmt: skip
    d_o = torch.zeros_like(o) if d_o is None else d_o
    d_o = aligned(d_o)
    at_keys = None if decay is None else q.new_empty(x.batch, x.heads_q, x.tokens_k, dtype=torch.float32)
    stats = (level, share, delta)
    d_k, d_v = _backward_keys(x, d_o, stats, at_keys, decay)
    d_q = _backward_queries(x, d_o, stats, (d_slopes, at_rows), decay)
    gradients = [d_q, d_k, d_v]
    for feature, found in ((x.sink, d_sink), (x.slopes, d_slopes)):
        if feature is not None and found is not None:
            gradients.append(found.sum((0, 2), dtype=torch.float64).to(feature.dtype))
    return gradients, at_rows, at_keys


Stats = tuple[Tensor, Tensor | None, Tensor]  # what is taken off a row's scores, 1 / l, delta


def _backward_keys(
    x: Call, d_o: Tensor, stats: Stats, at_keys: Tensor | None, decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v = x.q, x.k, x.v
    d_k, d_v = q.new_empty(k.shape), q.new_empty(v.shape)
    form, launch = x.form("keys", decay is not None)
    blocks, table = packed_blocks(x.cu_k, x.tokens_k, form.BN)
    programs = blocks * x.batch * x.heads
    if programs > 0:
        attention_backward_keys_kernel[(programs,)](
            q, k, v, d_o, *descriptors(q, form, form.BM, form.D1, form.D2), *descriptors(d_o, form, form.BM, form.V1, form.V2),
            d_k, d_v, *stats, at_keys, x.slopes, decay, x.seed, x.cu_q, x.cu_k, table, *x.strides(form, q, k, v, d_o),
            x.tokens_q, x.tokens_k, x.heads, x.group, x.batch, blocks, max(1, x.at_once(form) // x.group), x.count,
            *x.numbers(form), x.score.scale, form, **launch,
        )  # fmt: skip
    return d_k, d_v


def _backward_queries(
    x: Call, d_o: Tensor, stats: Stats, sums: tuple[Tensor | None, Tensor | None], decay: Tensor | None
) -> Tensor:
    q, k, v = x.q, x.k, x.v
    d_q = q.new_empty(q.shape)
    form, launch = x.form("queries", decay is not None)
    blocks, table = packed_blocks(x.cu_q, x.tokens_q, form.BM)
    programs = blocks * x.batch * x.heads_q
    if programs > 0:
        attention_backward_queries_kernel[(programs,)](
            q, k, v, d_o, *descriptors(k, form, form.BN, form.D1, form.D2), *descriptors(v, form, form.BN, form.V1, form.V2),
            d_q, *stats, *sums, x.slopes, decay, x.seed, x.cu_q, x.cu_k, table, *x.strides(form, q, k, v, d_o),
            x.tokens_q, x.tokens_k, x.heads_q, x.group, x.batch, blocks, x.at_once(form), x.count,
            *x.numbers(form), x.score.scale, form, **launch,
        )  # fmt: skip
    return d_q
