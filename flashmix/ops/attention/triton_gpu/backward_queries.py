"""dQ of softmax attention: a program has BM queries and walks over their keys."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.triton_gpu.launch import Call, Stats, descriptors, packed_blocks
from flashmix.ops.attention.triton_gpu.tiles import (
    accumulated,
    bias_of_keys,
    bias_of_rows,
    dropout_keeps,
    dropout_rows,
    find_place,
    find_sequence,
    in_units,
    keys_of_rows,
    load_decay,
    load_head,
    padded_tokens,
    probabilities,
    product,
    score_gradients,
    store_rows,
)

Sums = tuple[Tensor | None, Tensor | None]  # of what the slopes get and of dS, by row


@triton.jit
def _walk_keys(state, low, high, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers,
               MASK: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Adds what the keys from `low` to `high` give to `(dQ, dQ_2, slopes' gradient, sums of dS)` of BM queries.

    MASK where some keys are not seen, EDGE where keys may be past the last one.
    """
    d_q, d_q2, d_slope, sums = state
    k, k_desc, k_desc_2, stride_k = keys
    v, v_desc, v_desc_2, stride_v = values
    position, level, share, delta, flow, of_row = rows
    decay_q, high_g, low_g, decay_ref, reference, row_bias = gates
    tokens_k = numbers[0]
    for start in tl.range(low, high, C.BN, num_stages=C.MASKED_STAGES if EDGE else C.STAGES):
        # k, v: [BN, K], [BN, V], in two parts
        k_1, k_2 = load_head(k, k_desc, k_desc_2, place, start, tokens_k, stride_k, C.D, 0, C.D1, C.D2, C.BN, EDGE, C)
        if EDGE and C.PACKED:  # not prefetched: both at once
            v_1, v_2 = load_head(
                v, v_desc, v_desc_2, place, start, tokens_k, stride_v, C.DV, 0, C.V1, C.V2, C.BN, EDGE, C
            )
        s = product(q_1, q_2, k_1, k_2, C.D2, C)
        keys_here = start + tl.arange(0, C.BN)
        key = keys_here[None, :]
        decay_k, key_bias, at_rows = (0.0, 0.0), 0.0, level
        if C.DECAY:
            decay_k = load_decay(high_g, low_g, keys_here, tokens_k, MASK)
        if not MASK and (C.DECAY or (C.ALIBI and C.CAUSAL)):
            key_bias = bias_of_keys(keys_here, reference, numbers[5], decay_k, decay_ref, C)[None, :]
            at_rows = level - row_bias
        if MASK and C.DECAY:
            decay_k = (decay_k[0][None, :], decay_k[1][None, :])  # type: ignore[index]
        p, squashed = probabilities(
            s, position, key, at_rows, share, decay_q, decay_k, key_bias, numbers, numbers[1], MASK, C
        )
        if not (EDGE and C.PACKED):
            v_1, v_2 = load_head(
                v, v_desc, v_desc_2, place, start, tokens_k, stride_v, C.DV, 0, C.V1, C.V2, C.BN, EDGE, C
            )
        d_p = product(o_1, o_2, v_1, v_2, C.V2, C)
        keeps = 0
        if C.DROPOUT:
            keeps = dropout_keeps(of_row, key, numbers[6])
        d_s, d_raw = score_gradients(p, d_p, squashed, delta, flow, keeps, numbers[7], C)
        if C.ALIBI and not C.DELTA:
            d_slope -= tl.sum(d_s * tl.abs(position.to(tl.float32) - key.to(tl.float32)), 1)
        if C.DECAY or C.DELTA:
            sums += tl.sum(d_s, 1)
        if not C.DELTA:
            d_raw = d_raw.to(k_1.dtype)
            d_q = accumulated(d_q, d_raw, k_1, C)
            if C.D2 > 0:
                d_q2 = accumulated(d_q2, d_raw, k_2, C)
    return d_q, d_q2, d_slope, sums


@with_sound_ptxas
@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "heads_q", "group", "batches", "blocks", "at_once", "left", "right",
                       "threshold", "sqb", "sqt", "sqh", "skb", "skt", "skh", "svb", "svt", "svh", "sob", "sot", "soh"]
)  # fmt: skip
def attention_backward_queries_kernel(
    q, k, v, d_o, k_desc, k_desc_2, v_desc, v_desc_2, d_q, level, share, delta, d_slopes, at_rows, slopes, decay, seed,
    table, sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sob, sot, soh,
    tokens_q, tokens_k, heads_q, group, batches, blocks, at_once,
    scale, softcap, left, right, threshold, keep_scale, d_scale, C: tl.constexpr,
):  # fmt: skip
    """dQ `[B, Tq, HQ, K]` of BM queries; the slopes' gradient and the sums of dS over keys a row, `[B, HQ, Tq]`."""
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
    padded = bh.to(tl.int64) * padded_tokens(tokens_q) + start_q + index
    at_row = tl.load(level + padded, mask=inside, other=float("inf"))[:, None]
    of_row = at_row
    if C.EXACT:
        of_row = tl.load(share + padded, mask=inside, other=0.0)[:, None]
    shift = len_k - len_q
    slope, hashes = 0.0, 0
    if C.ALIBI:
        slope = in_units(tl.load(slopes + head), C)
    if C.DROPOUT:
        hashes = dropout_rows(seed, head, batch * tokens_q + start_q + index)[:, None]
    position = index + shift
    decay_q, decay_ref, high_g, low_g, row_bias = (0.0, 0.0), (0.0, 0.0), decay, decay, 0.0
    if C.DECAY:
        high_g = decay + bh.to(tl.int64) * tokens_k + start_k
        low_g = high_g + (batches * heads_q).to(tl.int64) * tokens_k
        decay_q = load_decay(high_g, low_g, position, len_k, True)
        decay_ref = load_decay(high_g, low_g, first + shift, len_k, True)
    if C.DECAY or C.ALIBI:
        row_bias = bias_of_rows(position, first + shift, slope, decay_q, decay_ref, C)[:, None]
    if C.DECAY:
        decay_q = (decay_q[0][:, None], decay_q[1][:, None])  # type: ignore[index]
    gates = (decay_q, high_g, low_g, decay_ref, first + shift, row_bias)
    found = 0.0
    if not C.DELTA:
        found = tl.load(delta + padded, mask=inside, other=0.0)[:, None]
    flow = found
    if C.EXACT and not C.DELTA:
        flow = tl.load(
            share + (batches * heads_q).to(tl.int64) * padded_tokens(tokens_q) + padded, mask=inside, other=0.0
        )
        flow = flow[:, None]
    rows = (position[:, None], at_row, of_row, found, flow, hashes)
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
        state = _walk_keys(
            state, low, end, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, True, True, C
        )
    state = _walk_keys(
        state, inner, outer, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, False, False, C
    )
    if C.PACKED and C.CAUSAL:  # copies do not stop at the end of a sequence
        whole = tl.maximum(tl.minimum(high, len_k // C.BN * C.BN), outer)
        state = _walk_keys(
            state, outer, whole, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, True, False, C
        )
        outer = (whole + C.BN - 1) // C.BN * C.BN
    state = _walk_keys(state, outer, high, q_1, q_2, o_1, o_2, keys, values, place, rows, gates, numbers, True, True, C)
    d_q1, d_q2, d_slope, sums = state
    if C.DELTA:
        tl.store(delta + padded, sums, mask=inside)
    else:
        d_q += (batch.to(tl.int64) * tokens_q + start_q) * heads_q * C.D + head * C.D
        store_rows(d_q, d_q1 * d_scale, first, len_q, heads_q * C.D, C.D, 0, C.D1, C.BM)
        if C.D2 > 0:
            store_rows(d_q, d_q2 * d_scale, first, len_q, heads_q * C.D, C.D, C.D1, C.D2, C.BM)
        if C.ALIBI:
            tl.store(d_slopes + at, d_slope, mask=inside)
        if C.DECAY:
            tl.store(at_rows + at, sums, mask=inside)


def attention_delta(x: Call, d_o: Tensor, stats: Stats, decay: Tensor | None) -> None:
    """Writes delta (the last of `stats`) from P and `dO V^T`."""
    _launch("delta", x, d_o, None, stats, (None, None), decay)


def attention_backward_queries(x: Call, d_o: Tensor, stats: Stats, sums: Sums, decay: Tensor | None) -> Tensor:
    d_q = x.q.new_empty(x.q.shape)
    _launch("queries", x, d_o, d_q, stats, sums, decay)
    return d_q


def _launch(
    phase: str, x: Call, d_o: Tensor, d_q: Tensor | None, stats: Stats, sums: Sums, decay: Tensor | None
) -> None:
    q, k, v = x.q, x.k, x.v
    form, launch = x.form(phase, decay is not None)
    blocks, table = packed_blocks(x.cu_q, x.tokens_q, form.BM, x.cu_k, x.tokens_k)
    programs = blocks * x.batch * x.heads_q
    if programs > 0:
        attention_backward_queries_kernel[(programs,)](
            q, k, v, d_o, *descriptors(k, form, form.BN, form.D1, form.D2), *descriptors(v, form, form.BN, form.V1, form.V2),
            d_q, *stats, *sums, x.slopes, decay, x.seed, table, *x.strides(form, q, k, v, d_o),
            x.tokens_q, x.tokens_k, x.heads_q, x.group, x.batch, blocks, x.at_once(form),
            *x.numbers(form), x.score.scale, form, **launch,
        )  # fmt: skip
