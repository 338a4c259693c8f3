"""One phrasing of every error: `{name} must ..., got ...`, raised before anything is computed.

ValueError for shapes, devices and values, TypeError for dtypes and for things that are not tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SMALLEST = torch.finfo(torch.float32).tiny
_contents_everywhere = False


class checks:
    """Checks the *contents* of tensors (sorted `cu_seqlens`, positions within their table) on GPUs too.

    On the CPU contents are always checked. On a GPU that costs a synchronisation, so it is off until
    `checks(True)`; kernels bound what they read in any case. `with checks(True): ...` restores the setting.
    """

    def __init__(self, enabled: bool) -> None:
        global _contents_everywhere
        self._before = _contents_everywhere
        _contents_everywhere = bool(enabled)

    def __enter__(self) -> checks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _contents_everywhere
        _contents_everywhere = self._before


def contents_are_checked(tensor: Tensor) -> bool:
    """Whether the values of `tensor` may be read here: always on the CPU, on a GPU after `checks(True)`, never while tracing."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" or _contents_everywhere


def is_mapped(tensor: Tensor) -> bool:
    """Whether it stands for a row of each of many tensors, under vmap."""
    while not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def have_addresses(*tensors: Tensor) -> bool:
    """Whether it can be asked where the tensors lie: not while tracing, under torch.func, or of tensors without data."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors)


def contents_everywhere() -> bool:
    """Whether `checks(True)` asks for the contents of tensors on GPUs."""
    return _contents_everywhere


def _brackets(sizes: Sequence[int | str]) -> str:
    return "[" + ", ".join(str(size) for size in sizes) + "]"


# Tensors whose numbers are not all there, by class; under most ops of torch they raise its own errors, or lose their mask.
WITHOUT_NUMBERS = {
    "MaskedTensor": "a masked tensor",
    "UninitializedParameter": "an uninitialized parameter",
    "UninitializedBuffer": "an uninitialized buffer",
}


def check_tensor(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a tensor with strides and numbers: neither sparse nor nested, masked or uninitialized."""
    if type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if (kind := type(value).__name__) in WITHOUT_NUMBERS:
        raise TypeError(f"{name} must be a dense tensor, got {WITHOUT_NUMBERS[kind]}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor, got {kind}")


def check_pair(name: str, value: object, of: str) -> tuple[Any, Any]:
    """Both entries of a pair of `of`."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{name} must be a pair of {of}, got {value if isinstance(value, tuple) else type(value).__name__}"
        )
    return value[0], value[1]


def dims(name: str, tensor: Tensor, axes: str) -> tuple[int, ...]:
    """The sizes of `tensor`, which must have as many axes as `axes` ("B T H K") names."""
    check_tensor(name, tensor)
    if tensor.dim() != axes.count(" ") + 1:
        raise ValueError(f"{name} must have shape {_brackets(axes.split())}, got {_brackets(tensor.shape)}")
    return tuple(tensor.shape)


def check_shape(name: str, tensor: Tensor, *expected: int) -> None:
    """Raises ValueError unless `tensor` has exactly the sizes `expected`."""
    check_tensor(name, tensor)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must have shape {_brackets(expected)}, got {_brackets(tensor.shape)}")


def check_floating(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless `tensor` is of a floating dtype that ops compute with."""
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must have a floating dtype, got {_dtype(tensor)}")
    if tensor.dtype not in FLOATING:
        check_dtype(name, tensor, *FLOATING)


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raises TypeError unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must have dtype {wanted}, got {_dtype(tensor)}")


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor, *, dtype: bool = True) -> None:
    """Raises unless `tensor` lives on the device of `other` (ValueError) and, with `dtype`, shares its dtype (TypeError)."""
    if tensor.device != other.device:
        raise ValueError(f"{name} must be on {other.device} like {other_name}, got {tensor.device}")
    if dtype and tensor.dtype != other.dtype:
        raise TypeError(f"{name} must have dtype {_dtype(other)} like {other_name}, got {_dtype(tensor)}")


def check_written(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless each number of a tensor that is written has memory of its own, with the sign that it has there."""
    if not torch.compiler.is_compiling() and tensor.is_neg():
        raise ValueError(f"{name} must not be a negated view, whose memory has the other sign (resolve_neg copies it)")
    if tensor.is_contiguous():
        return
    layout = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for axis, (stride, _) in enumerate(layout):
        reach = sum([s * (n - 1) for other, (s, n) in enumerate(layout) if other != axis and s <= stride])
        if stride <= reach:
            raise ValueError(f"{name} must have memory of its own for each number, got strides {list(tensor.stride())}")


def check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    """Raises ValueError unless `value` is a positive multiple of `of`."""
    if of <= 0 or value <= 0 or value % of:
        raise ValueError(f"{name} must be a positive multiple of {of_name} = {of}, got {value}")


def check_range(name: str, value: int | float, low: int | float, high: int | float) -> None:
    """Raises ValueError unless `low <= value <= high`."""
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


def check_positive(name: str, value: float | None) -> None:
    """Raises ValueError unless `value` is None or above 0, with an inverse that float32 holds."""
    if value is not None and not value >= SMALLEST:
        raise ValueError(f"{name} must be positive{' in float32' * (value > 0)}, got {value}")


def check_choice(name: str, value: object, *allowed: object) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(choice) for choice in allowed)}, got {value!r}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
