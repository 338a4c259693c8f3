"""The cross entropy of given logits, and losses of a language model's head without holding the logits of all tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.checks import (
    check_choice,
    check_floating,
    check_like,
    check_pair,
    check_positive,
    check_shape,
    check_tensor,
)
from flashmix.op.choose import choose
from flashmix.op.dtypes import at_least_float32, compute_dtype
from flashmix.op.public import check_number, public
from flashmix.ops.losses.call import (
    CrossEntropyCall,
    GRPOCall,
    KLDivergenceCall,
    LinearCrossEntropyCall,
    ParallelCrossEntropyCall,
    triton_refuses_head,
)
from flashmix.ops.losses.head import (
    as_rows,
    check_grpo,
    check_head,
    check_mask,
    check_target,
    count_of,
    head_fields,
    mean_over,
    needed,
    row_options,
)
from flashmix.ops.losses.parallel import name_of
from flashmix.ops.losses.portable.grpo import policy_losses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


losses = partial(implementations, "losses")
CROSS_ENTROPY = Op("cross_entropy", CrossEntropyCall, losses(module="cross_entropy"), once=True)
LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy", LinearCrossEntropyCall, losses(module="linear_cross_entropy"), once=True
)
PARALLEL_CROSS_ENTROPY = Op(
    "linear_cross_entropy_parallel", ParallelCrossEntropyCall, losses(module="parallel"), once=True
)
KL_DIVERGENCE = Op("linear_kl_divergence", KLDivergenceCall, losses(module="kl_divergence"), once=True)
GRPO_IMPLEMENTATIONS = losses(triton_refuses_head, module="grpo")
GRPO = Op("linear_grpo", GRPOCall, GRPO_IMPLEMENTATIONS, once=True)


@public
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
    options = row_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    overwrite = overwrite_logits and not torch.compiler.is_compiling()
    rows = logits.reshape(target.numel(), vocabulary)
    call = CrossEntropyCall(logits=rows, target=target.flatten(), overwrite_logits=overwrite, **options)
    losses = CROSS_ENTROPY(call, impl)[0]
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / count_of(target, ignore_index)


@public
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
    if group is not None and not hasattr(group, "group_name"):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    total = vocabulary if group is None else vocabulary * group.size()
    check_target(target, hidden.shape[:-1], "hidden", hidden, total, ignore_index)
    options = row_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_positive("chunk", chunk)
    head, targets = head_fields(hidden, weight, bias, chunk), target.flatten()
    if group is None:
        call = LinearCrossEntropyCall(target=targets, summed=reduction != "none", **head, **options)
        losses = LINEAR_CROSS_ENTROPY(call, impl)[0]
    else:
        if torch.compiler.is_compiling():
            raise NotImplementedError("linear_cross_entropy with a group is not for torch.compile")
        call = ParallelCrossEntropyCall(target=targets, summed=False, group=name_of(group), **head, **options)
        losses = PARALLEL_CROSS_ENTROPY(call, impl, "linear_cross_entropy")[0]
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / count_of(target, ignore_index)


@public
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
    for name in needed(teacher_hidden=teacher_hidden, teacher_weight=teacher_weight, teacher_bias=teacher_bias):
        raise ValueError(f"{name} must not require a gradient (it gets none; detach it), got one that does")
    check_mask(mask, hidden)
    check_positive("temperature", temperature)
    check_positive("chunk", chunk)
    check_choice("reduction", reduction, "mean", "sum", "none")
    teacher_rows, teacher_weight = as_rows(teacher_hidden, teacher_weight)
    call = KLDivergenceCall(
        **head_fields(hidden, weight, bias, chunk),
        teacher_hidden=teacher_rows,
        teacher_weight=teacher_weight,
        teacher_bias=teacher_bias,
        mask=None if mask is None or reduction == "none" else mask.flatten(),
        temperature=float(temperature),
        reverse=reverse,
        reduction=reduction,
    )
    losses = KL_DIVERGENCE(call, impl)[0]
    return mean_over(losses.view(hidden.shape[:-1]), mask, reduction) if reduction == "none" else losses


@public
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
        d_t    = ref_t - l_t
        loss_t = -min(r_t A_t, clamp(r_t, 1 - clip[0], 1 + clip[1]) A_t) + kl_weight (e^(d_t) - d_t - 1)

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
    low, high = check_pair("clip", clip, "numbers")
    call = GRPOCall(
        hidden=hidden,
        weight=weight,
        bias=bias,
        chunk=chunk,
        needs=(),
        target=target,
        advantages=advantages,
        old_log_probs=old_log_probs,
        reference_log_probs=reference_log_probs,
        mask=mask,
        clip=(check_number("clip", low), check_number("clip", high)),
        kl_weight=kl_weight,
        temperature=temperature,
        reduction=reduction,
    )
    call = check_grpo(call)
    chosen = choose("linear_grpo", GRPO_IMPLEMENTATIONS, call, impl).name
    numbers = {"advantages": advantages, "old": old_log_probs, "reference": reference_log_probs}
    apart = needed(**numbers) or compute_dtype(*numbers.values()) == torch.float64
    if chosen == "triton" and reduction != "none" and not apart:
        return GRPO(call.but(**head_fields(hidden, weight, bias, chunk)), chosen)[0]
    return mean_over(policy_losses(call, log_probs(call, chosen)), mask, reduction)


def log_probs(call: GRPOCall, impl: str) -> Tensor:
    """The log-probability `[B, T]` of each target under the scaled logits; 0 where it is masked."""
    hidden, bias = call.hidden, call.bias
    if call.temperature != 1.0:
        hidden, bias = hidden / call.temperature, None if bias is None else at_least_float32(bias) / call.temperature
    head = head_fields(hidden, call.weight, bias, call.chunk)
    options = row_options(-100, 0.0, 0.0, None, "none")
    plain = LinearCrossEntropyCall(target=call.target.flatten(), summed=False, **head, **options)
    return -LINEAR_CROSS_ENTROPY(plain, impl)[0].view(call.target.shape)
