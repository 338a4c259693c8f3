"""Layers that attend to a fixed number of slots: gated slot attention and ABC."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layers.linear_attention import head_size
from flashmix.modules.decay import LogSigmoidDecay
from flashmix.modules.norm import GatedRMSNorm, RMSNorm
from flashmix.op.checks import check_range
from flashmix.op.packing import Packing
from flashmix.ops.named import abc, gsa


class GSA(Mixer[RecurrentCache]):
    """Gated slot attention: silu of queries, keys and values, slots that forget by `g = logsigmoid(W x) / 8`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        slots: memory slots of a head.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `width / heads`.

    Source: Zhang et al., arXiv:2409.07146, section 3.

    Example:
        >>> import torch
        >>> GSA(32, heads=2, slots=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        slots: int = 64,
        head_dim: int | None = None,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_range("slots", slots, 1, 256)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        keys, values = heads * self.head_dim, heads * self.value_dim
        self.sizes = [keys, keys, values, heads * slots]
        self.qkvf = nn.Linear(width, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.decay = LogSigmoidDecay(8.0)
        self.norm = RMSNorm(values, device=device, dtype=dtype)
        self.output = nn.Linear(values, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v, f = (part.unflatten(-1, (self.heads, -1)) for part in self.qkvf(x).split(self.sizes, dim=-1))
        log_decay = self.decay(f)
        o, state = gsa(
            silu(q),
            silu(k),
            silu(v),
            -torch.expm1(log_decay).to(q.dtype),
            log_decay,
            scale=1.0,
            initial_state=None if cache is None else cache.state,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        if cache is not None:
            cache.state = state
        return self.output(self.norm(silu(o).flatten(2)))


class ABC(Mixer[RecurrentCache]):
    """Attention with bounded memory control: a learned softmax over the past fills each slot; a silu gate on the output.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        slots: memory slots of a head.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `width / heads`.

    Source: Peng et al., arXiv:2110.02488, section 3.

    Example:
        >>> import torch
        >>> ABC(32, heads=2, slots=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        slots: int = 64,
        head_dim: int | None = None,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_range("slots", slots, 1, 256)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        keys, values = heads * self.head_dim, heads * self.value_dim
        self.sizes = [keys, keys, values, heads * slots, values]
        self.qkvsg = nn.Linear(width, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.norm = GatedRMSNorm(self.value_dim, device=device, dtype=dtype)
        self.output = nn.Linear(values, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v, s, gate = (part.unflatten(-1, (self.heads, -1)) for part in self.qkvsg(x).split(self.sizes, dim=-1))
        o, state = abc(
            q,
            k,
            v,
            s,
            initial_state=None if cache is None else cache.state,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        if cache is not None:
            cache.state = state
        return self.output(self.norm(o, gate).flatten(2))
