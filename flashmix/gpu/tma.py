"""Tensors whose tiles the Tensor Memory Accelerator (TMA) of Hopper and later moves: the descriptors that a kernel takes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

KEPT = 1024  # descriptors a kernel keeps; 128 bytes each


class ThreadContext(threading.local):
    """Whether the GPU's context is known to be current on this thread."""

    has_context = False


_thread = ThreadContext()


def make_context_current() -> None:
    """Makes the context of the current GPU current on this thread: without one the driver makes no tensor map.

    torch leaves that to the first of its own calls that needs one, which on autograd's thread of a new process can come after ours.
    """
    if not _thread.has_context and torch.cuda.is_initialized():
        torch.cuda.mem_get_info()  # needs a context, and a stream that is captured allows it
        _thread.has_context = True


def renamed(owner: Any, before: str, now: str) -> Any:
    """What a part of Triton calls `now`, and called `before` up to the release before the one that is named where this is called."""
    return getattr(owner, now if hasattr(owner, now) else before)


class Tiles:
    """A tensor whose `block` of elements is moved at once: an argument of a kernel, not a member of a struct; a tensor descriptor there.

    `shape` and `strides` (in elements, the last is 1, the others multiples of 16 bytes) need not be the tensor's own. What lies outside of
    `shape` is read as 0 and never written. `swizzle`: bytes over which shared memory is permuted in a Gluon kernel, by default the
    widest that the block's last axis allows.
    """

    __slots__ = ("block", "kind", "shape", "strides", "swizzle", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        block: Sequence[int],
        swizzle: int | None = None,
    ) -> None:
        if tensor.data_ptr() % 16:
            raise ValueError("TMA takes tensors at multiples of 16 bytes")
        self.tensor, self.shape, self.strides = tensor, tuple(shape), tuple(strides)
        self.block, self.swizzle = tuple(block), swizzle
        self.kind = (tensor.dtype, self.block, swizzle)  # what code is compiled for

    def described(self, gluon: bool = False, base: Any = None) -> Any:
        """Triton's descriptor, or Gluon's; of `base` where that stands for the tensor."""
        base, shape, strides = self.tensor if base is None else base, list(self.shape), list(self.strides)
        if not gluon:
            return TensorDescriptor(base, shape, strides, list(self.block))
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(
            base, shape, strides, list(self.block), shared_layout(self.block, self.tensor.dtype, self.swizzle)
        )


def shared_layout(block: Sequence[int], dtype: torch.dtype, swizzle: int | None = None) -> Any:
    """Gluon's layout in shared memory of a block that TMA moves and `wgmma` reads."""
    from triton.experimental.gluon import language as gl

    element = getattr(gl, str(dtype).removeprefix("torch."))
    if swizzle is None:
        return gl.NVMMASharedLayout.get_default_for(list(block), element)
    return gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=element.primitive_bitwidth, rank=len(block)
    )


class Maps:
    """The tensor maps that compiled code takes in place of `Tiles`: made by the driver's own function and kept by what they describe."""

    def __init__(self, metadata: Sequence[Any] | None) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        utils = triton.runtime.driver.active.utils
        self._fill = renamed(utils, "fill_tma_descriptor", "fill_tma_descriptor_tiled")  # 3.7
        self._facts = [
            (m["swizzle"], m["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]], m["block_size"])
            for m in metadata or ()
        ]
        self._kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def place(self, values: Sequence[Any]) -> list[Any]:
        """The arguments, each of the `Tiles` replaced by its map, shape and strides."""
        placed: list[Any] = []
        number = 0
        for x in values:
            if type(x) is Tiles:
                placed.extend(self.at(number, x.tensor.data_ptr(), x.shape, x.strides))
                number += 1
            else:
                placed.append(x)
        return placed

    def at(self, number: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
        """Map, shape and strides of the kernel's tiles `number`, of a tensor that begins at `address`."""
        key = number, address, shape, strides
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            make_context_current()
            found = self._fill(address, *self._facts[number], shape, strides, 0), *shape, *strides
            self._kept[key] = found
        return found


def without_descriptors(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The driver's launch function behind the one that makes a tensor map of each descriptor at each launch."""
    return inspect.getclosurevars(launch).nonlocals["launcher"]
