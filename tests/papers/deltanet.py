"""DeltaNet as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BETA, QKV, Mechanism, householder, rows
from torch import Tensor


def deltanet(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2406.06484, equation 4: S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t; `S` is `V x K`."""
    o = []
    for t in range(len(v)):
        S = S @ householder(k[t], beta[t]) + beta[t] * torch.outer(v[t], k[t])
        o.append(scale * S @ q[t])
    return rows(o, v), S


CASES = {
    "deltanet": Mechanism(
        deltanet,
        QKV | BETA,
        values_first=True,
        layers={
            "deltanet": {"heads": 2, "negative_eigenvalues": True},
            "deltanet_gated": {"heads": 2, "output_gate": "silu", "conv_bias": True, "eps": 1e-3},
            "deltanet_sum": {"heads": 2, "qk_activation": "elu", "qk_norm": "sum"},
        },
    )
}
