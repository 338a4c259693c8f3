"""Mamba-3 as its paper writes it: the token loop."""

from __future__ import annotations

import math

import torch
from paper_cases import BY_TOKEN, K, Mechanism, T, rows, zeros
from torch import Tensor

States = tuple[Tensor, Tensor, Tensor, Tensor]


def turned(x: Tensor, theta: Tensor) -> Tensor:
    """Blocks of rotations times the pairs of `x`; its other channels stay."""
    c, s, pairs = torch.cos(theta), torch.sin(theta), len(theta)
    blocks = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    return torch.cat([(blocks @ x[: 2 * pairs].view(pairs, 2, 1)).flatten(), x[2 * pairs :]])


def mamba3(
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    trapezoid_gate: Tensor,
    B: Tensor,
    C: Tensor,
    angles: Tensor,
    D: Tensor | None = None,
    *,
    S: States,
    scale: float,
) -> tuple[Tensor, States]:
    """2603.15569, section 3: h_t = alpha_t h_{t-1} + beta_t B_{t-1} x_{t-1}^T + gamma_t B_t x_t^T, alpha = exp(dt A),
    beta = (1 - lambda) dt alpha, gamma = lambda dt, with B and C rotated by the sum of dt theta; y_t = C_t^T h_t."""
    theta, h, B_before, x_before = S
    y = []
    for t in range(len(x)):
        theta = torch.remainder(theta + dt[t] * angles[t], 2 * math.pi)
        B_t, C_t, alpha = turned(B[t], theta), turned(C[t], theta), torch.exp(log_decay[t])
        beta, gamma = (1 - trapezoid_gate[t]) * dt[t] * alpha, trapezoid_gate[t] * dt[t]
        h = alpha * h + beta * torch.outer(B_before, x_before) + gamma * torch.outer(B_t, x[t])
        y.append(scale * C_t @ h + (0 if D is None else D * x[t]))
        B_before, x_before = B_t, x[t]
    return rows(y, x), (theta, h, B_before, x_before)


CASES = {
    "mamba3": Mechanism(
        mamba3,
        {"x": "B T HV V", "dt": "B T HV"}
        | BY_TOKEN
        | {"trapezoid_gate": "B T HV", "B": "B T H K", "C": "B T H K", "angles": "B T HV R", "D": "HV"},
        ("D",),
        scale=1.0,
        states=("N HV R", "N HV K V", "N HV K", "N HV V"),
        errors=[
            ({"x": zeros(1, T, 1, 2, K)}, ValueError, "x must have shape [B, T, HV, V], got [1, 6, 1, 2, 8]"),
            ({"angles": zeros(1, T, 2, 5)}, ValueError, "angles must have shape [1, 6, 2, 4], got [1, 6, 2, 5]"),
            (
                {"x": zeros(1, T, 3, 2, K), "B": zeros(1, T, 3, 2, K), "C": zeros(1, T, 2, 2, K)},
                ValueError,
                "x must have shape [1, 6, 2, 2, 8], got [1, 6, 3, 2, 8]",
            ),
            (
                {"x": zeros(1, T, 2, 2, K), "B": zeros(1, T, 3, 2, K), "C": zeros(1, T, 2, 2, K)},
                ValueError,
                "B must have shape [1, 6, 2, 2, 8], got [1, 6, 3, 2, 8]",
            ),
        ],
    )
}
