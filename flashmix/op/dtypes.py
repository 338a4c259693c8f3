"""The dtypes that ops compute in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype that a row-wise op computes in: float64 if any input is float64, else float32."""
    for t in tensors:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and of everything computed inside the recurrence: float32, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants of `t`; None where it is off, where there is none (on "meta"), and for float64."""
    kind = t.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind) or t.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(t: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off on the device of `t`."""
    return nullcontext() if autocast_dtype(t) is None else torch.autocast(t.device.type, enabled=False)


def product_dtype(x: Tensor, impl: str) -> torch.dtype:
    """The dtype of the recurrence's operands where one of them is a product of arguments in the dtype of `x`.

    Plain PyTorch and C compute in float32, so 16-bit arguments on a CPU come as float32, and the product reaches the state unrounded.
    Kernels multiply in the operands' dtype, and autocast asks for its own: there it is rounded once.
    """
    half = x.dtype in (torch.bfloat16, torch.float16)
    if half and x.device.type == "cpu" and impl != "triton" and autocast_dtype(x) is None:
        return torch.float32
    return x.dtype


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the autocast dtype of the first one's device, if that is wanted of it."""
    first, *_ = tensors
    dtype = autocast_dtype(next(t for t in tensors if t is not None) if first is None else first)
    return tensors if dtype is None else tuple([None if t is None else t.to(dtype) for t in tensors])


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself if float32 or float64, else in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
