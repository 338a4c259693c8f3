"""Mamba-3 as its paper writes it: the token loop, and the layer around it."""

from __future__ import annotations

import math
from typing import Any

import torch
from layer_math import linear, rms
from paper_cases import BY_TOKEN, K, Mechanism, T, rows, zeros
from torch import Tensor
from torch.nn.functional import silu, softplus

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


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """The layer of one sequence `[T, width]`; several ranks write their sum, and each reads it."""
    parts = linear(x, layer.input).split(layer.input.sizes, -1)
    values, gate, B, C, step, rate, trapezoid, angles = (
        part.unflatten(-1, shape) for part, shape in zip(parts, layer.input.parts.values(), strict=True)
    )
    R, H, _ = layer.key_bias.shape
    dt, lam = softplus(step + layer.step_bias.weight), torch.sigmoid(trapezoid)
    decay = -dt * torch.where(rate >= 0, rate + 1, 1 / (1 - rate)).clamp(min=1e-4)
    weights = torch.ones(3, R, *values.shape[1:], dtype=x.dtype) if R == 1 else layer.rank_weights
    keys, queries = (
        (rms(t, 1e-5) * norm.weight).repeat_interleave(H // t.shape[2], 2) + bias
        for t, norm, bias in ((B, layer.key_norm, layer.key_bias), (C, layer.query_norm, layer.query_bias))
    )
    y = torch.zeros_like(values)
    for h in range(H):
        theta, S, before = torch.zeros(angles.shape[1], dtype=x.dtype), 0.0, 0.0
        for t in range(len(x)):
            theta = theta + dt[t, h] * math.pi * torch.tanh(angles[t])
            k, q = (torch.stack([turned(part[t, r, h], theta) for r in range(R)]) for part in (keys, queries))
            v, alpha = weights[0, :, h] * values[t, h], torch.exp(decay[t, h])
            S = alpha * S + (1 - lam[t, h]) * dt[t, h] * alpha * before + lam[t, h] * dt[t, h] * k.T @ v
            before = k.T @ v
            read = (q @ S + layer.skip[h] * v) * silu(weights[1, :, h] * gate[t, h])
            y[t, h] = (weights[2, :, h] * read).sum(0)
    return linear(y.flatten(1), layer.output)


CASES = {
    "mamba3": Mechanism(
        mamba3,
        {"x": "B T HV V", "dt": "B T HV"}
        | BY_TOKEN
        | {"trapezoid_gate": "B T HV", "B": "B T H K", "C": "B T H K", "angles": "B T HV R", "D": "HV"},
        ("D",),
        scale=1.0,
        layers={
            "mamba3": {"heads": 4, "state_dim": 6, "groups": 2},
            "mamba3_ranks": {"heads": 2, "state_dim": 6, "ranks": 2, "angles": 3},
        },
        layer=layer_output,
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
