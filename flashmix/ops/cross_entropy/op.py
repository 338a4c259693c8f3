"""The cross entropy over given logits, and of a language model's head without holding the logits of all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashmix.op.checks import check_choice, check_floating, check_range, check_tensor
from flashmix.op.choose import choose
from flashmix.op.dtypes import compute_dtype
from flashmix.op.operator import differentiable, once_differentiable, operator
from flashmix.op.rowwise import Operator, portable, triton, wants_gradient
from flashmix.ops.cross_entropy.head import (
    HeadGradients,
    Options,
    check_head,
    check_positive,
    check_target,
    chunks,
    head_inputs,
    head_logits,
    room_for_logits,
    rows_at_once,
    rows_backward,
    rows_forward,
)
from flashmix.ops.cross_entropy.parallel import parallel_losses

IMPLEMENTATIONS = (triton("flashmix.ops.cross_entropy.triton_gpu"), portable(__name__))


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    overwrite_logits: bool = False,
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
        overwrite_logits: whether the backward may write the gradient over `logits`, so that nothing else of their size
            is allocated. Whatever else needs them in a backward, or a second backward of the loss, then raises. Under
            `torch.compile` the compiler decides.
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
    chosen = choose("cross_entropy", IMPLEMENTATIONS, (logits,), impl)
    rows, targets = logits.reshape(-1, vocabulary), target.flatten()
    if overwrite_logits and wants_gradient(logits) and not torch.compiler.is_compiling():
        losses = _Overwriting.apply(rows, targets, options, chosen.name)
    elif chosen.name == "triton":
        losses = _KERNELS(rows, targets, options=tuple(options))[0]
    else:
        losses, _ = _losses(rows, targets, *options)
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
    group: ProcessGroup | None = None,
    impl: str = "auto",
) -> Tensor:
    """The cross entropy of `target` under the logits `hidden @ weight.T + bias`, a chunk of tokens at a time.

        z = hidden weight^T + bias                  (softcapped: c tanh(z / c))
        loss = (1 - e) (lse(z) - z_target) + e (lse(z) - mean(z)) + z_loss lse(z)^2,    e = label_smoothing

    The backward computes each chunk's logits again and adds up the gradients; a frozen `weight` costs nothing there. The
    kernels have the gradients of a sum or mean ready with the loss, without computing logits again.

    Vocabulary-parallel: with `group`, each of its processes holds equally many rows of the head, in the order of ranks,
    and the same `hidden` and `target`. Each gets the loss, the whole gradient of `hidden` and that of its rows.

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
        chunk: tokens a chunk; None for as many as make 2^23 logits, with kernels 2^29 bytes.
        group: processes that share the vocabulary, or None; not under `torch.compile`.
        impl: "auto" or the name of an implementation.

    Returns:
        A scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64 inputs), as is all arithmetic (with
        kernels, logits and their gradients are rounded to the dtype of `hidden`).

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
    total = vocabulary if group is None else vocabulary * group.size()
    check_target(target, hidden.shape[:-1], "hidden", hidden, total, ignore_index)
    options = _options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_positive("chunk", chunk)
    chosen = choose("linear_cross_entropy", IMPLEMENTATIONS, (hidden, weight, bias), impl)
    needs = [wants_gradient(t) for t in (hidden, weight, bias)]
    rows, weight = head_inputs(hidden, weight)
    targets = target.flatten()
    if group is not None:
        losses = parallel_losses(rows, weight, bias, targets, options, chunk, group, chosen.name)
    elif chosen.name == "triton" and reduction != "none":
        summed = _SUM_KERNELS(rows, weight, bias, targets, options=(*options, chunk or 0, *needs))[0]
        return summed if reduction == "sum" else summed / _count(target, ignore_index)
    elif chosen.name == "triton":
        losses = _ROW_KERNELS(rows, weight, bias, targets, options=(*options, chunk or 0))[0]
    else:
        losses, _ = _linear_losses(rows, weight, bias, targets, *options, rows_at_once(chunk, vocabulary))
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
    return total if reduction == "sum" else total / _count(target, ignore_index)


def _count(target: Tensor, ignore_index: int) -> Tensor:
    return (target != ignore_index).sum().clamp(min=1)


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target"
_MODULE = "flashmix.ops.cross_entropy.triton_gpu"
_KERNELS = Operator("cross_entropy_rows", f"{_MODULE}.CrossEntropy", "Tensor logits, Tensor target", _OPTIONS)
_ROW_KERNELS = Operator("linear_cross_entropy_rows", f"{_MODULE}.LinearCrossEntropy", _HEAD, f"{_OPTIONS}, int chunk")
_SUM_KERNELS = Operator(
    "linear_cross_entropy_sum",
    f"{_MODULE}.LinearCrossEntropySum",
    _HEAD,
    f"{_OPTIONS}, int chunk, bool need_hidden, bool need_weight, bool need_bias",
)


class _Overwriting(torch.autograd.Function):
    """The losses of rows of logits; the backward writes over them and says so to autograd."""

    @staticmethod
    def forward(ctx, rows, target, options, name):  # type: ignore[no-untyped-def]
        if name == "triton":
            (losses,), kept = _KERNELS._run((rows, target), tuple(options), True)
        else:
            losses, *kept = _losses(rows, target, *options)
        ctx.save_for_backward(rows, target, *kept)
        ctx.options = options, name
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, target, *kept = ctx.saved_tensors
        options, name = ctx.options
        if name == "triton":
            _KERNELS.kernels.backward([rows], (grad,), (rows, target), kept, tuple(options))
        else:
            _gradient_into(rows, grad, rows, target, kept[0], options)
        torch.autograd.graph.increment_version(rows)
        return rows, None, None, None


def _run_losses(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The loss and the log-sum-exp of each row of `logits [N, V]`."""
    options, wide = Options(ignore_index, label_smoothing, z_loss, softcap), compute_dtype(logits)
    losses, lse = (logits.new_empty(logits.shape[0], dtype=wide) for _ in range(2))
    for rows in chunks(logits.shape[0], rows_at_once(None, logits.shape[1])):
        losses[rows], lse[rows] = rows_forward(logits[rows].to(wide, copy=True), target[rows], options)
    return losses, lse


def _run_gradient(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> Tensor:  # fmt: skip
    """The gradient of `logits` for the gradient `grad [N]` of the losses."""
    d_logits = torch.empty_like(logits)
    _gradient_into(d_logits, grad, logits, target, lse, Options(ignore_index, label_smoothing, z_loss, softcap))
    return d_logits


def _gradient_into(
    d_logits: Tensor, grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, options: Options
) -> None:
    for rows in chunks(logits.shape[0], rows_at_once(None, logits.shape[1])):
        z = logits[rows].to(lse.dtype, copy=True)
        d_logits[rows] = rows_backward(z, target[rows], lse[rows], grad[rows], options)


def _run_linear_losses(
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
            losses[rows], lse[rows] = rows_forward(z, target[rows], options)
    return losses, lse


def _run_linear_gradients(
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
            dz = rows_backward(z, target[rows], lse[rows], grad[rows], options)
            gradients.add(rows, dz, wide_weight)
    return gradients.results()


def _fake_losses(logits: Tensor, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(logits)
    return logits.new_empty(logits.shape[0], dtype=wide), logits.new_empty(logits.shape[0], dtype=wide)


def _fake_gradient(grad: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


def _fake_linear_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(hidden, weight, bias)
    return hidden.new_empty(hidden.shape[0], dtype=wide), hidden.new_empty(hidden.shape[0], dtype=wide)


def _fake_linear_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> list[Tensor]:
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


_losses = operator("cross_entropy", _run_losses, _fake_losses)
_gradient = operator("cross_entropy_backward", _run_gradient, _fake_gradient)
_linear_losses = operator("linear_cross_entropy", _run_linear_losses, _fake_linear_losses)
_linear_gradients = operator("linear_cross_entropy_backward", _run_linear_gradients, _fake_linear_gradients)
differentiable("cross_entropy", _backward, _setup_context)
differentiable("linear_cross_entropy", _linear_backward, _setup_context)
once_differentiable("cross_entropy")
once_differentiable("linear_cross_entropy")
