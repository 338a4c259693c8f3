"""dK and dV of softmax attention: a program has BN keys and walks over the queries that see them, head by head in order."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.triton_gpu.launch import Call, Stats, descriptors, packed_blocks
from flashmix.ops.attention.triton_gpu.table import phases_of_keys
from flashmix.ops.attention.triton_gpu.tiles import (
    accumulated,
    bias_of_keys,
    bias_of_rows,
    dropout_keeps,
    dropout_rows,
    find_place,
    find_sequence,
    in_units,
    load_decay,
    load_head,
    load_numbers,
    padded_tokens,
    probabilities,
    product,
    rows_of_keys,
    score_gradients,
    store_rows,
)


@triton.jit
def _walk_queries(state, low, high, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers,
                  MASK: tl.constexpr, EDGE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Adds what the queries from `low` to `high` of one head give to `(dK, dK_2, dV, dV_2, sums of dS)` of BN keys.

    MASK where some keys are not seen, EDGE where rows may be past the last one.
    """
    d_k, d_k2, d_v, d_v2, sums = state
    q, q_desc, q_desc_2, stride_q = queries
    d_o, o_desc, o_desc_2, stride_o = flows
    level, share, delta, seed, head, first_row, shift, tokens_q, high_g, low_g, decay_ref, reference, all_rows = stats
    key, decay_k, key_bias = columns
    tokens_k = numbers[0]
    for start in tl.range(low, high, C.BM, num_stages=C.MASKED_STAGES if EDGE else C.STAGES):
        index = start + tl.arange(0, C.BM)
        position = (index + shift)[None, :]
        # q, dO: [BM, K], [BM, V], in two parts
        q_1, q_2 = load_head(q, q_desc, q_desc_2, place, start, tokens_q, stride_q, C.D, 0, C.D1, C.D2, C.BM, EDGE, C)
        if EDGE and C.PACKED:  # not prefetched: both at once
            o_1, o_2 = load_head(
                d_o, o_desc, o_desc_2, place, start, tokens_q, stride_o, C.DV, 0, C.V1, C.V2, C.BM, EDGE, C
            )
        s = product(k_1, k_2, q_1, q_2, C.D2, C)  # [BN, BM]
        at_rows = load_numbers(level, index, tokens_q, float("inf"), EDGE)
        of_rows = at_rows[None, :]
        if C.EXACT:
            of_rows = load_numbers(share, index, tokens_q, 0.0, EDGE)[None, :]
        decay_q = (0.0, 0.0)
        if C.DECAY:
            decay_q = load_decay(high_g, low_g, index + shift, tokens_k, MASK)
        if not MASK and (C.DECAY or (C.ALIBI and C.CAUSAL)):
            at_rows -= bias_of_rows(index + shift, reference, numbers[5], decay_q, decay_ref, C)
        if MASK and C.DECAY:
            decay_q = (decay_q[0][None, :], decay_q[1][None, :])  # type: ignore[index]
        p, squashed = probabilities(
            s, position, key, at_rows[None, :], of_rows, decay_q, decay_k, key_bias, numbers, numbers[1], MASK, C
        )
        if not (EDGE and C.PACKED):
            o_1, o_2 = load_head(
                d_o, o_desc, o_desc_2, place, start, tokens_q, stride_o, C.DV, 0, C.V1, C.V2, C.BM, EDGE, C
            )
        keeps = 0
        if C.DROPOUT:
            keeps = dropout_keeps(dropout_rows(seed, head, first_row + index)[None, :], key, numbers[6])
        if C.WITH_V:
            kept = tl.where(keeps, p, 0.0) if C.DROPOUT else p
            kept = kept.to(o_1.dtype)
            d_v = accumulated(d_v, kept, o_1, C)
            if C.V2 > 0:
                d_v2 = accumulated(d_v2, kept, o_2, C)
        if C.WITH_K:
            d_p = product(v_1, v_2, o_1, o_2, C.V2, C)
            found = load_numbers(delta, index, tokens_q, 0.0, True)[None, :]  # without a mask it spills
            flow = found
            if C.EXACT:
                flow = load_numbers(share + all_rows, index, tokens_q, 0.0, EDGE)[None, :]
            d_s, d_raw = score_gradients(p, d_p, squashed, found, flow, keeps, numbers[7], C)
            if C.DECAY:
                sums += tl.sum(d_s, 1)
            d_raw = d_raw.to(q_1.dtype)
            d_k = accumulated(d_k, d_raw, q_1, C)
            if C.D2 > 0:
                d_k2 = accumulated(d_k2, d_raw, q_2, C)
    return d_k, d_k2, d_v, d_v2, sums


@with_sound_ptxas
@triton.jit(
    do_not_specialize=["tokens_q", "tokens_k", "heads", "group", "batches", "blocks", "at_once", "left", "right",
                       "threshold", "sqb", "sqt", "sqh", "skb", "skt", "skh", "svb", "svt", "svh", "sob", "sot", "soh"]
)  # fmt: skip
def attention_backward_keys_kernel(
    q, k, v, d_o, q_desc, q_desc_2, o_desc, o_desc_2, d_k, d_v, level, share, delta, at_keys, slopes, decay, seed,
    table, sqb, sqt, sqh, skb, skt, skh, svb, svt, svh, sob, sot, soh,
    tokens_q, tokens_k, heads, group, batches, blocks, at_once,
    scale, softcap, left, right, threshold, keep_scale, d_scale, C: tl.constexpr,
):  # fmt: skip
    """dK `[B, Tk, H, K]` and dV `[B, Tk, H, V]` of BN keys; with a decay also the sums of dS over rows, `[B, HQ, Tk]`."""
    bh, block = find_place(tl.program_id(0), blocks, batches * heads, at_once)
    batch, head_k = bh // heads, bh % heads
    start_q, start_k, len_q, len_k = tokens_q * 0, tokens_k * 0, tokens_q, tokens_k
    if C.PACKED:
        _, start_k, len_k, start_q, len_q, block = find_sequence(block, table)
    first = block * C.BN
    if first < 0 or first >= len_k:
        return
    heads_q = heads * group
    shift = len_k - len_q
    k += batch.to(tl.int64) * skb * C.UNIT + head_k.to(tl.int64) * skh * C.UNIT + start_k.to(tl.int64) * skt * C.UNIT
    v += batch.to(tl.int64) * svb * C.UNIT + head_k.to(tl.int64) * svh * C.UNIT + start_k.to(tl.int64) * svt * C.UNIT
    k_1, k_2 = load_head(k, None, None, None, first, len_k, skt * C.UNIT, C.D, 0, C.D1, C.D2, C.BN, True, C)  # [BN, K]
    v_1, v_2 = k_1, k_2
    if C.WITH_K:
        v_1, v_2 = load_head(
            v, None, None, None, first, len_k, svt * C.UNIT, C.DV, 0, C.V1, C.V2, C.BN, True, C
        )  # [BN, V]
    index = first + tl.arange(0, C.BN)
    zeros = tl.full([C.BN], 0.0, tl.float32)
    d_k1, d_k2, d_v1, d_v2 = zeros, zeros, zeros, zeros
    if C.WITH_K:
        d_k1 = tl.full([C.BN, C.D1], 0.0, tl.float32)
        if C.D2 > 0:
            d_k2 = tl.full([C.BN, C.D2], 0.0, tl.float32)
    if C.WITH_V:
        d_v1 = tl.full([C.BN, C.V1], 0.0, tl.float32)
        if C.V2 > 0:
            d_v2 = tl.full([C.BN, C.V2], 0.0, tl.float32)
    low, inner, outer, high = rows_of_keys(first, shift, len_q, left, right, C)
    whole, last = high, outer  # the end of the first walk and the start of the last
    if C.PACKED:  # whose copies do not stop at the end of a sequence
        whole = tl.minimum(high, len_q // C.BM * C.BM)
        last = tl.maximum(tl.minimum(outer, len_q // C.BM * C.BM), low)
    for turn in range(group):
        head = head_k * group + turn
        row = (batch * heads_q + head).to(tl.int64)
        slope = 0.0
        if C.ALIBI:
            slope = in_units(tl.load(slopes + head), C)
        numbers = (len_k, scale, softcap, left, right, slope, threshold, keep_scale)
        high_g, low_g, decay_k, decay_ref, key_bias = decay, decay, (0.0, 0.0), (0.0, 0.0), 0.0
        reference = first + C.BN - 1
        if C.DECAY:
            high_g = decay + row * tokens_k + start_k
            low_g = high_g + (batches * heads_q).to(tl.int64) * tokens_k
            decay_k = load_decay(high_g, low_g, index, len_k, True)
            decay_ref = load_decay(high_g, low_g, reference, len_k, True)
        if C.DECAY or C.ALIBI:
            key_bias = bias_of_keys(index, reference, slope, decay_k, decay_ref, C)[:, None]
        if C.DECAY:
            decay_k = (decay_k[0][:, None], decay_k[1][:, None])  # type: ignore[index]
        columns = (index[:, None], decay_k, key_bias)
        at = row * padded_tokens(tokens_q) + start_q
        stats = (level + at, share + at if C.EXACT else share, delta + at, seed, head, batch * tokens_q + start_q, shift, len_q,
                 high_g, low_g, decay_ref, reference, (batches * heads_q).to(tl.int64) * padded_tokens(tokens_q))  # fmt: skip
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
            state = _walk_queries(
                state, low, tl.minimum(inner, whole), k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers,
                True, not C.PACKED, C,
            )  # fmt: skip
        state = _walk_queries(
            state, inner, outer, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers, False, False, C
        )
        state = _walk_queries(
            state, last, high, k_1, k_2, v_1, v_2, queries, flows, place, columns, stats, numbers, True, True, C
        )
        d_k1, d_k2, d_v1, d_v2, sums = state
        if C.DECAY and C.WITH_K:
            tl.store(at_keys + row * tokens_k + start_k + index, sums, mask=index < len_k)
    d_k += (batch.to(tl.int64) * tokens_k + start_k) * heads * C.D + head_k * C.D
    d_v += (batch.to(tl.int64) * tokens_k + start_k) * heads * C.DV + head_k * C.DV
    if C.WITH_K:
        store_rows(d_k, d_k1 * d_scale, first, len_k, heads * C.D, C.D, 0, C.D1, C.BN)
        if C.D2 > 0:
            store_rows(d_k, d_k2 * d_scale, first, len_k, heads * C.D, C.D, C.D1, C.D2, C.BN)
    if C.WITH_V:
        store_rows(d_v, d_v1 * keep_scale, first, len_k, heads * C.DV, C.DV, 0, C.V1, C.BN)
        if C.V2 > 0:
            store_rows(d_v, d_v2 * keep_scale, first, len_k, heads * C.DV, C.DV, C.V1, C.V2, C.BN)


def attention_backward_keys(
    x: Call, d_o: Tensor, stats: Stats, at_keys: Tensor | None, decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v = x.q, x.k, x.v
    d_k, d_v = q.new_empty(k.shape), q.new_empty(v.shape)
    for phase in phases_of_keys(max(k.shape[3], v.shape[3]), q.dtype, x.target):
        _launch(phase, x, d_o, stats, (d_k, d_v, at_keys), decay)
    return d_k, d_v


def _launch(
    phase: str, x: Call, d_o: Tensor, stats: Stats, results: tuple[Tensor, Tensor, Tensor | None], decay: Tensor | None
) -> None:
    q, k, v = x.q, x.k, x.v
    d_k, d_v, at_keys = results
    form, launch = x.form(phase, decay is not None)
    blocks, table = packed_blocks(x.cu_k, x.tokens_k, form.BN, x.cu_q, x.tokens_q)
    programs = blocks * x.batch * x.heads
    if programs > 0:
        attention_backward_keys_kernel[(programs,)](
            q, k, v, d_o, *descriptors(q, form, form.BM, form.D1, form.D2), *descriptors(d_o, form, form.BM, form.V1, form.V2),
            d_k, d_v, *stats, at_keys, x.slopes, decay, x.seed, table, *x.strides(form, q, k, v, d_o),
            x.tokens_q, x.tokens_k, x.heads, x.group, x.batch, blocks, max(1, x.at_once(form) // x.group),
            *x.numbers(form), x.score.scale, form, **launch,
        )  # fmt: skip
