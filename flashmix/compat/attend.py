"""Softmax attention with the conventions of flash_attn: windows of -1, packed tensors without a batch axis, caches of the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashmix.compat.surface import refuse
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache
from flashmix.ops.rotary.op import rotary

Result = tuple[Tensor, Tensor | None]


def options_of(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """The options of `softmax_attention`: -1 in a window and a softcap of 0 are None there."""
    left, right = (None if side is None or side < 0 else side for side in window_size)
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": None if left is None and right is None else (left, right),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
    }


def attend(q: Tensor, k: Tensor, v: Tensor, *, alibi_slopes: Tensor | None, return_lse: bool, **options: Any) -> Result:
    """`softmax_attention` of `[B, T, H, D]`; slopes are `[H]` or `[B, H]`."""
    return softmax_attention(q, k, v, alibi_slopes=alibi_slopes, return_lse=return_lse, **options)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Result:
    """`softmax_attention` of `[total, H, D]`; slopes `[N, H]` take one call per sequence."""
    if alibi_slopes is None or alibi_slopes.dim() == 1:
        o, lse = softmax_attention(
            q[None],
            k[None],
            v[None],
            cu_seqlens=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            alibi_slopes=alibi_slopes,
            return_lse=return_lse,
            **options,
        )
        return o[0], lse
    rows, keys = (cu.diff().tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
    parts = [
        attend(a[None], b[None], c[None], alibi_slopes=slopes, return_lse=True, **options)
        for a, b, c, slopes in zip(q.split(rows), k.split(keys), v.split(keys), alibi_slopes, strict=True)
    ]
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts if lse is not None], 1)


def gather(cache: Tensor, table: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The tokens `start[n] .. end[n]` of every sequence, end to end `[total, H, D]`, out of pages `[pages, page, H, D]`."""
    lengths = (end - start).clamp(min=0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=cache.device), lengths)
    first = boundaries(lengths)[:-1]
    place = torch.arange(len(sequence), device=cache.device) - first[sequence] + start[sequence]
    size = cache.shape[1]
    return cache[table[sequence, place // size].long(), place % size]


def boundaries(lengths: Tensor) -> Tensor:
    """`[0, l_0, l_0 + l_1, ...]`."""
    return pad(lengths.cumsum(0), (1, 0))


def lengths_of(cache_seqlens: int | Tensor | None, rows: int, capacity: int, device: torch.device) -> Tensor:
    """The tokens in each sequence of a cache, int64; None: it is full."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens.to(torch.int64)
    return torch.full((rows,), capacity if cache_seqlens is None else cache_seqlens, device=device)


@torch.no_grad()
def attend_to_cache(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    table: Tensor,
    lengths: Tensor,
    *,
    in_order: bool,
    rotary_table: tuple[Tensor | None, Tensor | None],
    interleaved: bool,
    leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    return_lse: bool,
    **options: Any,
) -> Result:
    """Appends `new` to the caches in place and attends; `lengths` are those before. `q` is `[B, T, HQ, D]`, packed `[total, HQ, D]`.

    Causal calls are `attention_with_cache`. Others, and those with `leftpad` or slopes `[B, H]`, read the caches where they lie if row n
    is sequence n (`in_order`); with pages or chosen rows the keys are gathered.
    """
    cos, sin = rotary_table
    if cos is not None and new[0] is None:
        raise ValueError("rotary_cos must come with k and v, the tokens that it rotates too")
    turn = None if cos is None or sin is None else (cos, sin)
    slopes = options["alibi_slopes"]
    if options.pop("causal"):
        if leftpad is None and (slopes is None or slopes.dim() == 1):
            pages = KVCache(*cache, table, lengths.clone())
            packed = [x[None] if x is not None and cu_seqlens_q is not None else x for x in (q, *new)]
            o, lse = attention_with_cache(
                packed[0],  # type: ignore[arg-type]
                pages,
                *packed[1:],
                rotary=turn,
                interleaved=interleaved,
                cu_seqlens=cu_seqlens_q,
                return_lse=return_lse,
                **options,
            )
            return (o if cu_seqlens_q is None else o[0]), lse
        options["causal"], local = True, True
    else:
        local = options["window"] is not None
    refuse("flash_attn_with_kvcache", "cu_seqlens_q without causal=True, or with leftpad", cu_seqlens_q is None)
    q, lengths = _append(q, cache, new, table, lengths, turn, interleaved, local)
    start = torch.zeros_like(lengths) if leftpad is None else leftpad.to(torch.int64)
    if in_order:
        options |= {"key_starts": None if leftpad is None else start.minimum(lengths), "key_lengths": lengths}
        return softmax_attention(q, *cache, return_lse=return_lse, **options)
    keys, values = (gather(x, table, start, lengths) for x in cache)
    B, T = q.shape[:2]
    rows = torch.arange(0, B * T + 1, T, device=q.device)
    ends = boundaries((lengths - start).clamp(min=0))
    o, lse = attend_packed(q.flatten(0, 1), keys, values, rows, ends, return_lse=return_lse, **options)
    return o.view(B, T, *o.shape[1:]), None if lse is None else lse.unflatten(1, (B, T)).transpose(0, 1)


def _append(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    new: tuple[Tensor | None, Tensor | None],
    table: Tensor,
    lengths: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    interleaved: bool,
    local: bool,
) -> tuple[Tensor, Tensor]:
    """Writes the new tokens, rotated, into the cache; returns the rotated queries, at one position unless `local`, and the new lengths."""
    k, v = new
    if k is None or v is None:
        return q, lengths
    place = lengths[:, None] + torch.arange(k.shape[1], device=k.device)
    if turn is not None:
        k = rotary(k, *turn, positions=place, interleaved=interleaved)
        steps = torch.arange(q.shape[1], device=q.device) * int(local)
        q = rotary(q, *turn, positions=lengths[:, None] + steps, interleaved=interleaved)
    size = cache[0].shape[1]
    pages = table.long().gather(1, place // size)
    for stored, tokens in zip(cache, (k, v), strict=True):
        stored[pages, place % size] = tokens.to(stored.dtype)
    return q, lengths + k.shape[1]
