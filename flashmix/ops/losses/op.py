"""Losses of a language model's head for distillation and for policy gradients, without the logits of all tokens."""

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
    check_range,
    check_shape,
    check_tensor,
)
from flashmix.op.choose import choose
from flashmix.op.dtypes import compute_dtype
from flashmix.op.operator import differentiable, once_differentiable, operator
from flashmix.op.rowwise import Operator, portable, triton, wants_gradient
from flashmix.ops.cross_entropy.head import (
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
from flashmix.ops.cross_entropy.op import linear_cross_entropy

IMPLEMENTATIONS = (triton("flashmix.ops.losses.triton_gpu"), portable(__name__))


def linear_kl_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
    reduction: str = "mean",
    chunk: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """How far a student's next-token distribution is from a teacher's, a chunk of tokens at a time.

        p = softmax((teacher_hidden teacher_weight^T + teacher_bias) / temperature)
        q = softmax((hidden weight^T + bias) / temperature)
        loss = temperature^2 sum_v p_v (ln p_v - ln q_v)            `reverse`: temperature^2 sum_v q_v (ln q_v - ln p_v)

    The backward computes each chunk's logits again; the kernels have the gradients of a sum or mean ready with the loss.
    The teacher gets no gradient.

    Args:
        hidden: `[..., D]`, floating: the student's.
        weight: `[V, D]`, the dtype of `hidden`; under autocast both are cast.
        teacher_hidden: `[..., E]`, as many tokens as `hidden`, floating.
        teacher_weight: `[V, E]`, the dtype of `teacher_hidden`.
        bias: `[V]`, floating, or None.
        teacher_bias: `[V]`, floating, or None.
        mask: `[...]` bool, the tokens that count; None for all.
        temperature: divides the logits of both.
        reverse: the student's mean instead of the teacher's: it seeks a mode where the other covers all.
        reduction: "mean" over the tokens that count (0 if none do), "sum", or "none".
        chunk: tokens a chunk; None for as many as make 2^22 logits of each, with kernels 2^28 bytes.
        impl: "auto" or the name of an implementation.

    Returns:
        A scalar, or `[...]` with `reduction="none"`; float32 (float64 for float64 inputs), as is all arithmetic.

    Raises:
        TypeError: an input is not a tensor of the dtype above.
        ValueError: shapes or devices differ, a teacher's tensor asks for a gradient, an option is out of its range, or
            `impl` is unknown.

    Source:
        Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network" (1503.02531), section 2; reverse: Gu et
        al., "MiniLLM" (2306.08543), section 2.1.

    Example:
        >>> import torch
        >>> student, teacher, head = torch.zeros(2, 3, 4), torch.ones(2, 3, 8), torch.zeros(16, 8)
        >>> linear_kl_divergence(student, torch.zeros(16, 4), teacher, head).item()
        0.0
    """
    vocabulary = check_head(hidden, weight, bias)
    check_head(teacher_hidden, teacher_weight, teacher_bias, "teacher_")
    check_shape("teacher_weight", teacher_weight, vocabulary, teacher_weight.shape[1])
    check_shape("teacher_hidden", teacher_hidden, *hidden.shape[:-1], teacher_hidden.shape[-1])
    check_like("teacher_hidden", teacher_hidden, "hidden", hidden, dtype=False)
    for name, value in (("hidden", teacher_hidden), ("weight", teacher_weight), ("bias", teacher_bias)):
        if wants_gradient(value):
            raise ValueError(f"teacher_{name} must not require a gradient (it gets none; detach it), got one that does")
    _check_mask(mask, hidden)
    check_positive("temperature", temperature)
    check_positive("chunk", chunk)
    check_choice("reduction", reduction, "mean", "sum", "none")
    tensors = (hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias)
    chosen = choose("linear_kl_divergence", IMPLEMENTATIONS, tensors, impl)
    needs = [wants_gradient(t) for t in (hidden, weight, bias)]
    rows, weight = head_inputs(hidden, weight)
    teacher_rows, teacher_weight = head_inputs(teacher_hidden, teacher_weight)
    if chosen.name == "triton":
        heads = (rows, weight, bias, teacher_rows, teacher_weight, teacher_bias)
        options = (1 / temperature, reverse, chunk or 0)
        if reduction == "none":
            return _mean_over(_KL_ROWS(*heads, options=options)[0].view(hidden.shape[:-1]), mask, reduction)
        weights = _row_weights(hidden.shape[:-1], hidden.device, mask, reduction)
        return _KL_SUM(*heads, weights.flatten(), options=(*options, *needs))[0]
    size = rows_at_once(chunk, 2 * vocabulary)
    losses = _divergences(
        rows, weight, bias, teacher_rows, teacher_weight, teacher_bias, 1 / temperature, reverse, size
    )
    return _mean_over(losses.view(hidden.shape[:-1]), mask, reduction)


def linear_grpo(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    bias: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    mask: Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    kl_weight: float = 0.0,
    temperature: float = 1.0,
    reduction: str = "sequence",
    chunk: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """The clipped policy loss of group relative policy optimisation, a chunk of tokens at a time.

        l_t    = ln softmax((hidden_t weight^T + bias) / temperature)[target_t]
        r_t    = e^(l_t - old_t)
        loss_t = -min(r_t A_t, clamp(r_t, 1 - clip[0], 1 + clip[1]) A_t) + kl_weight (e^(ref_t - l_t) - (ref_t - l_t) -
        1)

    Args:
        hidden: `[B, T, D]`, floating: the states that predict `target`.
        weight: `[V, D]`, the dtype of `hidden`; under autocast both are cast.
        target: `[B, T]` int64, the sampled tokens, in `[0, V)`; anything where `mask` is False.
        advantages: `[B]`, one a sequence, or `[B, T]`; floating.
        bias: `[V]`, floating, or None.
        old_log_probs: `[B, T]`, `l_t` of the policy that sampled; None where that is this policy (then r = 1).
        reference_log_probs: `[B, T]`, `l_t` of the reference policy; needed when `kl_weight` is not 0.
        mask: `[B, T]` bool, the sampled tokens that count; None for all.
        clip: how far r may fall below and rise above 1 before its gradient stops.
        kl_weight: weight of the divergence from the reference policy.
        temperature: divides the logits, as when sampling.
        reduction: "sequence": the mean over sequences of the mean over a sequence's tokens (GRPO); "mean": the mean
            over all tokens that count (DAPO); "sum"; or "none".
        chunk: tokens a chunk; None for as many as make 2^23 logits, with kernels 2^29 bytes.
        impl: "auto" or the name of an implementation.

    Returns:
        A scalar, or `[B, T]` with `reduction="none"` (0 where the mask is False); float32 (float64 for float64 inputs).

    Raises:
        TypeError: an input is not a tensor of the dtype above.
        ValueError: shapes or devices differ, `kl_weight` without `reference_log_probs`, an option is out of its range,
            or `impl` is unknown.

    Source:
        Shao et al., "DeepSeekMath" (2402.03300), equations 3 and 4; unequal clips and the mean over tokens: Yu et al.,
        "DAPO" (2503.14476), sections 3.1 and 3.3.

    Example:
        >>> import torch
        >>> hidden, weight, target = torch.zeros(2, 3, 4), torch.zeros(8, 4), torch.zeros(2, 3, dtype=torch.int64)
        >>> linear_grpo(hidden, weight, target, torch.tensor([1.0, 3.0])).item()
        -2.0
    """
    check_head(hidden, weight, bias)
    if hidden.dim() != 3:
        raise ValueError(f"hidden must have shape [B, T, D], got {list(hidden.shape)}")
    _check_mask(mask, hidden)
    batch, tokens = hidden.shape[:2]
    for name, value in (("old_log_probs", old_log_probs), ("reference_log_probs", reference_log_probs)):
        if value is not None:
            check_shape(name, value, batch, tokens)
            check_floating(name, value)
            check_like(name, value, "hidden", hidden, dtype=False)
    check_tensor("advantages", advantages)
    check_shape("advantages", advantages, *((batch,) if advantages.dim() == 1 else (batch, tokens)))
    check_floating("advantages", advantages)
    check_like("advantages", advantages, "hidden", hidden, dtype=False)
    for bound in clip:
        check_range("clip", bound, 0.0, float("inf"))
    if kl_weight and reference_log_probs is None:
        raise ValueError("reference_log_probs must be given when kl_weight is not 0, got None")
    check_positive("temperature", temperature)
    check_choice("reduction", reduction, "sequence", "mean", "sum", "none")
    log_probs = (old_log_probs, reference_log_probs)
    chosen_impl = choose("linear_grpo", IMPLEMENTATIONS, (hidden, weight, bias), impl)
    target = target if mask is None else target.masked_fill(~mask, -100)
    apart = wants_gradient(advantages, *log_probs) or compute_dtype(advantages, *log_probs) == torch.float64
    if chosen_impl.name == "triton" and reduction != "none" and not apart:
        check_target(target, hidden.shape[:-1], "hidden", hidden, weight.shape[0], -100)
        needs = [wants_gradient(t) for t in (hidden, weight, bias)]
        hidden, weight = head_inputs(hidden, weight)
        if advantages.dim() == 1:
            advantages = advantages.unsqueeze(1).expand(batch, tokens)
        numbers = (None if t is None else t.to(torch.float32).flatten() for t in (advantages, *log_probs))
        weights = _row_weights((batch, tokens), hidden.device, mask, reduction).flatten()
        options = (*map(float, clip), float(kl_weight), 1 / temperature, chunk or 0, *needs)
        return _GRPO_SUM(hidden, weight, bias, target.flatten(), *numbers, weights, options=options)[0]
    if temperature != 1.0:
        hidden, bias = hidden / temperature, None if bias is None else bias / temperature
    chosen = -linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", chunk=chunk, impl=impl)
    ratio = torch.exp(chosen - (chosen.detach() if old_log_probs is None else old_log_probs))
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    if kl_weight and reference_log_probs is not None:
        above = reference_log_probs - chosen
        losses = losses + kl_weight * (torch.expm1(above) - above)
    return _mean_over(losses, mask, reduction)


def _mean_over(losses: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
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


def _row_weights(shape: Sequence[int], device: torch.device, mask: Tensor | None, reduction: str) -> Tensor:
    """What `_mean_over` multiplies each token's loss with, float32."""
    counts = torch.ones(shape, device=device) if mask is None else mask.to(torch.float32)
    if reduction == "sum":
        return counts
    if reduction == "mean":
        return counts / counts.sum().clamp(min=1)
    return counts / (counts.sum(-1, keepdim=True).clamp(min=1) * max(shape[0], 1))


def _check_mask(mask: Tensor | None, hidden: Tensor) -> None:
    if mask is not None:
        check_shape("mask", mask, *hidden.shape[:-1])
        check_dtype("mask", mask, torch.bool)
        check_like("mask", mask, "hidden", hidden, dtype=False)


def _log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities under scaled logits, and the probabilities."""
    z = head_logits(hidden, weight, bias, room).mul_(scale)
    z.sub_(z.amax(1, keepdim=True))
    p = torch.exp(z)
    total = p.sum(1, keepdim=True)
    return z.sub_(total.log()), p.div_(total)


def _weighted(weights: Tensor, difference: Tensor, out: Tensor) -> Tensor:
    """`weights * difference`, 0 where the weight is (a token ruled out by an infinite logit); `out` may be either."""
    ruled_out = weights == 0
    return torch.mul(weights, difference, out=out).masked_fill_(ruled_out, 0.0)


_HEADS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias"
)
_NEEDS = "int chunk, bool need_hidden, bool need_weight, bool need_bias"
_KL_ROWS = Operator(
    "linear_kl_rows", "flashmix.ops.losses.triton_gpu.LinearKL", _HEADS, "float scale, bool reverse, int chunk"
)
_KL_SUM = Operator(
    "linear_kl_sum",
    "flashmix.ops.losses.triton_gpu.LinearKLSum",
    f"{_HEADS}, Tensor weights",
    f"float scale, bool reverse, {_NEEDS}",
)
_GRPO_SUM = Operator(
    "linear_grpo_sum",
    "flashmix.ops.losses.triton_gpu.LinearGRPOSum",
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor advantages, Tensor? old, Tensor? reference, "
    "Tensor weights",
    f"float low, float high, float kl_weight, float scale, {_NEEDS}",
)


def _run_divergences(
    hidden: Tensor, weight: Tensor, bias: Tensor | None,
    teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None,
    scale: float, reverse: bool, chunk: int,
) -> Tensor:  # fmt: skip
    """The divergence of each row of `hidden [N, D]` from the same row of `teacher_hidden [N, E]`."""
    wide = compute_dtype(hidden, weight, bias, teacher_hidden)
    losses = hidden.new_empty(hidden.shape[0], dtype=wide)
    weight, teacher_weight = weight.to(wide), teacher_weight.to(wide)
    room, teacher_room = (room_for_logits(hidden.shape[0], chunk, weight) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(hidden.shape[0], chunk):
            log_q, q = _log_softmax(hidden[rows], weight, bias, scale, room)
            log_p, p = _log_softmax(teacher_hidden[rows], teacher_weight, teacher_bias, scale, teacher_room)
            terms = _weighted(q, log_q.sub_(log_p), out=q) if reverse else _weighted(p, log_p.sub_(log_q), out=p)
            losses[rows] = terms.sum(1).div_(scale * scale)
    return losses


def _run_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Tensor | None,
    scale: float, reverse: bool, chunk: int, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of `hidden`, `weight` and `bias` for the gradient `grad [N]` of the divergences; empty unless in
    `needs`.

    dz = grad (q - p) / scale,    reversed: grad q (ln q - ln p - sum_v q_v (ln q_v - ln p_v)) / scale
    """
    gradients = HeadGradients(hidden, weight, bias, needs)
    wide_weight, teacher_weight = weight.to(grad.dtype), teacher_weight.to(grad.dtype)
    room, teacher_room = (room_for_logits(hidden.shape[0], chunk, wide_weight) for _ in range(2))
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(hidden.shape[0], chunk):
            log_q, q = _log_softmax(hidden[rows], wide_weight, bias, scale, room)
            log_p, p = _log_softmax(teacher_hidden[rows], teacher_weight, teacher_bias, scale, teacher_room)
            if reverse:
                difference = log_q.sub_(log_p)
                mean = _weighted(q, difference, out=p).sum(1, keepdim=True)
                dz = _weighted(q, difference.sub_(mean), out=difference)
            else:
                dz = q.sub_(p)
            gradients.add(rows, dz.mul_((grad[rows] / scale).unsqueeze(1)), wide_weight)
    return gradients.results()


def _fake_divergences(hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher_hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(hidden.shape[0], dtype=compute_dtype(hidden, weight, bias, teacher_hidden))


def _fake_gradients(grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return HeadGradients(hidden, weight, bias, rest[-1]).results()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    found = _gradients(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *[None] * 6


_divergences = operator("linear_kl_divergence", _run_divergences, _fake_divergences)
_gradients = operator("linear_kl_divergence_backward", _run_gradients, _fake_gradients)
differentiable("linear_kl_divergence", _backward, _setup_context)
once_differentiable("linear_kl_divergence")
