"""Forward of softmax attention: a program has BM queries of a head and walks over the keys that they see.

In units of log 2, with the running maximum m and sum l of each row:

    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v
    o = a / l;  lse = (m + log2 l) / log2 e;  a sink is where m and l start: m = sink, l = 1
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.attention.triton_gpu.launch import Call, descriptors, packed_blocks
from flashmix.ops.attention.triton_gpu.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    accumulated,
    bias_of_rows,
    biased,
    dropout_keeps,
    dropout_rows,
    find_place,
    find_sequence,
    keys_of_rows,
    load_decay,
    load_head,
    load_rows,
    product,
    scaled,
    store_rows,
    tanh,
    visible,
)


@triton.jit
def _attend(state, low, high, q, q_2, keys, values, place, rows, numbers, MASK: tl.constexpr, C: tl.constexpr):
    """Takes the keys from `low` to `high` into `state`: `(a, a_2, m, l)`."""
    acc, acc_2, m, l = state
    k, k_desc, k_desc_2, stride_k = keys
    v, v_desc, v_desc_2, stride_v = values
    position, of_row, decay_q, high_g, low_g, tile_g, decay_ref, reference, row_bias = rows
    tokens_k, scale, softcap, left, right, slope, threshold = numbers
    for start in tl.range(low, high, C.BN, num_stages=C.MASKED_STAGES if MASK else C.STAGES):
        keys_here = start + tl.arange(0, C.BN)
        key = keys_here[None, :]
        decay_k, of_keys, to_rows = (0.0, 0.0), 0.0, row_bias
        if C.DECAY and MASK:
            high_k, low_k = load_decay(high_g, low_g, keys_here, tokens_k, True)
            decay_k = (high_k[None, :], low_k[None, :])
        elif C.DECAY:  # from a key to the end of its tile, and from there to the rows
            end = load_decay(high_g, low_g, start + C.BN - 1, tokens_k, False)
            of_keys = tl.load(tile_g + keys_here)[None, :]
            to_rows = row_bias + ((decay_ref[0] - end[0]) + (decay_ref[1] - end[1]))
        # k, v: [BN, K], [BN, V], in two parts
        k_1, k_2 = load_head(k, k_desc, k_desc_2, place, start, tokens_k, stride_k, C.D, 0, C.D1, C.D2, C.BN, MASK, C)
        s = product(q, q_2, k_1, k_2, C.D2, C)
        if C.RAW:
            if MASK:
                s = tl.where(visible(position, key, tokens_k, left, right, C), s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - m_new[:, None])
        else:
            x = tanh(s * scale, C) * softcap if C.SOFTCAP else s * scale
            if MASK:
                x = biased(x, position, key, slope, decay_q, decay_k, C)
                x = tl.where(visible(position, key, tokens_k, left, right, C), x, -float("inf"))
                m_new = tl.maximum(m, tl.max(x, 1))
                p = tl.exp2(x - m_new[:, None])
            else:
                if C.ALIBI and C.CAUSAL:
                    of_keys -= slope * (reference - key).to(tl.float32)
                if C.DECAY or (C.ALIBI and C.CAUSAL):
                    x += of_keys
                if C.ALIBI and not C.CAUSAL:
                    x -= slope * tl.abs(position.to(tl.float32) - key.to(tl.float32))
                m_new = tl.maximum(m, tl.max(x, 1) + to_rows)
                p = tl.exp2(x - (m_new - to_rows)[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        if C.DROPOUT:
            p = tl.where(dropout_keeps(of_row, key, threshold), p, 0.0)
        acc = acc * shrink[:, None]
        if C.V2 > 0:
            acc_2 = acc_2 * shrink[:, None]
        v_1, v_2 = load_head(v, v_desc, v_desc_2, place, start, tokens_k, stride_v, C.DV, 0, C.V1, C.V2, C.BN, MASK, C)
        p = p.to(v_1.dtype)
        acc = accumulated(acc, p, v_1, C)
        if C.V2 > 0:
            acc_2 = accumulated(acc_2, p, v_2, C)
        m = m_new
    return acc, acc_2, m, l


@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "heads_q", "group", "batches", "blocks", "at_once", "count", "left", "right",
                       "threshold", "sqb", "sqt", "sqh", "skb", "skt", "skh", "svb", "svt", "svh"]
)  # fmt: skip
def attention_forward_kernel(
    q, k, v, k_desc, k_desc_2, v_desc, v_desc_2, o, lse, top, total, sink, slopes, decay, seed, cu_q, cu_k, table,
    sqb, sqt, sqh, skb, skt, skh, svb, svt, svh,
    tokens_q, tokens_k, heads_q, group, batches, blocks, at_once, count,
    scale, softcap, left, right, threshold, keep_scale, C: tl.constexpr,
):  # fmt: skip
    """o `[B, Tq, HQ, V]`, lse, m and l `[B, HQ, Tq]` of BM queries of a head."""
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
    k += batch.to(tl.int64) * skb * C.UNIT + head_k.to(tl.int64) * skh * C.UNIT + start_k.to(tl.int64) * skt * C.UNIT
    v += batch.to(tl.int64) * svb * C.UNIT + head_k.to(tl.int64) * svh * C.UNIT + start_k.to(tl.int64) * svt * C.UNIT
    row = bh.to(tl.int64) * tokens_q + start_q  # of lse `[B, HQ, Tq]`

    index = first + tl.arange(0, C.BM)
    shift = len_k - len_q
    m = tl.full([C.BM], LOWEST, tl.float32)
    l = tl.full([C.BM], 0.0, tl.float32)
    if C.SINK:
        at_sink = tl.load(sink + head).to(tl.float32) * LOG2_E
        m = tl.maximum(m, at_sink)
        l = tl.exp2(at_sink - m)
    slope = 0.0
    if C.ALIBI:
        slope = tl.load(slopes + head).to(tl.float32) * LOG2_E
    of_row = 0
    if C.DROPOUT:
        of_row = dropout_rows(seed, head, batch * tokens_q + start_q + index)[:, None]
    decay_q, decay_ref, high_g, low_g, tile_g = (0.0, 0.0), (0.0, 0.0), decay, decay, decay
    position = index + shift
    row_bias = m * 0.0
    if C.DECAY:
        high_g = decay + bh.to(tl.int64) * tokens_k + start_k
        low_g = high_g + (batches * heads_q).to(tl.int64) * tokens_k
        tile_g = low_g + (batches * heads_q).to(tl.int64) * tokens_k
        high_q, low_q = load_decay(high_g, low_g, position, len_k, True)
        decay_ref = load_decay(high_g, low_g, first + shift, len_k, True)
        row_bias = bias_of_rows(position, first + shift, slope, (high_q, low_q), decay_ref, C)
        decay_q = (high_q[:, None], low_q[:, None])
    elif C.ALIBI:
        row_bias = bias_of_rows(position, first + shift, slope, decay_q, decay_ref, C)

    q_1 = load_rows(q, first, len_q, sqt * C.UNIT, C.D, 0, C.D1, C.BM, True)  # [BM, K]
    q_2 = q_1
    if C.D2 > 0:
        q_2 = load_rows(q, first, len_q, sqt * C.UNIT, C.D, C.D1, C.D2, C.BM, True)
    q_1, q_2, factor = scaled(q_1, q_2, scale, C)
    acc = tl.full([C.BM, C.V1], 0.0, tl.float32)
    acc_2 = tl.full([C.BM, C.V2], 0.0, tl.float32) if C.V2 > 0 else m
    state = (acc, acc_2, m, l)
    keys, values = (k, k_desc, k_desc_2, skt * C.UNIT), (v, v_desc, v_desc_2, svt * C.UNIT)
    rows = (position[:, None], of_row, decay_q, high_g, low_g, tile_g, decay_ref, first + shift, row_bias)
    numbers = (len_k, factor, softcap, left, right, slope, threshold)
    place = (batch, head_k, start_k)
    low, inner, outer, high = keys_of_rows(first + shift, len_k, left, right, C)
    if C.LEFT:
        state = _attend(state, low, tl.minimum(inner, high), q_1, q_2, keys, values, place, rows, numbers, True, C)
    state = _attend(state, inner, outer, q_1, q_2, keys, values, place, rows, numbers, False, C)
    state = _attend(state, outer, high, q_1, q_2, keys, values, place, rows, numbers, True, C)
    acc, acc_2, m, l = state

    share = keep_scale / tl.where(l == 0, 1.0, l)
    o += (batch.to(tl.int64) * tokens_q + start_q) * heads_q * C.DV + head * C.DV
    store_rows(o, acc * share[:, None], first, len_q, heads_q * C.DV, C.DV, 0, C.V1, C.BM)
    if C.V2 > 0:
        store_rows(o, acc_2 * share[:, None], first, len_q, heads_q * C.DV, C.DV, C.V1, C.V2, C.BM)
    inside = index < len_q
    tl.store(lse + row + index, (m + tl.log2(l)) * LN_2, mask=inside)
    tl.store(top + row + index, m, mask=inside)
    tl.store(total + row + index, l, mask=inside)


def attention_forward(x: Call, decay: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`o [B,Tq,HQ,V]`, `lse [B,HQ,Tq]` (packed `[HQ,Tq]`), and m and l, `[B,HQ,Tq]` each.

    `decay`: the running sums of the gates, `[3, B, HQ, Tk]`.
    """
    q, k, v = x.q, x.k, x.v
    o = q.new_empty(x.batch, x.tokens_q, x.heads_q, v.shape[3])
    top, total = (q.new_empty(x.rows, dtype=torch.float32) for _ in range(2))
    lse = q.new_empty(x.rows if x.cu_q is None else x.rows[1:], dtype=torch.float32)
    form, launch = x.form("forward", decay is not None)
    blocks, table = packed_blocks(x.cu_q, x.tokens_q, form.BM)
    programs = blocks * x.batch * x.heads_q
    if programs > 0:
        attention_forward_kernel[(programs,)](
            q, k, v, *descriptors(k, form, form.BN, form.D1, form.D2), *descriptors(v, form, form.BN, form.V1, form.V2),
            o, lse, top, total, x.sink, x.slopes, decay, x.seed, x.cu_q, x.cu_k, table, *x.strides(form, q, k, v),
            x.tokens_q, x.tokens_k, x.heads_q, x.group, x.batch, blocks, x.at_once(form), x.count, *x.numbers(form),
            form, **launch,
        )  # fmt: skip
    return o, lse, [top, total]
