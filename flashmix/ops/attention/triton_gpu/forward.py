"""Forward of softmax attention: a program has BM queries of a head and walks over the keys that they see.

In units of log 2 (float32: natural, with e for 2), with the running maximum m and sum l of each row:

    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v
    o = a / l;  lse = (m + log2 l) / log2 e;  a sink comes last, as a score whose value is 0
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.triton_gpu.launch import Call, Sums, descriptors, packed_blocks
from flashmix.ops.attention.triton_gpu.tiles import (
    LOWEST,
    accumulated,
    bias_of_rows,
    biased,
    dropout_keeps,
    dropout_rows,
    exponential,
    find_place,
    find_sequence,
    in_units,
    keys_of_rows,
    load_decay,
    load_head,
    load_rows,
    log_sum,
    padded_tokens,
    product,
    store_rows,
    tanh,
    times,
    visible,
)


@triton.jit
def _divided(acc, l, keep_scale, C: tl.constexpr):
    """`keep_scale a / l`; in float32 rounded once, where the GPU's own division is right to 2 units in the last place."""
    if C.EXACT:
        return tl.div_rn(acc * keep_scale, tl.broadcast_to(l[:, None], acc.shape))
    else:
        return acc * (keep_scale / l)[:, None]


@triton.jit
def _way(decay_ref, decay_end, distance, slope, C: tl.constexpr):
    """What the way from the end of a tile (G there, in two parts) over `distance` positions takes off a score."""
    bias = 0.0
    if C.DECAY:
        bias += (decay_ref[0] - decay_end[0]) + (decay_ref[1] - decay_end[1])
    if C.ALIBI:
        bias -= slope * distance.to(tl.float32)
    return bias


@triton.jit
def _attend(state, low, high, q, q_2, keys, values, place, rows, numbers, MASK: tl.constexpr, C: tl.constexpr):
    """Takes the keys from `low` to `high` into `state`: `(a, a_2, m, l)`."""
    acc, acc_2, m, l = state
    k, k_desc, k_desc_2, stride_k = keys
    v, v_desc, v_desc_2, stride_v = values
    position, of_row, decay_q, high_g, low_g, tile_g, decay_ref, reference, row_bias = rows
    tokens_k, scale, softcap, left, right, slope, threshold = numbers
    # Unless MASK a bias is in two: from each key to the first row, and from there to each row, from which m is counted here.
    # If nothing but the scale comes between (BEGUN), the first, divided by it, is what the sum q k^T starts from, and then an
    # element costs no more than without a bias.
    BY_TILE: tl.constexpr = not MASK and C.CAUSAL and (C.DECAY or C.ALIBI)
    BEGUN: tl.constexpr = BY_TILE and C.SCALED
    RAW: tl.constexpr = C.SCALED and (BEGUN or not (C.DECAY or C.ALIBI))
    falls, end_high, end_low, share = 0.0, 0.0, 0.0, 1.0
    if BY_TILE:
        row_bias = tl.where(low < high, row_bias, 0.0)
        m -= row_bias
    if BEGUN:
        share = 1.0 / scale
    if C.ALIBI and BY_TILE:
        falls = slope * share * (tl.arange(0, C.BN) - (C.BN - 1)).to(tl.float32)
    if C.DECAY and BY_TILE:  # loaded a tile ahead
        end_high, end_low = load_decay(high_g, low_g, low + C.BN - 1, tokens_k, True)
        to_end = tl.load(tile_g + low + tl.arange(0, C.BN))
    for start in tl.range(low, high, C.BN, num_stages=C.MASKED_STAGES if MASK else C.STAGES):
        keys_here = start + tl.arange(0, C.BN)
        key = keys_here[None, :]
        decay_k = (0.0, 0.0)
        if C.DECAY and MASK:
            high_k, low_k = load_decay(high_g, low_g, keys_here, tokens_k, True)
            decay_k = (high_k[None, :], low_k[None, :])
        bias = falls
        begin = None
        if BY_TILE:
            bias += share * _way(decay_ref, (end_high, end_low), reference - start - (C.BN - 1), slope, C)
        if C.DECAY and BY_TILE:
            bias += to_end
        if BEGUN:
            begin = tl.broadcast_to(bias[None, :], [C.BM, C.BN])  # type: ignore[index]
        # k, v: [BN, K], [BN, V], in two parts
        k_1, k_2 = load_head(k, k_desc, k_desc_2, place, start, tokens_k, stride_k, C.D, 0, C.D1, C.D2, C.BN, MASK, C)
        s = product(q, q_2, k_1, k_2, C.D2, C, begin)
        if C.DECAY and BY_TILE:
            more = start + C.BN < high
            end_high = tl.load(high_g + start + (2 * C.BN - 1), mask=more, other=end_high)
            end_low = tl.load(low_g + start + (2 * C.BN - 1), mask=more, other=end_low)
            to_end = tl.load(tile_g + start + C.BN + tl.arange(0, C.BN), mask=more, other=to_end)
        if RAW:
            if MASK:
                s = tl.where(visible(position, key, tokens_k, left, right, C), s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - m_new[:, None])
        else:
            x = times(s, scale, C)
            if C.SOFTCAP:
                x = times(tanh(x, C), softcap, C)
            if MASK:
                x = biased(x, position, key, slope, decay_q, decay_k, C)
                x = tl.where(visible(position, key, tokens_k, left, right, C), x, -float("inf"))
            elif BY_TILE:
                x += bias[None, :]  # type: ignore[index]
            elif C.ALIBI:
                x -= slope * tl.abs(position.to(tl.float32) - key.to(tl.float32))
            m_new = tl.maximum(m, tl.max(x, 1))
            p = exponential(x - m_new[:, None], C)
        shrink = exponential(m - m_new, C)
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
    if BY_TILE:
        m += row_bias
    return acc, acc_2, m, l


@with_sound_ptxas
@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "heads_q", "group", "batches", "blocks", "at_once", "left", "right",
                       "threshold", "sqb", "sqt", "sqh", "skb", "skt", "skh", "svb", "svt", "svh"]
)  # fmt: skip
def attention_forward_kernel(
    q, k, v, k_desc, k_desc_2, v_desc, v_desc_2, o, lse, top, total, sink, slopes, decay, tiles, seed, table,
    sqb, sqt, sqh, skb, skt, skh, svb, svt, svh,
    tokens_q, tokens_k, heads_q, group, batches, blocks, at_once,
    scale, softcap, left, right, threshold, keep_scale, C: tl.constexpr,
):  # fmt: skip
    """o `[B, Tq, HQ, V]`, lse, m and l `[B, HQ, Tq]` of BM queries of a head."""
    bh, block = find_place(tl.program_id(0), blocks, batches * heads_q, at_once)
    batch, head = bh // heads_q, bh % heads_q
    start_q, start_k, len_q, len_k = tokens_q * 0, tokens_k * 0, tokens_q, tokens_k
    if C.PACKED:
        _, start_q, len_q, start_k, len_k, block = find_sequence(block, table)
        blocks = tl.cdiv(len_q, C.BM)
    if C.CAUSAL:
        block = blocks - 1 - block  # the heaviest first
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
    slope = 0.0
    if C.ALIBI:
        slope = in_units(tl.load(slopes + head), C)
    of_row = 0
    if C.DROPOUT:
        of_row = dropout_rows(seed, head, batch * tokens_q + start_q + index)[:, None]
    decay_q, decay_ref, high_g, low_g, tile_g = (0.0, 0.0), (0.0, 0.0), decay, decay, tiles
    position = index + shift
    row_bias = m * 0.0
    if C.DECAY:
        high_g = decay + bh.to(tl.int64) * tokens_k + start_k
        low_g = high_g + (batches * heads_q).to(tl.int64) * tokens_k
        tile_g = tiles + bh.to(tl.int64) * padded_tokens(tokens_k) + start_k
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
    acc = tl.full([C.BM, C.V1], 0.0, tl.float32)
    acc_2 = tl.full([C.BM, C.V2], 0.0, tl.float32) if C.V2 > 0 else m
    state = (acc, acc_2, m, l)
    keys, values = (k, k_desc, k_desc_2, skt * C.UNIT), (v, v_desc, v_desc_2, svt * C.UNIT)
    rows = (position[:, None], of_row, decay_q, high_g, low_g, tile_g, decay_ref, first + shift, row_bias)
    numbers = (len_k, scale, softcap, left, right, slope, threshold)
    place = (batch, head_k, start_k)
    low, inner, outer, high = keys_of_rows(first + shift, len_k, left, right, C)
    if C.LEFT:
        state = _attend(state, low, tl.minimum(inner, high), q_1, q_2, keys, values, place, rows, numbers, True, C)
    state = _attend(state, inner, outer, q_1, q_2, keys, values, place, rows, numbers, False, C)
    state = _attend(state, outer, high, q_1, q_2, keys, values, place, rows, numbers, True, C)
    acc, acc_2, m, l = state

    if C.SINK:
        at_sink = in_units(tl.load(sink + head), C)
        top_key, m = m, tl.maximum(m, at_sink)
        shrink = exponential(top_key - m, C)
        l = l * shrink + exponential(at_sink - m, C)
        acc = acc * shrink[:, None]
        if C.V2 > 0:
            acc_2 = acc_2 * shrink[:, None]
    divisor = tl.where(l == 0, 1.0, l)
    o += (batch.to(tl.int64) * tokens_q + start_q) * heads_q * C.DV + head * C.DV
    store_rows(o, _divided(acc, divisor, keep_scale, C), first, len_q, heads_q * C.DV, C.DV, 0, C.V1, C.BM)
    if C.V2 > 0:
        store_rows(o, _divided(acc_2, divisor, keep_scale, C), first, len_q, heads_q * C.DV, C.DV, C.V1, C.V2, C.BM)
    inside = index < len_q
    tl.store(lse + row + index, log_sum(m, l, C), mask=inside)
    tl.store(top + row + index, m, mask=inside)
    tl.store(total + row + index, l, mask=inside)


def attention_forward(x: Call, decay: Sums) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`o [B,Tq,HQ,V]`, `lse [B,HQ,Tq]` (packed `[HQ,Tq]`), and m and l, `[B,HQ,Tq]` each.

    `decay`: the gates' running sums, see `decay.running_sums`.
    """
    q, k, v = x.q, x.k, x.v
    o = q.new_empty(x.batch, x.tokens_q, x.heads_q, v.shape[3])
    top, total = (q.new_empty(x.rows, dtype=torch.float32) for _ in range(2))
    lse = q.new_empty(x.rows if x.cu_q is None else x.rows[1:], dtype=torch.float32)
    form, launch = x.form("forward", decay[0] is not None)
    blocks, table = packed_blocks(x.cu_q, x.tokens_q, form.BM, x.cu_k, x.tokens_k)
    programs = blocks * x.batch * x.heads_q
    if programs > 0:
        attention_forward_kernel[(programs,)](
            q, k, v, *descriptors(k, form, form.BN, form.D1, form.D2), *descriptors(v, form, form.BN, form.V1, form.V2),
            o, lse, top, total, x.sink, x.slopes, *decay, x.seed, table, *x.strides(form, q, k, v),
            x.tokens_q, x.tokens_k, x.heads_q, x.group, x.batch, blocks, x.at_once(form), *x.numbers(form),
            form, **launch,
        )  # fmt: skip
    return o, lse, [top, total]
