"""GLA as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BY_CHANNEL, QKV, H, Mechanism, T, rows, zeros
from torch import Tensor


def gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2312.06635, equation 3: S_t = (alpha_t^T 1) * S_{t-1} + k_t^T v_t, o_t = q_t S_t."""
    o = []
    for t in range(len(v)):
        alpha, ones = torch.exp(log_decay[t]), torch.ones_like(v[t])
        S = torch.outer(alpha, ones) * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


CASES = {
    "gla": Mechanism(
        gla,
        QKV | BY_CHANNEL,
        layers={"gla": {"heads": 2, "rank": 4}},
        errors=[({"log_decay": zeros(1, T, H)}, ValueError, "log_decay must have shape [B, T, H, K], got [1, 6, 2]")],
    )
}
