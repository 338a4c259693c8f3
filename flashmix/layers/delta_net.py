"""Layers of the delta rule: DeltaNet, Gated DeltaNet and Kimi Delta Attention.

q, k, v -> short convolution, silu -> q, k of length 1 -> delta rule with decay and write strength
        -> RMS norm a head (gated) -> output projection
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layers.linear_attention import head_size
from flashmix.modules.decay import BoundedDecay, MambaDecay, WriteStrength
from flashmix.modules.mlp import LowRank
from flashmix.modules.norm import GatedRMSNorm, RMSNorm
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.checks import check_multiple
from flashmix.op.packing import Packing
from flashmix.ops.delta_net_step import delta_net_step
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.recurrence import delta_rule


class DeltaNet(Mixer[RecurrentCache]):
    """The delta rule without decay: a token replaces what the state holds for its key by its value, `beta` of the way.

    Args:
        width: channels of the input and output.
        heads: heads of queries and keys.
        head_dim: channels of a query and key; default `width / heads`.
        value_heads: heads of values, a multiple of `heads`; default `heads`.
        value_dim: channels of a value; default `head_dim`.
        conv_width: tokens that the short convolution sees.
        negative_eigenvalues: whether `beta` reaches to 2 instead of 1, so that the state can count.

    Source: Yang et al., arXiv:2406.06484, section 3.

    Example:
        >>> import torch
        >>> DeltaNet(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    norm: nn.Module
    steps = 1  # keys and values of a token

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_heads: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        self.value_heads = heads if value_heads is None else value_heads
        check_multiple("value_heads", self.value_heads, "heads", heads)
        self.value_dim = head_size(
            width, self.value_heads, self.head_dim if value_dim is None else value_dim, "value_dim"
        )
        self.keys, self.values = heads * self.head_dim, self.value_heads * self.value_dim
        channels = self.keys + self.steps * (self.keys + self.values)
        self.qkv = nn.Linear(width, channels, bias=False, device=device, dtype=dtype)
        self.convolution = ShortConvolution(channels, conv_width, device=device, dtype=dtype)
        self.write_strength = WriteStrength(negative_eigenvalues)
        self.output = nn.Linear(self.values, width, bias=False, device=device, dtype=dtype)
        self.make_gates(device, dtype)
        self.has_step = self._defines("recurrence") is DeltaNet and (
            self._defines("gates") is self._defines("step_inputs") is self._defines("normalise")
        )

    def _defines(self, method: str) -> type:
        """The class that a method of this layer comes from: one that changes the mechanism has no `delta_net_step`."""
        return next(owner for owner in type(self).__mro__ if method in vars(owner))

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """The parameters of `gates` and `normalise`, which differ within the family."""
        self.strength = nn.Linear(self.width, self.value_heads, bias=False, device=device, dtype=dtype)
        self.norm = RMSNorm(self.value_dim, device=device, dtype=dtype)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """`beta` `[B, T, HV]`, and the log decay or None."""
        return self.write_strength(self.strength(x)), None

    def normalise(self, o: Tensor, x: Tensor) -> Tensor:
        """The output `[B, T, HV, V]` of the recurrence, normalised a head (and gated by the input)."""
        return self.norm(o)

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        """What `delta_net_step` takes of `gates` and `normalise`, for one token `[B, D]` of each sequence."""
        return {"strength": self.strength(x)}

    def step(self, x: Tensor, cache: RecurrentCache) -> Tensor:
        """`mix` for one token of each sequence, which updates the cache in place."""
        cache.own()
        x, conv = x[:, 0], self.convolution
        y = delta_net_step(
            self.qkv(x),
            state=cache.state,
            conv_state=cache.recent,  # type: ignore[arg-type]
            conv_weight=conv.weight,
            conv_bias=conv.bias,
            heads=self.heads,
            negative_eigenvalues=self.write_strength.negative_eigenvalues,
            norm_weight=self.norm.weight,  # type: ignore[arg-type]
            eps=self.norm.eps,  # type: ignore[arg-type]
            **self.step_inputs(x),
        )
        return self.output(y.flatten(1))[:, None]

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        if cache is not None and self.has_step and cache.can_step(x, packing):
            return self.step(x, cache)
        q, k, v, recent = self.convolution.of_qkv(
            self.qkv(x),
            (self.keys, self.steps * self.keys, self.steps * self.values),
            initial_state=None if cache is None else cache.recent,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        q, k = (l2_norm(t.unflatten(-1, (-1, self.head_dim))) for t in (q, k))
        v = v.unflatten(-1, (self.steps * self.value_heads, self.value_dim))
        o, state = self.recurrence(x, q, k, v, None if cache is None else cache.state, cache is not None, packing)
        if cache is not None:
            cache.state, cache.recent = state, recent
        return self.output(self.normalise(o, x).flatten(2))

    def recurrence(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, return_state: bool, packing: Packing | None
    ) -> tuple[Tensor, Any]:
        """The mechanism: output `[B, T, HV, V]` and last state, from the input, queries and keys of length 1, and values."""
        beta, log_decay = self.gates(x)
        return delta_rule(q, k, v, beta, log_decay, initial_state=state, return_state=return_state, cu_seqlens=packing)


class GatedDeltaNet(DeltaNet):
    """The delta rule with a decay a head, `g = -exp(A_log) softplus(W x + dt_bias)`, and a silu gate on the output.

    Args: those of `DeltaNet`.

    Source: Yang et al., arXiv:2412.06464, section 3.4.

    Example:
        >>> import torch
        >>> GatedDeltaNet(32, heads=2, value_heads=4, value_dim=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.strength_and_decay = nn.Linear(self.width, 2 * self.value_heads, bias=False, device=device, dtype=dtype)
        self.decay = MambaDecay(self.value_heads, device=device, dtype=dtype)
        self.gate = nn.Linear(self.width, self.values, bias=False, device=device, dtype=dtype)
        self.norm = GatedRMSNorm(self.value_dim, device=device, dtype=dtype)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        strength, decay = self.strength_and_decay(x).chunk(2, dim=-1)
        return self.write_strength(strength), self.decay(decay)

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        strength, decay = self.strength_and_decay(x).chunk(2, dim=-1)
        gate = self.gate(x).unflatten(-1, (self.value_heads, self.value_dim))
        parameters = {"A_log": self.decay.A_log, "dt_bias": self.decay.dt_bias}
        return {"strength": strength, "decay": decay, "gate": gate, **parameters}

    def normalise(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o, self.gate(x).view_as(o))


class KDA(DeltaNet):
    """Kimi Delta Attention: the delta rule with a decay per channel; it and the output's sigmoid gate are low-rank.

    Args: those of `DeltaNet`, and
        rank: of the decay's and the gate's projections; default `value_dim`.
        lower: None for the decay `-exp(A_log) softplus(x + dt_bias)`, else the floor of `BoundedDecay`, in [-5, 0).

    Source: Kimi Linear, arXiv:2510.26692, section 4.

    Example:
        >>> import torch
        >>> KDA(32, heads=2, lower=-5.0)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_heads: int | None = None,
        value_dim: int | None = None,
        conv_width: int = 4,
        negative_eigenvalues: bool = False,
        rank: int | None = None,
        lower: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rank, self.lower = rank, lower
        super().__init__(
            width,
            heads,
            head_dim=head_dim,
            value_heads=value_heads,
            value_dim=value_dim,
            conv_width=conv_width,
            negative_eigenvalues=negative_eigenvalues,
            device=device,
            dtype=dtype,
        )

    def make_gates(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        rank = self.value_dim if self.rank is None else self.rank
        heads, channels = self.value_heads, self.decay_channels()
        self.strength = nn.Linear(self.width, heads, bias=False, device=device, dtype=dtype)
        self.decay_projection = LowRank(self.width, rank, heads * channels, device=device, dtype=dtype)
        self.decay: MambaDecay | BoundedDecay
        if self.lower is None:
            self.decay = MambaDecay(heads, channels, device=device, dtype=dtype)
        else:
            self.decay = BoundedDecay(heads, channels, lower=self.lower, device=device, dtype=dtype)
        self.gate = LowRank(self.width, rank, self.values, bias=True, device=device, dtype=dtype)
        self.norm = GatedRMSNorm(self.value_dim, activation="sigmoid", device=device, dtype=dtype)

    def decay_channels(self) -> int:
        """How many channels of a head decay on their own."""
        return self.head_dim

    def channel_decay(self, x: Tensor) -> Tensor:
        """The log decay `[B, T, HV, channels]`."""
        decay: Tensor = self.decay(self.decay_projection(x).unflatten(-1, (self.value_heads, self.decay_channels())))
        return decay

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.write_strength(self.strength(x)), self.channel_decay(x)

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        decay = self.decay_projection(x).unflatten(-1, (self.value_heads, self.head_dim))
        gate = self.gate(x).unflatten(-1, (self.value_heads, self.value_dim))
        parameters = {"A_log": self.decay.A_log, "dt_bias": self.decay.dt_bias, "lower": self.lower}
        return {"strength": self.strength(x), "decay": decay, "gate": gate, "gate_activation": "sigmoid", **parameters}

    def normalise(self, o: Tensor, x: Tensor) -> Tensor:
        return self.norm(o, self.gate(x).view_as(o))
