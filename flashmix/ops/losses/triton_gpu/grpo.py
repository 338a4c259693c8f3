"""The reduced policy loss of a head on a GPU; its gradients are ready with the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.ops.losses.call import GRPOCall, LossOptions
from flashmix.ops.losses.head import row_weights
from flashmix.ops.losses.triton_gpu.head import HeadSums, empty_sums, head_of, rows_of, scaled_sums, statistics_of
from flashmix.ops.losses.triton_gpu.kl_divergence import weighted
from flashmix.ops.losses.triton_gpu.rows import RowGradient, RowStatistics, logit_rows, rows_backward, rows_forward

PLAIN = LossOptions(ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None)

backward = scaled_sums


def keeps(call: GRPOCall) -> Outputs:
    """The gradients of the needed tensors."""
    return tuple(empty_sums(call, call.needs, rows_of(call)).values())


def forward(call: GRPOCall, save: bool) -> tuple[Outputs, Outputs]:
    target, weights = (
        call.target.flatten().contiguous(),  # flatten leaves one expanded row expanded
        row_weights(call.target.shape, call.device, call.mask, call.reduction).flatten(),
    )
    policy, scale = policy_of(call), 1 / call.temperature
    losses, level, whole, expected = statistics_of(call.hidden, 4)
    head = head_of(call)
    sums = empty_sums(call, call.needs, head.rows) if save else {}
    gradients = HeadSums(head, sums)
    for part, z in head.chunks():
        logits, found = logit_rows(z, head.bias, scale), RowStatistics(None, level, whole, expected).rows(part)
        rows_forward(logits, target[part], found, PLAIN)
        log_probs = (found.expected - found.level) - found.whole.log()
        losses[part], slope = policy.rows(part).losses(log_probs, call)
        if sums:
            grad = weighted(-slope, weights[part])
            rows_backward(logits, target[part], found, RowGradient(grad, z, z.stride(0)), PLAIN)
            gradients.add(part, z)
    return (weighted(losses, weights).sum(0),), tuple(sums.values())


class Policy(NamedTuple):
    """What the policy loss of each row needs, float32 `[N]`."""

    advantages: Tensor
    old: Tensor | None
    reference: Tensor | None

    def rows(self, part: slice) -> Policy:
        return Policy(*[None if t is None else t[part] for t in self])  # type: ignore[arg-type]

    def losses(self, log_probs: Tensor, call: GRPOCall) -> tuple[Tensor, Tensor]:
        """Losses of rows, and their derivatives by the log-probabilities."""
        low, high = call.clip
        ratio = torch.ones_like(log_probs) if self.old is None else torch.exp(log_probs - self.old)
        free, bounded = ratio * self.advantages, ratio.clamp(1 - low, 1 + high) * self.advantages
        loss, slope = -torch.minimum(free, bounded), torch.where(free <= bounded, -free, 0.0)
        if call.kl_weight and self.reference is not None:
            above = self.reference - log_probs
            loss = loss + call.kl_weight * (torch.expm1(above) - above)
            slope = slope - call.kl_weight * torch.expm1(above)
        return loss, slope


def policy_of(call: GRPOCall) -> Policy:
    advantages = call.advantages
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand(call.target.shape)
    given = (advantages, call.old_log_probs, call.reference_log_probs)
    return Policy(*[None if t is None else t.to(torch.float32).flatten() for t in given])  # type: ignore[arg-type]
