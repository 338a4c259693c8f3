"""Mamba, the selective state space: a diagonal state per channel, a call of `selective_scan`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from flashmix.layer.cache import RecurrentCache
from flashmix.layer.mixer import Mixer
from flashmix.mechanisms.common import Result, StateOptions, check_per_head, scan_options
from flashmix.mechanisms.registry import Mechanism, Options, Size, register
from flashmix.modules.decay import SelectiveDecay
from flashmix.modules.norm import RMSNorm
from flashmix.modules.projection import HeadLinears
from flashmix.modules.short_convolution import ShortConvolution
from flashmix.op.checks import FLOATING, check_dtype, check_like, check_multiple, check_range, check_shape, dims
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing, as_packing
from flashmix.op.public import public
from flashmix.ops.norm.op import rms_norm
from flashmix.ops.selective_scan import selective_scan
from flashmix.ops.selective_scan.step import selective_scan_step


@public
@scan_options
def mamba(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    **options: Unpack[StateOptions],
) -> Result:
    """Mamba, the selective state space: each channel has a diagonal state and a step size per token.

        h_t = e^{-e^{A_log} dt_t} h_{t-1} + dt_t x_t B_t;  y_t = h_t C_t + D x_t

    Args:
        x: inputs `[B, T, H, P]`; the paper's channels are `H P`, in blocks that share `B` and `C`.
        dt: step sizes, at least 0, after their softplus, like `x`, any floating dtype.
        A_log: logarithm of the decay rate, `[H, P, S]`, any floating dtype.
        B: input weights `[B, T, G, S]`; `H` is a multiple of the number of groups `G`, 1 in the paper.
        C: output weights, like `B`.
        D: skip weight `[H, P]`, or None.
        initial_state: `h` `[N, H, P, S]`, float32 (float64 for float64 inputs); default zeros.

    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3.2, algorithm 2.

    Example:
        >>> x, dt, B = torch.randn(1, 10, 4, 8), torch.rand(1, 10, 4, 8), torch.randn(1, 10, 1, 16)
        >>> y, state = mamba(x, dt, torch.zeros(4, 8, 16), B, B, return_state=True)
        >>> y.shape, state.shape
        (torch.Size([1, 10, 4, 8]), torch.Size([1, 4, 8, 16]))
    """
    batch, tokens, H, P = dims("x", x, "B T H P")
    S = dims("A_log", A_log, "H P S")[2]
    check_dtype("x", x, *FLOATING)
    check_per_head("A_log", A_log, "x", x, H, P, S)
    check_per_head("dt", dt, "x", x, batch, tokens, H, P)
    G = dims("B", B, "B T G S")[2]
    if G < 1 or H % G:
        raise ValueError(
            f"the number of heads of x must be a positive multiple of the number of groups of B = {G}, got {H}"
        )
    for name, t in (("B", B), ("C", C)):
        check_shape(name, t, batch, tokens, G, S)
        check_like(name, t, "x", x)
    if D is not None:
        check_per_head("D", D, "x", x, H, P)
    packing = as_packing(options.get("cu_seqlens"), batch, tokens, x.device)
    given: dict[str, Any] = {**options, "cu_seqlens": packing}
    state = options.get("initial_state")
    if state is not None:
        check_shape("initial_state", state, batch if packing is None else packing.count, H, P, S)
        check_dtype("initial_state", state, state_dtype(x.dtype))
        check_like("initial_state", state, "x", x, dtype=False)
        given["initial_state"] = state.flatten(1, 2)
    A = -A_log.to(state_dtype(x.dtype)).exp().flatten(0, 1)
    weight = None if D is None else D.flatten()
    y, last = selective_scan(x.flatten(2), dt.flatten(2), A, B, C, D=weight, **given)
    return y.unflatten(2, (H, P)), None if last is None else last.unflatten(1, (H, P))


class Mamba(Mixer[RecurrentCache]):
    """The Mamba block: a short convolution, a selective scan of each channel, a silu gate.

    Args:
        width: channels of the input and output.
        inner: channels of the scan; default `2 width`.
        state_dim: numbers of a channel's state.
        rank: of the projection to the step sizes; default `width / 16`, rounded up.
        heads: into which the channels are split for step sizes, `B` and `C` of their own, each of its own channels (Zamba); 1 in the paper.
        conv_width: tokens that the short convolution sees.
        conv_bias: whether that convolution has a bias.
        norms: whether step sizes, `B` and `C` are normalised (Jamba, Falcon-Mamba).
        norm_weights: whether these norms have weights (Falcon-Mamba's have none).
        eps: of these norms.

    Source: Gu and Dao, arXiv:2312.00752, section 3.4.

    Example:
        >>> import torch
        >>> Mamba(32, state_dim=8)(torch.randn(2, 5, 32)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        width: int,
        *,
        inner: int | None = None,
        state_dim: int = 16,
        rank: int | None = None,
        heads: int = 1,
        conv_width: int = 4,
        conv_bias: bool = True,
        norms: bool = False,
        norm_weights: bool = True,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width)
        check_range("state_dim", state_dim, 1, 256)
        placement: dict[str, Any] = {"device": device, "dtype": dtype}
        inner = 2 * width if inner is None else inner
        rank = -(-width // 16) if rank is None else rank
        self.inner, self.state_dim, self.parts = inner, state_dim, [rank, state_dim, state_dim]
        self.input = nn.Linear(width, 2 * inner, bias=False, **placement)
        self.convolution = ShortConvolution(inner, conv_width, bias=conv_bias, **placement)
        check_range("heads", heads, 1, inner)
        check_multiple("inner", inner, "heads", heads)
        self.heads, share = heads, inner // heads
        if heads == 1:
            self.selection: nn.Module = nn.Linear(inner, sum(self.parts), bias=False, **placement)
            self.step: nn.Module = nn.Linear(rank, inner, bias=False, **placement)
        else:
            self.selection = HeadLinears(heads, share, sum(self.parts), **placement)
            self.step = HeadLinears(heads, rank, share, **placement)
        self.eps = eps if norms else None
        weighted = norms and norm_weights
        self.norms = nn.ModuleList(RMSNorm(part, eps, **placement) for part in self.parts) if weighted else None
        self.decay = SelectiveDecay(inner, state_dim, **placement)
        self.skip = nn.Parameter(torch.ones(inner, **placement))
        self.output = nn.Linear(inner, width, bias=False, **placement)

    def mix(self, x: Tensor, packing: Packing | None, cache: RecurrentCache | None) -> Tensor:
        u, z = self.input(x).chunk(2, dim=-1)
        u, recent = self.convolution(
            u, initial_state=None if cache is None else cache.recent, return_state=cache is not None, cu_seqlens=packing
        )
        heads = u if self.heads == 1 else u.unflatten(-1, (self.heads, -1))
        dt, B, C = self.selection(heads).split(self.parts, dim=-1)
        if self.norms is not None:
            dt, B, C = (norm(part) for norm, part in zip(self.norms, (dt, B, C), strict=True))
        elif self.eps is not None:
            dt, B, C = (rms_norm(part, eps=self.eps) for part in (dt, B, C))
        dt, (A, dt_bias) = self.step(dt).flatten(2), self.decay()
        options: dict[str, Any] = {"D": self.skip, "z": z, "dt_bias": dt_bias, "softplus": True}
        if cache is None:
            y, _ = selective_scan(u, dt, A, B, C, cu_seqlens=packing, **options)
        elif cache.can_step(u, packing):
            cache.own()
            y = selective_scan_step(u, dt, A, B, C, cache.state, **options)
        else:
            y, cache.state = selective_scan(
                u, dt, A, B, C, initial_state=cache.state, return_state=True, cu_seqlens=packing, **options
            )
        if cache is not None:
            cache.recent = recent
        return self.output(y)


def by_width(size: Size) -> list[Options]:
    """The paper's sizes: 16 numbers a channel."""
    return size.depth * [{"state_dim": 16}]


register(
    Mechanism(
        title="Mamba",
        paper="2312.00752",
        function=mamba,
        call="x:BTHK dt:BTHK A_log:HKK B:BTHK C:BTHK",
        wide=("dt", "A_log"),
        layer=Mamba,
        preset=by_width,
    )
)
