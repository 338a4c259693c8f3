"""`attention_with_cache` in plain PyTorch: one sequence after the other, over the keys that its new tokens may see.

Lengths and pages are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from flashmix.ops.attention.call import Score
from flashmix.ops.attention.op import softmax_attention


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    held: tuple[Tensor, Tensor, Tensor, Tensor],
    features: tuple[Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    score: Score,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """`o [B, T, HQ, V]` and `lse` `[B, HQ, T]`, packed `[HQ, total]`, or `[0]` where it is not wanted."""
    keys, values, page_table, lengths = held
    batch, tokens, heads, _ = q.shape
    ends = [n * tokens for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    counts = [end - start for start, end in pairwise(ends)]
    after = [length + count * (k is not None) for length, count in zip(lengths.tolist(), counts, strict=True)]
    pages = page_table.tolist()
    _check_room(after, counts, pages, keys)
    if k is not None and v is not None:
        new_k, new_v = k.flatten(0, 1), v.flatten(0, 1)
        for n, (end, count) in enumerate(zip(after, counts, strict=True)):
            first = ends[n]
            for page, slots in _spans(end - count, end, keys.shape[1], pages[n]):
                new = slice(first, first + slots.stop - slots.start)
                keys[page, slots], values[page, slots] = new_k[new], new_v[new]
                first = new.stop
        lengths += torch.tensor(counts, device=lengths.device)

    rows = q.flatten(0, 1)
    o = q.new_zeros(batch * tokens, heads, values.shape[3])
    lse = torch.zeros(batch * tokens, heads, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    lse = lse.to(q.device) if return_lse else lse[:0]
    for n, (end, count) in enumerate(zip(after, counts, strict=True)):
        if count == 0:
            continue
        start = 0 if score.left is None else max(0, end - count - score.left)
        found, found_lse = softmax_attention(
            rows[None, ends[n] : ends[n + 1]],
            _gather(keys, pages[n], start, end),
            _gather(values, pages[n], start, end),
            causal=count > 1,
            scale=score.scale,
            window=None if score.left is None or count == 1 else (score.left, 0),
            softcap=score.softcap,
            sink=features[0],
            alibi_slopes=features[1],
            return_lse=return_lse,
        )
        o[ends[n] : ends[n + 1]] = found[0]
        if found_lse is not None:
            lse[ends[n] : ends[n + 1]] = found_lse[0].t()
    o = o.view(batch, tokens, heads, values.shape[3])
    if not return_lse:
        return o, lse.flatten()
    lse = lse.view(batch, tokens, heads).transpose(1, 2).contiguous()
    return o, lse if cu_seqlens is None else lse[0].clone()


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
