"""Random calls of the losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashmix.ops.losses import definition

from .draw import Draw
from .rowwise import other
from .sample import Sample, Tensors

IGNORED = -100
KERNEL_STEPS = 3  # logits, their gradients and the products are rounded to the dtype
ONE_TOKEN = 8.0  # budgets of a vocabulary of one token: the loss is 0, and its roundings are those of the logits


def drawn(draw: Draw, op: str) -> Sample:
    dtype = draw.dtype()
    B, T = draw.batch(), draw.tokens(70)
    D, M = draw.channels(), draw.pick((1, 2, 12, 33, 100, 257)) if not draw.on_gpu else draw.pick((12, 100, 257, 1000))
    grpo = op == "linear_grpo"
    reduction = draw.pick(("sequence", "mean", "sum", "none") if grpo else ("mean", "sum", "none"))
    options: dict[str, Any] = {"reduction": reduction}
    x: Tensors = {}
    if op == "cross_entropy":
        x["logits"] = (draw.free.choice((1.0, 20.0)) * draw.normal(B, T, M)).to(dtype)
    else:
        x |= {"hidden": draw.normal(B, T, D).to(dtype), "weight": (draw.normal(M, D) / D**0.5).to(dtype)}
        if draw.chance(0.4):
            x["bias"] = draw.normal(M).to(other(draw, dtype))
        if draw.chance(0.4):
            options["chunk"] = draw.pick((1, 3, 16))
    maker = {"linear_kl_divergence": _divergence, "linear_grpo": _policy}.get(op, _entropy)
    fixed, means = maker(draw, x, options, (B, T, M), dtype)
    own = frozenset(
        n for n, t in x.items() if tuple(t.shape[:2]) == (B, T) and n not in ("weight", "bias", "teacher_weight")
    )
    each = reduction == "none"
    return Sample(
        op=op,
        dtype=dtype,
        tensors=x,
        means=means,
        axes=("token",) if each else ("whole",),
        options=options,
        per_token=own,
        per_row=own | ({"advantages"} if grpo else set()),
        fixed=frozenset(fixed),
        steps=KERNEL_STEPS,
        bound=ONE_TOKEN if M == 1 else 1.0,
        laws=frozenset({"repeat", "batch", "prefix", "layout"}) if each else frozenset({"repeat", "layout"}),
        loose=frozenset({"batch", "prefix", "layout"}),  # products, and sums over a vocabulary
    )


def _entropy(draw: Draw, x: Tensors, options: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype) -> Any:
    B, T, M = shape
    target = draw.integers(0, M, B, T)
    x["target"] = target.masked_fill(draw.uniform(B, T) < draw.free.choice((0.0, 0.3, 1.0)), IGNORED)
    for name, values in (("label_smoothing", (0.1, 1.0)), ("z_loss", (1e-3,)), ("softcap", (2.0, 30.0))):
        if draw.chance(0.3):
            options[name] = draw.pick(values)
    return (), partial(_entropy_means, dict(options))


def _entropy_means(options: dict[str, Any], x: Tensors) -> list[Tensor]:
    reduction = options["reduction"]
    rest = {n: v for n, v in options.items() if n not in ("reduction", "chunk")}
    losses = definition.cross_entropy(_logits(x), x["target"], **rest)
    count = (x["target"] != IGNORED).sum().clamp(min=1)
    return [losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / count]


def _logits(x: Tensors, mark: str = "") -> Tensor:
    if "logits" in x:
        return x["logits"]
    z = x[f"{mark}hidden"] @ x[f"{mark}weight"].T.to(x[f"{mark}hidden"].dtype)
    return z if f"{mark}bias" not in x else z + x[f"{mark}bias"]


def _divergence(
    draw: Draw, x: Tensors, options: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype
) -> Any:
    B, T, M = shape
    E, kind = draw.channels(), other(draw, dtype)
    x |= {"teacher_hidden": draw.normal(B, T, E).to(kind), "teacher_weight": (draw.normal(M, E) / E**0.5).to(kind)}
    if draw.chance(0.3):
        x["teacher_bias"] = draw.normal(M).to(kind)
    if draw.chance(0.4):
        x["mask"] = draw.uniform(B, T) < draw.free.choice((0.0, 0.7, 1.0))
    if draw.chance(0.4):
        options["temperature"] = draw.pick((0.5, 2.0))
    options["reverse"] = draw.chance(0.4)
    return ("teacher_hidden", "teacher_weight", "teacher_bias"), partial(_divergence_means, dict(options))


def _divergence_means(options: dict[str, Any], x: Tensors) -> list[Tensor]:
    temperature = options.get("temperature", 1.0)
    losses = definition.kl_divergence(
        _logits(x), _logits(x, "teacher_").to(x["hidden"].dtype), temperature, options["reverse"]
    )
    return [_reduced(losses, x.get("mask"), options["reduction"])]


def _policy(draw: Draw, x: Tensors, options: dict[str, Any], shape: tuple[int, int, int], dtype: torch.dtype) -> Any:
    B, T, M = shape
    x["target"] = draw.integers(0, M, B, T)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    x["advantages"] = (draw.normal(B) if draw.chance(0.6) else draw.normal(B, T)).to(kind)
    if draw.chance(0.5):
        options["temperature"] = draw.pick((0.7, 2.0))
    now = _chosen(options, {n: t.double() if t.is_floating_point() else t for n, t in x.items()})
    if draw.chance(0.7):
        x["old_log_probs"] = (now + 0.4 * draw.normal(B, T)).to(kind)
    if draw.chance(0.6):
        x["reference_log_probs"] = (now + 0.4 * draw.normal(B, T)).to(kind)
        options["kl_weight"] = draw.pick((0.0, 0.1))
    if draw.chance(0.4):
        x["mask"] = draw.uniform(B, T) < draw.free.choice((0.0, 0.7, 1.0))
    if draw.chance(0.5):
        options["clip"] = draw.pick(((0.2, 0.28), (0.0, 0.1)))
    return (), partial(_policy_means, dict(options))


def _chosen(options: dict[str, Any], x: Tensors) -> Tensor:
    scores = torch.log_softmax(_logits(x) / options.get("temperature", 1.0), -1)
    return scores.gather(-1, x["target"].unsqueeze(-1)).squeeze(-1)


def _policy_means(options: dict[str, Any], x: Tensors) -> list[Tensor]:
    now = _chosen(options, x)
    old, reference = x.get("old_log_probs", now.detach()), x.get("reference_log_probs", now.detach())
    A = x["advantages"]
    A = A[:, None] if A.dim() == 1 else A
    weight = options.get("kl_weight", 0.0)
    losses = definition.grpo(now, old, reference, A, *options.get("clip", (0.2, 0.2)), weight)
    return [_reduced(losses, x.get("mask"), options["reduction"])]


def _reduced(losses: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    mask = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask
    losses = losses.masked_fill(~mask, 0.0)
    if reduction in ("none", "sum"):
        return losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        return losses.sum() / mask.sum().clamp(min=1)
    return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / max(losses.shape[0], 1)
