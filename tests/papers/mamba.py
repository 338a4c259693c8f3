"""Mamba as its paper writes it: the token loop."""

from __future__ import annotations

import torch
from paper_cases import K, Mechanism, T, rows, zeros
from torch import Tensor


def mamba(
    x: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, S: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """2312.00752, equations 2 and 4: h_t = exp(dt A) h_{t-1} + dt B x_t, y_t = C h_t + D x_t, for each channel of a head."""
    A = -torch.exp(A_log)
    y = []
    for t in range(len(x)):
        S = torch.exp(dt[t][:, None] * A) * S + torch.outer(dt[t] * x[t], B[t])
        y.append(S @ C[t] + (0 if D is None else D * x[t]))
    return rows(y, x), S


CASES = {
    "mamba": Mechanism(
        mamba,
        {"x": "B T HV V", "dt": "B T HV V", "A_log": "HV V M", "B": "B T H M", "C": "B T H M", "D": "HV V"},
        ("D",),
        scale=1.0,
        states=("N HV V M",),
        layers={
            "mamba": {"state_dim": 8},
            "mamba_norms": {"inner": 24, "state_dim": 4, "rank": 3, "conv_width": 2, "conv_bias": False, "norms": True},
        },
        errors=[
            (
                {"B": zeros(1, T, 3, 4), "C": zeros(1, T, 3, 4)},
                ValueError,
                "the number of heads of x must be a positive multiple of the number of groups of B = 3, got 2",
            ),
            ({"dt": zeros(1, T, 1, K)}, ValueError, "dt must have shape [1, 6, 2, 8], got [1, 6, 1, 8]"),
            ({"A_log": zeros(4, K, 4)}, ValueError, "A_log must have shape [2, 8, 4], got [4, 8, 4]"),
            ({"D": zeros(1)}, ValueError, "D must have shape [2, 8], got [1]"),
        ],
    )
}
