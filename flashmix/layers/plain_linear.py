"""Layers of raw writes without more than a projection or two: linear attention, Lightning attention, HGRN-2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, silu

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layers.linear_attention import head_size
from flashmix.modules.decay import ForgetGate
from flashmix.modules.norm import GatedRMSNorm, RMSNorm
from flashmix.op.packing import Packing
from flashmix.ops.named import hgrn2, lightning, normalised_linear_attention


class LinearAttention(Mixer[RecurrentCache]):
    """The first linear attention: features `elu(x) + 1`, and the output divided by the sum of its weights.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `width / heads`.

    Source: Katharopoulos et al., arXiv:2006.16236, equations 7 and 10 to 12.

    Example:
        >>> import torch
        >>> LinearAttention(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        keys, values = heads * self.head_dim, heads * self.value_dim
        self.sizes = [keys, keys, values]
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.output = nn.Linear(values, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).split(self.sizes, dim=-1))
        o, state = normalised_linear_attention(
            elu(q) + 1,
            elu(k) + 1,
            v,
            initial_state=None if cache is None else cache.state,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        if cache is not None:
            cache.state = state
        return self.output(o.flatten(2))


class Lightning(Mixer[RecurrentCache]):
    """Lightning attention: silu of queries, keys and values, a fixed decay a head that weakens with depth, a sigmoid gate.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        layer: place of this layer in the model, from 0.
        layers: number of layers of the model.
        head_dim: channels of a head; default `width / heads`.

    Source: Qin et al., arXiv:2401.04658, section 3.

    Example:
        >>> import torch
        >>> Lightning(32, heads=2, layer=0, layers=12)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        layer: int = 0,
        layers: int = 1,
        head_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        if not 0 <= layer < layers:
            raise ValueError(f"layer must be between 0 and layers - 1 = {layers - 1}, got {layer}")
        self.layer, self.layers = layer, layers
        inner = heads * self.head_dim
        self.qkvg = nn.Linear(width, 4 * inner, bias=False, device=device, dtype=dtype)
        self.norm = GatedRMSNorm(self.head_dim, activation="sigmoid", device=device, dtype=dtype)
        self.output = nn.Linear(inner, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in self.qkvg(x).chunk(4, dim=-1))
        o, state = lightning(
            silu(q),
            silu(k),
            silu(v),
            layer=self.layer,
            layers=self.layers,
            initial_state=None if cache is None else cache.state,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        if cache is not None:
            cache.state = state
        return self.output(self.norm(o, gate).flatten(2))


class HGRN2(Mixer[RecurrentCache]):
    """HGRN-2: the key is what the forget gate leaves free, `1 - f`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a head, of keys and values; default `width / heads`.
        lower: the least that the forget gate keeps, in [0, 1).

    Source: Qin et al., arXiv:2404.07904, section 3.

    Example:
        >>> import torch
        >>> HGRN2(32, heads=2, lower=0.5)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        lower: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        inner = heads * self.head_dim
        self.qfv = nn.Linear(width, 3 * inner, bias=False, device=device, dtype=dtype)
        self.log_forget = ForgetGate(lower)
        self.norm = RMSNorm(inner, device=device, dtype=dtype)
        self.output = nn.Linear(inner, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, f, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qfv(x).chunk(3, dim=-1))
        o, state = hgrn2(
            silu(q),
            self.log_forget(f),
            v,
            initial_state=None if cache is None else cache.state,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        if cache is not None:
            cache.state = state
        return self.output(self.norm(o.flatten(2)))
