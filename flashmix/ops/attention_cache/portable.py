"""`attention_with_cache` in plain PyTorch: one sequence after the other, over the keys that its new tokens may see.

Lengths and pages are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.ops.attention.op import softmax_attention
from flashmix.ops.attention_cache.call import AttentionCacheCall


def forward(call: AttentionCacheCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o [B, T, HQ, V]` and `lse` `[B, HQ, T]`, packed `[HQ, total]`, or `[0]` where it is not wanted."""
    q, keys, values, lengths = call.q, call.keys, call.values, call.lengths
    batch, tokens, heads, _ = q.shape
    ends = [n * tokens for n in range(batch + 1)] if call.packing is None else call.packing.cu_seqlens.tolist()
    counts = [end - start for start, end in pairwise(ends)]
    after = [length + count * (call.k is not None) for length, count in zip(lengths.tolist(), counts, strict=True)]
    pages = call.page_table.tolist()
    _check_room(after, counts, pages, keys)
    if call.k is not None and call.v is not None:
        _append(call, ends, after, pages)
        lengths += torch.tensor(counts, device=lengths.device)

    rows = q.flatten(0, 1)
    o = q.new_zeros(batch * tokens, heads, values.shape[3])
    lse = q.new_zeros(batch * tokens if call.return_lse else 0, heads, dtype=state_dtype(q.dtype))
    for n, (end, count) in enumerate(zip(after, counts, strict=True)):
        if count == 0:
            continue
        start = 0 if call.left is None else max(0, end - count - call.left)
        found, found_lse = softmax_attention(
            rows[None, ends[n] : ends[n + 1]],
            _gather(keys, pages[n], start, end),
            _gather(values, pages[n], start, end),
            causal=count > 1,
            scale=call.scale,
            window=None if call.left is None or count == 1 else (call.left, 0),
            softcap=call.softcap,
            sink=call.sink,
            alibi_slopes=call.alibi_slopes,
            return_lse=call.return_lse,
        )
        o[ends[n] : ends[n + 1]] = found[0]
        if found_lse is not None:
            lse[ends[n] : ends[n + 1]] = found_lse[0].t()
    o = o.view(batch, tokens, heads, values.shape[3])
    if not call.return_lse:
        return (o, lse.flatten()), ()
    lse = lse.view(batch, tokens, heads).transpose(1, 2).contiguous()
    return (o, lse[0].clone() if call.packed else lse), ()


def _append(call: AttentionCacheCall, ends: list[int], after: list[int], pages: list[list[int]]) -> None:
    """Writes the new keys and values: tokens `ends[n] ..` of the batch come last of the `after[n]` tokens of sequence n."""
    assert call.k is not None and call.v is not None
    k, v = call.k.flatten(0, 1), call.v.flatten(0, 1)
    for n, (first, last) in enumerate(pairwise(ends)):
        for page, slots in _spans(after[n] - (last - first), after[n], call.page_size, pages[n]):
            new = slice(first, first + slots.stop - slots.start)
            call.keys[page, slots], call.values[page, slots] = k[new], v[new]
            first = new.stop


def _check_room(after: list[int], counts: list[int], pages: list[list[int]], keys: Tensor) -> None:
    """Raises ValueError before anything is written: too many tokens, or a page that does not exist."""
    count, page_size = keys.shape[:2]
    for n, (end, new) in enumerate(zip(after, counts, strict=True)):
        room = len(pages[n]) * page_size
        if end > room:
            raise ValueError(f"the cache must have room for {end} tokens in sequence {n}, got {room}")
        if end < new:
            raise ValueError(f"the cache must hold the {new} tokens of q in sequence {n}, got {end}")
        used = pages[n][: -(-end // page_size)]
        if any(not 0 <= page < count for page in used):
            raise ValueError(f"cache.page_table must name pages between 0 and {count - 1}, got {used} in sequence {n}")


def _spans(start: int, stop: int, page_size: int, pages: list[int]) -> Iterator[tuple[int, slice]]:
    """Tokens `start` to `stop` of a sequence as (page, slots in it)."""
    while start < stop:
        slot = start % page_size
        count = min(page_size - slot, stop - start)
        yield pages[start // page_size], slice(slot, slot + count)
        start += count


def _gather(held: Tensor, pages: list[int], start: int, stop: int) -> Tensor:
    """Tokens `start` to `stop` of a sequence, `[1, tokens, H, D]`; a view where they lie in one page."""
    pieces = [held[page, slots] for page, slots in _spans(start, stop, held.shape[1], pages)]
    if not pieces:
        return held[:1, :0]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None]
