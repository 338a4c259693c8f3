"""dK and dV of softmax attention: a program has BN keys and walks over the queries that see them, head by head in order.

    P = 2^(S - m) / l;  dV = P^T dO;  dS = P (dO V^T - delta);  dK = scale dS^T Q

Tiles of scores lie `[BN, BM]`: BN keys, BM queries, K channels of q and k, V of v; K and V in one part or two (`Channels`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.launch import bound
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.packed import blocks_of, find_sequence
from flashmix.ops.attention.triton_gpu.scores import (
    ScoreKeys,
    ScoreRows,
    bias_of_keys,
    bias_of_rows,
    dropout_keeps,
    dropout_rows,
    expanded,
    in_units,
    probabilities,
    score_gradients,
)
from flashmix.ops.attention.triton_gpu.spec import BackwardInputs, descriptors, numbers_of, spec_of, table_or_ranges
from flashmix.ops.attention.triton_gpu.table import phases_of_keys
from flashmix.ops.attention.triton_gpu.tiles import (
    AttentionBlock,
    HeadRows,
    accumulated,
    find_head,
    head_of,
    keys_of_sequence,
    load_decay,
    load_head,
    load_numbers,
    padded_tokens,
    product,
    result_rows,
    rows_of_keys,
    store_rows,
)


class KeyResults(NamedTuple):
    d_k: Any  # [B, Tk, H, K]
    d_v: Any  # [B, Tk, H, V]
    at_keys: Any  # with a decay the sums of dS over rows, [B, HQ, Tk]


class KeyTile(NamedTuple):
    """BN keys of a head: k `[BN, K]` and v `[BN, V]`, each in its two parts, and their side of the scores."""

    k: Any
    v: Any
    scores: Any


class QueryHead(NamedTuple):
    """One query head of a sequence, as the walk over its rows reads it."""

    q: Any  # `HeadRows`
    d_o: Any
    seed: Any  # of dropout
    rows: Any  # `HeadStatistics`


class HeadStatistics(NamedTuple):
    level: Any  # addresses of row 0
    share: Any
    flow: Any
    delta: Any
    head: Any
    first_row: Any  # of the sequence, in the batch
    shift: Any  # query i stands at position i + shift
    slope: Any
    gates: Any  # addresses of both parts of G of the sequence's first key
    reference: Any  # position of the last of the BN keys, and G there
    decay_ref: Any


@triton.jit
def find_keys(table, n, S: tl.constexpr):
    """The block of BN keys of a program; its `bh` counts key heads."""
    bh, block = find_head(tl.program_id(0), n.blocks, n.batches * n.heads, n.at_once)
    batch, head_k = bh // n.heads, bh % n.heads
    start_q, tokens_q = n.tokens_q * 0, n.tokens_q
    start_k, tokens_k = keys_of_sequence(batch, table, n, S)
    if S.PACKED:
        _, start_k, tokens_k, start_q, tokens_q, block = find_sequence(block, table)
    return AttentionBlock(batch, head_k * n.group, head_k, bh, block * S.BN, start_q, tokens_q, start_k, tokens_k)


@triton.jit
def walk_queries(state, low, high, keys, head, n, MASK: tl.constexpr, EDGE: tl.constexpr, S: tl.constexpr):
    """Adds what the queries from `low` to `high` of one head give to `(dK, dK_2, dV, dV_2, sums of dS)` of BN keys.

    MASK where some keys are not seen, EDGE where rows may be past the last one.
    """
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    d_k, d_k2, d_v, d_v2, sums = state
    key, tokens_q, x = keys.scores.key, head.q.tokens, head.rows
    for start in tl.range(low, high, S.BM, num_stages=S.MASKED_STAGES if EDGE else S.STAGES):
        index = start + tl.arange(0, S.BM)
        # s = k q^T
        q = load_head(head.q, start, QK, S.BM, EDGE, S)  # [BM, K]
        if EDGE and S.PACKED:  # not prefetched: both at once
            d_o = load_head(head.d_o, start, V, S.BM, EDGE, S)  # [BM, V]
        s = product(keys.k, q, QK.SECOND, S)  # [BN, BM]
        # P = 2^(s - level)
        level = load_numbers(x.level, index, tokens_q, float("inf"), EDGE)  # [BM]
        share = level[None, :]
        if S.EXACT:
            share = load_numbers(x.share, index, tokens_q, 0.0, EDGE)[None, :]  # [1, BM]
        decay_q = (0.0, 0.0)
        if S.DECAY:
            decay_q = load_decay(x.gates, index + x.shift, keys.scores.tokens, MASK)  # [BM]
        if not MASK and (S.DECAY or (S.ALIBI and S.CAUSAL)):
            level -= bias_of_rows(index + x.shift, x.reference, x.slope, decay_q, x.decay_ref, S)
        if MASK and S.DECAY:
            decay_q = expanded(decay_q, 0)
        rows = ScoreRows((index + x.shift)[None, :], level[None, :], share, decay_q)
        p, squashed = probabilities(s, rows, keys.scores, x.slope, n, MASK, S)
        if not (EDGE and S.PACKED):
            d_o = load_head(head.d_o, start, V, S.BM, EDGE, S)  # [BM, V]
        keeps = 0
        if S.DROPOUT:
            keeps = dropout_keeps(dropout_rows(head.seed, x.head, x.first_row + index)[None, :], key, n.threshold)
        # dV += P^T dO
        d_o_1, d_o_2 = d_o
        if S.WITH_V:
            kept = tl.where(keeps, p, 0.0) if S.DROPOUT else p
            kept = kept.to(d_o_1.dtype)
            d_v = accumulated(d_v, kept, d_o_1, S)
            if V.SECOND > 0:
                d_v2 = accumulated(d_v2, kept, d_o_2, S)
        # dS = P (v dO^T - delta);  dK += dS^T Q
        if S.WITH_K:
            q_1, q_2 = q
            d_p = product(keys.v, d_o, V.SECOND, S)  # [BN, BM]
            delta = load_numbers(x.delta, index, tokens_q, 0.0, True)[None, :]  # [1, BM]; without a mask it spills
            flow = delta
            if S.EXACT:
                flow = load_numbers(x.flow, index, tokens_q, 0.0, EDGE)[None, :]  # [1, BM]
            d_s, d_raw = score_gradients(p, d_p, squashed, delta, flow, keeps, n.keep_scale, S)
            if S.DECAY:
                sums += tl.sum(d_s, 1)
            d_raw = d_raw.to(q_1.dtype)
            d_k = accumulated(d_k, d_raw, q_1, S)
            if QK.SECOND > 0:
                d_k2 = accumulated(d_k2, d_raw, q_2, S)
    return d_k, d_k2, d_v, d_v2, sums


@triton.jit
def head_statistics(x, at, head, n, S: tl.constexpr):
    """What the walk reads of a query head, and the block's side of its scores."""
    shift = at.tokens_k - at.tokens_q
    index = at.first + tl.arange(0, S.BN)
    row = (at.batch * n.heads_q + head).to(tl.int64)
    rows_of_all = (n.batches * n.heads_q).to(tl.int64)
    slope = 0.0
    if S.ALIBI:
        slope = in_units(tl.load(x.alibi_slopes + (row if S.SLOPES_BY_SEQUENCE else head)), S)
    gates, decay_k, decay_ref, key_bias = (0, 0), (0.0, 0.0), (0.0, 0.0), 0.0
    reference = at.first + S.BN - 1
    if S.DECAY:
        high_g = x.decay + row * n.tokens_k + at.start_k
        gates = (high_g, high_g + rows_of_all * n.tokens_k)
        decay_k = load_decay(gates, index, at.tokens_k, True)  # [BN]
        decay_ref = load_decay(gates, reference, at.tokens_k, True)  # []
    if S.DECAY or S.ALIBI:
        key_bias = bias_of_keys(index, reference, slope, decay_k, decay_ref, S)[:, None]
    if S.DECAY:
        decay_k = expanded(decay_k, 1)
    keys = ScoreKeys(index[:, None], at.tokens_k, decay_k, key_bias)
    padded = row * padded_tokens(n.tokens_q) + at.start_q
    share, flow = 0, 0
    if S.EXACT:
        share = x.share + padded
        flow = share + rows_of_all * padded_tokens(n.tokens_q)
    rows = HeadStatistics(
        x.level + padded,
        share,
        flow,
        x.delta + padded,
        head,
        first_row=at.batch * n.tokens_q + at.start_q,
        shift=shift,
        slope=slope,
        gates=gates,
        reference=reference,
        decay_ref=decay_ref,
    )
    return rows, keys


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def attention_backward_keys_kernel(x, out, q_tiles, q_rest, o_tiles, o_rest, n, S: tl.constexpr):
    """dK and dV of BN keys; `q_tiles` to `o_rest` are TMA descriptors of both parts of q and dO."""
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    at = find_keys(x.table, n, S)
    if at.first < 0 or at.first >= at.tokens_k:
        return
    shift = at.tokens_k - at.tokens_q
    place = (at.batch, at.head_k, at.start_k)
    k = HeadRows(head_of(x.k, n.k_at, place, S), at.tokens_k, (None, None), place)
    k = load_head(k, at.first, QK, S.BN, True, S)  # [BN, K]
    v = k
    if S.WITH_K:
        v_rows = HeadRows(head_of(x.v, n.v_at, place, S), at.tokens_k, (None, None), place)
        v = load_head(v_rows, at.first, V, S.BN, True, S)  # [BN, V]
    zeros = tl.full([S.BN], 0.0, tl.float32)
    d_k1, d_k2, d_v1, d_v2 = zeros, zeros, zeros, zeros
    if S.WITH_K:
        d_k1 = tl.full([S.BN, QK.FIRST], 0.0, tl.float32)
        if QK.SECOND > 0:
            d_k2 = tl.full([S.BN, QK.SECOND], 0.0, tl.float32)
    if S.WITH_V:
        d_v1 = tl.full([S.BN, V.FIRST], 0.0, tl.float32)
        if V.SECOND > 0:
            d_v2 = tl.full([S.BN, V.SECOND], 0.0, tl.float32)
    low, inner, outer, high = rows_of_keys(at.first, shift, at.tokens_q, n, S)
    whole, last = high, outer  # the end of the first walk and the start of the last
    if S.PACKED:  # whose copies do not stop at the end of a sequence
        whole = tl.minimum(high, at.tokens_q // S.BM * S.BM)
        last = tl.maximum(tl.minimum(outer, at.tokens_q // S.BM * S.BM), low)
    for turn in range(n.group):
        head = at.head + turn
        rows, scores = head_statistics(x, at, head, n, S)
        keys, place = KeyTile(k, v, scores), (at.batch, head, at.start_q)
        q = HeadRows(head_of(x.q, n.q_at, place, S), at.tokens_q, (q_tiles, q_rest), place)
        d_o = HeadRows(head_of(x.d_o, n.d_o_at, place, S), at.tokens_q, (o_tiles, o_rest), place)
        queries = QueryHead(q, d_o, x.seed, rows)
        state = (d_k1, d_k2, d_v1, d_v2, zeros)
        if S.CAUSAL or S.RIGHT:
            state = walk_queries(state, low, tl.minimum(inner, whole), keys, queries, n, True, EDGE=not S.PACKED, S=S)
        state = walk_queries(state, inner, outer, keys, queries, n, False, EDGE=False, S=S)
        state = walk_queries(state, last, high, keys, queries, n, True, EDGE=True, S=S)
        d_k1, d_k2, d_v1, d_v2, sums = state
        if S.DECAY and S.WITH_K:
            row = (at.batch * n.heads_q + head).to(tl.int64) * n.tokens_k + at.start_k
            index = at.first + tl.arange(0, S.BN)
            tl.store(out.at_keys + row + index, sums, mask=index < at.tokens_k)
    if S.WITH_K:  # dK = scale dS^T Q
        d_k = result_rows(out.d_k, at, n.heads, at.head_k, n.tokens_k, at.start_k, QK)
        store_rows(d_k, d_k1 * n.d_scale, at.first, at.tokens_k, 0, QK.FIRST, QK, S.BN)
        if QK.SECOND > 0:
            store_rows(d_k, d_k2 * n.d_scale, at.first, at.tokens_k, QK.FIRST, QK.SECOND, QK, S.BN)
    if S.WITH_V:
        d_v = result_rows(out.d_v, at, n.heads, at.head_k, n.tokens_k, at.start_k, V)
        store_rows(d_v, d_v1 * n.keep_scale, at.first, at.tokens_k, 0, V.FIRST, V, S.BN)
        if V.SECOND > 0:
            store_rows(d_v, d_v2 * n.keep_scale, at.first, at.tokens_k, V.FIRST, V.SECOND, V, S.BN)


def attention_backward_keys(call: AttentionCall, x: BackwardInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """dK, dV, and with a decay the sums of dS over rows, by one pass or by one each."""
    k, v = call.k, call.v
    at_keys = None
    if call.log_decay is not None:
        shape = (call.batch, call.heads_q, call.tokens_k)
        at_keys = torch.empty(size=shape, dtype=torch.float32, device=call.device)
    new = k.new_zeros if call.ranged else k.new_empty  # no program has the keys outside of the ranges
    out = KeyResults(new(k.shape), new(v.shape), at_keys)
    for phase in phases_of_keys(max(k.shape[3], v.shape[3]), call.dtype, gpu.target(call.device)):
        spec, options = spec_of(call, phase)
        blocks, table = blocks_of(call.packing_k, call.tokens_k, spec.BN, call.packing)
        n = numbers_of(call, spec, blocks, x.d_o)
        bound(attention_backward_keys_kernel, spec, **options)(
            blocks * call.batch * call.heads,
            x._replace(table=table_or_ranges(call, table)),
            out,
            *descriptors(call.q, spec, spec.BM, spec.QK),
            *descriptors(x.d_o, spec, spec.BM, spec.V),
            n._replace(at_once=max(1, n.at_once // call.group)),  # here heads are those of keys
        )
    return out.d_k, out.d_v, at_keys
