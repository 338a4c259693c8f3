"""The definition of each op as a function of the op's own arguments, for the self-test: reference in float64, baseline in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashmix.ops.attention import definition as attention
from flashmix.ops.decay import definition as decay
from flashmix.ops.delta_net_step import definition as delta_net_step
from flashmix.ops.gated_product import definition as gated_product
from flashmix.ops.losses import definition as losses
from flashmix.ops.norm import definition as norm
from flashmix.ops.recurrence import definition as recurrence
from flashmix.ops.rotary import definition as rotary
from flashmix.ops.scan import definition as scan
from flashmix.ops.scan.step import definition as scan_step
from flashmix.ops.selective_scan import definition as selective_scan
from flashmix.ops.selective_scan.step import definition as selective_step
from flashmix.ops.short_conv import definition as short_conv
from flashmix.ops.token_shift import definition as token_shift

Definition = Callable[..., Any]


def in_order(q: Tensor) -> Tensor:
    """`[B, T]`: the positions of tokens that are read from the first one on."""
    return torch.arange(q.shape[1]).expand(q.shape[:2])


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return attention.softmax_attention(q, k, v, scale=q.shape[-1] ** -0.5, causal=causal)[0]


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    at = in_order(q)
    return rotary.rotary(q, cos, sin, at), rotary.rotary(k, cos, sin, at)


def convolve(q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, v_weight: Tensor) -> Any:
    return short_conv.short_conv_qkv((q, k, v), (q_weight, k_weight, v_weight))


def divergence(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
    return losses.kl_divergence(hidden @ weight.T, teacher_hidden @ teacher_weight.T).mean()


def policy_loss(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor) -> Tensor:
    scores = (hidden @ weight.T).log_softmax(-1).gather(-1, target[..., None])[..., 0]
    now = scores.detach()
    return losses.grpo(scores, now, now, advantages[:, None], 0.2, 0.2, 0.0).mean()


def step_of_layer(qkv: Tensor, strength: Tensor, **rest: Any) -> tuple[Tensor, ...]:
    o, *states = delta_net_step.delta_net_step(qkv[:, None], strength[:, None], **rest)
    return o[:, 0], *states


def by_groups(x: Tensor, groups: int) -> Tensor:
    return norm.group_norm(x, groups, x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1]))


# A function of the arguments of the op's tiny call (`flashmix.capabilities.tiny_call`), `causal` where the op has it; the results are
# those of the op with `return_state=True`, and the tensors that a step has written.
DEFINITIONS: dict[str, Definition] = {
    "linear_attention": recurrence.linear_attention,
    "delta_rule": recurrence.delta_rule,
    "dplr": recurrence.dplr,
    "linear_attention_step": lambda q, k, v, state: recurrence.linear_attention(q, k, v, initial_state=state),
    "delta_rule_step": lambda q, k, v, beta, state: recurrence.delta_rule(q, k, v, beta, initial_state=state),
    "dplr_step": lambda q, k, v, a, b, state: recurrence.dplr(q, k, v, a, b, initial_state=state),
    "delta_net_step": step_of_layer,
    "softmax_attention": attend,
    "attention_with_cache": lambda q, cache, k, v: attend(q, k, v, causal=True),
    "rotary": lambda x, cos, sin: rotary.rotary(x, cos, sin, in_order(x)),
    "rotary_qk": turn,
    "rms_norm": norm.rms_norm,
    "layer_norm": norm.layer_norm,
    "group_norm": by_groups,
    "l2_norm": norm.l2_norm,
    "gated": gated_product.swiglu,
    "swiglu": gated_product.swiglu,
    "softplus_decay": decay.softplus_decay,
    "bounded_decay": decay.bounded_decay,
    "write_strength": decay.write_strength,
    "short_conv": short_conv.short_conv,
    "short_conv_qkv": convolve,
    "token_shift": token_shift.token_shift,
    "scan": scan.scan,
    "scan_max": scan.scan_max,
    "selective_scan": selective_scan.selective_scan,
    "selective_scan_step": selective_step.selective_scan_step,
    "scan_step": scan_step.scan_step,
    "cross_entropy": lambda logits, target: losses.cross_entropy(logits, target).mean(),
    "linear_cross_entropy": lambda hidden, weight, target: losses.cross_entropy(hidden @ weight.T, target).mean(),
    "linear_kl_divergence": divergence,
    "linear_grpo": policy_loss,
}


def flattened(got: Any) -> list[Tensor]:
    """The tensors of a result, however it nests them; None is left out."""
    if isinstance(got, Tensor):
        return [got]
    return [] if got is None else [t for part in got for t in flattened(part)]


def packed(definition: Definition, call: dict[str, Any], per_token: set[str], ends: Sequence[int]) -> list[Tensor]:
    """The results of sequences that lie end to end: one after the other, then those per token joined, states stacked.

    `per_token` names the arguments that have one entry per token.
    """
    parts, lengths = [], [last - first for first, last in pairwise(ends)]
    for first, last in pairwise(ends):
        own = {name: t[:, first:last] if name in per_token else t for name, t in call.items()}
        parts.append(flattened(definition(**own)))

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        tokens = [t.shape[1] for t in tensors] == lengths
        return torch.cat(list(tensors), dim=1 if tokens else 0)

    return [joined(tensors) for tensors in zip(*parts, strict=True)]
