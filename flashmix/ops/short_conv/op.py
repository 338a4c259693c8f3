"""Short causal depthwise convolution over time: each channel mixes its last few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix.op.checks import check_choice, check_floating, check_like, check_shape, dims
from flashmix.op.choose import choose
from flashmix.op.dtypes import compute_dtype
from flashmix.op.packing import Packing, as_packing
from flashmix.op.rowwise import Operator, differentiable_gradients, portable, triton, wants_gradient
from flashmix.ops.gated_product.portable import ACTIVATIONS

KERNEL_WIDTH = 8  # the kernels hold that many inputs of a channel in registers


def kernel_width_refused(weight: Tensor | None) -> str | None:
    """Why the kernels cannot take the width of `weight`, or None."""
    if weight is not None and weight.shape[1] > KERNEL_WIDTH:
        return f"its kernels take widths up to {KERNEL_WIDTH}, got {weight.shape[1]}"
    return None


IMPLEMENTATIONS = (
    triton("flashmix.ops.short_conv.triton_gpu", lambda tensors: kernel_width_refused(tensors[1])),
    portable(__name__),
)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Convolves each channel with its own W weights over the tokens so far.

        y_t = act(sum_{i < W} weight[:, W-1-i] * x_{t-i} + bias) + residual_t
        x_{-1}, x_{-2}, ... from the state, newest last

    The backward keeps the inputs and nothing else.

    Args:
        x: `[B, T, D]`, floating.
        weight: `[D, W]`, floating; the last column weighs the token itself.
        bias: `[D]`, floating, or None.
        activation: "silu" or another of `gated`, or None.
        residual: like `x`, added to the output before it is rounded; None: nothing. It is `x` itself in Canon layers.
        initial_state: `[N, W - 1, D]` in the dtype of `x`, the inputs before the first token, oldest first; None:
            zeros.
        return_state: also return the last W - 1 inputs, the `initial_state` of what follows.
        cu_seqlens: `[N + 1]` or `Packing`, with `B == 1`: nothing passes from one sequence into the next.
        impl: "auto" or the name of an implementation.

    Returns:
        `(y, state)`: `y` like `x`, and the state `[N, W - 1, D]` or None, N = B or the number of packed sequences.
        Computed in float32 (float64 if any input is).

    Raises:
        TypeError: an input is not a floating tensor, or the state's dtype is not that of `x`.
        ValueError: shapes or devices differ, `cu_seqlens` does not fit, `activation` or `impl` is unknown.

    Source:
        The convolution of Mamba (2312.00752), section 3.4. With a residual: Allen-Zhu, "Physics of language models:
        part 4.1" (Canon layers).

    Example:
        >>> import torch
        >>> x = torch.arange(4.0).view(1, 4, 1)
        >>> y, state = short_conv(x, torch.ones(1, 3), activation=None, return_state=True)
        >>> y.flatten().tolist(), state.flatten().tolist()
        ([0.0, 1.0, 3.0, 6.0], [2.0, 3.0])
    """
    batch, tokens, channels = dims("x", x, "B T D")
    check_floating("x", x)
    _, width = dims("weight", weight, "D W")
    if width < 1:
        raise ValueError(f"weight must have shape [{channels}, W] with W >= 1, got [{weight.shape[0]}, 0]")
    packing = as_packing(cu_seqlens, batch, tokens, x.device)
    count = batch if packing is None else packing.count
    expected = {"weight": (channels, width), "bias": (channels,), "initial_state": (count, width - 1, channels)}
    for (name, shape), value in zip(expected.items(), (weight, bias, initial_state), strict=True):
        if value is not None:
            check_shape(name, value, *shape)
            check_floating(name, value)
            check_like(name, value, "x", x, dtype=name == "initial_state")
    if residual is not None:
        check_shape("residual", residual, *x.shape)
        check_like("residual", residual, "x", x)
    check_choice("activation", activation, None, *ACTIVATIONS)
    chosen = choose("short_conv", IMPLEMENTATIONS, (x, weight, bias, initial_state), impl)
    if chosen.name == "triton":
        boundaries = (None, None) if packing is None else (packing.sequence, packing.cu_seqlens)
        options = (activation or "", return_state)
        added = None if residual is None else residual.detach()
        results = _OPERATOR(x, weight, bias, added, initial_state, *boundaries, options=options)
        y = results[0] if residual is None else _Added.apply(results[0], residual)
        return y, results[1] if return_state else None
    layout = _Layout(width, packing)
    if torch.compiler.is_compiling():
        y, state = _formula(x, weight, bias, residual, initial_state, layout, activation)
    elif wants_gradient(x, weight, bias, residual, initial_state):
        y, state = _ShortConv.apply(x, weight, bias, residual, initial_state, layout, activation)
    else:
        y, state = _forward(x, weight, bias, residual, initial_state, layout, activation)
    return y, state if return_state else None


class _Layout:
    """Lays every sequence out with the W - 1 inputs before it, so that one convolution without bounds serves all cases.

    In a packed row this moves a token by W - 1 rows for its own and each earlier sequence. Rows are gathered, not
    scattered, which is slow on the CPU.
    """

    def __init__(self, width: int, packing: Packing | None) -> None:
        self.past, self.packing = width - 1, packing
        if packing is not None:
            tokens = torch.arange(packing.total, device=packing.cu_seqlens.device)
            self.rows = tokens + (packing.sequence + 1) * self.past

    def lay_out(self, x: Tensor, state: Tensor | None) -> Tensor:
        if self.packing is None:
            return F.pad(x, (0, 0, self.past, 0)) if state is None else torch.cat([state, x], dim=1)
        tokens, channels = x.shape[1:]
        before = x.new_zeros((self.packing.count + 1) * self.past, channels)
        if state is not None:
            before = torch.cat([state.flatten(0, 1), before[: self.past]])
        if tokens == 0:
            return before.unsqueeze(0)
        source = torch.zeros(tokens + before.shape[0], dtype=torch.int64, device=x.device)
        source[self.rows] = torch.arange(tokens, device=x.device)
        return x[0].index_select(0, source).index_copy(0, self._edges(self.packing.cu_seqlens), before).unsqueeze(0)

    def tokens(self, laid: Tensor) -> Tensor:
        """The rows of the tokens, `[B, T, D]`."""
        return laid[:, self.past :] if self.packing is None else laid[0].index_select(0, self.rows).unsqueeze(0)

    def outputs(self, y: Tensor) -> Tensor:
        """What the convolution of a layout gave for the tokens: it has no rows for the first W - 1."""
        return y if self.packing is None else y[0].index_select(0, self.rows - self.past).unsqueeze(0)

    def starts(self, laid: Tensor) -> Tensor:
        """`[N, W - 1, D]`: the rows before each sequence."""
        if self.packing is None:
            return laid[:, : self.past]
        return (
            laid[0]
            .index_select(0, self._edges(self.packing.cu_seqlens[:-1]))
            .unflatten(0, (self.packing.count, self.past))
        )

    def ends(self, laid: Tensor) -> Tensor:
        """`[N, W - 1, D]`: the last rows of each sequence."""
        if self.packing is None:
            return laid[:, laid.shape[1] - self.past :].clone()
        return (
            laid[0]
            .index_select(0, self._edges(self.packing.cu_seqlens[1:]))
            .unflatten(0, (self.packing.count, self.past))
        )

    def add_to_ends(self, laid: Tensor, values: Tensor) -> None:
        if self.packing is None:
            laid[:, laid.shape[1] - self.past :] += values
        else:
            laid[0].index_add_(0, self._edges(self.packing.cu_seqlens[1:]), values.flatten(0, 1).to(laid.dtype))

    def _edges(self, boundaries: Tensor) -> Tensor:
        """`[N (W - 1)]`: given sequences' starts, the rows before them; given their ends, their last rows."""
        past = torch.arange(self.past, device=boundaries.device)
        shift = torch.arange(boundaries.shape[0], device=boundaries.device) * self.past
        return ((boundaries + shift).unsqueeze(1) + past).flatten()


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None,
    sequence: Tensor | None, starts: Tensor | None, activation: str, return_state: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The plain formula on what the kernels get."""
    packing = None if starts is None else Packing(starts, x.shape[1])
    y, final = _formula(x, weight, bias, residual, state, _Layout(weight.shape[1], packing), activation or None)
    return (y, final) if return_state else (y,)


_OPERATOR = Operator(
    "short_conv",
    "flashmix.ops.short_conv.triton_gpu.ShortConv",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? state, Tensor? sequence, Tensor? starts",
    "str activation, bool return_state",
    formula=convolved,
)


class _Added(torch.autograd.Function):
    """`y`, in which the residual already is, as a sum that autograd sees."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, residual: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def _formula(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, layout: _Layout,
    activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = compute_dtype(x, weight, bias)
    laid = layout.lay_out(x, state)
    tokens = laid.shape[1] - layout.past
    taps = weight.to(wide).unbind(1)
    y = torch.stack([laid[:, i : i + tokens].to(wide) * tap for i, tap in enumerate(taps)]).sum(0)
    y = y if bias is None else y + bias
    y = layout.outputs(y if activation is None else ACTIVATIONS[activation].formula(y))
    y = y if residual is None else y + residual
    return y.to(x.dtype), layout.ends(laid)


def _convolve(laid: Tensor, taps: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The convolution before its activation; `taps` are `[D]` each, oldest first."""
    tokens = laid.shape[1] - (len(taps) - 1)
    y = laid.narrow(1, 0, tokens) * taps[0]
    for i, tap in enumerate(taps[1:], 1):
        y.addcmul_(laid.narrow(1, i, tokens), tap)
    return y if bias is None else y.add_(bias)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, layout: _Layout,
    activation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = compute_dtype(x, weight, bias)
    laid = layout.lay_out(x, state)
    y = _convolve(laid.to(wide), weight.T.to(wide).contiguous().unbind(), bias)
    y = layout.outputs(y if activation is None else ACTIVATIONS[activation].value(y))
    y = y if residual is None else y + residual
    return y.to(x.dtype), layout.ends(laid)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, state, layout, activation):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, state)
        ctx.options = layout, activation
        return _forward(x, weight, bias, residual, state, layout, activation)

    @staticmethod
    def backward(ctx, grad, grad_state):  # type: ignore[no-untyped-def]
        x, weight, bias, state = ctx.saved_tensors
        layout, activation = ctx.options
        if torch.is_grad_enabled():
            inputs = (x, weight, bias, state)
            *first, last = differentiable_gradients(
                lambda x, w, b, s: _formula(x, w, b, None, s, *ctx.options), inputs, grad, grad_state
            )
            return *first, grad if ctx.needs_input_grad[3] else None, last, None, None
        width, wide = weight.shape[1], compute_dtype(x, weight, bias)
        laid, taps = layout.lay_out(x, state).to(wide), weight.T.to(wide).contiguous().unbind()
        d_laid, d_weight, d_bias = torch.zeros_like(laid), None, None
        if grad is not None:
            d_y = grad.to(wide) if layout.packing is None else layout.lay_out(grad, None)[:, layout.past :].to(wide)
            if activation is not None:
                d_y = ACTIVATIONS[activation].value_and_slope(_convolve(laid, taps, bias))[1].mul_(d_y)
            tokens = d_y.shape[1]
            for i in range(width):
                d_laid[:, i : i + tokens].addcmul_(d_y, taps[i])
            if ctx.needs_input_grad[1]:
                room = torch.empty_like(d_y)
                columns = [torch.mul(d_y, laid[:, i : i + tokens], out=room).sum((0, 1)) for i in range(width)]
                d_weight = torch.stack(columns, dim=1).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                d_bias = d_y.sum((0, 1)).to(bias.dtype)
        if grad_state is not None:
            layout.add_to_ends(d_laid, grad_state)
        d_state = None if state is None else layout.starts(d_laid).to(state.dtype)
        d_residual = grad if ctx.needs_input_grad[3] else None
        return layout.tokens(d_laid).to(x.dtype), d_weight, d_bias, d_residual, d_state, None, None
