"""RetNet: multi-scale retention, a fixed decay per head."""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried_linear_attention, convolved, rotated
from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.norm import output_norm
from flashmix.modules.projection import HeadProjection, head_size, shared_heads
from flashmix.modules.rotary_embedding import RotaryEmbedding
from flashmix.modules.short_convolution import maybe_convolution
from flashmix.op.checks import dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention


@public
@engine_options
def retnet(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[EngineOptions]) -> Result:
    """Multi-scale retention: a fixed decay per head.

        S_t = gamma_h S_{t-1} + k_t v_t^T,  gamma_h = 1 - 2^{-5-h};  o_t = scale S_t^T q_t

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 5 and 8.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> retnet(q, k, v)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    heads = torch.arange(dims("v", v, "B T HV V")[2], device=v.device, dtype=state_dtype(v.dtype))
    decay = torch.log1p(-torch.exp2(-5.0 - heads))
    return linear_attention(q, k, v, decay, **options)


class RetNet(Mixer[RecurrentCache]):
    """Multi-scale retention: rotated queries and keys, one fixed decay per head, `g_h = log(1 - 2^(-5-h))`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a query and key; default `width / heads`.
        value_dim: channels of a value; default `2 head_dim`.
        kv_heads: heads of keys and values, a divisor of `heads`; default `heads`.
        base: of the rotary embedding.
        conv_width: tokens that a short convolution of queries, keys and values sees; 0: there is none.
        conv_bias: whether it has a bias.
        output_gate: activation of the gate on the output, "silu" or "sigmoid", or "none".
        eps: of the norm of the output.

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
        kv_heads: int | None = None,
        base: float = 10000.0,
        conv_width: int = 0,
        conv_bias: bool = False,
        output_gate: str = "silu",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_dim = 2 * self.head_dim if value_dim is None else value_dim
        self.kv_heads = shared_heads(heads, kv_heads)
        qk, v = (heads + self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        gate = None if output_gate == "none" else (heads, self.value_dim)
        self.qkvg = HeadProjection(width, qk=qk, v=v, gate=gate, device=device, dtype=dtype)
        self.rotary = RotaryEmbedding(self.head_dim, base)
        self.convolution = maybe_convolution(prod(qk) + prod(v), conv_width, bias=conv_bias, device=device, dtype=dtype)
        self.norm = output_norm(self.value_dim, eps, output_gate, device=device, dtype=dtype)
        self.output = nn.Linear(heads * self.value_dim, width, bias=False, device=device, dtype=dtype)
        decay = torch.tensor([math.log1p(-(2.0 ** (-5 - head))) for head in range(heads)], device=device)
        self.register_buffer("decay", decay, persistent=False)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        *qkv, gate = self.qkvg(x)
        qk, v = convolved(self.convolution, qkv, packing, cache)
        qk = rotated(self.rotary, qk, packing, cache)
        q, k = qk.split([self.heads, self.kv_heads], dim=2)
        k, v = repeat_heads(k, self.heads), repeat_heads(v, self.heads)
        o = carried_linear_attention(q, k, v, log_decay=self.decay, cache=cache, packing=packing)
        return self.output((self.norm(o) if gate is None else self.norm(o, gate)).flatten(2))


register(
    Mechanism(
        title="RetNet", paper="2307.08621", function=retnet, call="q:BTHK k:BTHK v:BTHK", layer=RetNet, preset=by_heads
    )
)
