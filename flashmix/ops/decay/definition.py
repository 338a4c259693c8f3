"""The meaning of the decays and of beta: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """`g = -e^{A_log} log(1 + e^{x + dt_bias})` for `x [..., H]` or, with `dt_bias [H, K]`, `[..., H, K]`."""
    rate = A_log if dt_bias.dim() == 1 else A_log[:, None]
    z = x + dt_bias
    return -torch.exp(rate) * torch.logaddexp(z, torch.zeros_like(z))


def bounded_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, lower: float = -5.0) -> Tensor:
    """`g = lower / (1 + e^{-e^{A_log} (x + dt_bias)})`."""
    sharpness = torch.exp(A_log if dt_bias.dim() == 1 else A_log[:, None])
    return lower * torch.sigmoid(sharpness * (x + dt_bias))


def write_strength(x: Tensor, negative_eigenvalues: bool = False) -> Tensor:
    return (2 if negative_eigenvalues else 1) * torch.sigmoid(x)
