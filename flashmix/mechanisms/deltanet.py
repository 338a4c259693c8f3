"""DeltaNet: the delta rule without decay, and the base of the layers that build on it."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.decay import WriteStrength
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import head_size
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.checks import check_multiple
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.delta_net_step import delta_net_step
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.recurrence import delta_rule


@public
@engine_options
def deltanet(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Unpack[EngineOptions]) -> Result:
    """DeltaNet: each token replaces the value that the state holds under its key. The paper normalises keys (`flashmix.l2_norm`).

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T;  o_t = scale S_t^T q_t

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 4.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> deltanet(q, k / 4, v, torch.rand(1, 10, 4))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    return delta_rule(q, k, v, beta, **options)


class DeltaNetOptions(TypedDict, total=False):
    """The options of the layers that build on `DeltaNet`."""

    head_dim: int | None
    value_heads: int | None
    value_dim: int | None
    conv_width: int
    negative_eigenvalues: bool


class DeltaNet(Mixer[RecurrentCache]):
    """The delta rule without decay: each token replaces the value that the state holds under its key, by the fraction `beta`.

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
    steps = 1  # keys and values per token
    # Whether `step` computes the same as `mix`: false in a class with its own `recurrence` or without its own `step_inputs`.
    has_step = True

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
        self.make_parameters(device=device, dtype=dtype)

    def make_parameters(self, **placement: Any) -> None:
        """Makes the parameters of `beta_and_decay` and `normalise`, in which the family differs."""
        self.strength = nn.Linear(self.width, self.value_heads, bias=False, **placement)
        self.norm = RMSNorm(self.value_dim, **placement)

    def beta_and_decay(self, x: Tensor) -> tuple[Tensor, Any]:
        """`beta` `[B, T, HV]`, and the log decay or None."""
        return self.write_strength(self.strength(x)), None

    def normalise(self, o: Tensor, x: Tensor) -> Tensor:
        """The output `[B, T, HV, V]` of the recurrence, normalised per head, in some layers with an output gate."""
        return self.norm(o)

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        """The arguments of `delta_net_step` that stand for `beta_and_decay` and `normalise`, for one token `[B, D]` of each sequence."""
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
        o = carried(self.recurrence, x, q, k, v, cache=cache, packing=packing)
        if cache is not None:
            cache.recent = recent
        return self.output(self.normalise(o, x).flatten(2))

    def recurrence(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """The mechanism: output `[B, T, HV, V]` and last state, from the input, queries and keys of length 1, and values.

        `options` are its `initial_state`, `return_state` and `cu_seqlens`.
        """
        return delta_rule(q, k, v, *self.beta_and_decay(x), **options)


register(
    Mechanism(
        title="DeltaNet",
        paper="2406.06484",
        function=deltanet,
        call="q:BTHK k:BTHK v:BTHK beta:BTH",
        layer=DeltaNet,
        preset=by_heads,
    )
)
