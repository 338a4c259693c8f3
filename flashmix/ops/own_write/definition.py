"""The meaning of the read of a token's own write: a plain formula, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

from torch import Tensor


def with_own_write(
    y: Tensor, x: Tensor, B: Tensor, C: Tensor, own: Tensor, D: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    scores = (B * C).sum(-1).repeat_interleave(own.shape[2] // B.shape[2], 2)
    weight = scale * own * scores
    return y + (weight if D is None else weight + D).unsqueeze(-1) * x
