"""Raven as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import BY_TOKEN, QKV, H, K, Mechanism, T, rows, zeros
from torch import Tensor


def raven(
    q: Tensor, k: Tensor, v: Tensor, routing: Tensor, log_decay: Tensor, *, S: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """github.com/goombalab/raven: a slot keeps exp(a_t r_t) of its key and value, and takes 1 - exp(a_t r_t) of the token's."""
    keys, values = S[0].T, S[1]
    o = []
    for t in range(len(v)):
        kept = torch.exp(log_decay[t] * routing[t])
        if torch.isinf(log_decay[t]):  # 0 times infinity: a slot that was not chosen keeps all
            kept = (routing[t] == 0).to(kept.dtype)
        keys = torch.diag(kept) @ keys + torch.outer(1 - kept, k[t])
        values = torch.diag(kept) @ values + torch.outer(1 - kept, v[t])
        o.append(values.T @ torch.softmax(scale * keys @ q[t], 0))
    return rows(o, v), (keys.T, values)


CASES = {
    "raven": Mechanism(
        raven,
        QKV | {"routing": "B T HV M"} | BY_TOKEN,
        rare=True,
        states=("N HV K M", "N HV M V"),
        routing=("routing",),
        errors=[
            (
                {"routing": zeros(1, T, H, 0)},
                ValueError,
                "routing must have shape [B, T, HV, M] with M >= 1, got M = 0",
            ),
            ({"log_decay": zeros(1, T, H, K)}, ValueError, "log_decay must have shape [1, 6, 2], got [1, 6, 2, 8]"),
        ],
    )
}
