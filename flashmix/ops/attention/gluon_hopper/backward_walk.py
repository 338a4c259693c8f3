"""The walk of a block of keys over its queries, in backward on Hopper: which queries, their tiles copied, P from their scores.

Tiles of scores lie `[keys, queries]`. With gates or slopes what is added to a score is in two where a whole tile is seen: from each key to
the block's last one, which the group knows, and from there to each query, which the copying warp takes off the query's level.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.hopper import accumulator, await_readers, ex2, gl, gluon, signal, wait_empty
from flashmix.ops.attention.gluon_hopper.scores import hidden, queries_seeing, scaled
from flashmix.ops.attention.gluon_hopper.table import HEADS_OF_BOTH_WAYS
from flashmix.ops.attention.gluon_hopper.tiles import fill_tile
from flashmix.ops.attention.triton_gpu.packed import find_sequence
from flashmix.ops.attention.triton_gpu.scores import bias_of_keys, bias_of_rows, biased, expanded, in_units
from flashmix.ops.attention.triton_gpu.tiles import AttentionBlock, find_head, load_decay, padded_tokens, rows_of_keys

# Named barriers, which ask no group to wait for its own warps first; q and dO have a number for each stage, dQ's pieces two each.
BOTH_GROUPS, D_Q_FULL, Q_READ, D_O_READ = gl.constexpr(4), gl.constexpr(5), gl.constexpr(9), gl.constexpr(12)
GROUPS_AND_COPIES = gl.constexpr(256 + 32)  # threads
EIGHT = gl.constexpr(HEADS_OF_BOTH_WAYS)


class BackwardWork(NamedTuple):
    """Pointers; the first counter hands out numbers to programs, the others belong to dQ's blocks."""

    table: Any  # of packed keys
    level: Any  # [B, HQ, Tq], rows padded to 16 bytes, as delta
    delta: Any
    d_k: Any  # [B, Tk, H, K]
    d_v: Any  # [B, Tk, H, V]
    counters: Any  # None without dQ
    alibi_slopes: Any
    decay: Any  # the gates' running sums, see `decay.running_sums`
    at_keys: Any  # with a decay the sums of dS over queries, [B, HQ, Tk]
    n: Any  # `AttentionNumbers`
    blocks_q: Any  # with dQ, its blocks of a head
    at_once_back: Any  # with TWO_WAYS, heads that take turns of those that go from their first keys


class QuerySteps(NamedTuple):
    """The walk of a program: `each` blocks of queries from number `first` on, for each of its query heads (with dQ: for one)."""

    first: Any
    each: Any
    all: Any
    inner: Any  # queries `inner` to `outer` see all its keys
    outer: Any
    sums: Any  # number of the sequence's first block of dQ


class HeadBias(NamedTuple):
    """What gates and slopes of a query head add to scores."""

    slope: Any
    gates: Any  # addresses of both parts of G of the sequence's first key
    reference: Any  # the block's last key, and G there
    decay_ref: Any


@triton.jit
def first_sums(sequence, start_q, S: tl.constexpr):
    """The number of a packed sequence's first block of dQ: no two sequences share one."""
    if S.PACKED:
        return start_q // S.BM + sequence
    else:
        return start_q * 0


@gluon.jit
def way_of(head, S: gl.constexpr):
    """1, or -1 for every eighth query head with TWO_WAYS: it goes from its first keys, and over their queries from the last.

    The way follows from the number of the head alone, so that dQ's bits depend on neither the batch nor the packing.
    """
    if S.TWO_WAYS:
        return gl.where(head % EIGHT == EIGHT - 1, -1, 1)
    else:
        return 1


@gluon.jit
def find_head_of_two_ways(number, work, n):
    """(sequence of the batch, query head, block): heads that go from their first keys come after all the others."""
    back = n.heads_q // EIGHT
    first_back = n.batches * (n.heads_q - back) * n.blocks
    is_back = number >= first_back
    heads = gl.where(is_back, back, n.heads_q - back)
    number -= gl.where(is_back, first_back, 0)
    bh, block = find_head(number, n.blocks, n.batches * heads, gl.where(is_back, work.at_once_back, n.at_once))
    nth = bh % heads
    head = gl.where(is_back, nth * EIGHT + EIGHT - 1, nth + nth // (EIGHT - 1))
    return bh // heads, head, block


@gluon.jit
def find_keys(number, work, n, S: gl.constexpr):
    """The BN keys of a program, and its `QuerySteps`. Where dQ is added up, keys come from the last, else the heaviest first.

    Of causal keys the last are the lightest: a head's programs come to each block in the order in which they start, and none waits for
    long. But the heaviest of the last heads then run alone at the end. With TWO_WAYS the heads that come last go the other way
    (`way_of`), each program a block behind the one before.
    """
    heads, group, walked = n.heads, n.group, n.group
    if S.WITH_Q:
        heads, group, walked = n.heads_q, 1, 1
    if S.TWO_WAYS:
        batch, head, block = find_head_of_two_ways(number, work, n)
        bh = batch * heads + head
    else:
        bh, block = find_head(number, n.blocks, n.batches * heads, n.at_once)
        batch, head = bh // heads, bh % heads * group
    sequence, start_q, start_k, tokens_q, tokens_k = bh * 0, n.tokens_q * 0, n.tokens_k * 0, n.tokens_q, n.tokens_k
    if S.PACKED:
        sequence, start_k, tokens_k, start_q, tokens_q, block = find_sequence(block, work.table)
    if S.WITH_Q:
        last = gl.cdiv(tokens_k, S.BN) - 1
        if S.TWO_WAYS:
            block = gl.where(way_of(head, S) > 0, last - block, gl.where(block > last, -1, block))
        else:
            block = last - block
    else:
        block = gl.where(block * S.BN < tokens_k, block, -1)
    at = AttentionBlock(batch, head, head // n.group, bh, block * S.BN, start_q, tokens_q, start_k, tokens_k)
    low, inner, outer, high = rows_of_keys(at.first, tokens_k - tokens_q, tokens_q, n, S)
    each = gl.maximum((high + S.BM - 1) // S.BM - low // S.BM, 0)
    if at.first + S.BN > tokens_k:  # some keys are past the last
        outer = inner
    first = low // S.BM
    if S.TWO_WAYS:
        first += gl.where(way_of(head, S) > 0, 0, each - 1)
    return at, QuerySteps(first, each, each * walked, inner, outer, first_sums(sequence, start_q, S))


@gluon.jit
def next_step(head, block, steps, S: gl.constexpr):
    """The head and the block of queries after these."""
    if S.WITH_Q:  # one head
        return head, block + way_of(head, S)
    else:
        more = block + 1 < steps.first + steps.each
        return gl.where(more, head, head + 1), gl.where(more, block + 1, steps.first)


@gluon.jit
def at_edge(start, steps):
    """Whether some of the queries from `start` do not see all keys."""
    return (start < steps.inner) | (start >= steps.outer)


@gluon.jit
def whole_steps(head, steps, S: gl.constexpr):
    """`(0, begin, end)`: from `begin` to `end`, as a program with dQ walks, all queries of its steps see all its keys."""
    low = steps.first
    if S.TWO_WAYS:
        low -= gl.where(way_of(head, S) > 0, 0, steps.each - 1)
    begin = gl.minimum(gl.maximum(steps.inner // S.BM - low, 0), steps.all)
    end = gl.minimum(gl.maximum(steps.outer // S.BM - low, begin), steps.all)
    if S.TWO_WAYS:
        back = way_of(head, S) < 0
        begin, end = gl.where(back, steps.all - end, begin), gl.where(back, steps.all - begin, end)
    return begin * 0, begin, end


@gluon.jit
def head_bias(work, at, head, n, S: gl.constexpr):
    """The `HeadBias` of a query head."""
    slope, gates, decay_ref = 0.0, (0, 0), (0.0, 0.0)
    reference = at.first + S.BN - 1
    if S.ALIBI:
        slope = in_units(gl.load(work.alibi_slopes + head), S)
    if S.DECAY:
        high = work.decay + (at.batch * n.heads_q + head).to(gl.int64) * n.tokens_k + at.start_k
        gates = (high, high + (n.batches * n.heads_q).to(gl.int64) * n.tokens_k)
        decay_ref = load_decay(gates, reference, at.tokens_k, True)  # []
    return HeadBias(slope, gates, reference, decay_ref)


@gluon.jit
def bias_to_last(work, at, head, key, n, S: gl.constexpr):
    """What the way from each `key` to the block's last one takes off scores, `[64]`."""
    x = head_bias(work, at, head, n, S)
    decay_k = (0.0, 0.0)
    if S.DECAY:
        decay_k = load_decay(x.gates, key, at.tokens_k, True)  # [64]
    return bias_of_keys(key, x.reference, x.slope, decay_k, x.decay_ref, S)


@gluon.jit
def level_from_last(level, work, at, head, position, edge, n, S: gl.constexpr):
    """The level of queries, less what the way from the block's last key to them takes off their scores."""
    if S.CAUSAL and (S.DECAY or S.ALIBI):
        if not edge:
            x = head_bias(work, at, head, n, S)
            decay_q = (0.0, 0.0)
            if S.DECAY:
                decay_q = load_decay(x.gates, position, at.tokens_k, True)  # [BM]
            level -= bias_of_rows(position, x.reference, x.slope, decay_q, x.decay_ref, S)
    return level


@gluon.jit
def put_numbers(numbers, full, tiles, use):
    """Stores numbers of BM rows as tile `use` of a ring. (TMA would want those of each packed sequence to begin at 16 bytes.)"""
    tiles.index(use % full.shape[0]).store(numbers)
    signal(full, use)


@gluon.jit
def copy_keys(at, turn, descriptor, tiles, C: gl.constexpr, S: gl.constexpr):
    """Begins to copy k or v of a program's `turn`-th block of keys, where it has several when the one before has been left."""
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    TILES: gl.constexpr = tiles.full.shape[0]
    for part in gl.static_range(TILES):
        use = turn * TILES + part
        if S.STAYS:
            wait_empty(tiles.empty, use)
        fill_tile(descriptor, of_k, at.first + part * (S.BN // TILES), tiles, use, C, S)


@gluon.jit
def backward_copies(work, at, steps, turn, base, descriptors, rings, n, S: gl.constexpr):
    """The warp that copies: k, v, and in turns q with its level and dO with its delta, from use `base` of their rings on.

    k comes before the first q, or behind it where it has to wait for the program's block before. Keys that no query sees need no v, but
    where a program takes several blocks it comes, as uses of its ring count them. A pass for dV alone reads neither v nor delta.
    """
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    q_d, d_o_d, k_d, v_d = descriptors
    lanes = gl.arange(0, S.BM, gl.BlockedLayout([S.BM // 32], [32], [1], [0]))
    if not S.STAYS:
        copy_keys(at, turn, k_d, rings.k, QK, S)
    elif steps.all == 0:
        copy_keys(at, turn, k_d, rings.k, QK, S)
        copy_keys(at, turn, v_d, rings.v, V, S)
    head, block = at.head, steps.first
    for i in range(steps.all):
        row = block * S.BM
        of_q = (at.batch, head, at.start_q, at.tokens_q)
        numbers = (at.batch * n.heads_q + head).to(gl.int64) * padded_tokens(n.tokens_q) + at.start_q + row + lanes
        inside = row + lanes < at.tokens_q
        level = gl.load(work.level + numbers, mask=inside, other=float("inf"))  # [BM]
        delta = level
        if S.WITH_K:
            delta = gl.load(work.delta + numbers, mask=inside, other=0.0)  # [BM]
        position = row + lanes + at.tokens_k - at.tokens_q
        level = level_from_last(level, work, at, head, position, at_edge(row, steps), n, S)
        use = base + i
        await_readers(Q_READ, use, GROUPS_AND_COPIES, S.STAGES)
        fill_tile(q_d, of_q, row, rings.q, use, QK, S)
        put_numbers(level, rings.q.full, rings.level, use)
        if i == 0:
            if S.STAYS:
                copy_keys(at, turn, k_d, rings.k, QK, S)
            if S.WITH_K:
                copy_keys(at, turn, v_d, rings.v, V, S)
        await_readers(D_O_READ, use, GROUPS_AND_COPIES, S.STAGES)
        fill_tile(d_o_d, of_q, row, rings.d_o, use, V, S)
        if S.WITH_K:
            put_numbers(delta, rings.d_o.full, rings.delta, use)
        head, block = next_step(head, block, steps, S)


@gluon.jit
def key_probabilities(s, level, key, block, steps, biases, n, KIND: gl.constexpr, S: gl.constexpr):
    """P of `k q^T`, `[keys, BM]`, and tanh(scores / softcap), of a block of queries: `(at, query head, first query)`.

    `biases`: with gates or slopes the `BackwardWork` and what `bias_to_last` found for the head.
    """
    at, head, start = block
    L: gl.constexpr = accumulator(S.BM, s.shape[0])
    edge = at_edge(start, steps)
    place = at.tokens_k - at.tokens_q + start + gl.arange(0, S.BM, gl.SliceLayout(0, L))
    position, keys = place[None, :], key[:, None]
    y, squashed = scaled(s, n, S)
    if S.CAUSAL and (S.DECAY or S.ALIBI):
        work, bias = biases
        if edge:
            x = head_bias(work, at, head, n, S)
            decay_q, decay_k = (0.0, 0.0), (0.0, 0.0)
            if S.DECAY:
                decay_q = expanded(load_decay(x.gates, place, at.tokens_k, True), 0)  # [1, BM]
                decay_k = expanded(load_decay(x.gates, key, at.tokens_k, True), 1)  # [64, 1]
            y = biased(y, position, keys, x.slope, decay_q, decay_k, S)
        else:
            y += bias[:, None]
    elif S.ALIBI:
        work, bias = biases
        slope = in_units(gl.load(work.alibi_slopes + head), S)
        y = biased(y, position, keys, slope, (0.0, 0.0), (0.0, 0.0), S)
    y -= level[None, :]
    if hidden(edge, KIND):
        y = queries_seeing(y, keys, at.tokens_k - at.tokens_q + start, at.tokens_k, n, S)
    return ex2(y), squashed


@gluon.jit
def store_sums(sums, work, at, head, key, n, S: gl.constexpr):
    """Writes the sums of dS over the queries of a head, `[64, 4]` in pieces."""
    row = (at.batch * n.heads_q + head).to(gl.int64) * n.tokens_k + at.start_k
    found = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, accumulator(S.BM)))
    gl.store(work.at_keys + row + key, found, mask=key < at.tokens_k)
