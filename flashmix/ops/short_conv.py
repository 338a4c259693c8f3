"""Short causal depthwise convolution over time: each channel mixes its last few tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix._checks import check_choice, check_floating, check_like, check_shape, dims
from flashmix._dispatch import choose
from flashmix.ops._rowwise import compute_dtype, differentiable_gradients, portable, wants_gradient
from flashmix.ops.activation import ACTIVATIONS
from flashmix.ops.packing import Packing, as_packing

IMPLEMENTATIONS = (portable(__name__),)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Convolves each channel with its own W weights over the tokens so far.

        y_t = act(sum_{i < W} weight[:, W-1-i] * x_{t-i} + bias),    x_{-1}, x_{-2}, ... from the state, newest last

    The backward keeps the inputs and nothing else.

    Args:
        x: `[B, T, D]`, floating.
        weight: `[D, W]`, floating; the last column weighs the token itself.
        bias: `[D]`, floating, or None.
        activation: "silu" or None.
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
        The convolution of Mamba (2312.00752), section 3.4.

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
    check_choice("activation", activation, None, *ACTIVATIONS)
    choose("short_conv", IMPLEMENTATIONS, x, impl)
    if torch.compiler.is_compiling():
        y, state = _formula(x, weight, bias, initial_state, packing, activation)
    elif wants_gradient(x, weight, bias, initial_state):
        y, state = _ShortConv.apply(x, weight, bias, initial_state, packing, activation)
    else:
        y, state = _forward(x, weight, bias, initial_state, packing, activation)
    return y, state if return_state else None


# Every sequence is laid out with the W - 1 inputs before it, so that one convolution without bounds serves whole,
# carried and packed sequences alike. In a packed row that shifts token t by W - 1 rows for its own and each earlier
# sequence.


def _token_rows(packing: Packing, width: int) -> Tensor:
    """`[T]`: the row of each packed token in that layout."""
    tokens = torch.arange(packing.total, device=packing.cu_seqlens.device)
    return tokens + (packing.sequence + 1) * (width - 1)


def _edge_rows(boundaries: Tensor, width: int) -> Tensor:
    """`[N (W - 1)]`: given the sequences' starts, the rows before them; given their ends, their last W - 1 rows."""
    shift = torch.arange(boundaries.shape[0], device=boundaries.device) * (width - 1)
    return ((boundaries + shift).unsqueeze(1) + torch.arange(width - 1, device=boundaries.device)).flatten()


def _lay_out(x: Tensor, state: Tensor | None, width: int, packing: Packing | None) -> Tensor:
    if packing is None:
        return F.pad(x, (0, 0, width - 1, 0)) if state is None else torch.cat([state, x], dim=1)
    laid = x.new_zeros(packing.total + (packing.count + 1) * (width - 1), x.shape[2])
    laid = laid.index_copy(0, _token_rows(packing, width), x[0])
    if state is not None:
        laid = laid.index_copy(0, _edge_rows(packing.cu_seqlens[:-1], width), state.flatten(0, 1))
    return laid.unsqueeze(0)


def _last_inputs(laid: Tensor, width: int, packing: Packing | None) -> Tensor:
    """`[N, W - 1, D]`: the last W - 1 inputs of every sequence."""
    if packing is None:
        return laid[:, laid.shape[1] - (width - 1) :].clone()
    return laid[0, _edge_rows(packing.cu_seqlens[1:], width)].unflatten(0, (packing.count, width - 1))


def _take_apart(laid: Tensor, width: int, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """The inverse of `_lay_out`: the tokens and the inputs before them."""
    if packing is None:
        return laid[:, width - 1 :], laid[:, : width - 1]
    before = laid[0, _edge_rows(packing.cu_seqlens[:-1], width)]
    return laid[:, _token_rows(packing, width)], before.unflatten(0, (packing.count, width - 1))


def _formula(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    packing: Packing | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    width, wide = weight.shape[1], compute_dtype(x, weight, bias)
    laid = _lay_out(x, state, width, packing)
    tokens = laid.shape[1] - (width - 1)
    y = torch.stack([laid[:, i : i + tokens].to(wide) * weight[:, i].to(wide) for i in range(width)]).sum(0)
    y = y if bias is None else y + bias
    y = y if activation is None else ACTIVATIONS[activation].formula(y)
    y = y if packing is None else y[:, _token_rows(packing, width) - (width - 1)]
    return y.to(x.dtype), _last_inputs(laid, width, packing)


def _convolve(laid: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution before its activation; `taps` is `[W, D]`, oldest first."""
    tokens = laid.shape[1] - (taps.shape[0] - 1)
    y = laid[:, :tokens] * taps[0]
    for i in range(1, taps.shape[0]):
        y.addcmul_(laid[:, i : i + tokens], taps[i])
    return y if bias is None else y.add_(bias)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    packing: Packing | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    width, wide = weight.shape[1], compute_dtype(x, weight, bias)
    laid = _lay_out(x, state, width, packing)
    y = _convolve(laid.to(wide), weight.T.to(wide).contiguous(), bias)
    y = y if activation is None else ACTIVATIONS[activation].value(y)
    y = y if packing is None else y[:, _token_rows(packing, width) - (width - 1)]
    return y.to(x.dtype), _last_inputs(laid, width, packing)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, packing, activation):  # type: ignore[no-untyped-def]
        y, final = _forward(x, weight, bias, state, packing, activation)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, state)
        ctx.options = packing, activation
        return y, final

    @staticmethod
    def backward(ctx, grad: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, weight, bias, state = ctx.saved_tensors
        packing, activation = ctx.options
        if torch.is_grad_enabled():
            inputs = (x, weight, bias, state)
            return (
                *differentiable_gradients(lambda *a: _formula(*a, *ctx.options), inputs, grad, grad_state),
                None,
                None,
            )
        width, wide = weight.shape[1], compute_dtype(x, weight, bias)
        laid, taps = _lay_out(x, state, width, packing).to(wide), weight.T.to(wide).contiguous()
        d_laid, d_weight, d_bias = torch.zeros_like(laid), None, None
        if grad is not None:
            if packing is not None:
                rows = _token_rows(packing, width) - (width - 1)
                grad = grad.new_zeros(1, laid.shape[1] - (width - 1), grad.shape[2]).index_copy_(1, rows, grad)
            d_pre = grad.to(wide)
            if activation is not None:
                d_pre = ACTIVATIONS[activation].slope(_convolve(laid, taps, bias)).mul_(d_pre)
            tokens = d_pre.shape[1]
            for i in range(width):
                d_laid[:, i : i + tokens].addcmul_(d_pre, taps[i])
            if ctx.needs_input_grad[1]:
                columns = [(d_pre * laid[:, i : i + tokens]).sum((0, 1)) for i in range(width)]
                d_weight = torch.stack(columns, dim=1).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                d_bias = d_pre.sum((0, 1)).to(bias.dtype)
        if grad_state is not None:
            if packing is None:
                d_laid[:, x.shape[1] :] += grad_state
            else:
                d_laid[0].index_add_(0, _edge_rows(packing.cu_seqlens[1:], width), grad_state.flatten(0, 1).to(wide))
        d_x, d_state = _take_apart(d_laid, width, packing)
        return d_x.to(x.dtype), d_weight, d_bias, None if state is None else d_state.to(x.dtype), None, None
