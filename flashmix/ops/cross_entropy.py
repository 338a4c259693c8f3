"""The cross entropy of a language model's head, from hidden states, without ever holding the logits of all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix._checks import (
    check_choice,
    check_dtype,
    check_floating,
    check_like,
    check_range,
    check_shape,
    check_tensor,
    contents_are_checked,
    dims,
)
from flashmix._dispatch import choose
from flashmix.ops._rowwise import compute_dtype, portable

IMPLEMENTATIONS = (portable(__name__),)

# Logits held at once: 2^23 are 32 MiB in float32, enough rows for an efficient matrix product at any usual vocabulary.
LOGITS_AT_ONCE = 2**23


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
    check_tensor("hidden", hidden)
    check_floating("hidden", hidden)
    if hidden.dim() < 1:
        raise ValueError("hidden must have shape [..., D], got []")
    vocabulary, _ = dims("weight", weight, "V D")
    check_shape("weight", weight, vocabulary, hidden.shape[-1])
    if vocabulary < 1:
        raise ValueError(f"weight must have shape [V, D] with V >= 1, got [0, {hidden.shape[-1]}]")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    check_floating("weight", weight)
    check_like("weight", weight, "hidden", hidden, dtype=not autocast)
    if bias is not None:
        check_shape("bias", bias, vocabulary)
        check_floating("bias", bias)
        check_like("bias", bias, "hidden", hidden, dtype=False)
    _check_target(target, hidden, vocabulary, ignore_index)
    check_range("label_smoothing", label_smoothing, 0.0, 1.0)
    check_choice("reduction", reduction, "mean", "sum", "none")
    for name, value in (("softcap", softcap), ("chunk", chunk)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    choose("linear_cross_entropy", IMPLEMENTATIONS, hidden, impl)
    if autocast:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    losses, _ = _token_losses(
        hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0),
        weight,
        bias,
        target.flatten(),
        ignore_index,
        label_smoothing,
        z_loss,
        softcap or 0.0,
        chunk or max(1, LOGITS_AT_ONCE // max(vocabulary, 1)),
    )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum().clamp(min=1)


def _check_target(target: Tensor, hidden: Tensor, vocabulary: int, ignore_index: int) -> None:
    check_tensor("target", target)
    check_dtype("target", target, torch.int64)
    check_shape("target", target, *hidden.shape[:-1])
    check_like("target", target, "hidden", hidden, dtype=False)
    if contents_are_checked(target):
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= vocabulary))]
        if wrong.numel():
            raise ValueError(
                f"target must be below the vocabulary {vocabulary} and not negative, or ignore_index = {ignore_index}, "
                f"got {wrong[0].item()}"
            )


@torch.library.custom_op("flashmix::linear_cross_entropy", mutates_args=())
def _token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The loss and the log-sum-exp of each token of `hidden [N, D]`; `softcap` 0 is none."""
    wide = compute_dtype(hidden, weight, bias)
    losses, lse = (torch.zeros(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(2))
    weight = weight.to(wide)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            z = _logits(hidden[rows], weight, bias, softcap)
            column = target[rows].clamp(0, z.shape[1] - 1).unsqueeze(1)
            expected = (1 - label_smoothing) * z.gather(1, column).squeeze(1)
            if label_smoothing:
                expected += label_smoothing * z.mean(1)
            largest = z.amax(1, keepdim=True)
            lse[rows] = z.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
            loss = lse[rows] - expected + z_loss * lse[rows].square()
            losses[rows] = loss.masked_fill_(target[rows] == ignore_index, 0.0)
    return losses, lse


@torch.library.custom_op("flashmix::linear_cross_entropy_backward", mutates_args=())
def _gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    needs: list[bool],
) -> list[Tensor]:
    """Gradients of `hidden`, `weight` and `bias` for the gradient `grad [N]` of the losses; empty unless in `needs`.

    dz = grad * (p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / V),    p = e^(z - lse)
    and through the softcap * (1 - (z / c)^2).
    """
    wide = compute_dtype(hidden, weight, bias)
    d_hidden, d_weight, d_bias = _empty_gradients(hidden, weight, bias, needs, wide)
    grad = grad.to(wide).masked_fill(target == ignore_index, 0.0).unsqueeze(1)
    wide_weight = weight.to(wide)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            z, g = _logits(hidden[rows], wide_weight, bias, softcap), grad[rows]
            row_lse = lse[rows].unsqueeze(1)
            dz = torch.sub(z, row_lse, out=None if softcap else z).exp_().mul_(g * (1 + 2 * z_loss * row_lse))
            if label_smoothing:
                dz.sub_(g * (label_smoothing / z.shape[1]))
            column = target[rows].clamp(0, z.shape[1] - 1).unsqueeze(1)
            dz.scatter_add_(1, column, g * (label_smoothing - 1))
            if softcap:
                dz.mul_(z.div_(softcap).square_().neg_().add_(1))
            if needs[0]:
                d_hidden[rows] = dz @ wide_weight
            if needs[1]:
                d_weight.addmm_(dz.T, hidden[rows].to(wide))
            if needs[2]:
                d_bias += dz.sum(0)
    return [d_hidden, d_weight.to(weight.dtype), d_bias if bias is None else d_bias.to(bias.dtype)]


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: list[bool], wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients: of a row of `hidden` each is written once, `weight` and `bias` are added up in `wide`."""
    sizes = [hidden.shape, weight.shape, weight.shape[:1]]
    dtypes = [hidden.dtype, wide, wide]
    return tuple(  # type: ignore[return-value]
        torch.zeros(size if need else (0,), dtype=dtype, device=hidden.device)
        for size, dtype, need in zip(sizes, dtypes, needs, strict=True)
    )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float) -> Tensor:
    z = torch.mm(hidden.to(weight.dtype), weight.T)
    if bias is not None:
        z.add_(bias)
    return z.div_(softcap).tanh_().mul_(softcap) if softcap else z


@_token_losses.register_fake
def _(hidden, weight, bias, target, *_):  # type: ignore[no-untyped-def]
    wide = compute_dtype(hidden, weight, bias)
    return hidden.new_empty(hidden.shape[0], dtype=wide), hidden.new_empty(hidden.shape[0], dtype=wide)


@_gradients.register_fake
def _(grad, hidden, weight, bias, target, lse, *options):  # type: ignore[no-untyped-def]
    d_hidden, d_weight, d_bias = _empty_gradients(
        hidden, weight, bias, options[-1], compute_dtype(hidden, weight, bias)
    )
    return [d_hidden, d_weight.to(weight.dtype), d_bias if bias is None else d_bias.to(bias.dtype)]


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    hidden, weight, bias, target, *ctx.options = inputs
    ctx.save_for_backward(hidden, weight, bias, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    needs = list(ctx.needs_input_grad[:3])
    found = _gradients(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *[None] * 6


def _no_second_derivative(ctx, *grads) -> None:  # type: ignore[no-untyped-def]
    raise RuntimeError("linear_cross_entropy has no second derivative")


_token_losses.register_autograd(_backward, setup_context=_setup_context)
_gradients.register_autograd(_no_second_derivative)
