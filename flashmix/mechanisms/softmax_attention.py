"""Softmax attention as a layer: grouped heads, rotary positions, a window, query and key norm, an output gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.layer.cache import AttentionCache, Lengths
from flashmix.layer.cached_attention import CachedAttention
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.modules.input_linear import unobserved
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection, head_size, shared_heads
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.op.checks import check_range
from flashmix.op.packing import Packing
from flashmix.op.recompute import recomputed
from flashmix.ops.rotary.scaling import rotary_scaling


class SoftmaxAttention(CachedAttention):
    """Causal softmax attention.

    Args:
        width: channels of the input and output.
        heads: heads of queries.
        kv_heads: heads of keys and values, a divisor of `heads`; default `heads`.
        head_dim: channels of a head; default `width / heads`.
        window: how many last tokens a query sees, itself included; None: all.
        rotary: how many channels of a head are rotated; None: all, 0: no positions.
        base: of the rotary embedding.
        scaling: of the rotary embedding: None, or a dict with the "kind" of a scaling ("linear", "ntk", "yarn", "llama3") and
            its values by name.
        qk_norm: whether queries and keys are RMS-normalised before the rotation.
        joint_qk_norm: whether that norm is over all heads at once, as in OLMo, instead of over each.
        unit_offset: whether its factors are `1 + weight`.
        eps: of that norm.
        gated: whether a sigmoid of the input multiplies the output.
        output_bias: whether the last projection has a bias, 0 at first.

    Source: Vaswani et al., arXiv:1706.03762; grouped heads: arXiv:2305.13245; output gate: arXiv:2505.06708.

    Example:
        >>> import torch
        >>> SoftmaxAttention(32, heads=4, kv_heads=2, window=3)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

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
        scaling: dict[str, Any] | None = None,
        qk_norm: bool = False,
        joint_qk_norm: bool = False,
        unit_offset: bool = False,
        eps: float = 1e-6,
        gated: bool = False,
        output_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.kv_heads = shared_heads(heads, kv_heads)
        if window is not None:
            check_range("window", window, 1, 2**31)
        self.window = window
        qk, v = (heads + self.kv_heads, self.head_dim), (self.kv_heads, self.head_dim)
        gate = (heads, self.head_dim) if gated else None
        self.qkvg = HeadProjection(width, qk=qk, v=v, gate=gate, device=device, dtype=dtype)
        self.joint_qk_norm = joint_qk_norm

        def norm(heads: int) -> RMSNorm | None:
            channels = self.head_dim * (heads if joint_qk_norm else 1)
            return RMSNorm(channels, eps, unit_offset=unit_offset, device=device, dtype=dtype) if qk_norm else None

        self.q_norm, self.k_norm = norm(heads), norm(self.kv_heads)
        scales = None if scaling is None else rotary_scaling(**scaling)
        self.rotary = None if rotary == 0 else RotaryEmbedding(self.head_dim, base, rotated=rotary, scaling=scales)
        self.output = nn.Linear(heads * self.head_dim, width, bias=output_bias, device=device, dtype=dtype)
        if output_bias:
            nn.init.zeros_(self.output.bias)

    def mix(self, x: Tensor, packing: Packing | None, cache: AttentionCache | None) -> Tensor:
        if cache is None and self.rotary is not None and self.q_norm is None and self._is_plain():
            qkv = self.qkvg.whole(x).unflatten(-1, (-1, self.head_dim))
            q, k, v = self.rotary.of_parts(qkv, (self.heads, self.kv_heads, self.kv_heads), cu_seqlens=packing)
            return self.output(self.attend(q, k, v, packing, cache).flatten(2))
        qk, v, gate = self.qkvg(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            if self.joint_qk_norm:
                q, k = self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)
            else:
                q, k = self.q_norm(q), self.k_norm(k)
            qk = recomputed("rotary", _joined, q, k)
        if self.rotary is not None:
            qk = self._rotate(self.rotary, qk, packing, None if cache is None else cache.lengths)
        q, k = qk.split([self.heads, self.kv_heads], dim=2)
        o = self.attend(q, k, v, packing, cache)
        return self.output((o if gate is None else o * torch.sigmoid(gate)).flatten(2))

    def _is_plain(self) -> bool:
        """Whether queries, keys and values are all that the projection makes, and nothing else looks at them."""
        project = self.qkvg
        return type(project) is HeadProjection and project.parts["gate"] is None and unobserved(project)

    def _rotate(self, rotary: RotaryEmbedding, qk: Tensor, packing: Packing | None, seen: Lengths | None) -> Tensor:
        if seen is None:
            return recomputed("rotary", partial(rotary, cu_seqlens=packing), qk)
        tokens = qk.shape[1]
        return rotary(qk, positions=seen.positions(packing, tokens), limit=seen.reach(tokens))


def _joined(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat([q, k], dim=2)


register(Mechanism(title="Softmax attention", paper="1706.03762", layer=SoftmaxAttention, mixer="attention"))
