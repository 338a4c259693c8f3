"""DeltaNet: the delta rule without decay, and the base of the layers that build on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, relu, silu
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried
from flashmix.mechanisms.common import EngineOptions, Result, engine_options
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.decay import WriteStrength
from flashmix.modules.input_linear import InputLinear, as_one_node
from flashmix.modules.norm import GatedRMSNorm, RMSNorm, output_norm
from flashmix.modules.projection import head_size
from flashmix.modules.short_convolution import maybe_convolution
from flashmix.op.checks import check_choice, check_multiple
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.op.recompute import recomputed
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


# Activations of queries and keys other than silu, which the convolution has in itself.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": relu,
    "elu": lambda x: elu(x) + 1,
    "identity": lambda x: x,
}


class DeltaNetOptions(TypedDict, total=False):
    """The options of the layers that build on `DeltaNet`."""

    head_dim: int | None
    value_heads: int | None
    value_dim: int | None
    conv_width: int
    conv_bias: bool
    qk_activation: str
    qk_norm: str
    output_gate: str | None
    negative_eigenvalues: bool
    eps: float


class DeltaNet(Mixer[RecurrentCache]):
    """The delta rule without decay: each token replaces the value that the state holds under its key, by the fraction `beta`.

    Args:
        width: channels of the input and output.
        heads: heads of queries and keys.
        head_dim: channels of a query and key; default `width / heads`.
        value_heads: heads of values, a multiple of `heads`; default `heads`.
        value_dim: channels of a value; default `head_dim`.
        conv_width: tokens that the short convolution sees; 0: none, only its silu.
        conv_bias: whether the short convolution has a bias.
        qk_activation: of queries and keys, "silu", "relu", "elu" (plus 1) or "identity"; values have silu.
        qk_norm: of queries and keys, "l2" (divided by their length) or "sum" (by their sum).
        output_gate: activation of the gate on the output, "silu" or "sigmoid", or "none"; None: the class's own.
        negative_eigenvalues: whether `beta` reaches to 2 instead of 1, so that the state can count.
        eps: of the norm of the output.

    Source: Yang et al., arXiv:2406.06484, section 3.

    Example:
        >>> import torch
        >>> DeltaNet(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    norm: RMSNorm | GatedRMSNorm
    gate: nn.Module | None
    own_gate = "none"  # the activation of the output gate where the option does not say
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
        conv_bias: bool = False,
        qk_activation: str = "silu",
        qk_norm: str = "l2",
        output_gate: str | None = None,
        negative_eigenvalues: bool = False,
        eps: float = 1e-6,
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
        self.qkv = InputLinear(width, channels, device=device, dtype=dtype)
        check_choice("qk_activation", qk_activation, "silu", *ACTIVATIONS)
        check_choice("qk_norm", qk_norm, "l2", "sum")
        self.qk_activation, self.qk_norm = qk_activation, qk_norm
        activation = "silu" if qk_activation == "silu" else None
        self.convolution = maybe_convolution(
            channels, conv_width, activation=activation, bias=conv_bias, device=device, dtype=dtype
        )
        self.output_gate = self.own_gate if output_gate is None else output_gate
        check_choice("output_gate", self.output_gate, "silu", "sigmoid", "none")
        self.eps = eps
        self.write_strength = WriteStrength(negative_eigenvalues)
        self.output = nn.Linear(self.values, width, bias=False, device=device, dtype=dtype)
        self.make_parameters(device=device, dtype=dtype)

    def make_parameters(self, **placement: Any) -> None:
        """Makes the parameters of `beta_and_decay`, in which the family differs, and last those of `normalise`."""
        self.strength = InputLinear(self.width, self.value_heads, **placement)
        self.make_norm(**placement)

    def make_norm(self, **placement: Any) -> None:
        """Makes the parameters of `normalise`."""
        self.gate = None if self.output_gate == "none" else self.make_gate(**placement)
        self.norm = output_norm(self.value_dim, self.eps, self.output_gate, **placement)

    def make_gate(self, **placement: Any) -> nn.Module:
        """The projection of the output gate."""
        return InputLinear(self.width, self.values, **placement)

    def beta_and_decay(self, x: Tensor) -> tuple[Tensor, Any]:
        """`beta` `[B, T, HV]`, and the log decay or None."""
        return self.write_strength(self.strength(x)), None

    def normalise(self, o: Tensor, x: Tensor) -> Tensor:
        """The output `[B, T, HV, V]` of the recurrence, normalised per head, with the output gate if there is one."""
        return self.norm(o) if self.gate is None else self.norm(o, self.gate(x).view_as(o))

    def step_inputs(self, x: Tensor) -> dict[str, Any]:
        """The arguments of `delta_net_step` that stand for `beta_and_decay`, for one token `[B, D]` of each sequence."""
        return {"strength": self.strength(x)}

    def step(self, x: Tensor, cache: RecurrentCache) -> Tensor:
        """`mix` for one token of each sequence, which updates the cache in place."""
        cache.own()
        x, conv = x[:, 0], self.convolution
        assert conv is not None
        gate: dict[str, Any] = {}
        if self.gate is not None:
            gate["gate"] = self.gate(x).unflatten(-1, (self.value_heads, self.value_dim))
            gate["gate_activation"] = self.output_gate
        y = delta_net_step(
            self.qkv(x),
            state=cache.state,
            conv_state=cache.recent,  # type: ignore[arg-type]
            conv_weight=conv.weight,
            conv_bias=conv.bias,
            heads=self.heads,
            negative_eigenvalues=self.write_strength.negative_eigenvalues,
            norm_weight=self.norm.weight,
            eps=self.eps,
            **gate,
            **self.step_inputs(x),
        )
        return self.output(y.flatten(1))[:, None]

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        plain = self.convolution is not None and self.qk_activation == "silu" and self.qk_norm == "l2"
        if cache is not None and self.has_step and plain and cache.can_step(x, packing):
            return self.step(x, cache)
        with as_one_node(x, self):
            q, k, v, recent = self.queries_keys_values(x, packing, cache)
            o = carried(self.recurrence, x, q, k, v, cache=cache, packing=packing)
            if cache is not None:
                cache.recent = recent
            o = self.normalise(o, x)
        return self.output(o.flatten(2))

    def queries_keys_values(
        self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Normalised queries and keys, and values, each by heads, and the last inputs of the convolution."""
        sizes, recent = (self.keys, self.steps * self.keys, self.steps * self.values), None
        unit = 0
        if self.convolution is None:
            q, k, v = self.qkv(x).split(sizes, dim=-1)
        else:
            unit = self.unit_channels() if self.convolution.activation is not None else 0
            q, k, v, recent = self.convolution.of_qkv(
                self.qkv(x),
                sizes,
                unit=unit,
                initial_state=None if cache is None else cache.recent,
                return_state=cache is not None,
                cu_seqlens=packing,
            )
        if self.convolution is None or self.convolution.activation is None:
            activation = ACTIVATIONS.get(self.qk_activation, silu)
            q, k, v = activation(q), activation(k), silu(v)
        q, k = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k))
        if not unit:
            q, k = self.unit(q), self.unit(k)
        return q, k, v.unflatten(-1, (self.steps * self.value_heads, self.value_dim)), recent

    def unit_channels(self) -> int:
        """The size of the heads whose queries and keys the convolution divides by their length, or 0: `unit` normalises them."""
        return self.head_dim if self.qk_norm == "l2" else 0

    def unit(self, x: Tensor) -> Tensor:
        """Queries or keys as `qk_norm` normalises them."""
        return recomputed("convolutions", l2_norm, x) if self.qk_norm == "l2" else x / x.sum(-1, keepdim=True)

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
