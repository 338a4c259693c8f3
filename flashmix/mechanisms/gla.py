"""Gated linear attention: a per-channel decay."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried_linear_attention, convolved
from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import LogSigmoidDecay
from flashmix.modules.mlp import LowRank
from flashmix.modules.norm import output_norm
from flashmix.modules.projection import HeadProjection, head_size, shared_heads
from flashmix.modules.short_convolution import maybe_convolution
from flashmix.op.checks import dims
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention


@public
@engine_options
def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Unpack[EngineOptions]) -> Result:
    """Gated linear attention: a per-token, per-channel decay, `[B, T, H, K]`.

        S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T;  o_t = scale S_t^T q_t

    Source: Yang et al. 2023 (arXiv 2312.06635), equation 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> gla(q, k, v, -torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T H K")
    return linear_attention(q, k, v, log_decay, **options)


class GLA(Mixer[RecurrentCache]):
    """Gated linear attention: a per-channel decay from a low-rank projection, `g = logsigmoid(W x) / 16`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / (2 heads)`.
        value_dim: channels of a value; default `width / heads`.
        kv_heads: heads of keys, values and decays, a divisor of `heads`; default `heads`.
        rank: of the decay's projection.
        conv_width: tokens that a short convolution of queries, keys and values sees; 0: there is none.
        conv_bias: whether it has a bias.
        output_gate: activation of the gate on the output, "silu" or "sigmoid", or "none".
        eps: of the norm of the output.

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
        kv_heads: int | None = None,
        rank: int = 16,
        conv_width: int = 0,
        conv_bias: bool = False,
        output_gate: str = "silu",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads = heads
        self.value_dim = head_size(width, heads, value_dim, "value_dim")
        self.head_dim = max(1, self.value_dim // 2) if head_dim is None else head_dim
        self.kv_heads = shared_heads(heads, kv_heads)
        q, k = (heads, self.head_dim), (self.kv_heads, self.head_dim)
        v, gate = (self.kv_heads, self.value_dim), (heads, self.value_dim) if output_gate != "none" else None
        self.qkvg = HeadProjection(width, q=q, k=k, v=v, gate=gate, device=device, dtype=dtype)
        channels = self.kv_heads * self.head_dim
        self.decay_projection = LowRank(width, rank, channels, bias=True, device=device, dtype=dtype)
        self.decay = LogSigmoidDecay()
        self.convolution = maybe_convolution(
            prod(q) + prod(k) + prod(v), conv_width, bias=conv_bias, device=device, dtype=dtype
        )
        self.norm = output_norm(self.value_dim, eps, output_gate, device=device, dtype=dtype)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        *qkv, gate = self.qkvg(x)
        q, k, v = convolved(self.convolution, qkv, packing, cache)
        log_decay = self.decay(self.decay_projection(x)).unflatten(-1, (self.kv_heads, self.head_dim))
        k, v, log_decay = (repeat_heads(part, self.heads) for part in (k, v, log_decay))
        o = carried_linear_attention(q, k, v, log_decay=log_decay, cache=cache, packing=packing)
        return self.output((self.norm(o) if gate is None else self.norm(o, gate)).flatten(2))


def by_half_the_heads(size: Size) -> list[Options]:
    """Half as many heads as attention would have."""
    return size.depth * [{"heads": max(1, size.heads // 2)}]


register(
    Mechanism(
        title="GLA",
        paper="2312.06635",
        function=gla,
        call="q:BTHK k:BTHK v:BTHK log_decay:BTHK",
        layer=GLA,
        preset=by_half_the_heads,
    )
)
