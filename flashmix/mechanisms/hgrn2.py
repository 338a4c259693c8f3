"""HGRN-2: gated linear attention whose key is one minus the forget gate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried, convolved
from flashmix.mechanisms.common import Result, StateOptions, check_same_heads, complement, engine_options, unrounded
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import ForgetGate
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.modules.short_convolution import maybe_convolution
from flashmix.op.checks import dims
from flashmix.op.dtypes import at_least_float32, state_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
@unrounded("q", "v")
def hgrn2(q: Tensor, log_forget: Tensor, v: Tensor, *, scale: float = 1.0, **options: Unpack[StateOptions]) -> Result:
    """HGRN-2: gated linear attention whose key is one minus the forget gate.

        S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t^T,  f_t = e^{log_forget_t};  o_t = scale S_t^T q_t

    Args:
        log_forget: `log f`, at most 0, `[B, T, H, K]`.

    Source: Qin et al. 2024 (arXiv 2404.07904), equation 6.

    Example:
        >>> q, v = torch.randn(2, 1, 10, 4, 16)
        >>> hgrn2(q, -torch.rand(1, 10, 4, 16), v)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    dims("log_forget", log_forget, "B T H K")
    check_same_heads(q, "q", v)
    state, names = options.get("initial_state"), {"log_decay": "log_forget"}
    check_operands(q, v, {}, None, log_forget, state, options.get("cu_seqlens"), names)
    k = complement(log_forget.to(state_dtype(q.dtype)))
    return linear_attention(q, k.to(q.dtype), v, log_forget, scale=scale, **options)


class HGRN2(Mixer[RecurrentCache]):
    """HGRN-2: the key is one minus the forget gate, `1 - f`.

    Args:
        width: channels of the input and output.
        heads: number of heads.
        head_dim: channels of a head, of keys and values; default `width / heads`.
        lower: the smallest value of the forget gate, in [0, 1).
        layers: None, or how many HGRN-2 layers the model has: the smallest values are then learned per channel, `lower_i` the sum of
            `softmax(lower_bounds)` over the layers from 1 to `i`. The first layer holds `lower_bounds` `[layers, heads * head_dim]`.
        layer: place of this layer among them, from 0; the others read what the first holds, passed as `first_values`.
        conv_width: tokens that a short convolution of queries, gates and values sees, without activation; 0: there is none.
        conv_bias: whether it has a bias.
        eps: of the norm of the output.

    Source: Qin et al., arXiv:2404.07904, section 3.

    Example:
        >>> import torch
        >>> HGRN2(32, heads=2, lower=0.5)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    shares = "layer"
    lower_bounds: nn.Parameter | None

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        lower: float = 0.0,
        layers: int | None = None,
        layer: int = 0,
        conv_width: int = 0,
        conv_bias: bool = False,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        self.heads, self.head_dim = heads, head_size(width, heads, head_dim)
        head, inner = (heads, self.head_dim), heads * self.head_dim
        self.qfv = HeadProjection(width, q=head, f=head, v=head, device=device, dtype=dtype)
        self.convolution = maybe_convolution(
            3 * inner, conv_width, activation=None, bias=conv_bias, device=device, dtype=dtype
        )
        self.log_forget = ForgetGate(lower)
        self.norm = RMSNorm(inner, eps, device=device, dtype=dtype)
        self.output = nn.Linear(inner, width, bias=False, device=device, dtype=dtype)
        if not 0 <= layer < (layers or 1):
            raise ValueError(f"layer must be between 0 and layers - 1 = {(layers or 1) - 1}, got {layer}")
        self.layer, self.layers = layer, layers
        holds = layers is not None and layer == 0
        bounds = nn.Parameter(torch.zeros(layers or 1, inner, device=device, dtype=dtype)) if holds else None
        self.register_parameter("lower_bounds", bounds)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        cache: RecurrentCache | None = None,
        first_values: Tensor | None = None,
        return_values: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Mixes the tokens of each sequence; see `Mixer.forward`.

        Args:
            x, cu_seqlens, attention_mask, cache: as in `Mixer.forward`.
            first_values: the `lower_bounds` of the model's first HGRN-2 layer; needed where `layer` is above 0.
            return_values: also return these, which later layers take as `first_values`; without `layers` nothing is in them.

        Returns:
            `[B, T, width]`, with `return_values` the pair of it and `lower_bounds`.
        """
        bounds = first_values if self.lower_bounds is None else self.lower_bounds
        if self.layer and bounds is None:
            raise ValueError("first_values must be given to a layer that reads the first one's bounds, got None")
        x, packing, padding = self.prepare(x, cu_seqlens, attention_mask, cache)
        y = self.mix_bounded(x, packing, cache, bounds if self.layer else None)
        y = y if padding is None else padding.restore(y)
        return (y, x.new_empty(0) if bounds is None else bounds) if return_values else y

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        return self.mix_bounded(x, packing, cache, None)

    def mix_bounded(
        self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None, bounds: Tensor | None
    ) -> Tensor:
        """The layer on checked inputs without padding, with the learned bounds of all layers or none."""
        q, f, v = convolved(self.convolution, self.qfv(x), packing, cache)
        lower = None
        if bounds is not None:
            shares = at_least_float32(bounds).softmax(0)
            lower = shares[1 : self.layer + 1].sum(0).unflatten(-1, (self.heads, self.head_dim))
        o = carried(hgrn2, silu(q), self.log_forget(f, lower), v, cache=cache, packing=packing)
        return self.output(self.norm(o.flatten(2)))


def by_depth(size: Size) -> list[Options]:
    """The lower bound of the forget gate grows from layer to layer, as the paper's learned one does at initialisation."""
    return [{"heads": size.heads, "lower": index / size.depth} for index in range(size.depth)]


register(
    Mechanism(
        title="HGRN-2",
        paper="2404.07904",
        function=hgrn2,
        call="q:BTHK log_forget:BTHK v:BTHK",
        wide=("log_forget",),
        layer=HGRN2,
        preset=by_depth,
    )
)
