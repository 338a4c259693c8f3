"""Launching a kernel many times at little cost to the host: its constants are looked at once, its compiled code is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from flashmix.gpu.prepared import DIRECT, hooked


class Kernel:
    """A kernel with its compile-time constants, launched many times with other tensors, grids and numbers.

    It takes pointers first, then numbers that it is not specialised on, then the constants. There is one compiled code for each
    way the pointers come: their dtypes, which are None, which are aligned. The first launch of each is an ordinary one.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        names = getattr(kernel, "arg_names", ())
        self.kernel, self.constants = kernel, constants
        self._values = [constants[name] for name in names if name in constants]
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: int, tensors: Sequence[Tensor | None], numbers: Sequence[int | float]) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        kinds = [None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors]
        key = (device, *kinds, *(number >= 2**31 for number in numbers))
        made = self._made.get(key)
        if made is None or hooked():
            made = self.kernel[(grid,)](*tensors, *numbers, **self.constants)
            if DIRECT and isinstance(made, triton.compiler.CompiledKernel):
                self._made[key] = made
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        made.run(
            grid, 1, 1, stream, made.function, made.packed_metadata, None, None, None,
            *pointers, *numbers, *self._values,
        )  # fmt: skip
