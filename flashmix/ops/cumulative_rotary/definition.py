"""The meaning of the rotation by angles that add up: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def cumulative_rotary(
    B: Tensor,
    C: Tensor,
    angles: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    trapezoid_gate: Tensor,
    theta: Tensor | None = None,
    last_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`q, late_k` and the last `theta, k, own` of `CumulativeRotaryCall`, for sequences of one length; `theta` is not within a turn."""

    def none(x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 1, *x.shape[2:])

    heads, M, axis = dt.shape[2], angles.shape[3], B.dim() - 2
    steps = dt.unsqueeze(-1) * angles
    start = none(steps) if theta is None else theta.unsqueeze(1)
    sums = torch.cat([start, steps], 1).cumsum(1)
    within = sums[:, 1:] if axis == 2 else sums[:, 1:].unsqueeze(2)

    def turned(x: Tensor) -> Tensor:
        x = x.repeat_interleave(heads // x.shape[axis], axis)
        pairs = torch.view_as_complex(x[..., : 2 * M].unflatten(-1, (M, 2)).contiguous())
        rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(within), within)).flatten(-2)
        return torch.cat([rotated, x[..., 2 * M :]], -1)

    q, k, own = turned(C), turned(B), trapezoid_gate * dt
    first = none(k) if last_k is None else last_k.unsqueeze(1)
    all_k, all_own = torch.cat([first, k], 1), torch.cat([none(own), own], 1)
    weight = log_decay.exp() * (all_own[:, :-1] + (1 - trapezoid_gate) * dt)
    late_k = (weight if axis == 2 else weight.unsqueeze(2)).unsqueeze(-1) * all_k[:, :-1]
    return q, late_k, sums[:, -1], all_k[:, -1], all_own[:, -1]
