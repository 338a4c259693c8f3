"""The meaning of the rotary position embedding: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotates the pairs `(i, i + R/2)` of the first R channels of `x [B, T, H, D]`; `positions [B, T]`."""
    half = cos.shape[-1]
    c, s = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)
