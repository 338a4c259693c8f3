"""RWKV-7 as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import RWKV7, H, K, Mechanism, T, rows, zeros
from torch import Tensor


def rwkv7(
    r: Tensor, log_decay: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2503.14456, equation 17: wkv_t = wkv_{t-1} (diag(w_t) - kk_t^T (a_t * kk_t)) + v_t^T k_t; `wkv` is `V x K`."""
    o = []
    for t in range(len(v)):
        transition = torch.diag(torch.exp(log_decay[t])) - torch.outer(kk[t], a[t] * kk[t])
        S = S @ transition + torch.outer(v[t], k[t])
        o.append(scale * S @ r[t])
    return rows(o, v), S


CASES = {
    "rwkv7": Mechanism(
        rwkv7,
        RWKV7,
        scale=1.0,
        values_first=True,
        grouped=False,
        layers={"rwkv7": {"heads": 2}},
        errors=[
            ({"kk": zeros(1, T, 4, K)}, ValueError, "kk must have shape [1, 6, 2, 8], got [1, 6, 4, 8]"),
            ({"log_decay": zeros(H)}, ValueError, "log_decay must have shape [B, T, H, K], got [2]"),
        ],
    )
}
