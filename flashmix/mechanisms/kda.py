"""Kimi Delta Attention: the delta rule with a per-channel decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.deltanet import DeltaNet, DeltaNetOptions
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.decay import BoundedDecay, MambaDecay
from flashmix.modules.input_linear import InputLinear
from flashmix.modules.mlp import LowRank
from flashmix.op.checks import dims
from flashmix.op.options import hands_on
from flashmix.op.public import public
from flashmix.ops.recurrence import delta_rule


@public
@engine_options
def kda(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, **options: Unpack[EngineOptions]) -> Result:
    """Kimi Delta Attention: the delta rule on a state with a per-channel decay, `log_decay` `[B, T, HV, K]`.

        S = diag(e^{g_t}) S_{t-1};  S_t = S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Kimi Team 2025 (arXiv 2510.26692), equation 1.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> kda(q, k / 4, v, torch.rand(1, 10, 4), -torch.rand(1, 10, 4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_decay", log_decay, "B T HV K")
    return delta_rule(q, k, v, beta, log_decay, **options)


class KDA(DeltaNet):
    """Kimi Delta Attention: the delta rule with a per-channel decay and a sigmoid output gate, both from low-rank projections.

    Args: those of `DeltaNet`, and
        rank: of the projections of the decay and the output gate; default `value_dim`.
        lower: None for the decay `-exp(A_log) softplus(x + dt_bias)`, else the floor of `BoundedDecay`, in [-5, 0).
        gate_bias: whether the projection of the output gate has a bias.

    Source: Kimi Linear, arXiv:2510.26692, section 4.

    Example:
        >>> import torch
        >>> KDA(32, heads=2, lower=-5.0)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    own_gate = "sigmoid"

    @hands_on(DeltaNet.__init__, first=True)
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rank: int | None = None,
        lower: float | None = None,
        gate_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[DeltaNetOptions],
    ) -> None:
        self.rank, self.lower, self.gate_bias = rank, lower, gate_bias
        super().__init__(width, heads, device=device, dtype=dtype, **options)

    def make_gate(self, **placement: Any) -> nn.Module:
        rank = self.value_dim if self.rank is None else self.rank
        return LowRank(self.width, rank, self.values, bias=self.gate_bias, **placement)

    def make_parameters(self, **placement: Any) -> None:
        rank = self.value_dim if self.rank is None else self.rank
        heads, channels = self.value_heads, self.decay_channels()
        self.strength = InputLinear(self.width, heads, **placement)
        self.decay_projection = LowRank(self.width, rank, heads * channels, **placement)
        self.decay: MambaDecay | BoundedDecay
        if self.lower is None:
            self.decay = MambaDecay(heads, channels, **placement)
        else:
            self.decay = BoundedDecay(heads, channels, lower=self.lower, **placement)
        self.make_norm(**placement)

    def decay_channels(self) -> int:
        """The number of channels per head with a decay of their own."""
        return self.head_dim

    def channel_decay(self, x: Tensor) -> Tensor:
        """The log decay `[B, T, HV, channels]`."""
        decay: Tensor = self.decay(self.decay_projection(x).unflatten(-1, (self.value_heads, self.decay_channels())))
        return decay

    def beta_and_decay(self, x: Tensor) -> tuple[Tensor, Any]:
        return self.write_strength(self.strength(x)), self.channel_decay(x)

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        decay = self.decay_projection(x).unflatten(-1, (self.value_heads, self.head_dim))
        parameters = {"A_log": self.decay.A_log, "dt_bias": self.decay.dt_bias, "lower": self.lower}
        return {"strength": self.strength(x), "decay": decay, **parameters}


register(
    Mechanism(
        title="Kimi Delta Attention",
        paper="2510.26692",
        function=kda,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTHK",
        layer=KDA,
        preset=by_heads,
    )
)
