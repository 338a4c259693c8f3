"""Mamba-2 as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import MAMBA, K, Mechanism, T, rows, zeros
from torch import Tensor


def mamba2(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2405.21060, equation 1 with scalar A, discretised: h_t = exp(dt A) h_{t-1} + dt B x_t^T, y_t = C^T h_t + D x_t."""
    A = -torch.exp(A_log)
    y = []
    for t in range(len(x)):
        S = torch.exp(dt[t] * A) * S + dt[t] * torch.outer(B[t], x[t])
        y.append(scale * C[t] @ S + (0 if D is None else D * x[t]))
    return rows(y, x), S


CASES = {
    "mamba2": Mechanism(
        mamba2,
        MAMBA,
        ("D",),
        scale=1.0,
        layers={
            "mamba2": {"heads": 4, "state_dim": 8},
            "mamba2_groups": {"heads": 4, "state_dim": 8, "groups": 2, "conv_width": 2},
            "mamba2_one_norm": {
                "heads": 4,
                "state_dim": 8,
                "groups": 2,
                "norm_groups": 1,
                "conv_bias": False,
                "eps": 1e-3,
            },
        },
        errors=[
            (
                {"B": zeros(1, T, 3, K), "C": zeros(1, T, 3, K)},
                ValueError,
                "the number of heads of x must be a positive multiple of the number of heads of C = 3, got 2",
            ),
            ({"dt": zeros(1, T, 1)}, ValueError, "dt must have shape [1, 6, 2], got [1, 6, 1]"),
            ({"A_log": zeros(4)}, ValueError, "A_log must have shape [2], got [4]"),
            ({"D": zeros(1)}, ValueError, "D must have shape [2], got [1]"),
        ],
    )
}
