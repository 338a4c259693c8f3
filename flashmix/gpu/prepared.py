"""Launching one kernel again and again at little cost to the host: what a decode step needs.

An ordinary launch looks at every argument, each time, to find the code that was compiled for such arguments. A step of
some microseconds is called with the same sizes a thousand times over, so that is done once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashmix.gpu import device as gpu

DIRECT = tuple(triton.__version__.split(".")[:2]) == ("3", "6")  # the releases whose launcher this file knows


class Launch:
    """One kernel with its grid and its numbers; a call hands over the tensors and launches.

    The kernel takes pointers first, then numbers, then compile-time constants. Tensors of later calls must be like those of
    the first: the same dtypes and the same ones None; a pointer on whose alignment the kernel is specialised must be
    aligned as it was. The first call is an ordinary launch, later ones hand its compiled code to the driver.
    """

    def __init__(
        self, kernel: Any, grid: int, numbers: tuple[int | float, ...], constants: dict[str, Any], num_warps: int
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.warps = kernel, grid, numbers, constants, num_warps
        self._rest = (*numbers, *constants.values())
        self._run: Any = None

    def __call__(self, device: torch.device, tensors: tuple[Tensor | None, ...]) -> None:
        if self._run is None or device.index != torch.cuda.current_device() or hooked():
            with gpu.on(device):
                self._first(tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        pointers = [None if t is None else t.data_ptr() for t in tensors]
        self._run(self.grid, 1, 1, stream, *self._code, *pointers, *self._rest)

    def _first(self, tensors: tuple[Tensor | None, ...]) -> None:
        """An ordinary launch; keeps what it compiled to, where there is a GPU."""
        options = {"num_warps": self.warps, "num_stages": 1}
        made = self.kernel[(self.grid,)](*tensors, *self.numbers, **self.constants, **options)
        if not DIRECT or not isinstance(made, triton.compiler.CompiledKernel):
            return
        launcher = made.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return  # it takes memory of its own a launch
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        self._code = (made.function, *flags, None, None, made.packed_metadata, None, None, None)
        self._run = launcher.launch  # last: another thread may be looking


def hooked() -> bool:
    """Whether a profiler wants to see launches: then they are ordinary ones."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
