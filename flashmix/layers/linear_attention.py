"""Layers whose state takes raw writes: RetNet, GLA and Mamba-2."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flashmix.layer.cache import Lengths, RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried_linear_attention
from flashmix.modules.decay import LogSigmoidDecay, MambaDecay
from flashmix.modules.mlp import LowRank
from flashmix.modules.norm import GatedRMSNorm, RMSNorm
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.checks import check_multiple, check_range
from flashmix.op.packing import Packing
from flashmix.ops.gated_product.op import swiglu


class RetNet(Mixer[RecurrentCache]):
    """Multi-scale retention: rotated queries and keys, one fixed decay a head, `g_h = log(1 - 2^(-5-h))`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `2 head_dim`.
        base: of the rotary embedding.

    Source: Sun et al., arXiv:2307.08621, equations 5 to 8.

    Example:
        >>> import torch
        >>> RetNet(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    decay: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = 2 * self.head_dim if value_dim is None else value_dim
        keys, values = heads * self.head_dim, heads * self.value_dim
        self.sizes = [2 * keys, values, values]
        self.qkvg = nn.Linear(width, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.rotary = RotaryEmbedding(self.head_dim, base)
        self.norm = GatedRMSNorm(self.value_dim, device=device, dtype=dtype)
        self.output = nn.Linear(values, width, bias=False, device=device, dtype=dtype)
        decay = torch.tensor([math.log1p(-(2.0 ** (-5 - head))) for head in range(heads)], device=device)
        self.register_buffer("decay", decay, persistent=False)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        qk, v, gate = self.qkvg(x).split(self.sizes, dim=-1)
        qk = qk.unflatten(-1, (2 * self.heads, self.head_dim))
        if cache is None:
            qk = self.rotary(qk, cu_seqlens=packing)
        else:
            before = cache.lengths or Lengths.zero(x.shape[0] if packing is None else packing.count, x.device)
            cache.lengths = before.advanced(packing, x.shape[1])
            qk = self.rotary(qk, positions=before.positions(packing, x.shape[1]), limit=cache.lengths.longest)
        q, k = qk.chunk(2, dim=2)
        o = carried_linear_attention(q, k, v.unflatten(-1, (self.heads, self.value_dim)), self.decay, cache, packing)
        return self.output(self.norm(o, gate.view_as(o)).flatten(2))


class GLA(Mixer[RecurrentCache]):
    """Gated linear attention: a decay per channel from a low-rank projection, `g = logsigmoid(W x) / 16`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / (2 heads)`.
        value_dim: channels of a value; default `width / heads`.
        rank: of the decay's projection.

    Source: Yang et al., arXiv:2312.06635, section 4.4.

    Example:
        >>> import torch
        >>> GLA(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rank: int = 16,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads = heads
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        self.head_dim = max(1, self.value_dim // 2) if head_dim is None else head_dim
        keys, values = heads * self.head_dim, heads * self.value_dim
        self.sizes = [keys, keys, values, values]
        self.qkvg = nn.Linear(width, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.decay_projection = LowRank(width, rank, keys, bias=True, device=device, dtype=dtype)
        self.decay = LogSigmoidDecay()
        self.norm = GatedRMSNorm(self.value_dim, device=device, dtype=dtype)
        self.output = nn.Linear(values, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in self.qkvg(x).split(self.sizes, dim=-1))
        log_decay = self.decay(self.decay_projection(x)).unflatten(-1, (self.heads, self.head_dim))
        o = carried_linear_attention(q, k, v, log_decay, cache, packing)
        return self.output(self.norm(o, gate).flatten(2))


class Mamba2(Mixer[RecurrentCache]):
    """The Mamba-2 block: `S = e^{A dt} S + B (dt x)^T`, `y = S^T C + D x`, gated and normalised.

    Args:
        width: channels of the input and output.
        heads: number of heads; the inner width is `heads * head_dim`.
        head_dim: channels of a head's `x`; default `2 width / heads`.
        state_dim: channels of `B` and `C`, the N of the paper.
        groups: heads of `B` and `C`; each serves `heads / groups` heads of `x`.
        conv_width: tokens that the short convolution over `x, B, C` sees.

    Source: Dao and Gu, arXiv:2405.21060, section 7.1.

    Example:
        >>> import torch
        >>> Mamba2(32, heads=4, state_dim=16)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        conv_width: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_multiple("heads", heads, "groups", groups)
        check_range("state_dim", state_dim, 1, 256)
        self.heads, self.head_dim = heads, head_size(2 * width, heads, head_dim)
        self.state_dim, self.groups = state_dim, groups
        inner, shared = heads * self.head_dim, groups * state_dim
        self.sizes = [inner + 2 * shared, inner, heads]
        self.inner_sizes = [inner, shared, shared]
        self.input = nn.Linear(width, sum(self.sizes), bias=False, device=device, dtype=dtype)
        self.convolution = ShortConvolution(inner + 2 * shared, conv_width, bias=True, device=device, dtype=dtype)
        self.decay = MambaDecay(heads, device=device, dtype=dtype)
        self.skip = nn.Parameter(torch.ones(heads, device=device, dtype=dtype))
        self.norm = RMSNorm(inner // groups, device=device, dtype=dtype)
        self.output = nn.Linear(inner, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        xbc, gate, step = self.input(x).split(self.sizes, dim=-1)
        xbc, recent = self.convolution(
            xbc,
            initial_state=None if cache is None else cache.recent,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        values, B, C = xbc.split(self.inner_sizes, dim=-1)
        values = values.unflatten(-1, (self.heads, self.head_dim))
        step = self.decay.step_size(step)
        o = carried_linear_attention(
            C.unflatten(-1, (self.groups, self.state_dim)),
            B.unflatten(-1, (self.groups, self.state_dim)),
            values * step.to(values.dtype)[..., None],
            step * self.decay.rate(),
            cache,
            packing,
            scale=1.0,
        )
        if cache is not None:
            cache.recent = recent
        o = (o + values * self.skip.to(values.dtype)[:, None]).flatten(2)
        o = swiglu(gate, o).unflatten(-1, (self.groups, -1))
        return self.output(self.norm(o).flatten(2))


def head_size(width: int, heads: int, given: int | None, name: str = "head_dim") -> int:
    """Channels of one head: `given`, or an equal share of `width`; a ValueError where that is not even."""
    check_range("heads", heads, 1, 65536)
    if given is None:
        if width % heads:
            raise ValueError(f"{name} must be given where heads = {heads} does not divide {width}")
        given = width // heads
    check_range(name, given, 1, 256)
    return given
