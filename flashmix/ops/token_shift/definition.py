"""The meaning of the token shift: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def token_shift(x: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`y_t = x_{t-1}` for `x [B, T, D]`, and the last token."""
    past = x.new_zeros(x.shape[0], 1, x.shape[2]) if initial_state is None else initial_state
    past = torch.cat([past, x], dim=1)
    return past[:, :-1], past[:, -1:]
