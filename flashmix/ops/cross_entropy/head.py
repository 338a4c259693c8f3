"""What the losses over a language model's head share: logits a chunk of tokens at a time, gradients added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.checks import (
    check_dtype,
    check_floating,
    check_like,
    check_shape,
    check_tensor,
    contents_are_checked,
    dims,
)
from flashmix.op.dtypes import compute_dtype

# Logits held at once: 2^23 are 32 MiB in float32, enough rows for an efficient matrix product at any usual vocabulary.
LOGITS_AT_ONCE = 2**23


class Options(NamedTuple):
    """Which cross entropy; `softcap` 0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> int:
    """Checks `hidden [..., D]`, `weight [V, D]` and `bias [V]`, whose names begin with `prefix`; returns V."""
    names = [prefix + name for name in ("hidden", "weight", "bias")]
    check_tensor(names[0], hidden)
    check_floating(names[0], hidden)
    if hidden.dim() < 1:
        raise ValueError(f"{names[0]} must have shape [..., D], got []")
    vocabulary, _ = dims(names[1], weight, "V D")
    check_shape(names[1], weight, vocabulary, hidden.shape[-1])
    if vocabulary < 1:
        raise ValueError(f"{names[1]} must have shape [V, D] with V >= 1, got [0, {hidden.shape[-1]}]")
    check_floating(names[1], weight)
    check_like(names[1], weight, names[0], hidden, dtype=False)
    check_like(names[1], weight, names[0], hidden, dtype=_autocast_dtype(hidden) is None)
    if bias is not None:
        check_shape(names[2], bias, vocabulary)
        check_floating(names[2], bias)
        check_like(names[2], bias, names[0], hidden, dtype=False)
    return vocabulary


def check_target(
    target: Tensor, shape: Sequence[int], like_name: str, like: Tensor, vocabulary: int, ignore: int
) -> None:
    """Checks `target` to be int64 of this shape, below the vocabulary or `ignore`."""
    check_tensor("target", target)
    check_dtype("target", target, torch.int64)
    check_shape("target", target, *shape)
    check_like("target", target, like_name, like, dtype=False)
    if contents_are_checked(target):
        wrong = target[(target != ignore) & ((target < 0) | (target >= vocabulary))]
        if wrong.numel():
            raise ValueError(
                f"target must be below the vocabulary {vocabulary} and not negative, or ignore_index = {ignore}, "
                f"got {wrong[0].item()}"
            )


def check_positive(name: str, value: float | None) -> None:
    """Raises ValueError unless `value` is None or above 0."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def head_inputs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`hidden` as `[N, D]` and `weight`, under autocast both in its dtype."""
    dtype = _autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden.reshape(-1, hidden.shape[-1]) if hidden.shape[-1] else hidden.flatten(0, -2), weight


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants of `hidden`, or None: it is off, or unknown on this device, or passes float64 by."""
    kind = hidden.device.type
    if hidden.dtype == torch.float64 or not _knows_autocast(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


@gpu.constant_when_compiled
def _knows_autocast(kind: str) -> bool:
    """Whether autocast may be asked about devices of this kind: it may not about "meta". Compilers cannot trace the question."""
    return torch.amp.is_autocast_available(kind)


def rows_at_once(chunk: int | None, vocabulary: int) -> int:
    """Tokens a chunk: the caller's, or as many as make 2^23 logits."""
    return chunk or max(1, LOGITS_AT_ONCE // vocabulary)


def chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, tokens, chunk))


def room_for_logits(tokens: int, chunk: int, weight: Tensor) -> Tensor:
    """Memory for the logits of one chunk, used by one after the other."""
    return weight.new_empty(min(tokens, chunk), weight.shape[0])


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, room: Tensor) -> Tensor:
    """The logits `hidden @ weight.T + bias`, written into the first rows of `room`."""
    z = torch.mm(hidden.to(weight.dtype), weight.T, out=room[: hidden.shape[0]])
    return z if bias is None else z.add_(bias)


class HeadGradients:
    """Gradients of `hidden`, `weight` and `bias`, added up over chunks; empty tensors unless in `needs`."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> None:
        self.needs, self.hidden, self.weight, self.bias = needs, hidden, weight, bias
        self.dtype = compute_dtype(hidden, weight, bias)
        sizes, dtypes = (hidden.shape, weight.shape, weight.shape[:1]), (hidden.dtype, self.dtype, self.dtype)
        self.d_hidden, self.d_weight, self.d_bias = (
            torch.zeros(size if need else (0,), dtype=dtype, device=hidden.device)
            for size, dtype, need in zip(sizes, dtypes, needs, strict=True)
        )

    def add(self, rows: slice, dz: Tensor, wide_weight: Tensor) -> None:
        """Adds what the gradient `dz` of these rows' logits gives; `wide_weight` is the weight in the dtype of `dz`."""
        if self.needs[0]:
            self.d_hidden[rows] = dz @ wide_weight
        if self.needs[1]:
            self.d_weight.addmm_(dz.T, self.hidden[rows].to(dz.dtype))
        if self.needs[2]:
            self.d_bias += dz.sum(0)

    def results(self) -> list[Tensor]:
        bias_dtype = self.dtype if self.bias is None else self.bias.dtype
        return [self.d_hidden, self.d_weight.to(self.weight.dtype), self.d_bias.to(bias_dtype)]


def rows_statistics(z: Tensor, target: Tensor, options: Options, total: int | None = None) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of rows of logits, which it overwrites, and what the loss subtracts: the target's share and the mean's.

    With a `total` vocabulary of which z is a part, a target outside of it adds nothing.
    """
    if options.softcap:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    column = target.clamp(0, z.shape[1] - 1)
    expected = z.gather(1, column.unsqueeze(1)).squeeze(1).mul_(1 - options.label_smoothing)
    if total is not None:
        expected.masked_fill_(column != target, 0.0)
    if options.label_smoothing:
        expected += options.label_smoothing * (z.mean(1) if total is None else z.sum(1) / total)
    largest = z.amax(1, keepdim=True)
    lse = z.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
    return lse, expected


def rows_losses(lse: Tensor, expected: Tensor, target: Tensor, options: Options) -> Tensor:
    losses = lse - expected + options.z_loss * lse.square()
    return losses.masked_fill_(target == options.ignore_index, 0.0)


def rows_forward(z: Tensor, target: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of rows of logits, which it overwrites."""
    lse, expected = rows_statistics(z, target, options)
    return rows_losses(lse, expected, target, options), lse


def rows_backward(
    z: Tensor,
    target: Tensor,
    lse: Tensor,
    grad: Tensor,
    options: Options,
    local: Tensor | None = None,
    total: int | None = None,
) -> Tensor:
    """Gradient of rows of logits, which it overwrites, for the gradient `grad` of their losses.

    dz = grad * (p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / V),    p = e^(z - lse)
    and through the softcap * (1 - (z / c)^2). Of a part of a `total` vocabulary, `local` are the targets as seen from it.
    """
    ignore_index, smoothing, z_loss, softcap = options
    grad = grad.masked_fill(target == ignore_index, 0.0).unsqueeze(1)
    lse = lse.unsqueeze(1)
    if softcap:
        z.div_(softcap).tanh_().mul_(softcap)
    dz = torch.sub(z, lse, out=None if softcap else z).exp_().mul_(grad * (1 + 2 * z_loss * lse))
    if smoothing:
        dz.sub_(grad * (smoothing / (total or z.shape[1])))
    column = (target if local is None else local).clamp(0, z.shape[1] - 1).unsqueeze(1)
    share = grad * (smoothing - 1)
    if local is not None:
        share = share.masked_fill(column != local.unsqueeze(1), 0.0)
    dz.scatter_add_(1, column, share)
    return dz.mul_(z.div_(softcap).square_().neg_().add_(1)) if softcap else dz
