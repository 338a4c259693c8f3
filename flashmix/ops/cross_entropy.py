"""The cross entropy over given logits, and of a language model's head without holding the logits of all tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix._checks import check_choice, check_floating, check_range, check_tensor
from flashmix._dispatch import choose
from flashmix.ops._head import (
    HeadGradients,
    check_head,
    check_positive,
    check_target,
    chunks,
    head_inputs,
    head_logits,
    room_for_logits,
    rows_at_once,
)
from flashmix.ops._rowwise import compute_dtype, portable

IMPLEMENTATIONS = (portable(__name__),)


class Options(NamedTuple):
    """Which cross entropy; `softcap` 0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    impl: str = "auto",
) -> Tensor:
    """The cross entropy of `target` under `logits`.

        z = logits                                  (softcapped: c tanh(logits / c))
        loss = (1 - e) (lse(z) - z_target) + e (lse(z) - mean(z)) + z_loss lse(z)^2,    e = label_smoothing

    The backward keeps `logits` and one number a token. From hidden states `linear_cross_entropy` needs less memory.

    Args:
        logits: `[..., V]`, floating.
        target: `[...]` int64, in `[0, V)` or `ignore_index`.
        ignore_index: targets that count for nothing.
        label_smoothing: share of the target's probability that is spread evenly over the vocabulary, in `[0, 1]`.
        z_loss: weight of the squared log of the softmax's denominator.
        softcap: bound c of the logits, or None.
        reduction: "mean" over the targets that are not ignored (0 if all are), "sum", or "none".
        impl: "auto" or the name of an implementation.

    Returns:
        A scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64 logits), as is all arithmetic.

    Raises:
        TypeError: an input is not a tensor of the dtype above.
        ValueError: shapes or devices differ, an option is out of its range, a target is outside the vocabulary (read on
            the CPU, and on a GPU after `flashmix.checks(True)`), or `impl` is unknown.

    Source:
        As `linear_cross_entropy`.

    Example:
        >>> import torch
        >>> round(cross_entropy(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)).item(), 4)  # log 8
        2.0794
    """
    check_tensor("logits", logits)
    check_floating("logits", logits)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits must have shape [..., V] with V >= 1, got {list(logits.shape)}")
    vocabulary = logits.shape[-1]
    check_target(target, logits.shape[:-1], "logits", logits, vocabulary, ignore_index)
    options = _options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    choose("cross_entropy", IMPLEMENTATIONS, logits, impl)
    losses, _ = _losses(logits.reshape(-1, vocabulary), target.flatten(), *options)
    return _reduce(losses.view(target.shape), target, ignore_index, reduction)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """The cross entropy of `target` under the logits `hidden @ weight.T + bias`, a chunk of tokens at a time.

        z = hidden weight^T + bias                  (softcapped: c tanh(z / c))
        loss = (1 - e) (lse(z) - z_target) + e (lse(z) - mean(z)) + z_loss lse(z)^2,    e = label_smoothing

    The backward computes each chunk's logits again and adds up the gradients; a frozen `weight` costs nothing there.

    With gradient accumulation a mean of means is wrong when the micro batches hold different numbers of tokens: take
    `reduction="sum"` and divide by the number of targets of the whole batch.

    Args:
        hidden: `[..., D]`, floating.
        weight: `[V, D]`, the dtype of `hidden`; under autocast both are cast.
        target: `[...]` int64, in `[0, V)` or `ignore_index`.
        bias: `[V]`, floating, or None.
        ignore_index: targets that count for nothing.
        label_smoothing: share of the target's probability that is spread evenly over the vocabulary, in `[0, 1]`.
        z_loss: weight of the squared log of the softmax's denominator.
        softcap: bound c of the logits, or None.
        reduction: "mean" over the targets that are not ignored (0 if all are), "sum", or "none".
        chunk: tokens a chunk; None for as many as make 2^23 logits.
        impl: "auto" or the name of an implementation.

    Returns:
        A scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64 inputs), as is all arithmetic.

    Raises:
        TypeError: an input is not a tensor of the dtype above.
        ValueError: shapes or devices differ, an option is out of its range, a target is outside the vocabulary (read on
            the CPU, and on a GPU after `flashmix.checks(True)`), or `impl` is unknown.

    Source:
        Label smoothing: Szegedy et al. (1512.00567), section 7. z-loss: PaLM (2204.02311), section 5. Softcap: Gemma 2
        (2408.00118), section 2.

    Example:
        >>> import torch
        >>> hidden, weight, target = torch.zeros(2, 3, 4), torch.zeros(8, 4), torch.zeros(2, 3, dtype=torch.int64)
        >>> round(linear_cross_entropy(hidden, weight, target).item(), 4)  # log 8
        2.0794
    """
    vocabulary = check_head(hidden, weight, bias)
    check_target(target, hidden.shape[:-1], "hidden", hidden, vocabulary, ignore_index)
    options = _options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_positive("chunk", chunk)
    choose("linear_cross_entropy", IMPLEMENTATIONS, hidden, impl)
    rows, weight = head_inputs(hidden, weight)
    losses, _ = _linear_losses(rows, weight, bias, target.flatten(), *options, rows_at_once(chunk, vocabulary))
    return _reduce(losses.view(target.shape), target, ignore_index, reduction)


def _options(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> Options:
    check_range("label_smoothing", label_smoothing, 0.0, 1.0)
    check_positive("softcap", softcap)
    check_choice("reduction", reduction, "mean", "sum", "none")
    return Options(ignore_index, label_smoothing, z_loss, softcap or 0.0)


def _reduce(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum().clamp(min=1)


def _rows_forward(z: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of rows of logits, which it overwrites."""
    if options.softcap:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    column = target.clamp(0, z.shape[1] - 1).unsqueeze(1)
    expected = z.gather(1, column).squeeze(1).mul_(1 - options.label_smoothing)
    if options.label_smoothing:
        expected += options.label_smoothing * z.mean(1)
    largest = z.amax(1, keepdim=True)
    lse = z.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
    losses = lse - expected + options.z_loss * lse.square()
    return losses.masked_fill_(target == options.ignore_index, 0.0), lse


def _rows_backward(z: Tensor, target: Tensor, lse: Tensor, grad: Tensor, options: Options) -> Tensor:
    """Gradient of rows of logits, which it overwrites, for the gradient `grad` of their losses.

    dz = grad * (p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / V),    p = e^(z - lse)
    and through the softcap * (1 - (z / c)^2).
    """
    ignore_index, smoothing, z_loss, softcap = options
    grad = grad.masked_fill(target == ignore_index, 0.0).unsqueeze(1)
    lse = lse.unsqueeze(1)
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)
    dz = torch.sub(z, lse, out=None if softcap else z).exp_().mul_(grad * (1 + 2 * z_loss * lse))
    if smoothing:
        dz.sub_(grad * (smoothing / z.shape[1]))
    dz.scatter_add_(1, target.clamp(0, z.shape[1] - 1).unsqueeze(1), grad * (smoothing - 1))
    return dz.mul_(z.div_(softcap).square_().neg_().add_(1)) if softcap else dz


@torch.library.custom_op("flashmix::cross_entropy", mutates_args=())
def _losses(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The loss and the log-sum-exp of each row of `logits [N, V]`."""
    options, wide = Options(ignore_index, label_smoothing, z_loss, softcap), compute_dtype(logits)
    losses, lse = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    for rows in chunks(logits.shape[0], rows_at_once(None, logits.shape[1])):
        losses[rows], lse[rows] = _rows_forward(logits[rows].to(wide, copy=True), target[rows], options)
    return losses, lse


@torch.library.custom_op("flashmix::cross_entropy_backward", mutates_args=())
def _gradient(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    """The gradient of `logits` for the gradient `grad [N]` of the losses."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    d_logits = torch.empty_like(logits)
    for rows in chunks(logits.shape[0], rows_at_once(None, logits.shape[1])):
        z = logits[rows].to(lse.dtype, copy=True)
        d_logits[rows] = _rows_backward(z, target[rows], lse[rows], grad[rows], options)
    return d_logits


@torch.library.custom_op("flashmix::linear_cross_entropy", mutates_args=())
def _linear_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss and the log-sum-exp of each row of `hidden [N, D]`."""
    options, wide = Options(ignore_index, label_smoothing, z_loss, softcap), compute_dtype(hidden, weight, bias)
    losses, lse = (hidden.new_empty(hidden.shape[0], dtype=wide) for _ in range(2))
    weight = weight.to(wide)
    room = room_for_logits(hidden.shape[0], chunk, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(hidden.shape[0], chunk):
            z = head_logits(hidden[rows], weight, bias, room)
            losses[rows], lse[rows] = _rows_forward(z, target[rows], options)
    return losses, lse


@torch.library.custom_op("flashmix::linear_cross_entropy_backward", mutates_args=())
def _linear_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, lse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, chunk: int, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of `hidden`, `weight` and `bias` for the gradient `grad [N]` of the losses; empty unless in `needs`."""
    options = Options(ignore_index, label_smoothing, z_loss, softcap)
    gradients = HeadGradients(hidden, weight, bias, needs)
    wide_weight = weight.to(lse.dtype)
    room = room_for_logits(hidden.shape[0], chunk, wide_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(hidden.shape[0], chunk):
            z = head_logits(hidden[rows], wide_weight, bias, room)
            dz = _rows_backward(z, target[rows], lse[rows], grad[rows], options)
            gradients.add(rows, dz, wide_weight)
    return gradients.results()


@_losses.register_fake
def _(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(logits)
    return logits.new_empty(logits.shape[0], dtype=wide), logits.new_empty(logits.shape[0], dtype=wide)


@_gradient.register_fake
def _(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


@_linear_losses.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(hidden, weight, bias)
    return hidden.new_empty(hidden.shape[0], dtype=wide), hidden.new_empty(hidden.shape[0], dtype=wide)


@_linear_gradients.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return HeadGradients(hidden, weight, bias, rest[-1]).results()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keeps the tensors among the inputs and the log-sum-exps; the rest are options."""
    tensors = 4 if len(inputs) == 9 else 2
    ctx.save_for_backward(*inputs[:tensors], output[1])
    ctx.options = inputs[tensors:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return _gradient(grad, *ctx.saved_tensors, *ctx.options), *[None] * 5


def _linear_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    found = _linear_gradients(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *[None] * 6


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("the cross entropy has no second derivative")


_losses.register_autograd(_backward, setup_context=_setup_context)
_linear_losses.register_autograd(_linear_backward, setup_context=_setup_context)
_gradient.register_autograd(_no_second_derivative)
_linear_gradients.register_autograd(_no_second_derivative)
