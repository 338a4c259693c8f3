"""dQ of softmax attention: a program has BM queries and walks over their keys.

    P = 2^(S - m) / l;  dS = P (dO V^T - delta);  dQ = scale dS K

Tiles of scores lie `[BM, BN]`: BM queries, BN keys, K channels of q and k, V of v; K and V in one part or two (`Channels`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.launch import bound
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.packed import blocks_of
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
from flashmix.ops.attention.triton_gpu.tiles import (
    HeadRows,
    accumulated,
    find_queries,
    head_of,
    keys_of_rows,
    load_decay,
    load_head,
    padded_tokens,
    product,
    result_rows,
    store_rows,
)


class QueryResults(NamedTuple):
    d_q: Any  # [B, Tq, HQ, K]; None where delta is wanted, which goes where the inputs have it
    d_slopes: Any  # of each row, [B, HQ, Tq]
    at_rows: Any  # with a decay the sums of dS over keys, [B, HQ, Tq]


class QueryTile(NamedTuple):
    """BM queries of a head: q `[BM, K]` and dO `[BM, V]`, each in its two parts, and their side of the scores."""

    q: Any
    d_o: Any
    scores: Any
    delta: Any  # [BM, 1], as the others
    flow: Any
    hashes: Any  # of dropout
    slope: Any
    reference: Any  # position of the first row, G there, and the bias from there to each row
    decay_ref: Any
    bias: Any


class KeyHead(NamedTuple):
    """One key head of a sequence, as the walk over its keys reads it."""

    k: Any  # `HeadRows`
    v: Any
    gates: Any  # addresses of both parts of G of the sequence's first key


@triton.jit
def walk_keys(state, low, high, rows, head, n, MASK: tl.constexpr, EDGE: tl.constexpr, S: tl.constexpr):
    """Adds what the keys from `low` to `high` give to `(dQ, dQ_2, slopes' gradient, sums of dS)` of BM queries.

    MASK where some keys are not seen, EDGE where keys may be past the last one.
    """
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    d_q, d_q2, d_slope, sums = state
    position = rows.scores.position
    for start in tl.range(low, high, S.BN, num_stages=S.MASKED_STAGES if EDGE else S.STAGES):
        # s = q k^T
        k = load_head(head.k, start, QK, S.BN, EDGE, S)  # [BN, K]
        if EDGE and S.PACKED:  # not prefetched: both at once
            v = load_head(head.v, start, V, S.BN, EDGE, S)  # [BN, V]
        s = product(rows.q, k, QK.SECOND, S)  # [BM, BN]
        # P = 2^(s - level)
        keys_here = start + tl.arange(0, S.BN)
        key = keys_here[None, :]
        decay_k, key_bias, level = (0.0, 0.0), 0.0, rows.scores.level
        if S.DECAY:
            decay_k = load_decay(head.gates, keys_here, head.k.tokens, MASK)  # [BN]
        if not MASK and (S.DECAY or (S.ALIBI and S.CAUSAL)):
            key_bias = bias_of_keys(keys_here, rows.reference, rows.slope, decay_k, rows.decay_ref, S)[None, :]
            level = level - rows.bias
        if MASK and S.DECAY:
            decay_k = expanded(decay_k, 0)
        here = ScoreRows(position, level, rows.scores.share, rows.scores.decay)
        keys = ScoreKeys(key, head.k.tokens, decay_k, key_bias)
        p, squashed = probabilities(s, here, keys, rows.slope, n, MASK, S)
        if not (EDGE and S.PACKED):
            v = load_head(head.v, start, V, S.BN, EDGE, S)  # [BN, V]
        # dS = P (dO v^T - delta)
        d_p = product(rows.d_o, v, V.SECOND, S)  # [BM, BN]
        keeps = 0
        if S.DROPOUT:
            keeps = dropout_keeps(rows.hashes, key, n.threshold)
        d_s, d_raw = score_gradients(p, d_p, squashed, rows.delta, rows.flow, keeps, n.keep_scale, S)
        if S.ALIBI and not S.DELTA:
            d_slope -= tl.sum(d_s * tl.abs(position.to(tl.float32) - key.to(tl.float32)), 1)
        if S.DECAY or S.DELTA:
            sums += tl.sum(d_s, 1)
        # dQ += dS k
        if not S.DELTA:
            k_1, k_2 = k
            d_raw = d_raw.to(k_1.dtype)
            d_q = accumulated(d_q, d_raw, k_1, S)
            if QK.SECOND > 0:
                d_q2 = accumulated(d_q2, d_raw, k_2, S)
    return d_q, d_q2, d_slope, sums


@triton.jit
def query_tile(x, at, n, S: tl.constexpr):
    """What a program loads of its BM queries, and the addresses of the gates."""
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    place = (at.batch, at.head, at.start_q)
    q = HeadRows(head_of(x.q, n.q_at, place, S), at.tokens_q, (None, None), place)
    d_o = HeadRows(head_of(x.d_o, n.d_o_at, place, S), at.tokens_q, (None, None), place)
    q = load_head(q, at.first, QK, S.BM, True, S)  # [BM, K]
    d_o = load_head(d_o, at.first, V, S.BM, True, S)  # [BM, V]
    index = at.first + tl.arange(0, S.BM)
    inside = index < at.tokens_q
    padded = at.bh.to(tl.int64) * padded_tokens(n.tokens_q) + at.start_q + index
    level = tl.load(x.level + padded, mask=inside, other=float("inf"))[:, None]  # [BM, 1]
    share = level
    if S.EXACT:
        share = tl.load(x.share + padded, mask=inside, other=0.0)[:, None]  # [BM, 1]
    shift = at.tokens_k - at.tokens_q
    slope, hashes = 0.0, 0
    if S.ALIBI:
        slope = in_units(tl.load(x.alibi_slopes + (at.bh if S.SLOPES_BY_SEQUENCE else at.head)), S)
    if S.DROPOUT:
        hashes = dropout_rows(x.seed, at.head, at.batch * n.tokens_q + at.start_q + index)[:, None]
    position = index + shift
    decay_q, decay_ref, gates, bias = (0.0, 0.0), (0.0, 0.0), (0, 0), 0.0
    if S.DECAY:
        high_g = x.decay + at.bh.to(tl.int64) * n.tokens_k + at.start_k
        gates = (high_g, high_g + (n.batches * n.heads_q).to(tl.int64) * n.tokens_k)
        decay_q = load_decay(gates, position, at.tokens_k, True)  # [BM]
        decay_ref = load_decay(gates, at.first + shift, at.tokens_k, True)  # []
    if S.DECAY or S.ALIBI:
        bias = bias_of_rows(position, at.first + shift, slope, decay_q, decay_ref, S)[:, None]
    if S.DECAY:
        decay_q = expanded(decay_q, 1)
    delta = 0.0
    if not S.DELTA:
        delta = tl.load(x.delta + padded, mask=inside, other=0.0)[:, None]  # [BM, 1]
    flow = delta
    if S.EXACT and not S.DELTA:
        flows = x.share + (n.batches * n.heads_q).to(tl.int64) * padded_tokens(n.tokens_q)
        flow = tl.load(flows + padded, mask=inside, other=0.0)[:, None]  # [BM, 1]
    rows = QueryTile(
        q,
        d_o,
        ScoreRows(position[:, None], level, share, decay_q),
        delta,
        flow,
        hashes,
        slope,
        reference=at.first + shift,
        decay_ref=decay_ref,
        bias=bias,
    )
    return rows, gates


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def attention_backward_queries_kernel(x, out, k_tiles, k_rest, v_tiles, v_rest, n, S: tl.constexpr):
    """dQ of BM queries, or delta; `k_tiles` to `v_rest` are TMA descriptors of both parts of k and v."""
    QK: tl.constexpr = S.QK
    at = find_queries(tl.program_id(0), x.table, n, S)
    if at.first < 0 or at.first >= at.tokens_q:
        return
    rows, gates = query_tile(x, at, n, S)
    place = (at.batch, at.head_k, at.start_k)
    k = HeadRows(head_of(x.k, n.k_at, place, S), at.tokens_k, (k_tiles, k_rest), place)
    v = HeadRows(head_of(x.v, n.v_at, place, S), at.tokens_k, (v_tiles, v_rest), place)
    head = KeyHead(k, v, gates)
    zeros = tl.full([S.BM], 0.0, tl.float32)
    d_q1 = tl.full([S.BM, QK.FIRST], 0.0, tl.float32)
    d_q2 = tl.full([S.BM, QK.SECOND], 0.0, tl.float32) if QK.SECOND > 0 else zeros
    state = (d_q1, d_q2, zeros, zeros)
    low, inner, outer, high = keys_of_rows(rows.reference, at.tokens_k, n, S.BM, S)
    if S.LEFT:
        state = walk_keys(state, low, tl.minimum(inner, high), rows, head, n, True, EDGE=True, S=S)
    state = walk_keys(state, inner, outer, rows, head, n, False, EDGE=False, S=S)
    if S.PACKED and S.CAUSAL:  # copies do not stop at the end of a sequence
        whole = tl.maximum(tl.minimum(high, at.tokens_k // S.BN * S.BN), outer)
        state = walk_keys(state, outer, whole, rows, head, n, True, EDGE=False, S=S)
        outer = (whole + S.BN - 1) // S.BN * S.BN
    state = walk_keys(state, outer, high, rows, head, n, True, EDGE=True, S=S)
    d_q1, d_q2, d_slope, sums = state
    index = at.first + tl.arange(0, S.BM)
    inside = index < at.tokens_q
    row = at.bh.to(tl.int64) * n.tokens_q + at.start_q + index
    if S.DELTA:  # delta_i = sum_j P_ij (dO V^T)_ij
        tl.store(x.delta + at.bh.to(tl.int64) * padded_tokens(n.tokens_q) + at.start_q + index, sums, mask=inside)
    else:  # dQ = scale dS K
        d_q = result_rows(out.d_q, at, n.heads_q, at.head, n.tokens_q, at.start_q, QK)
        store_rows(d_q, d_q1 * n.d_scale, at.first, at.tokens_q, 0, QK.FIRST, QK, S.BM)
        if QK.SECOND > 0:
            store_rows(d_q, d_q2 * n.d_scale, at.first, at.tokens_q, QK.FIRST, QK.SECOND, QK, S.BM)
        if S.ALIBI:
            tl.store(out.d_slopes + row, d_slope, mask=inside)
        if S.DECAY:
            tl.store(out.at_rows + row, sums, mask=inside)


def launch_queries(phase: str, call: AttentionCall, x: BackwardInputs, out: QueryResults) -> None:
    """The pass over queries that writes `out` ("queries"), or delta of `x` from P and `dO V^T` ("delta")."""
    spec, options = spec_of(call, phase)
    blocks, table = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
    bound(attention_backward_queries_kernel, spec, **options)(
        blocks * call.batch * call.heads_q,
        x._replace(table=table_or_ranges(call, table)),
        out,
        *descriptors(call.k, spec, spec.BN, spec.QK),
        *descriptors(call.v, spec, spec.BN, spec.V),
        numbers_of(call, spec, blocks, x.d_o),
    )
