"""Forward of softmax attention: a program has BM queries of a head and walks over the keys that they see.

In units of log 2 (float32: natural, with e for 2), with the running maximum m and sum l of each row:

    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v
    o = a / l;  lse = (m + log2 l) / log2 e;  a sink comes last, as a score whose value is 0

Tiles: BM queries, BN keys, K channels of q and k, V of v; K and V in one part or two (`Channels`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.launch import bound
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.op.call import Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.decay import Sums
from flashmix.ops.attention.triton_gpu.packed import blocks_of
from flashmix.ops.attention.triton_gpu.scores import (
    LOWEST,
    bias_of_rows,
    biased,
    decay_between,
    dropout_keeps,
    dropout_rows,
    expanded,
    exponential,
    in_units,
    log_sum,
    tanh,
    times,
    visible,
)
from flashmix.ops.attention.triton_gpu.spec import AttentionSpec, descriptors, numbers_of, table_or_ranges
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


class ForwardInputs(NamedTuple):
    q: Any
    k: Any
    v: Any
    sink: Any
    alibi_slopes: Any
    decay: Any  # the gates' running sums, and what is left of them to the end of each tile of keys, see `decay.running_sums`
    decay_tiles: Any
    seed: Any
    table: Any


class ForwardResults(NamedTuple):
    o: Any  # [B, Tq, HQ, V]
    lse: Any  # [B, HQ, Tq], as m and l
    top: Any
    total: Any


class QueryRows(NamedTuple):
    """What is known of BM queries of a head."""

    position: Any  # [BM, 1]
    hashes: Any  # of dropout, [BM, 1]
    slope: Any
    gates: Any  # addresses of both parts of G of the sequence's first key
    gates_to_end: Any  # and of what is left of G to the end of a tile
    decay: Any  # G at the rows in two parts, [BM, 1]
    reference: Any  # position of the first row, and G there
    decay_ref: Any
    bias: Any  # from the reference to each row, [BM]


@triton.jit
def divided(acc, l, keep_scale, S: tl.constexpr):
    """`keep_scale a / l`; in float32 rounded once, where the GPU's own division is right to 2 units in the last place."""
    if S.EXACT:
        return tl.div_rn(acc * keep_scale, tl.broadcast_to(l[:, None], acc.shape))
    else:
        return acc * (keep_scale / l)[:, None]


@triton.jit
def bias_of_way(decay_ref, decay_end, distance, slope, S: tl.constexpr):
    """What the way from the end of a tile (G there, in two parts) over `distance` positions takes off a score."""
    bias = 0.0
    if S.DECAY:
        bias += decay_between(decay_ref, decay_end)
    if S.ALIBI:
        bias -= slope * distance.to(tl.float32)
    return bias


@triton.jit
def attend(state, low, high, q, k, v, rows, n, MASK: tl.constexpr, S: tl.constexpr):
    """Takes the keys from `low` to `high` into `state`: `(a, a_2, m, l)`."""
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    acc, acc_2, m, l = state
    # Unless MASK a bias is in two: from each key to the first row, and from there to each row, from which m is counted here.
    # If nothing but the scale comes between (BEGUN), the first, divided by it, is what the sum q k^T starts from, and then an
    # element costs no more than without a bias.
    BY_TILE: tl.constexpr = not MASK and S.CAUSAL and (S.DECAY or S.ALIBI)
    BEGUN: tl.constexpr = BY_TILE and S.SCALED
    RAW: tl.constexpr = S.SCALED and (BEGUN or not (S.DECAY or S.ALIBI))
    falls, end_high, end_low, share, row_bias = 0.0, 0.0, 0.0, 1.0, rows.bias
    if BY_TILE:
        row_bias = tl.where(low < high, row_bias, 0.0)
        m -= row_bias
    if BEGUN:
        share = 1.0 / n.scale
    if S.ALIBI and BY_TILE:
        falls = rows.slope * share * (tl.arange(0, S.BN) - (S.BN - 1)).to(tl.float32)
    if S.DECAY and BY_TILE:  # loaded a tile ahead
        end_high, end_low = load_decay(rows.gates, low + S.BN - 1, k.tokens, True)  # []
        to_end = tl.load(rows.gates_to_end + low + tl.arange(0, S.BN))  # [BN]
    for start in tl.range(low, high, S.BN, num_stages=S.MASKED_STAGES if MASK else S.STAGES):
        keys_here = start + tl.arange(0, S.BN)
        key = keys_here[None, :]
        decay_k = (0.0, 0.0)
        if S.DECAY and MASK:
            decay_k = expanded(load_decay(rows.gates, keys_here, k.tokens, True), 0)  # [1, BN]
        bias = falls
        begin = None
        if BY_TILE:
            distance = rows.reference - start - (S.BN - 1)
            bias += share * bias_of_way(rows.decay_ref, (end_high, end_low), distance, rows.slope, S)
        if S.DECAY and BY_TILE:
            bias += to_end
        if BEGUN:
            begin = tl.broadcast_to(bias[None, :], [S.BM, S.BN])  # type: ignore[index]
        # s = q k^T
        s = product(q, load_head(k, start, QK, S.BN, MASK, S), QK.SECOND, S, begin)  # k: [BN, K]; s: [BM, BN]
        if S.DECAY and BY_TILE:
            more = start + S.BN < high
            high_g, low_g = rows.gates
            end_high = tl.load(high_g + start + (2 * S.BN - 1), mask=more, other=end_high)  # []
            end_low = tl.load(low_g + start + (2 * S.BN - 1), mask=more, other=end_low)  # []
            to_end = tl.load(rows.gates_to_end + start + S.BN + tl.arange(0, S.BN), mask=more, other=to_end)  # [BN]
        # m' = max(m, max_j s_j);  p_j = 2^(s_j - m')
        if RAW:
            if MASK:
                s = tl.where(visible(rows.position, key, k.tokens, n, S), s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * n.scale)
            p = tl.exp2(s * n.scale - m_new[:, None])
        else:
            x = times(s, n.scale, S)
            if S.SOFTCAP:
                x = times(tanh(x, S), n.softcap, S)
            if MASK:
                x = biased(x, rows.position, key, rows.slope, rows.decay, decay_k, S)
                x = tl.where(visible(rows.position, key, k.tokens, n, S), x, -float("inf"))
            elif BY_TILE:
                x += bias[None, :]  # type: ignore[index]
            elif S.ALIBI:
                x -= rows.slope * tl.abs(rows.position.to(tl.float32) - key.to(tl.float32))
            m_new = tl.maximum(m, tl.max(x, 1))
            p = exponential(x - m_new[:, None], S)
        # l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v
        shrink = exponential(m - m_new, S)
        l = l * shrink + tl.sum(p, 1)
        if S.DROPOUT:
            p = tl.where(dropout_keeps(rows.hashes, key, n.threshold), p, 0.0)
        acc = acc * shrink[:, None]
        if V.SECOND > 0:
            acc_2 = acc_2 * shrink[:, None]
        v_1, v_2 = load_head(v, start, V, S.BN, MASK, S)  # [BN, V]
        p = p.to(v_1.dtype)
        acc = accumulated(acc, p, v_1, S)
        if V.SECOND > 0:
            acc_2 = accumulated(acc_2, p, v_2, S)
        m = m_new
    if BY_TILE:
        m += row_bias
    return acc, acc_2, m, l


@triton.jit
def query_rows(x, at, index, n, S: tl.constexpr):
    """What is known of the queries `index` of a sequence, in the block `at`."""
    shift = at.tokens_k - at.tokens_q
    slope = 0.0
    if S.ALIBI:
        slope = in_units(tl.load(x.alibi_slopes + (at.bh if S.SLOPES_BY_SEQUENCE else at.head)), S)
    hashes = 0
    if S.DROPOUT:
        hashes = dropout_rows(x.seed, at.head, at.batch * n.tokens_q + at.start_q + index)[:, None]
    decay_q, decay_ref, gates, gates_to_end = (0.0, 0.0), (0.0, 0.0), (0, 0), 0
    position = index + shift
    bias = position.to(tl.float32) * 0.0
    if S.DECAY:
        high_g = x.decay + at.bh.to(tl.int64) * n.tokens_k + at.start_k
        gates = (high_g, high_g + (n.batches * n.heads_q).to(tl.int64) * n.tokens_k)
        gates_to_end = x.decay_tiles + at.bh.to(tl.int64) * padded_tokens(n.tokens_k) + at.start_k
        decay_q = load_decay(gates, position, at.tokens_k, True)  # [BM]
        decay_ref = load_decay(gates, at.first + shift, at.tokens_k, True)  # []
        bias = bias_of_rows(position, at.first + shift, slope, decay_q, decay_ref, S)
        decay_q = expanded(decay_q, 1)
    elif S.ALIBI:
        bias = bias_of_rows(position, at.first + shift, slope, decay_q, decay_ref, S)
    return QueryRows(
        position[:, None],
        hashes,
        slope,
        gates,
        gates_to_end,
        decay_q,
        reference=at.first + shift,
        decay_ref=decay_ref,
        bias=bias,
    )


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def attention_forward_kernel(x, out, k_tiles, k_rest, v_tiles, v_rest, n, S: tl.constexpr):
    """o, lse, m and l of BM queries of a head; `k_tiles` to `v_rest` are TMA descriptors of both parts of k and v."""
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    at = find_queries(tl.program_id(0), x.table, n, S)
    if at.first < 0 or at.first >= at.tokens_q:
        return
    place, place_k = (at.batch, at.head, at.start_q), (at.batch, at.head_k, at.start_k)
    q = HeadRows(head_of(x.q, n.q_at, place, S), at.tokens_q, (None, None), place)
    k = HeadRows(head_of(x.k, n.k_at, place_k, S), at.tokens_k, (k_tiles, k_rest), place_k)
    v = HeadRows(head_of(x.v, n.v_at, place_k, S), at.tokens_k, (v_tiles, v_rest), place_k)
    rows = query_rows(x, at, at.first + tl.arange(0, S.BM), n, S)

    q = load_head(q, at.first, QK, S.BM, True, S)  # [BM, K]
    m = tl.full([S.BM], LOWEST, tl.float32)
    l = tl.full([S.BM], 0.0, tl.float32)
    acc = tl.full([S.BM, V.FIRST], 0.0, tl.float32)
    acc_2 = tl.full([S.BM, V.SECOND], 0.0, tl.float32) if V.SECOND > 0 else m
    state = (acc, acc_2, m, l)
    low, inner, outer, high = keys_of_rows(rows.reference, at.tokens_k, n, S.BM, S)
    if S.LEFT:
        state = attend(state, low, tl.minimum(inner, high), q, k, v, rows, n, MASK=True, S=S)
    state = attend(state, inner, outer, q, k, v, rows, n, MASK=False, S=S)
    state = attend(state, outer, high, q, k, v, rows, n, MASK=True, S=S)
    acc, acc_2, m, l = state

    # m' = max(m, sink);  l = l 2^(m - m') + 2^(sink - m');  a = a 2^(m - m')
    if S.SINK:
        at_sink = in_units(tl.load(x.sink + at.head), S)
        top_key, m = m, tl.maximum(m, at_sink)
        shrink = exponential(top_key - m, S)
        l = l * shrink + exponential(at_sink - m, S)
        acc = acc * shrink[:, None]
        if V.SECOND > 0:
            acc_2 = acc_2 * shrink[:, None]
    # o = a / l;  lse = m + log l
    divisor = tl.where(l == 0, 1.0, l)
    o = result_rows(out.o, at, n.heads_q, at.head, n.tokens_q, at.start_q, V)
    store_rows(o, divided(acc, divisor, n.keep_scale, S), at.first, at.tokens_q, 0, V.FIRST, V, S.BM)
    if V.SECOND > 0:
        o_2 = divided(acc_2, divisor, n.keep_scale, S)
        store_rows(o, o_2, at.first, at.tokens_q, V.FIRST, V.SECOND, V, S.BM)
    index = at.first + tl.arange(0, S.BM)
    inside = index < at.tokens_q
    row = at.bh.to(tl.int64) * n.tokens_q + at.start_q  # of lse `[B, HQ, Tq]`
    tl.store(out.lse + row + index, log_sum(m, l, S), mask=inside)
    tl.store(out.top + row + index, m, mask=inside)
    tl.store(out.total + row + index, l, mask=inside)


def attention_forward(
    call: AttentionCall, spec: AttentionSpec, options: dict[str, int], decay: Sums
) -> tuple[Tensor, Tensor, Outputs]:
    """`o [B,Tq,HQ,V]`, `lse [B,HQ,Tq]` (packed `[HQ,Tq]`), and m and l, `[B,HQ,Tq]` each.

    `decay`: the gates' running sums, see `decay.running_sums`.
    """
    q, k, v = call.q, call.k, call.v
    o = q.new_empty(*q.shape[:3], v.shape[3])
    top, total = call.row_statistics()
    lse = q.new_empty(call.rows[1:] if call.packed else call.rows, dtype=torch.float32)
    blocks, table = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
    places = table_or_ranges(call, table)
    bound(attention_forward_kernel, spec, **options)(
        blocks * call.batch * call.heads_q,
        ForwardInputs(q, k, v, call.sink, call.alibi_slopes, *decay, seed=call.seed, table=places),
        ForwardResults(o, lse, top, total),
        *descriptors(k, spec, spec.BN, spec.QK),
        *descriptors(v, spec, spec.BN, spec.V),
        numbers_of(call, spec, blocks),
    )
    return o, lse, (top, total)
