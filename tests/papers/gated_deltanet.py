"""Gated DeltaNet as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BETA, BY_TOKEN, QKV, H, K, Mechanism, T, householder, rows, zeros
from torch import Tensor


def gated_deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2412.06464, equation 10: S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        alpha = torch.exp(log_decay[t])
        S = S @ (alpha * householder(k[t], beta[t])) + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


CASES = {
    "gated_deltanet": Mechanism(
        gated_deltanet,
        QKV | BETA | BY_TOKEN,
        values_first=True,
        layers={
            "gated_deltanet": {"heads": 2, "value_heads": 4, "value_dim": 6},
            "gated_deltanet_bare": {"heads": 2, "conv_width": 0, "output_gate": "none"},
        },
        errors=[
            ({"log_decay": zeros(1, T, H, K)}, ValueError, "log_decay must have shape [B, T, HV], got [1, 6, 2, 8]")
        ],
    )
}
