"""Mamba-2, the state space dual: a decay and a step size per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.layer.recurrent_state import carried_linear_attention
from flashmix.mechanisms.common import Result, StateOptions, check_per_head, engine_options, unrounded
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import MambaDecay
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadProjection, head_size
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.checks import check_multiple, check_pair, check_range, check_shape, check_tensor, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.op.public import public
from flashmix.ops.gated_product.op import swiglu
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands


@public
@engine_options
@unrounded("x", "B", "C")
def mamba2(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    A: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    scale: float = 1.0,
    **options: Unpack[StateOptions],
) -> Result:
    """Mamba-2, the state space dual: a decay and a step size per token.

        S_t = e^{-e^{A_log} dt_t} S_{t-1} + B_t (dt_t x_t)^T;  y_t = (scale S_t^T C_t + D x_t) silu(z_t)

    Args:
        x: inputs `[B, T, H, P]`.
        dt: step sizes, positive, `[B, T, H]`; with `softplus` the logits of `softplus(dt + dt_bias)`.
        A_log: logarithm of the decay rate, `[H]`; None where `A` is given.
        B: keys `[B, T, G, N]`; `H` is a multiple of the number of groups `G`.
        C: queries `[B, T, G, N]`.
        A: `-e^{A_log}` `[H]`, at most 0, in its place.
        D: skip weight `[H]` or `[H, P]`, or None.
        z: gate `[B, T, H, P]`, or None.
        dt_bias: added to `dt`, `[H]`; needs `softplus`.
        softplus: whether `dt` are logits.
        dt_limit: the least and the largest step size, or None.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7.

    Example:
        >>> x, dt, keys = torch.randn(1, 10, 4, 16), torch.rand(1, 10, 4), torch.randn(1, 10, 1, 32)
        >>> mamba2(x, dt, torch.zeros(4), keys, keys)[0].shape
        torch.Size([1, 10, 4, 16])
    """
    H, P = dims("x", x, "B T H P")[2:]
    if (A_log is None) == (A is None):
        raise ValueError(f"A must be given in place of A_log, got {'neither' if A is None else 'both'}")
    rate, name = (A_log, "A_log") if A is None else (A, "A")
    assert rate is not None
    check_shape(name, rate, H)
    names = {"q": "C", "k": "B", "v": "x", "beta": "dt", "log_decay": name}
    check_operands(C, x, {"k": B}, dt, rate, options.get("initial_state"), options.get("cu_seqlens"), names)
    if D is not None:
        check_tensor("D", D)
        check_per_head("D", D, "x", x, *((H, P) if D.dim() == 2 else (H,)))
    if z is not None:
        check_per_head("z", z, "x", x, *x.shape)
    wide = state_dtype(x.dtype)
    dt = _step_sizes(dt, dt_bias, softplus, dt_limit, wide)
    decay = (-rate.to(wide).exp() if A is None else rate.to(wide)) * dt.to(wide)
    v = (x * dt.unsqueeze(-1)).to(x.dtype)
    y, state = linear_attention(C, B, v, decay, scale=scale, **options)
    dtype = y.dtype
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * x
    return (y if z is None else y * F.silu(z.to(wide))).to(dtype), state


def _step_sizes(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None, wide: torch.dtype
) -> Tensor:
    """The step sizes: `dt` itself, or in float32 (float64) its softplus, within the limits."""
    if bias is not None:
        if not softplus:
            raise ValueError("dt_bias must be given with softplus=True, got softplus=False")
        check_per_head("dt_bias", bias, "dt", dt, dt.shape[2])
        dt = dt.to(wide) + bias.to(wide)
    dt = F.softplus(dt.to(wide)) if softplus else dt
    return dt if limit is None else dt.clamp(*_checked_limit(limit))


def _checked_limit(limit: object) -> tuple[float, float]:
    """Raises unless `dt_limit` is a pair of numbers from 0 up, in ascending order; the second one may be infinite."""
    low, high = check_pair("dt_limit", limit, "numbers")
    for bound in (low, high):
        if not isinstance(bound, (int, float)) or isinstance(bound, bool):
            raise TypeError(f"dt_limit must be a pair of numbers, got {limit}")
        check_range("dt_limit", bound, 0.0, float("inf"))
    if low > high:
        raise ValueError(f"dt_limit must be in ascending order, got {limit}")
    return low, high


class Mamba2(Mixer[RecurrentCache]):
    """The Mamba-2 block: `S = e^{A dt} S + B (dt x)^T`, `y = S^T C + D x`, gated and normalised.

    Args:
        width: channels of the input and output.
        heads: number of heads; the inner width is `heads * head_dim`.
        head_dim: channels of a head's `x`; default `2 width / heads`.
        state_dim: channels of `B` and `C`, the N of the paper.
        groups: heads of `B` and `C`; each serves `heads / groups` heads of `x`.
        conv_width: tokens that the short convolution over `x, B, C` sees.
        conv_bias: whether that convolution has a bias.
        norm_groups: blocks of the inner channels that are normalised each on its own; default `groups`.
        eps: of that norm.

    Source: Dao and Gu, arXiv:2405.21060, section 7.1.

    Example:
        >>> import torch
        >>> Mamba2(32, heads=4, state_dim=16)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_dim: int | None = None,
        state_dim: int = 128,
        groups: int = 1,
        conv_width: int = 4,
        conv_bias: bool = True,
        norm_groups: int | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_multiple("heads", heads, "groups", groups)
        check_range("state_dim", state_dim, 1, 256)
        self.heads, self.head_dim = heads, head_size(2 * width, heads, head_dim)
        self.state_dim, self.groups = state_dim, groups
        inner, shared = heads * self.head_dim, groups * state_dim
        self.inner_sizes = [inner, shared, shared]
        self.input = HeadProjection(
            width, xbc=(inner + 2 * shared,), gate=(inner,), step=(heads,), device=device, dtype=dtype
        )
        self.convolution = ShortConvolution(inner + 2 * shared, conv_width, bias=conv_bias, device=device, dtype=dtype)
        self.decay = MambaDecay(heads, device=device, dtype=dtype)
        self.skip = nn.Parameter(torch.ones(heads, device=device, dtype=dtype))
        norm_groups = groups if norm_groups is None else norm_groups
        check_multiple("heads * head_dim", inner, "norm_groups", norm_groups)
        self.norm = RMSNorm(inner, eps, groups=norm_groups, device=device, dtype=dtype)
        self.output = nn.Linear(inner, width, bias=False, device=device, dtype=dtype)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        xbc, gate, step = self.input(x)
        xbc, recent = self.convolution(
            xbc,
            initial_state=None if cache is None else cache.recent,
            return_state=cache is not None,
            cu_seqlens=packing,
        )
        values, B, C = xbc.split(self.inner_sizes, dim=-1)
        values = values.unflatten(-1, (self.heads, self.head_dim))
        step = self.decay.step_size(step)
        C, B = (part.unflatten(-1, (self.groups, self.state_dim)) for part in (C, B))
        v, log_decay = values * step.to(values.dtype)[..., None], step * self.decay.rate()
        o = self.recurrence(x, C, B, v, log_decay, cache=cache, packing=packing)
        if cache is not None:
            cache.recent = recent
        o = (o + values * self.skip.to(values.dtype)[:, None]).flatten(2)
        return self.output(self.norm(swiglu(gate, o)))

    def recurrence(self, x: Tensor, C: Tensor, B: Tensor, v: Tensor, log_decay: Tensor, **memory: Any) -> Tensor:
        """What the queries read; `memory` is the cache and the packing."""
        return carried_linear_attention(C, B, v, log_decay=log_decay, scale=1.0, **memory)


def two_by_width(size: Size) -> list[Options]:
    """Twice as many heads as attention would have, and a state of twice their channels."""
    return size.depth * [{"heads": 2 * size.heads, "state_dim": 2 * size.head_dim}]


register(
    Mechanism(
        title="Mamba-2",
        paper="2405.21060",
        function=mamba2,
        call="x:BTHK dt:BTH A_log:H B:BTHK C:BTHK",
        wide=("dt", "A_log"),
        layer=Mamba2,
        preset=two_by_width,
    )
)
