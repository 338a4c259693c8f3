"""Gated DeltaNet: the delta rule with one decay per token and head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.deltanet import DeltaNet
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import MambaDecay
from flashmix.modules.projection import HeadProjection
from flashmix.op.checks import dims
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule


@public
@engine_options
def gated_deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, **options: Unpack[EngineOptions]
) -> Result:
    """Gated DeltaNet: the delta rule on a state with one decay per token and head, `log_decay` `[B, T, HV]`.

        S_t = e^{g_t} S_{t-1} + beta_t k_t (v_t - e^{g_t} S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv 2412.06464), equation 10.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> gated_deltanet(q, k / 4, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV")
    return delta_rule(q, k, v, beta, log_decay, **options)


class GatedDeltaNet(DeltaNet):
    """The delta rule with a per-head decay, `g = -exp(A_log) softplus(W x + dt_bias)`, and a silu gate on the output.

    Args: those of `DeltaNet`.

    Source: Yang et al., arXiv:2412.06464, section 3.4.

    Example:
        >>> import torch
        >>> GatedDeltaNet(32, heads=2, value_heads=4, value_dim=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    own_gate = "silu"

    def make_parameters(self, **placement: Any) -> None:
        heads = (self.value_heads,)
        self.strength_and_decay = HeadProjection(self.width, strength=heads, decay=heads, **placement)
        self.decay = MambaDecay(self.value_heads, **placement)
        self.make_norm(**placement)

    def beta_and_decay(self, x: Tensor) -> tuple[Tensor, Any]:
        strength, decay = self.strength_and_decay(x)
        return self.write_strength(strength), self.decay(decay)

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        strength, decay = self.strength_and_decay(x)
        return {"strength": strength, "decay": decay, "A_log": self.decay.A_log, "dt_bias": self.decay.dt_bias}


def by_value_heads(size: Size) -> list[Options]:
    """Two heads of values for each head of keys."""
    heads = {"heads": max(1, size.heads // 2), "value_heads": size.heads, "head_dim": size.head_dim}
    return size.depth * [heads]


register(
    Mechanism(
        title="Gated DeltaNet",
        paper="2412.06464",
        function=gated_deltanet,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH",
        layer=GatedDeltaNet,
        preset=by_value_heads,
    )
)
