"""Softmax attention as a layer: grouped heads, rotary positions, a window, query and key norm, an output gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashmix.layer.cache import AttentionCache, Lengths
from flashmix.layer.mixer import Mixer
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.op.checks import check_multiple, check_range
from flashmix.op.packing import Packing
from flashmix.ops.attention import softmax_attention
from flashmix.ops.attention_cache import KVCache, attention_with_cache


class SoftmaxAttention(Mixer[AttentionCache]):
    """Causal softmax attention.

    Args:
        width: channels of the input and output.
        heads: heads of queries.
        kv_heads: heads of keys and values, a divisor of `heads`; default `heads`.
        head_dim: channels of a head; default `width / heads`.
        window: how many last tokens a query sees, itself included; None: all.
        rotary: how many channels of a head are rotated; None: all, 0: no positions.
        base: of the rotary embedding.
        qk_norm: whether queries and keys are RMS-normalised before the rotation.
        gated: whether a sigmoid of the input multiplies the output.

    Source: Vaswani et al., arXiv:1706.03762; grouped heads: arXiv:2305.13245; output gate: arXiv:2505.06708.

    Example:
        >>> import torch
        >>> SoftmaxAttention(32, heads=4, kv_heads=2, window=3)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    cache_class = AttentionCache

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        window: int | None = None,
        rotary: int | None = None,
        base: float = 10000.0,
        qk_norm: bool = False,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.kv_heads = heads if kv_heads is None else kv_heads
        check_multiple("heads", heads, "kv_heads", self.kv_heads)
        if window is not None:
            check_range("window", window, 1, 2**31)
        self.window = window
        qk, v = (heads + self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)
        gate = (heads, self.head_dim) if gated else None
        self.qkvg = HeadProjection(width, qk=qk, v=v, gate=gate, device=device, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.rotary = None if rotary == 0 else RotaryEmbedding(self.head_dim, base, rotated=rotary)
        self.output = nn.Linear(heads * self.head_dim, width, bias=False, device=device, dtype=dtype)

    def new_cache(self) -> AttentionCache:
        return AttentionCache(self.window)

    def mix(self, x: Tensor, packing: Packing | None, cache: AttentionCache | None) -> Tensor:
        qk, v, gate = self.qkvg(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        if self.rotary is not None:
            qk = self._rotate(self.rotary, qk, packing, None if cache is None else cache.lengths)
        q, k = qk.split([self.heads, self.kv_heads], dim=2)
        o = self._attend(q, k, v, packing) if cache is None else self._attend_cached(q, k, v, packing, cache)
        return self.output((o if gate is None else o * torch.sigmoid(gate)).flatten(2))

    def _rotate(self, rotary: RotaryEmbedding, qk: Tensor, packing: Packing | None, seen: Lengths | None) -> Tensor:
        if seen is None:
            return rotary(qk, cu_seqlens=packing)
        tokens = qk.shape[1]
        return rotary(qk, positions=seen.positions(packing, tokens), limit=seen.longest + tokens)

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
    if lengths.equal and (q.device.type == "cpu" or torch.is_grad_enabled()):
        seen = min(lengths.longest, slots)
        return softmax_attention(q, cache.keys[:, :seen], cache.values[:, :seen])[0]
    rows = torch.arange(B, device=q.device)[:, None]
    return attention_with_cache(q, KVCache(cache.keys, cache.values, rows, lengths.tokens.clamp(max=slots)))[0]


register(Mechanism(title="Softmax attention", paper="1706.03762", layer=SoftmaxAttention, mixer="attention"))
