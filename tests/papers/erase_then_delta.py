"""Erase-then-Delta Attention as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BETA, BY_CHANNEL, QKV, H, K, Mechanism, T, householder, rows, zeros
from torch import Tensor


def erase_then_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase_key: Tensor,
    erase_gate: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    S: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """2606.26560, equation 8: S_t = (I - beta_t k_t k_t^T) (I - gamma_t e_t e_t^T) D_t S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t."""
    o = []
    for t in range(len(v)):
        erase, correct = householder(erase_key[t], erase_gate[t]), householder(k[t], beta[t])
        S = correct @ erase @ torch.diag(torch.exp(log_decay[t])) @ S + beta[t] * torch.outer(k[t], v[t])
        o.append(scale * S.T @ q[t])
    return rows(o, v), S


CASES = {
    "erase_then_delta": Mechanism(
        erase_then_delta,
        QKV | {"erase_key": "B T H K", "erase_gate": "B T HV"} | BETA | BY_CHANNEL,
        unit=("k", "erase_key"),
        rare=True,
        errors=[
            ({"erase_key": zeros(1, T, H, 4)}, ValueError, "erase_key must have shape [1, 6, 2, 8], got [1, 6, 2, 4]"),
            ({"erase_gate": zeros(1, T, H, K)}, ValueError, "erase_gate must have shape [1, 6, 2], got [1, 6, 2, 8]"),
            ({"log_decay": zeros(1, T, H)}, ValueError, "log_decay must have shape [B, T, HV, K], got [1, 6, 2]"),
        ],
    )
}
