"""Kimi Delta Attention as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BETA, BY_CHANNEL, QKV, H, Mechanism, T, householder, rows, zeros
from torch import Tensor


def kda(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2510.26692, equation 1: S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t."""
    o = []
    for t in range(len(v)):
        alpha = torch.diag(torch.exp(log_decay[t]))
        S = householder(k[t], beta[t]) @ alpha @ S + beta[t] * torch.outer(k[t], v[t])
        o.append(scale * S.T @ q[t])
    return rows(o, v), S


CASES = {
    "kda": Mechanism(
        kda,
        QKV | BETA | BY_CHANNEL,
        layers={"kda": {"heads": 2}, "kda_bounded": {"heads": 2, "lower": -5.0, "rank": 3}},
        errors=[({"log_decay": zeros(1, T, H)}, ValueError, "log_decay must have shape [B, T, HV, K], got [1, 6, 2]")],
    )
}
