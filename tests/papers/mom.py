"""The mixture of memories as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import STEPS, H, K, Mechanism, T, householder, rows, zeros
from torch import Tensor


def mom(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, scores: Tensor, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2502.13685, section 3: the memories of the largest scores are updated with Gated DeltaNet, the output is read from their sum with
    the normalised weights. The other memories stay."""
    memories, o = list(S), []
    for t in range(len(q)):
        weight, chosen = torch.softmax(scores[t], 0).topk(k.shape[1])
        weight = weight / weight.sum()
        for j, m in enumerate(chosen.tolist()):
            step = torch.exp(log_decay[t, j]) * householder(k[t, j], beta[t, j])
            memories[m] = step @ memories[m] + beta[t, j] * torch.outer(k[t, j], v[t, j])
        o.append(scale * q[t] @ sum(weight[j] * memories[m] for j, m in enumerate(chosen.tolist())))
    return rows(o, v[:, 0]), torch.stack(memories)


CASES = {
    "mom": Mechanism(
        mom,
        STEPS | {"log_decay": "B T n HV", "scores": "B T M"},
        rare=True,
        states=("N HV M K V",),
        slots=12,
        errors=[
            ({"k": zeros(1, T, H, K)}, ValueError, "k must have shape [B, T, n, H, K], got [1, 6, 2, 8]"),
            (
                {"scores": zeros(1, T, 1)},
                ValueError,
                "k must have shape [B, T, n, H, K] with n from 1 to 1, got [1, 6, 2, 2, 8]",
            ),
        ],
    )
}
