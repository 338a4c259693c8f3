"""RG-LRU, the real-gated linear recurrent unit of Griffin and RecurrentGemma, and the block around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried, first_tokens
from flashmix.mechanisms.common import Result, StateOptions, check_elementwise, check_per_head, scan_options, unrounded
from flashmix.mechanisms.registry import Mechanism, by_heads, register
from flashmix.modules.decay import DecayWeight
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.checks import check_dtype, check_like, check_multiple, check_shape
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.op.softplus import invariant_softplus
from flashmix.ops.scan.op import scan

STRENGTH = 8.0  # of the decay, c in the paper


@public
@scan_options
@unrounded("x")
def rg_lru(
    x: Tensor,
    recurrence_gate: Tensor,
    input_gate: Tensor,
    decay: Tensor,
    *,
    reset: Tensor | None = None,
    **options: Unpack[StateOptions],
) -> Result:
    """RG-LRU: a scan whose decay is gated, and whose gated input is scaled so that the state keeps its size.

        a_t = e^{-8 r_t softplus(Lambda)};  h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t;  where reset: h_t = i_t x_t

    The derivative of the square root is bounded by 1000 in the gradient, as in the released models.

    Args:
        x: inputs `[B, T, D]` or `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        recurrence_gate: `r` in [0, 1], after its sigmoid, of the shape of `x`, any floating dtype.
        input_gate: `i`, like `recurrence_gate`.
        decay: `Lambda` `[D]` or `[H, D]`, any floating dtype.
        reset: `[B, T]` bool, tokens that forget the past and whose input is not scaled; RecurrentGemma's are the first of each sequence.
        initial_state: `h` `[N, D]` or `[N, H, D]`, float32 (float64 for float64 inputs); default zeros.

    Source: De et al. 2024 (arXiv 2402.19427), equations 3 to 6 and appendix A.

    Example:
        >>> import torch
        >>> r, i = torch.rand(2, 1, 10, 32)
        >>> h, state = rg_lru(torch.randn(1, 10, 32), r, i, torch.zeros(32), return_state=True)
        >>> h.shape, state.shape
        (torch.Size([1, 10, 32]), torch.Size([1, 32]))
    """
    options["cu_seqlens"] = check_elementwise(options, x=x, recurrence_gate=recurrence_gate, input_gate=input_gate)
    check_per_head("decay", decay, "x", x, *x.shape[2:])
    if reset is not None:
        check_shape("reset", reset, *x.shape[:2])
        check_dtype("reset", reset, torch.bool)
        check_like("reset", reset, "x", x, dtype=False)
    wide = state_dtype(x.dtype)
    log_decay = -STRENGTH * invariant_softplus(decay.to(wide)) * recurrence_gate.to(wide)
    if reset is not None:
        log_decay = log_decay.masked_fill(reset.view(*reset.shape, *(1,) * (x.dim() - 2)), -torch.inf)
    return scan((input_gate * x).to(x.dtype), log_decay, coupling="root", **options)


class RGLRU(Mixer[RecurrentCache]):
    """The recurrent block of Griffin and RecurrentGemma: a short convolution and RG-LRU beside a gelu gate.

    The gates of RG-LRU are block-diagonal maps of its input, one block per head.

    Args:
        width: channels of the input and output.
        heads: number of blocks.
        inner: channels of the recurrence; default `width`.
        conv_width: tokens that the short convolution sees.

    Source: De et al., arXiv:2402.19427, section 2 and figure 2; the reset at the first token: Botev et al., arXiv:2404.07839.

    Example:
        >>> import torch
        >>> RGLRU(32, heads=2)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        inner: int | None = None,
        conv_width: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        self.inner = width if inner is None else inner
        check_multiple("inner", self.inner, "heads", heads)
        self.heads, block = heads, self.inner // heads
        self.input = nn.Linear(width, 2 * self.inner, **placement)
        self.convolution = ShortConvolution(self.inner, conv_width, activation=None, bias=True, **placement)
        self.recurrence_weight = nn.Parameter(torch.empty(heads, block, block, **placement))
        self.recurrence_bias = nn.Parameter(torch.empty(heads, block, **placement))
        self.input_weight = nn.Parameter(torch.empty(heads, block, block, **placement))
        self.input_bias = nn.Parameter(torch.empty(heads, block, **placement))
        self.decay = DecayWeight(heads, block, **placement)
        self.output = nn.Linear(self.inner, width, **placement)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Gates of normal weights; `a` with an open gate uniform between 0.9 and 0.999 (section 2.4)."""
        for weight in (self.recurrence_weight, self.input_weight):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        nn.init.zeros_(self.recurrence_bias)
        nn.init.zeros_(self.input_bias)
        a = torch.empty_like(self.decay.weight, dtype=torch.float32).uniform_(0.9, 0.999)
        self.decay.weight.copy_(torch.expm1(-a.log() / STRENGTH).log())  # the inverse of softplus

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        gate, u = self.input(x).chunk(2, dim=-1)
        u, recent = self.convolution(
            u, initial_state=None if cache is None else cache.recent, return_state=cache is not None, cu_seqlens=packing
        )
        u = u.unflatten(-1, (self.heads, -1))
        r, i = (
            torch.sigmoid(torch.einsum("bthi,hij->bthj", u, weight.to(u.dtype)) + bias)
            for weight, bias in ((self.recurrence_weight, self.recurrence_bias), (self.input_weight, self.input_bias))
        )
        reset = first_tokens(x, packing, cache)
        h = carried(rg_lru, u, r, i, self.decay(), reset=reset, cache=cache, packing=packing)
        if cache is not None:
            cache.recent = recent
        return self.output(gelu(gate, approximate="tanh") * h.flatten(2))


register(
    Mechanism(
        title="RG-LRU",
        paper="2402.19427",
        function=rg_lru,
        call="x:BTHK recurrence_gate:BTHK input_gate:BTHK decay:HK",
        positive=("recurrence_gate", "input_gate"),
        wide=("recurrence_gate", "input_gate", "decay"),
        layer=RGLRU,
        preset=by_heads,
    )
)
