"""The parts that the layers of RWKV-6 and RWKV-7 share: heads, the norm of their output, the start of their decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.modules.mlp import LowRank


class RWKV(Mixer[RecurrentCache]):
    """The base of both layers. Their constructors set `heads`, `head_dim`, `value_dim` and `eps` and end with `make_output`."""

    heads: int
    head_dim: int
    value_dim: int
    eps: float
    decay_projection: LowRank

    def make_output(self, **placement: Any) -> None:
        """The parameters from the recurrence's output to the layer's; then all are reset."""
        inner = self.heads * self.value_dim
        self.bonus = nn.Parameter(torch.empty(self.heads, self.head_dim, **placement))
        self.norm_weight = nn.Parameter(torch.empty(inner, **placement))
        self.norm_bias = nn.Parameter(torch.empty(inner, **placement))
        self.output = nn.Linear(inner, self.width, bias=False, **placement)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        raise NotImplementedError

    def reset_norm_and_decay(self, spread: float) -> None:
        """The identity, and in each head decays `-e^x` or `-0.6 sigmoid(x)` with `x` from -6 to `-6 + spread`."""
        nn.init.ones_(self.norm_weight)
        nn.init.zeros_(self.norm_bias)
        channel = torch.linspace(0, 1, self.head_dim).repeat(self.heads)
        self.decay_projection.up.bias.copy_(-6.0 + spread * channel)

    def normalised(self, o: Tensor) -> Tensor:
        """The recurrence's output `[B, T, H, D]`, normalised per head, scaled and shifted: `[B, T, H * D]`."""
        o = layer_norm(o, (self.value_dim,), eps=self.eps).flatten(2)
        return torch.addcmul(self.norm_bias, o, self.norm_weight)

    def by_heads(self, x: Tensor) -> Tensor:
        """`[B, T, H * D]` as `[B, T, H, D]`."""
        return x.unflatten(-1, (self.heads, -1))
