"""The policy loss of given log-probabilities, in plain PyTorch that autograd differentiates."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.losses.call import GRPOCall


def policy_losses(call: GRPOCall, log_probs: Tensor) -> Tensor:
    """The loss of each token for the log-probabilities `[B, T]` of the targets.

    r = e^(l - old);    loss = -min(r A, clamp(r, 1 - clip[0], 1 + clip[1]) A) + kl_weight (e^(ref - l) - (ref - l) - 1)
    """
    low, high = call.clip
    old = log_probs.detach() if call.old_log_probs is None else call.old_log_probs
    advantages = call.advantages.unsqueeze(1) if call.advantages.dim() == 1 else call.advantages
    ratio = torch.exp(log_probs - old)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if call.kl_weight and call.reference_log_probs is not None:
        above = call.reference_log_probs - log_probs
        losses = losses + call.kl_weight * (torch.expm1(above) - above)
    return losses
