"""The meaning of the losses over a vocabulary: plain formulas, run in float64. Only tests, the self-test and docs import this."""

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


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0, reverse: bool = False) -> Tensor:
    """Of each token of logits `[..., V]`: `T^2 sum p ln(p / q)` for a student q and a teacher p, reversed `q ln(q / p)`."""
    log_q, log_p = (torch.log_softmax(z / temperature, dim=-1) for z in (student, teacher))
    upper, lower = (log_q, log_p) if reverse else (log_p, log_q)
    return temperature**2 * (upper.exp() * (upper - lower)).sum(-1)


def grpo(
    log_probs: Tensor, old: Tensor, reference: Tensor, advantages: Tensor, low: float, high: float, kl_weight: float
) -> Tensor:
    """The loss of each sampled token of `[B, T]`, advantages `[B, 1]` or `[B, T]`."""
    ratio = torch.exp(log_probs - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -gain + kl_weight * (torch.exp(reference - log_probs) - (reference - log_probs) - 1)
