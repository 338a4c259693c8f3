"""The common part of the losses before and after their calls: checks, the head's tensors as rows, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.op.checks import (
    check_choice,
    check_dtype,
    check_floating,
    check_like,
    check_positive,
    check_range,
    check_shape,
    check_tensor,
    contents_are_checked,
    dims,
)
from flashmix.op.dtypes import autocast_dtype
from flashmix.ops.losses.call import GRPOCall


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
    check_like(names[1], weight, names[0], hidden, dtype=autocast_dtype(hidden) is None)
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


def check_mask(mask: Tensor | None, hidden: Tensor) -> None:
    if mask is not None:
        check_shape("mask", mask, *hidden.shape[:-1])
        check_dtype("mask", mask, torch.bool)
        check_like("mask", mask, "hidden", hidden, dtype=False)


def check_grpo(call: GRPOCall) -> GRPOCall:
    """The checked call, with -100 for the targets that do not count."""
    hidden, advantages = call.hidden, call.advantages
    vocabulary = check_head(hidden, call.weight, call.bias)
    if hidden.dim() != 3:
        raise ValueError(f"hidden must have shape [B, T, D], got {list(hidden.shape)}")
    check_mask(call.mask, hidden)
    batch, tokens = hidden.shape[:2]
    for name, value in (("old_log_probs", call.old_log_probs), ("reference_log_probs", call.reference_log_probs)):
        if value is not None:
            check_shape(name, value, batch, tokens)
            check_floating(name, value)
            check_like(name, value, "hidden", hidden, dtype=False)
    check_tensor("advantages", advantages)
    check_shape("advantages", advantages, *((batch,) if advantages.dim() == 1 else (batch, tokens)))
    check_floating("advantages", advantages)
    check_like("advantages", advantages, "hidden", hidden, dtype=False)
    for bound in call.clip:
        check_range("clip", bound, 0.0, float("inf"))
    if call.kl_weight and call.reference_log_probs is None:
        raise ValueError("reference_log_probs must be given when kl_weight is not 0, got None")
    check_positive("temperature", call.temperature)
    check_positive("chunk", call.chunk)
    check_choice("reduction", call.reduction, "sequence", "mean", "sum", "none")
    check_tensor("target", call.target)
    check_like("target", call.target, "hidden", hidden, dtype=False)
    target = call.target if call.mask is None else call.target.masked_fill(~call.mask, -100)
    check_target(target, hidden.shape[:-1], "hidden", hidden, vocabulary, -100)
    return call.but(target=target)


def row_options(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> dict[str, Any]:
    """The checked options of a cross entropy, as fields of its call."""
    check_range("label_smoothing", label_smoothing, 0.0, 1.0)
    check_positive("softcap", softcap)
    check_choice("reduction", reduction, "mean", "sum", "none")
    return {
        "ignore_index": int(ignore_index),
        "label_smoothing": float(label_smoothing),
        "z_loss": float(z_loss),
        "softcap": None if softcap is None else float(softcap),
    }


def head_fields(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None) -> dict[str, Any]:
    """The fields of a call of a head, `hidden` as rows `[N, D]`."""
    needs = needed(hidden=hidden, weight=weight, bias=bias)
    rows, weight = as_rows(hidden, weight)
    return {"hidden": rows, "weight": weight, "bias": bias, "chunk": chunk, "needs": needs}


def needed(**tensors: Tensor | None) -> tuple[str, ...]:
    """The names of the tensors that autograd will ask a gradient of."""
    if not torch.is_grad_enabled():
        return ()
    return tuple([name for name, t in tensors.items() if t is not None and t.requires_grad])


def as_rows(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`hidden` as `[N, D]` and `weight`, under autocast both in its dtype."""
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0), weight


def count_of(target: Tensor, ignore_index: int) -> Tensor:
    """How many targets are not ignored, at least 1."""
    return (target != ignore_index).sum().clamp(min=1)


def mean_over(losses: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """`losses [..., T]` reduced over the tokens that count; means over none are 0."""
    if mask is None:
        mask = torch.ones_like(losses, dtype=torch.bool)
    losses = losses.masked_fill(~mask, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / mask.sum().clamp(min=1)
    return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(losses.shape[0], 1)


def row_weights(shape: Sequence[int], device: torch.device, mask: Tensor | None, reduction: str) -> Tensor:
    """What `mean_over` multiplies each token's loss with, float32."""
    counts = torch.ones(shape, device=device) if mask is None else mask.to(torch.float32)
    if reduction == "sum":
        return counts
    if reduction == "mean":
        return counts / counts.sum().clamp(min=1)
    return counts / (counts.sum(-1, keepdim=True).clamp(min=1) * max(shape[0], 1))
