"""Attention of new tokens to a cache: append, attend to pieces of the cache, combine the pieces.

A program has a tile of new tokens times the query heads that share a key head, and one piece of its sequence's keys. Pieces
start at multiples of a length that follows from the cache's shape alone, and are combined in order: a token gets the same
bits whatever the batch it is in. Lengths and pages are read on the device; what leaves the cache is not written and not seen.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.op.call import Outputs
from flashmix.ops.attention.triton_gpu.launch import LOG2_E as LOG2E
from flashmix.ops.attention.triton_gpu.launch import UNBOUNDED, aligned, packed_blocks, steps_of
from flashmix.ops.attention.triton_gpu.table import parts
from flashmix.ops.attention.triton_gpu.tiles import LN_2, LOG2_E, LOWEST, accumulated, find_sequence, product, tanh
from flashmix.ops.attention_cache.call import AttentionCacheCall
from flashmix.ops.attention_cache.triton_gpu.append import Held, cache_append, halvings, sequence_of

Features = tuple[Tensor | None, Tensor | None]  # sink, slopes
MOST_ROWS = 64  # of a tile: new tokens times query heads of a key head
MOST_TOKENS_SPLIT = 16
MOST_SCRATCH = 1 << 31  # bytes for pieces that are still to be combined
CONTIGUOUS, WHOLE_TILES, ANY_PAGES = 0, 1, 2


@triton.jit
def _load_cached(x, page, slot, inside, at_page, at_slot, DIM: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Rows `[BN, WIDTH]` of a cache; zero where not `inside`."""
    columns = FIRST + tl.arange(0, WIDTH)
    at = x + (page * at_page + slot.to(tl.int64) * at_slot)[:, None] + columns[None, :]
    if FIRST + WIDTH > DIM:
        return tl.load(at, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def _load_page(page_table, at, pages):
    return tl.minimum(tl.maximum(tl.load(page_table + at).to(tl.int64), 0), pages - 1)


@triton.jit
def _walk_cache(state, low, high, q_1, q_2, position, slope, keys, values, page_table, numbers, PAGES: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Takes the cached keys from `low` to `high` into `(a, a_2, m, l)`, as forward does."""
    acc, acc_2, m, l = state
    keys, kp, kt = keys
    values, vp, vt = values
    pages, page_size, scale, softcap, left = numbers
    for start in tl.range(low, high, C.BN, num_stages=C.STAGES):
        key = start + tl.arange(0, C.BN)
        inside = key < high
        if PAGES == 0:
            page, slot = tl.full([C.BN], 0, tl.int64) + _load_page(page_table, 0, pages), key
        elif PAGES == 1:
            page = tl.full([C.BN], 0, tl.int64) + _load_page(page_table, start // page_size, pages)
            slot = start % page_size + tl.arange(0, C.BN)
        else:
            page = tl.load(page_table + key // page_size, mask=inside, other=0).to(tl.int64)
            page, slot = tl.minimum(tl.maximum(page, 0), pages - 1), key % page_size
        k_1 = _load_cached(keys, page, slot, inside, kp * C.UNIT, kt * C.UNIT, C.D, 0, C.D1)  # [BN, K]
        k_2 = k_1
        if C.D2 > 0:
            k_2 = _load_cached(keys, page, slot, inside, kp * C.UNIT, kt * C.UNIT, C.D, C.D1, C.D2)
        x = product(q_1, q_2, k_1, k_2, C.D2, C) * scale
        if C.SOFTCAP:
            x = tanh(x, C) * softcap
        distance = position[:, None] - key[None, :]
        if C.ALIBI:
            x -= slope[:, None] * distance.to(tl.float32)
        seen = inside[None, :] & (distance >= 0)
        if C.LEFT:
            seen = seen & (distance <= left)
        x = tl.where(seen, x, -float("inf"))
        m_new = tl.maximum(m, tl.max(x, 1))
        p = tl.exp2(x - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        v_1 = _load_cached(values, page, slot, inside, vp * C.UNIT, vt * C.UNIT, C.DV, 0, C.V1)  # [BN, V]
        p = p.to(v_1.dtype)
        acc = accumulated(acc * shrink[:, None], p, v_1, C)
        if C.V2 > 0:
            v_2 = _load_cached(values, page, slot, inside, vp * C.UNIT, vt * C.UNIT, C.DV, C.V1, C.V2)
            acc_2 = accumulated(acc_2 * shrink[:, None], p, v_2, C)
        m = m_new
    return acc, acc_2, m, l


@triton.jit
def _load_queries(q, token, head, inside, sqt, sqh, FIRST: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    at = q + (token.to(tl.int64) * (sqt * C.UNIT_Q) + head.to(tl.int64) * (sqh * C.UNIT_Q))[:, None] + columns[None, :]
    return tl.load(at, mask=inside[:, None] & (columns < C.D)[None, :], other=0.0)


@with_sound_ptxas
@triton.jit(
    do_not_specialize=["tokens", "sequences", "heads", "group", "pages", "page_size", "table_width", "blocks", "piece", "pieces",
                       "left", "sqb", "sqt", "sqh", "kp", "kt", "kh", "vp", "vt", "vh"]
)  # fmt: skip
def cache_attend_kernel(
    q, keys, values, page_table, lengths, o, lse, mixed, levels, sink, slopes, table,
    sqb, sqt, sqh, kp, kt, kh, vp, vt, vh, tokens, sequences, heads, group, pages, page_size, table_width, blocks, piece, pieces,
    scale, softcap, left, HEADS: tl.constexpr, PAGES: tl.constexpr, SPLIT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """BM rows (new tokens x HEADS query heads) against one piece of their sequence's keys: o and lse, or what is combined."""
    part = tl.program_id(0) % pieces
    rest = tl.program_id(0) // pieces
    parts_of_group = tl.cdiv(group, HEADS)
    head_k = rest % (heads * parts_of_group)
    block = rest // (heads * parts_of_group)
    first_head = head_k % parts_of_group * HEADS
    head_k = head_k // parts_of_group
    heads_q = heads * group
    if C.PACKED:
        n, start, count, _, _, block = find_sequence(block, table)
    else:
        n = block // blocks
        block = block % blocks
        start, count = n * tokens, tokens
    first = block * (C.BM // HEADS)
    if first < 0 or first >= count:
        return
    length = 0
    if n < sequences:
        length = tl.minimum(tl.load(lengths + n), 1 << 30).to(tl.int32)
    row = tl.arange(0, C.BM)
    index = first + row // HEADS
    member = first_head + row % HEADS
    position = length - count + index
    low = part * piece
    last = tl.minimum(length - count + first + C.BM // HEADS, length)  # past the last key that a row sees
    high = tl.minimum(tl.minimum(low + piece, last), page_size * table_width)
    if C.LEFT:
        low = tl.maximum(low, tl.maximum(length - count + first - left, 0) // C.BN * C.BN)
    if SPLIT and low >= high:
        return
    inside = (index < count) & (member < group)
    head = head_k * group + member
    token = start + index
    m = tl.full([C.BM], LOWEST, tl.float32)
    l = tl.full([C.BM], 0.0, tl.float32)
    if C.SINK and not SPLIT:
        at_sink = tl.load(sink + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        m = tl.maximum(m, at_sink)
        l = tl.exp2(at_sink - m)
    slope = m
    if C.ALIBI:
        slope = tl.load(slopes + head, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    at_token = token
    if not C.PACKED:
        q += n.to(tl.int64) * sqb * C.UNIT_Q
        at_token = index
    q_1 = _load_queries(q, at_token, head, inside, sqt, sqh, 0, C.D1, C)  # [BM, K]
    q_2 = q_1
    if C.D2 > 0:
        q_2 = _load_queries(q, at_token, head, inside, sqt, sqh, C.D1, C.D2, C)
    acc = tl.full([C.BM, C.V1], 0.0, tl.float32)
    acc_2 = tl.full([C.BM, C.V2], 0.0, tl.float32) if C.V2 > 0 else m
    cached_k = (keys + head_k.to(tl.int64) * kh * C.UNIT, kp, kt)
    cached_v = (values + head_k.to(tl.int64) * vh * C.UNIT, vp, vt)
    own = page_table + tl.minimum(n, sequences - 1).to(tl.int64) * table_width
    numbers = (pages, page_size, scale, softcap, left)
    state = (acc, acc_2, m, l)
    acc, acc_2, m, l = _walk_cache(
        state, low, high, q_1, q_2, position, slope, cached_k, cached_v, own, numbers, PAGES, C
    )
    at = token.to(tl.int64) * heads_q + head
    if SPLIT:
        at = at * pieces + part
        tl.store(levels + 2 * at, m, mask=inside)
        tl.store(levels + 2 * at + 1, l, mask=inside)
        _store(mixed, acc, at, inside, 0, C.V1, C)
        if C.V2 > 0:
            _store(mixed, acc_2, at, inside, C.V1, C.V2, C)
    else:
        share = 1.0 / tl.where(l == 0, 1.0, l)
        _store(o, acc * share[:, None], at, inside, 0, C.V1, C)
        if C.V2 > 0:
            _store(o, acc_2 * share[:, None], at, inside, C.V1, C.V2, C)
        if lse is not None:
            at = head.to(tl.int64) * tokens + token
            if not C.PACKED:
                at = (n.to(tl.int64) * heads_q + head) * tokens + index
            tl.store(lse + at, (m + tl.log2(l)) * LN_2, mask=inside)


@triton.jit
def _store(x, tile, at, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    where = x + at[:, None] * C.DV + columns[None, :]
    tl.store(where, tile.to(x.dtype.element_ty), mask=inside[:, None] & (columns < C.DV)[None, :])


@triton.jit(do_not_specialize=["tokens", "sequences", "heads_q", "capacity", "piece", "pieces", "left", "steps"])
def cache_combine_kernel(
    mixed, levels, o, lse, sink, lengths, cu_seqlens, tokens, sequences, heads_q, capacity, piece, pieces, left, steps,
    DV: tl.constexpr, WIDTH: tl.constexpr, MANY: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """o `[V]` and lse of one query of one head from the pieces of its sequence's keys, MANY at a time, in order."""
    token = tl.program_id(0) // heads_q
    head = tl.program_id(0) % heads_q
    if PACKED:
        n, start, count = sequence_of(token, cu_seqlens, sequences, tokens, steps)
        index = token - start
        at_lse = head.to(tl.int64) * tokens + token
    else:
        n = token // tokens
        count, index = tokens, token % tokens
        at_lse = (n.to(tl.int64) * heads_q + head) * tokens + index
    position = tokens * 0 - 1
    if n < sequences:
        position = tl.minimum(tl.load(lengths + n), 1 << 30).to(tl.int32) - count + index
    last = tl.cdiv(tl.maximum(tl.minimum(position + 1, capacity), 0), piece)
    first = tokens * 0
    if LEFT:
        first = tl.maximum(position - left, 0) // piece
    at = (token.to(tl.int64) * heads_q + head) * pieces
    top = tl.full([1], -3.0e38, tl.float32)
    if sink is not None:
        at_sink = tl.load(sink + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, at_sink)
    for begin in range(first, last, MANY):
        part = begin + tl.arange(0, MANY)
        top = tl.maximum(top, tl.max(tl.load(levels + 2 * (at + part), mask=part < last, other=-3.0e38), 0))
    total = tl.zeros([1], tl.float32)
    if sink is not None:
        total = tl.exp2(at_sink - top)
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros([WIDTH], tl.float32)
    for begin in range(first, last, MANY):
        part = begin + tl.arange(0, MANY)
        here = part < last
        weight = tl.exp2(tl.load(levels + 2 * (at + part), mask=here, other=-float("inf")) - top)
        total += tl.sum(weight * tl.load(levels + 2 * (at + part) + 1, mask=here, other=0.0), 0)
        where = mixed + (at + part)[:, None] * DV + columns[None, :]
        tile = tl.load(where, mask=here[:, None] & (columns < DV)[None, :], other=0.0)  # [MANY, V]
        acc += tl.sum(tile * weight[:, None], 0)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    where = o + (token.to(tl.int64) * heads_q + head) * DV + columns
    tl.store(where, (acc * share).to(o.dtype.element_ty), mask=columns < DV)
    if lse is not None:
        tl.store(lse + at_lse + tl.arange(0, 1), (top + tl.log2(total)) * LN_2)


class CacheForm(NamedTuple):
    """What the kernels are compiled for; names as in `launch.Form`."""

    D: int
    D1: int
    D2: int
    DV: int
    V1: int
    V2: int
    BM: int
    BN: int
    STAGES: int
    UNIT: int  # of the cache's strides
    UNIT_Q: int
    SOFTCAP: bool
    ALIBI: bool
    LEFT: bool
    SINK: bool
    PACKED: bool
    EXACT: bool
    FAST_TANH: bool
    PRECISION: str


@dataclass(frozen=True)
class Plan:
    """How a call is cut, from shapes alone: query heads of a tile, blocks of tokens, pieces of the keys."""

    form: CacheForm
    heads: int
    pages: int
    piece: int
    pieces: int
    split: bool


def plan(q: Tensor, held: Held, features: Features, packed: bool, score: AttentionCacheCall) -> Plan:
    """The plan of a call. A tile has one row for each new token and query head of a key head, 16 to 64 of them."""
    keys, values, page_table, _ = held
    exact, size = q.dtype == torch.float32, q.element_size()
    dim, dim_v, page_size = q.shape[3], values.shape[3], keys.shape[1]
    heads = min(triton.next_power_of_2(q.shape[2] // keys.shape[2]), MOST_ROWS)
    whole = all(stride * size % 16 == 0 for x in (keys, values) for stride in x.stride()[:3])
    whole = whole and all(x.data_ptr() % 16 == 0 for x in (keys, values))
    tokens = q.shape[1] if not packed else 1
    rows = min(max(16, heads * triton.next_power_of_2(max(tokens, 1))), MOST_ROWS if whole else 32)
    large = max(dim, dim_v) > 128
    keys_at_once = 32 if exact or large else 64
    form = CacheForm(
        dim, *parts(dim), dim_v, *parts(dim_v), max(rows, heads), keys_at_once,
        STAGES=1 if exact else 2 if large else 3,
        UNIT=16 // size if whole else 1,
        UNIT_Q=16 // size,
        SOFTCAP=score.softcap is not None,
        ALIBI=features[1] is not None,
        LEFT=score.left is not None,
        SINK=features[0] is not None,
        PACKED=packed,
        EXACT=exact,
        FAST_TANH=not exact and not gpu.interpreted(),
        PRECISION="ieee" if exact else "tf32",
    )  # fmt: skip
    pages = CONTIGUOUS if page_table.shape[1] == 1 else WHOLE_TILES if page_size % keys_at_once == 0 else ANY_PAGES
    capacity = page_size * page_table.shape[1]
    piece = 256 if capacity <= 8192 else 512 if capacity <= 32768 else 1024
    pieces = max(1, -(-capacity // piece))
    few = packed or q.shape[1] <= MOST_TOKENS_SPLIT
    split = few and pieces > 1 and q.shape[0] * q.shape[1] * q.shape[2] * pieces * dim_v * 4 <= MOST_SCRATCH
    return Plan(form, heads, pages, piece if split else max(capacity, 1), pieces if split else 1, split)


def forward(call: AttentionCacheCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o [B, T, HQ, V]` and `lse` `[B, HQ, T]`, packed `[HQ, total]`, or `[0]` where it is not wanted."""
    q, held = aligned(call.q), (call.keys, call.values, call.page_table.contiguous(), call.lengths)
    features, cu_seqlens = (call.sink, call.alibi_slopes), None if call.packing is None else call.packing.cu_seqlens
    o, lse = call.results()
    if call.k is not None and call.v is not None and call.k.numel() > 0:
        cache_append(call.k, call.v, held, cu_seqlens)
    if o.numel() > 0 and call.lengths.numel() > 0:
        made = plan(q, held, features, call.packed, call)
        _attend(q, held, features, cu_seqlens, call, made, o, lse if call.return_lse else None)
    return (o, lse), ()


def _attend(
    q: Tensor, held: Held, features: Features, cu_seqlens: Tensor | None, score: AttentionCacheCall, made: Plan, o: Tensor,
    lse: Tensor | None,
) -> None:  # fmt: skip
    keys, values, page_table, lengths = held
    form, (batch, tokens, heads_q, _) = made.form, q.shape
    heads, sequences = keys.shape[2], lengths.shape[0]
    group = heads_q // heads
    blocks, table = packed_blocks(cu_seqlens, tokens, form.BM // made.heads)
    mixed = levels = None
    if made.split:
        mixed = q.new_empty(batch * tokens, heads_q, made.pieces, values.shape[3], dtype=torch.float32)
        levels = q.new_empty(batch * tokens, heads_q, made.pieces, 2, dtype=torch.float32)
    left = UNBOUNDED if score.left is None else min(score.left, UNBOUNDED)
    factors = (
        (score.scale * LOG2E, 1.0) if score.softcap is None else (score.scale / score.softcap, score.softcap * LOG2E)
    )
    programs = blocks * (1 if cu_seqlens is not None else batch) * heads * -(-group // made.heads) * made.pieces
    cached = [stride // form.UNIT for x in (keys, values) for stride in (x.stride(0), x.stride(1), x.stride(2))]
    cache_attend_kernel[(programs,)](
        q, keys, values, page_table, lengths, o, lse, mixed, levels, features[0], features[1], table,
        *(step // form.UNIT_Q for step in steps_of(q)), *cached, tokens, sequences, heads, group, keys.shape[0],
        keys.shape[1], page_table.shape[1], blocks, made.piece, made.pieces, *factors, left, made.heads, made.pages,
        made.split, form, num_warps=4, num_stages=form.STAGES,
    )  # fmt: skip
    if mixed is not None:
        width = triton.next_power_of_2(values.shape[3])
        cache_combine_kernel[(batch * tokens * heads_q,)](
            mixed, levels, o, lse, features[0], lengths, cu_seqlens, tokens, sequences, heads_q,
            keys.shape[1] * page_table.shape[1], made.piece, made.pieces, left, halvings(lengths), values.shape[3], width,
            max(1, 2048 // width), cu_seqlens is not None, form.LEFT, num_warps=2,
        )  # fmt: skip
