"""LightNet as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import QKV, Mechanism, rows
from torch import Tensor


def lightnet(
    q: Tensor, k: Tensor, v: Tensor, *, S: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """2405.21022, section 3: k~_tj = exp(k_j) / sum_{s <= t} exp(k_s), o_t = q_t^T sum_{j <= t} k~_tj v_j^T. The state holds the
    quotients and the logarithm of their denominator."""
    total = torch.exp(S[1])
    numerator = total[:, None] * S[0]
    o = []
    for t in range(len(v)):
        total, numerator = total + torch.exp(k[t]), numerator + torch.outer(torch.exp(k[t]), v[t])
        o.append(scale * q[t] @ (numerator / total[:, None]))
    return (rows(o, v), (numerator / total[:, None], torch.log(total))) if o else (rows(o, v), S)


CASES = {"lightnet": Mechanism(lightnet, QKV, rare=True, states=("N HV K V", "N H K"), logarithms=(1,))}
