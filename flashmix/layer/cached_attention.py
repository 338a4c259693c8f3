"""Softmax attention of a layer to new tokens and to those in its cache."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.layer.cache import AttentionCache, Lengths
from flashmix.layer.mixer import Mixer
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache


class CachedAttention(Mixer[AttentionCache]):
    """The base of layers that attend: a family makes queries, keys and values and hands them to `attend`.

    Attributes:
        window: how many last tokens a query sees, itself included; None: all.
    """

    cache_class = AttentionCache
    window: int | None = None

    def new_cache(self) -> AttentionCache:
        return AttentionCache(self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, cache: AttentionCache | None) -> Tensor:
        """Causal attention `[B, T, HQ, V]` to the new tokens and to what the cache holds, which then holds the new ones too."""
        return self._attend(q, k, v, packing) if cache is None else self._attend_cached(q, k, v, packing, cache)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, packing_k: Packing | None = None
    ) -> Tensor:
        """Causal attention, aligned to the last token where there are more keys than queries."""
        window = None if self.window is None else (self.window - 1, 0)
        return softmax_attention(q, k, v, causal=True, window=window, cu_seqlens=packing, cu_seqlens_k=packing_k)[0]

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None, cache: AttentionCache) -> Tensor:
        """Attention to what the cache holds and to the new tokens, which it holds afterwards."""
        B, T = q.shape[:2]
        if cache.lengths is None:
            o = self._attend(q, k, v, packing)
            cache.append(k, v, packing)
            return o
        if packing is None and T == 1:
            return _attend_step(q, cache, cache.append(k, v, None))
        rows = (1, B * T) if packing is None else (B, T)
        if packing is None:
            packing = Packing.from_lengths([T] * B, device=q.device)
        q, k, v = (tensor.reshape(*rows, *tensor.shape[2:]) for tensor in (q, k, v))
        keys, values, packing_k = cache.joined(k, v, packing)
        o = self._attend(q, keys, values, packing, packing_k)
        cache.append(k, v, packing)
        return o.view(B, T, *o.shape[2:])


def _attend_step(q: Tensor, cache: AttentionCache, lengths: Lengths) -> Tensor:
    """One query per sequence, `[B, 1, HQ, D]`, which sees everything in the cache, in whatever order it lies there."""
    assert cache.keys is not None and cache.values is not None
    B, slots = cache.keys.shape[:2]
    if lengths.known and (q.device.type == "cpu" or torch.is_grad_enabled()):
        seen = min(lengths.longest, slots)
        return softmax_attention(q, cache.keys[:, :seen], cache.values[:, :seen])[0]
    rows = torch.arange(B, device=q.device)[:, None]
    tokens = lengths.tokens if cache.window is None else lengths.tokens.clamp(max=slots)
    return attention_with_cache(q, KVCache(cache.keys, cache.values, rows, tokens))[0]
