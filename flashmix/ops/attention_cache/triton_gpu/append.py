"""New keys and values of a cache: each to its page and slot, where there is room for it."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.attention.triton_gpu.tiles import bounded

Held = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, page table, lengths


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


@triton.jit(
    do_not_specialize=["tokens", "sequences", "heads", "pages", "page_size", "table_width", "steps", "skb", "skt", "skh",
                       "svb", "svt", "svh", "kp", "kt", "kh", "vp", "vt", "vh"]
)  # fmt: skip
def cache_append_kernel(
    k, v, keys, values, page_table, lengths, cu_seqlens, skb, skt, skh, svb, svt, svh, kp, kt, kh, vp, vt, vh,
    tokens, sequences, heads, pages, page_size, table_width, steps,
    D: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Copies the keys and values of one new token into the cache, unless there is no room for it."""
    token = tl.program_id(0)
    if PACKED:
        n, start, _ = sequence_of(token, cu_seqlens, sequences, tokens, steps)
        batch, place, index = n * 0, token, token - start
        if n >= sequences:
            return
    else:
        n = token // tokens
        batch, place, index = n, token % tokens, token % tokens
    position = tl.load(lengths + n) + index
    if (position < 0) | (position >= page_size.to(tl.int64) * table_width):
        return
    page = tl.load(page_table + n.to(tl.int64) * table_width + position // page_size).to(tl.int64)
    if (page < 0) | (page >= pages):
        return
    slot = position % page_size
    columns = tl.arange(0, WIDTH)[None, :]
    k += batch.to(tl.int64) * skb + place.to(tl.int64) * skt
    v += batch.to(tl.int64) * svb + place.to(tl.int64) * svt
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS))[:, None].to(tl.int64)
        inside = (head < heads) & (columns < D)
        tl.store(
            keys + page * kp + slot * kt + head * kh + columns,
            tl.load(k + head * skh + columns, mask=inside),
            mask=inside,
        )
        inside = (head < heads) & (columns < DV)
        tl.store(
            values + page * vp + slot * vt + head * vh + columns,
            tl.load(v + head * svh + columns, mask=inside),
            mask=inside,
        )


def halvings(lengths: Tensor) -> int:
    """How often a bisection over the sequences halves."""
    return lengths.shape[0].bit_length() + 1


def cache_append(k: Tensor, v: Tensor, held: Held, cu_seqlens: Tensor | None) -> None:
    keys, values, page_table, lengths = held
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    width = triton.next_power_of_2(max(k.shape[3], v.shape[3]))
    strides = (stride for x in (k, v, keys, values) for stride in x.stride()[:3])
    cache_append_kernel[(k.shape[0] * k.shape[1],)](
        k, v, keys, values, page_table, lengths, cu_seqlens, *strides,
        k.shape[1], lengths.shape[0], k.shape[2], keys.shape[0], keys.shape[1], page_table.shape[1], halvings(lengths),
        k.shape[3], v.shape[3], width, max(1, min(triton.next_power_of_2(k.shape[2]), 2048 // width)), cu_seqlens is not None,
        num_warps=4,
    )  # fmt: skip
    lengths.add_(k.shape[1] if cu_seqlens is None else cu_seqlens.diff())
