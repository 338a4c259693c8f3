"""Heads that several value heads share."""

from __future__ import annotations

from torch import Tensor


def repeat_heads(x: Tensor, heads: int, dim: int = 2) -> Tensor:
    """`[B, T, G, ...]` as `[B, T, heads, ...]`: each head for as many neighbours as share it; `x` itself where each has its own."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)
