"""Attention of new tokens to pieces of a cache.

A program has a tile of new tokens times the query heads that share a key head, and one piece of its sequence's keys. Pieces
start at multiples of a length that follows from the cache's shape alone: a token gets the same bits whatever the batch it is in.

    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v

Tiles: BM rows, BN keys, K channels of q and k, V of v; K and V in one part or two (`Channels`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.attention.triton_gpu.packed import blocks_of, find_sequence
from flashmix.ops.attention.triton_gpu.scores import LN_2, LOG2_E, LOWEST, tanh
from flashmix.ops.attention.triton_gpu.spec import Channels, bounded_window, channels, factors, strides
from flashmix.ops.attention.triton_gpu.tiles import accumulated, product
from flashmix.ops.attention_cache.call import AttentionCacheCall
from flashmix.ops.attention_cache.triton_gpu.append import halvings
from flashmix.ops.attention_cache.triton_gpu.combine import (
    CombineNumbers,
    CombineSpec,
    PieceInputs,
    cache_combine_kernel,
)

MOST_ROWS = 64  # of a tile: new tokens times query heads of a key head
MOST_TOKENS_SPLIT = 16
MOST_SCRATCH = 1 << 31  # bytes for pieces that are still to be combined
CONTIGUOUS, WHOLE_TILES, ANY_PAGES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class CacheInputs(NamedTuple):
    q: Any
    held_keys: Any  # a field of Triton's structs cannot be called `values`
    held_values: Any
    page_table: Any
    lengths: Any
    sink: Any
    alibi_slopes: Any
    table: Any  # of blocks of packed tokens, see `packed.blocks_of`


class CacheResults(NamedTuple):
    """o and lse, or with SPLIT what is combined: a `[B T, HQ, pieces, V]`, m and l `[B T, HQ, pieces, 2]`."""

    o: Any
    lse: Any
    mixed: Any
    levels: Any


class CacheNumbers(NamedTuple):
    """Sizes; strides of q by (batch, token, head) in UNIT_Qs, of the cache by (page, slot, head) in UNITs."""

    tokens: Any
    sequences: Any
    heads: Any
    group: Any  # query heads of a key head
    pages: Any
    page_size: Any
    table_width: Any  # pages of a sequence
    blocks: Any  # of tokens
    piece: Any  # keys of a piece
    pieces: Any
    scale: Any  # of `q k^T`, and factor of tanh
    softcap: Any
    left: Any
    q_at: Any
    keys_at: Any
    values_at: Any


class CacheSpec(NamedTuple):
    """Compile-time facts; names as in `AttentionSpec`."""

    QK: Channels
    V: Channels
    BM: int
    BN: int
    STAGES: int
    UNIT: int
    UNIT_Q: int
    SOFTCAP: bool
    ALIBI: bool
    LEFT: bool
    SINK: bool
    PACKED: bool
    EXACT: bool
    FAST_TANH: bool
    PRECISION: str
    HEADS: int  # query heads of a tile
    PAGES: int  # CONTIGUOUS: one page a sequence; WHOLE_TILES: a tile of keys lies in one page; ANY_PAGES
    SPLIT: bool  # keys are cut into pieces


class CacheRows(NamedTuple):
    """BM rows of a tile: token of the batch, head, position, and what is added to their scores."""

    token: Any
    head: Any
    inside: Any
    position: Any
    slope: Any


@triton.jit
def load_cached(x, page, slot, inside, at, FIRST: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, S: tl.constexpr):
    """Rows `[BN, WIDTH]` of one head of a cache; zero where not `inside`."""
    page_at, slot_at, _ = at
    columns = FIRST + tl.arange(0, WIDTH)
    where = x + (page * (page_at * S.UNIT) + slot.to(tl.int64) * (slot_at * S.UNIT))[:, None] + columns[None, :]
    if FIRST + WIDTH > C.ALL:
        return tl.load(where, mask=inside[:, None] & (columns < C.ALL)[None, :], other=0.0)
    else:
        return tl.load(where, mask=inside[:, None], other=0.0)


@triton.jit
def load_page(page_table, at, pages):
    return tl.minimum(tl.maximum(tl.load(page_table + at).to(tl.int64), 0), pages - 1)


@triton.jit
def find_keys(key, start, inside, page_table, n, S: tl.constexpr):
    """`(page, slot)` of the keys from `start`, `[BN]` each."""
    if S.PAGES == CONTIGUOUS:
        return tl.full([S.BN], 0, tl.int64) + load_page(page_table, 0, n.pages), key
    elif S.PAGES == WHOLE_TILES:
        page = tl.full([S.BN], 0, tl.int64) + load_page(page_table, start // n.page_size, n.pages)  # [BN]
        return page, start % n.page_size + tl.arange(0, S.BN)
    else:
        page = tl.load(page_table + key // n.page_size, mask=inside, other=0).to(tl.int64)  # [BN]
        return tl.minimum(tl.maximum(page, 0), n.pages - 1), key % n.page_size


@triton.jit
def walk_cache(state, low, high, q, rows, cached, n, S: tl.constexpr):
    """Takes the cached keys from `low` to `high` into `(a, a_2, m, l)`, as forward does; `cached`: keys, values and pages."""
    QK: tl.constexpr = S.QK
    V: tl.constexpr = S.V
    acc, acc_2, m, l = state
    keys, values, page_table = cached
    for start in tl.range(low, high, S.BN, num_stages=S.STAGES):
        key = start + tl.arange(0, S.BN)
        inside = key < high
        page, slot = find_keys(key, start, inside, page_table, n, S)
        # s = scale q k^T
        k_1 = load_cached(keys, page, slot, inside, n.keys_at, 0, QK.FIRST, QK, S=S)  # [BN, K]
        k_2 = k_1
        if QK.SECOND > 0:
            k_2 = load_cached(keys, page, slot, inside, n.keys_at, QK.FIRST, QK.SECOND, QK, S=S)  # [BN, K]
        x = product(q, (k_1, k_2), QK.SECOND, S) * n.scale  # [BM, BN]
        if S.SOFTCAP:
            x = tanh(x, S) * n.softcap
        distance = rows.position[:, None] - key[None, :]
        if S.ALIBI:
            x -= rows.slope[:, None] * distance.to(tl.float32)
        seen = inside[None, :] & (distance >= 0)
        if S.LEFT:
            seen = seen & (distance <= n.left)
        x = tl.where(seen, x, -float("inf"))
        # m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j
        m_new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        # a = a 2^(m - m') + p v
        v_1 = load_cached(values, page, slot, inside, n.values_at, 0, V.FIRST, V, S=S)  # [BN, V]
        p = p.to(v_1.dtype)
        acc = accumulated(acc * shrink[:, None], p, v_1, S)
        if V.SECOND > 0:
            v_2 = load_cached(values, page, slot, inside, n.values_at, V.FIRST, V.SECOND, V, S=S)  # [BN, V]
            acc_2 = accumulated(acc_2 * shrink[:, None], p, v_2, S)
        m = m_new
    return acc, acc_2, m, l


@triton.jit
def load_queries(q, token, rows, at, FIRST: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Rows `[BM, WIDTH]` of q, each of its own token and head."""
    _, token_at, head_at = at
    columns = FIRST + tl.arange(0, WIDTH)
    where = token.to(tl.int64) * (token_at * S.UNIT_Q) + rows.head.to(tl.int64) * (head_at * S.UNIT_Q)
    where = q + where[:, None] + columns[None, :]
    return tl.load(where, mask=rows.inside[:, None] & (columns < S.QK.ALL)[None, :], other=0.0)


@triton.jit
def store_results(x, tile, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    where = x + at[:, None] * S.V.ALL + columns[None, :]
    tl.store(where, tile.to(x.dtype.element_ty), mask=inside[:, None] & (columns < S.V.ALL)[None, :])


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def cache_attend_kernel(x, out, n, S: tl.constexpr):
    """BM rows (new tokens x HEADS query heads) against one piece of their sequence's keys."""
    part = tl.program_id(0) % n.pieces
    rest = tl.program_id(0) // n.pieces
    parts_of_group = tl.cdiv(n.group, S.HEADS)
    head_k = rest % (n.heads * parts_of_group)
    block = rest // (n.heads * parts_of_group)
    first_head = head_k % parts_of_group * S.HEADS
    head_k = head_k // parts_of_group
    heads_q = n.heads * n.group
    if S.PACKED:
        sequence, start, count, _, _, block = find_sequence(block, x.table)
    else:
        sequence = block // n.blocks
        block = block % n.blocks
        start, count = sequence * n.tokens, n.tokens
    first = block * (S.BM // S.HEADS)
    if first < 0 or first >= count:
        return
    length = 0
    if sequence < n.sequences:
        length = tl.minimum(tl.load(x.lengths + sequence), 1 << 30).to(tl.int32)
    row = tl.arange(0, S.BM)
    index = first + row // S.HEADS
    member = first_head + row % S.HEADS
    low = part * n.piece
    last = tl.minimum(length - count + first + S.BM // S.HEADS, length)  # past the last key that a row sees
    high = tl.minimum(tl.minimum(low + n.piece, last), n.page_size * n.table_width)
    if S.LEFT:
        low = tl.maximum(low, tl.maximum(length - count + first - n.left, 0) // S.BN * S.BN)
    if S.SPLIT and low >= high:
        return
    inside = (index < count) & (member < n.group)
    head = head_k * n.group + member
    m = tl.full([S.BM], LOWEST, tl.float32)
    l = tl.full([S.BM], 0.0, tl.float32)
    if S.SINK and not S.SPLIT:
        at_sink = tl.load(x.sink + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E  # [BM]
        m = tl.maximum(m, at_sink)
        l = tl.exp2(at_sink - m)
    slope = m
    if S.ALIBI:
        slope = tl.load(x.alibi_slopes + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E  # [BM]
    rows = CacheRows(start + index, head, inside, length - count + index, slope)
    q, token = x.q, rows.token
    if not S.PACKED:
        batch_at, _, _ = n.q_at
        q += sequence.to(tl.int64) * batch_at * S.UNIT_Q
        token = index
    q_1 = load_queries(q, token, rows, n.q_at, 0, S.QK.FIRST, S)  # [BM, K]
    q_2 = q_1
    if S.QK.SECOND > 0:
        q_2 = load_queries(q, token, rows, n.q_at, S.QK.FIRST, S.QK.SECOND, S)  # [BM, K]
    acc = tl.full([S.BM, S.V.FIRST], 0.0, tl.float32)
    acc_2 = tl.full([S.BM, S.V.SECOND], 0.0, tl.float32) if S.V.SECOND > 0 else m
    _, _, keys_head = n.keys_at
    _, _, values_head = n.values_at
    keys = x.held_keys + head_k.to(tl.int64) * keys_head * S.UNIT
    values = x.held_values + head_k.to(tl.int64) * values_head * S.UNIT
    pages = x.page_table + tl.minimum(sequence, n.sequences - 1).to(tl.int64) * n.table_width
    acc, acc_2, m, l = walk_cache((acc, acc_2, m, l), low, high, (q_1, q_2), rows, (keys, values, pages), n, S)
    at = rows.token.to(tl.int64) * heads_q + head
    if S.SPLIT:
        at = at * n.pieces + part
        tl.store(out.levels + 2 * at, m, mask=inside)
        tl.store(out.levels + 2 * at + 1, l, mask=inside)
        store_results(out.mixed, acc, at, inside, 0, S.V.FIRST, S)
        if S.V.SECOND > 0:
            store_results(out.mixed, acc_2, at, inside, S.V.FIRST, S.V.SECOND, S)
    else:
        share = 1.0 / tl.where(l == 0, 1.0, l)
        store_results(out.o, acc * share[:, None], at, inside, 0, S.V.FIRST, S)
        if S.V.SECOND > 0:
            store_results(out.o, acc_2 * share[:, None], at, inside, S.V.FIRST, S.V.SECOND, S)
        if out.lse is not None:
            at = head.to(tl.int64) * n.tokens + rows.token
            if not S.PACKED:
                at = (sequence.to(tl.int64) * heads_q + head) * n.tokens + index
            tl.store(out.lse + at, (m + tl.log2(l)) * LN_2, mask=inside)


class Cut(NamedTuple):
    """How keys are cut, from shapes alone: their tokens, how many there may be, and whether they are combined afterwards."""

    piece: int
    pieces: int
    split: bool


def cut_of(call: AttentionCacheCall) -> Cut:
    capacity, q = call.capacity, call.q
    piece = 256 if capacity <= 8192 else 512 if capacity <= 32768 else 1024
    pieces = max(1, -(-capacity // piece))
    few = call.packed or call.tokens <= MOST_TOKENS_SPLIT
    rows, dim_v = q.shape[0] * q.shape[1] * q.shape[2], call.values.shape[3]
    if few and pieces > 1 and rows * pieces * dim_v * 4 <= MOST_SCRATCH:
        return Cut(piece, pieces, True)
    return Cut(max(capacity, 1), 1, False)


def cache_spec_of(call: AttentionCacheCall, split: bool) -> CacheSpec:
    """A tile has one row for each new token and query head of a key head, 16 to 64 of them."""
    q, keys, values = call.q, call.keys, call.values
    exact, size = q.dtype == torch.float32, q.element_size()
    dim, dim_v = q.shape[3], values.shape[3]
    heads = min(power_of_two(call.heads_q // call.heads), MOST_ROWS)
    whole = all(stride * size % 16 == 0 for x in (keys, values) for stride in x.stride()[:3])
    whole = whole and all(x.data_ptr() % 16 == 0 for x in (keys, values))
    tokens = 1 if call.packed else call.tokens
    rows = min(max(16, heads * power_of_two(tokens)), MOST_ROWS if whole else 32)
    large = max(dim, dim_v) > 128
    keys_at_once = 32 if exact or large else 64
    pages = CONTIGUOUS if call.page_table.shape[1] == 1 else ANY_PAGES if call.page_size % keys_at_once else WHOLE_TILES
    return CacheSpec(
        channels(dim),
        channels(dim_v),
        max(rows, heads),
        keys_at_once,
        STAGES=1 if exact else 2 if large else 3,
        UNIT=16 // size if whole else 1,
        UNIT_Q=16 // size,
        SOFTCAP=call.softcap is not None,
        ALIBI=call.alibi_slopes is not None,
        LEFT=call.left is not None,
        SINK=call.sink is not None,
        PACKED=call.packed,
        EXACT=exact,
        FAST_TANH=not exact and not gpu.interpreted(),
        PRECISION="ieee" if exact else "tf32",
        HEADS=heads,
        PAGES=pages.value,
        SPLIT=split,
    )


def cache_attend(call: AttentionCacheCall, o: Tensor, lse: Tensor | None) -> None:
    """Writes o, and lse where it is wanted."""
    cut = cut_of(call)
    S = cache_spec_of(call, cut.split)
    q, keys, values = call.q, call.keys, call.values
    batch, tokens, heads_q, _ = q.shape
    group = heads_q // call.heads
    blocks, table = blocks_of(call.packing, tokens, S.BM // S.HEADS)
    mixed = levels = None
    if cut.split:
        rows = (batch * tokens, heads_q, cut.pieces)
        mixed = torch.empty(*rows, values.shape[3], dtype=torch.float32, device=q.device)
        levels = torch.empty(*rows, 2, dtype=torch.float32, device=q.device)
    scale, softcap = factors(call.scale, call.softcap, exact=False)
    left = bounded_window(call.left)
    n = CacheNumbers(
        tokens, call.sequences, call.heads, group, keys.shape[0], call.page_size, call.page_table.shape[1], blocks,
        piece=cut.piece, pieces=cut.pieces, scale=scale, softcap=softcap, left=left, q_at=strides(q, S.UNIT_Q),
        keys_at=_strides(keys, S.UNIT), values_at=_strides(values, S.UNIT),
    )  # fmt: skip
    programs = blocks * (1 if call.packed else batch) * call.heads * -(-group // S.HEADS) * cut.pieces
    x = CacheInputs(q, keys, values, call.page_table, call.lengths, call.sink, call.alibi_slopes, table)
    bound(cache_attend_kernel, S, num_warps=4, num_stages=S.STAGES)(programs, x, CacheResults(o, lse, mixed, levels), n)
    if mixed is not None:
        width = power_of_two(values.shape[3])
        cu_seqlens = None if call.packing is None else call.packing.cu_seqlens
        spec = CombineSpec(values.shape[3], width, max(1, 2048 // width), call.packed, S.LEFT)
        numbers = CombineNumbers(
            tokens, call.sequences, heads_q, call.capacity, cut.piece, cut.pieces, left, halvings(call.sequences)
        )
        pieces = PieceInputs(mixed, levels, call.sink, call.lengths, cu_seqlens)
        bound(cache_combine_kernel, spec, num_warps=2)(batch * tokens * heads_q, pieces, o, lse, numbers)


def _strides(x: Tensor, unit: int) -> tuple[int, ...]:
    """Strides of page, slot and head."""
    return tuple([stride // unit for stride in x.stride()[:3]])
