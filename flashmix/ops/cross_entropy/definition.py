"""The meaning of the cross entropy: plain formulas, run in float64. Only tests and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The loss of each token: `(1 - e) (lse - z_target) + e (lse - mean z) + z_loss lse^2`, or 0 if it is ignored."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    lse = torch.log(torch.exp(z - z.amax(-1, keepdim=True)).sum(-1)) + z.amax(-1)
    z_target = z.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = (1 - label_smoothing) * (lse - z_target) + label_smoothing * (lse - z.mean(-1)) + z_loss * lse**2
    return torch.where(target == ignore_index, torch.zeros_like(loss), loss)
