"""Simple GLA as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BY_TOKEN, QKV, Mechanism, rows
from torch import Tensor


def simple_gla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, S: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """2405.21060, equation 1 with scalar A: h_t = a_t h_{t-1} + B_t x_t^T, y_t = C_t^T h_t."""
    o = []
    for t in range(len(v)):
        S = torch.exp(log_decay[t]) * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


CASES = {"simple_gla": Mechanism(simple_gla, QKV | BY_TOKEN)}
