"""The dtypes that ops compute in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that a row-wise op computes in: float64 if any input is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and of everything computed inside the recurrence: float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the autocast dtype of their device, where autocast is on and the first is not float64."""
    first = next(t for t in tensors if t is not None)
    kind = first.device.type
    if not torch.is_autocast_enabled(kind) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple([None if t is None else t.to(dtype) for t in tensors])


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself if float32 or float64, else in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
