"""The meaning of the losses of a language model's head: plain formulas, run in float64. Only tests and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


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
