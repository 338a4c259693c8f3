"""MesaNet as its paper writes it: the token loop with an exact solve."""

from __future__ import annotations

import torch
from paper_cases import BETA, BY_TOKEN, QKV, H, K, Mechanism, T, rows, zeros
from torch import Tensor


def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    *,
    steps: int,
    S: tuple[Tensor, Tensor],
    scale: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2506.05233, section 3: H_t = gamma_t H_{t-1} + beta_t k_t k_t^T, G_t = gamma_t G_{t-1} + beta_t v_t k_t^T,
    o_t = G_t (H_t + Lambda)^{-1} q_t; here G^T."""
    R, memory = S
    o = []
    for t in range(len(v)):
        gamma = torch.exp(log_decay[t])
        R = gamma * R + beta[t] * torch.outer(k[t], k[t])
        memory = gamma * memory + beta[t] * torch.outer(k[t], v[t])
        o.append(scale * torch.linalg.solve(R.T + torch.diag(ridge), q[t]) @ memory)
    return rows(o, v), (R, memory)


CASES = {
    "mesa_net": Mechanism(
        mesa_net,
        QKV | BETA | BY_TOKEN | {"ridge": "HV K"},
        options={"steps": 12},  # two for each channel; the loop is exact
        scale=1.0,
        states=("N HV K K", "N HV K V"),
        errors=[
            ({"steps": 0}, ValueError, "steps must be between 1 and 1000, got 0"),
            ({"ridge": zeros(K)}, ValueError, f"ridge must have shape [{H}, {K}], got [{K}]"),
            (
                {"log_decay": zeros(1, T, H, K)},
                ValueError,
                f"log_decay must have shape [B, T, HV], got [1, {T}, {H}, {K}]",
            ),
        ],
    )
}
