"""The meaning of rows with a factor each: a plain formula, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

from torch import Tensor


def scaled_rows(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor.unsqueeze(-1)
