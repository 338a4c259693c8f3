"""RetNet as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import QKV, Mechanism, rows
from torch import Tensor


def retnet(q: Tensor, k: Tensor, v: Tensor, *, S: Tensor, scale: float, head: int, heads: int) -> tuple[Tensor, Tensor]:
    """2307.08621, equations 5 and 8: S_n = gamma S_{n-1} + K_n^T V_n, Q_n S_n."""
    gamma = 1 - 2.0 ** (-5 - head)
    o = []
    for t in range(len(v)):
        S = gamma * S + torch.outer(k[t], v[t])
        o.append(scale * q[t] @ S)
    return rows(o, v), S


CASES = {"retnet": Mechanism(retnet, QKV, by_head=True, layers={"retnet": {"heads": 2}})}
