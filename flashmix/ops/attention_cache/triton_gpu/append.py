"""New keys and values of a cache: each to its page and slot, where there is room for it."""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.blocks import power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import inner_contiguous
from flashmix.ops.attention.triton_gpu.packed import bounded
from flashmix.ops.attention_cache.call import AttentionCacheCall


class AppendInputs(NamedTuple):
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, H, V]
    held_keys: Any  # of the cache, as the others below (a field of Triton's structs cannot be called `values`)
    held_values: Any
    page_table: Any
    lengths: Any
    cu_seqlens: Any


class AppendNumbers(NamedTuple):
    tokens: Any
    sequences: Any
    heads: Any
    pages: Any
    page_size: Any
    table_width: Any  # pages of a sequence
    steps: Any  # of a bisection over the sequences
    k_at: Any  # strides of (batch, token, head)
    v_at: Any
    keys_at: Any  # strides of (page, slot, head)
    values_at: Any


class AppendSpec(NamedTuple):
    D: int
    DV: int
    WIDTH: int  # channels of a tile
    HEADS: int  # heads of a tile
    PACKED: bool


@triton.jit
def sequence_of(token, cu_seqlens, count, tokens, steps):
    """The packed sequence of a token by bisection: `(n, start, tokens of it)`; n is `count` past the last one."""
    low = count * 0
    high = count
    for _ in range(steps):
        middle = (low + high) // 2
        after = bounded(cu_seqlens, tl.minimum(middle + 1, count), 0, tokens) <= token
        low = tl.where(after & (low < high), middle + 1, low)
        high = tl.where(after, high, middle)
    n = tl.minimum(low, count)
    start = bounded(cu_seqlens, n, 0, tokens)
    end = bounded(cu_seqlens, tl.minimum(n + 1, count), start, tokens)
    return n, start, end - start


@triton.jit(do_not_specialize=["n"])
def cache_append_kernel(x, n, S: tl.constexpr):
    """Copies the keys and values of one new token into the cache, unless there is no room for it."""
    token = tl.program_id(0)
    if S.PACKED:
        sequence, start, _ = sequence_of(token, x.cu_seqlens, n.sequences, n.tokens, n.steps)
        batch, place, index = sequence * 0, token, token - start
        if sequence >= n.sequences:
            return
    else:
        sequence = token // n.tokens
        batch, place, index = sequence, token % n.tokens, token % n.tokens
    position = tl.load(x.lengths + sequence) + index
    if (position < 0) | (position >= n.page_size.to(tl.int64) * n.table_width):
        return
    page = tl.load(x.page_table + sequence.to(tl.int64) * n.table_width + position // n.page_size).to(tl.int64)
    if (page < 0) | (page >= n.pages):
        return
    slot = position % n.page_size
    columns = tl.arange(0, S.WIDTH)[None, :]
    k_batch, k_token, k_head = n.k_at
    v_batch, v_token, v_head = n.v_at
    keys_page, keys_slot, keys_head = n.keys_at
    values_page, values_slot, values_head = n.values_at
    k = x.k + batch.to(tl.int64) * k_batch + place.to(tl.int64) * k_token
    v = x.v + batch.to(tl.int64) * v_batch + place.to(tl.int64) * v_token
    keys = x.held_keys + page * keys_page + slot * keys_slot
    values = x.held_values + page * values_page + slot * values_slot
    for first in range(0, n.heads, S.HEADS):
        head = (first + tl.arange(0, S.HEADS))[:, None].to(tl.int64)
        inside = (head < n.heads) & (columns < S.D)
        tile = tl.load(k + head * k_head + columns, mask=inside)  # [HEADS, K]
        tl.store(keys + head * keys_head + columns, tile, mask=inside)
        inside = (head < n.heads) & (columns < S.DV)
        tile = tl.load(v + head * v_head + columns, mask=inside)  # [HEADS, V]
        tl.store(values + head * values_head + columns, tile, mask=inside)


def halvings(sequences: int) -> int:
    """How often a bisection over the sequences halves."""
    return sequences.bit_length() + 1


def cache_append(call: AttentionCacheCall) -> None:
    """Appends `k` and `v` of the call, and counts them."""
    assert call.k is not None and call.v is not None
    k, v, keys, values = inner_contiguous(call.k), inner_contiguous(call.v), call.keys, call.values
    tokens, heads, width = k.shape[1], k.shape[2], power_of_two(max(k.shape[3], v.shape[3]))
    cu_seqlens = None if call.packing is None else call.packing.cu_seqlens
    n = AppendNumbers(
        tokens,
        call.sequences,
        heads,
        keys.shape[0],
        call.page_size,
        call.page_table.shape[1],
        halvings(call.sequences),
        k_at=k.stride()[:3],
        v_at=v.stride()[:3],
        keys_at=(keys.stride(0), keys.stride(1), keys.stride(2)),
        values_at=(values.stride(0), values.stride(1), values.stride(2)),
    )
    heads_at_once = max(1, min(power_of_two(heads), 2048 // width))
    spec = AppendSpec(k.shape[3], v.shape[3], width, heads_at_once, call.packed)
    bound(cache_append_kernel, spec, num_warps=4)(
        k.shape[0] * tokens, AppendInputs(k, v, keys, values, call.page_table, call.lengths, cu_seqlens), n
    )
    call.lengths.add_(tokens if cu_seqlens is None else cu_seqlens.diff())
