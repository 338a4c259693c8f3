"""Momentum DeltaNet and Titans with a linear memory as their papers write them: the token loops."""

from __future__ import annotations

import torch
from paper_cases import BETA, BY_TOKEN, QKV, H, K, Mechanism, T, rows, zeros
from torch import Tensor

States = tuple[Tensor, Tensor]


def momentum_deltanet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    gradient_beta: Tensor,
    momentum_log_decay: Tensor,
    *,
    S: States,
    scale: float,
) -> tuple[Tensor, States]:
    """2605.05838, section 3: M_t = mu_t M_{t-1} - eta_t k_t (v_t - alpha_t k_t^T S_{t-1}), S_t = alpha_t S_{t-1} - beta_t M_t; the state
    here is -M."""
    memory, M = S[0], -S[1]
    o = []
    for t in range(len(v)):
        alpha, mu = torch.exp(log_decay[t]), torch.exp(momentum_log_decay[t])
        M = mu * M - gradient_beta[t] * torch.outer(k[t], v[t] - alpha * k[t] @ memory)
        memory = alpha * memory - beta[t] * M
        o.append(scale * q[t] @ memory)
    return rows(o, v), (memory, -M)


def titans_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    momentum_log_decay: Tensor,
    *,
    S: States,
    scale: float,
) -> tuple[Tensor, States]:
    """2501.00663, equations 13 and 14: S_t = eta_t S_{t-1} - theta_t grad l(M_{t-1}; x_t), M_t = (1 - alpha_t) M_{t-1} + S_t, the
    gradient k (M^T k - v)^T."""
    M, step = S
    o = []
    for t in range(len(v)):
        gradient = torch.outer(k[t], k[t] @ M - v[t])
        step = torch.exp(momentum_log_decay[t]) * step - beta[t] * gradient
        M = torch.exp(log_decay[t]) * M + step
        o.append(scale * q[t] @ M)
    return rows(o, v), (M, step)


MOMENTUM, STATES = {"momentum_log_decay": "B T HV"}, ("N HV K V", "N HV K V")
WRONG = {"momentum_log_decay": zeros(1, T, H, K)}
CASES = {
    "momentum_deltanet": Mechanism(
        momentum_deltanet,
        QKV | BETA | BY_TOKEN | {"gradient_beta": "B T HV"} | MOMENTUM,
        rare=True,
        states=STATES,
        weak=True,
        errors=[(WRONG, ValueError, "momentum_log_decay must have shape [1, 6, 2], got [1, 6, 2, 8]")],
    ),
    "titans_linear": Mechanism(
        titans_linear,
        QKV | BETA | BY_TOKEN | MOMENTUM,
        rare=True,
        states=STATES,
        weak=True,
        errors=[({"beta": zeros(1, T, 1)}, ValueError, "beta must have shape [1, 6, 2], got [1, 6, 1]")],
    ),
}
