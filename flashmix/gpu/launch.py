"""The one launcher of Triton kernels: structs of tensors in, compiled code kept, little cost to the host.

A kernel is `kernel(x, out, ..., n, S)`: named tuples of tensors and strides, absent tensors None, and one compile-time spec `S`.
Triton's own launcher looks at every argument at every launch (18 us for 12 pointers on the host of an H200); here the compiled code
is kept by what it was compiled for (5 us).

Triton specialises code for integers that are 1 or multiples of 16, and for pointers aligned to 16 bytes. In a struct it does so even where
the kernel says `do_not_specialize` or `do_not_specialize_on_alignment`; this launcher holds to both, for all of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashmix.gpu import device as gpu

DIRECT = tuple(triton.__version__.split(".")[:2]) == ("3", "6")  # the releases whose launcher this file knows
ORDINARY = 3  # an integer for which Triton does not specialise


class Address:
    """Stands for a tensor where a kernel is compiled: its dtype, and an address that is aligned or not."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype, self._address = dtype, 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


class Kernel:
    """A kernel with its spec and launch options (`num_warps`, `num_stages`, `maxnreg`): call it with a grid and its structs.

    There is one compiled code for each kind of arguments: dtypes, which tensors are None, which are aligned, which integers need 64 bits,
    and what Triton specialises strides for.
    """

    def __init__(self, kernel: Any, spec: Any, **options: Any) -> None:
        self.kernel, self.spec, self.options = kernel, spec, options
        parameters = getattr(kernel, "params", ())  # the interpreter specialises nothing and has none
        self._loose = tuple((p.do_not_specialize, p.do_not_specialize_on_alignment) for p in parameters)
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: int, *structs: Any) -> Any:
        """Launches `grid` programs, none if it is 0; returns the compiled code where there is one."""
        if grid == 0:
            return None
        if not DIRECT or not self._loose:
            self.kernel[(grid,)](*structs, self.spec, **self.options)
            return None
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        kinds: list[Any] = [device]
        values = [_lowered(x, loose, kinds) for x, loose in zip(structs, self._loose, strict=False)]
        key = tuple(kinds)
        made = self._made.get(key)
        if made is None:
            made = self._compiled(grid, structs)
            if made is None:  # a test records launches
                return None
            self._made[key] = made
        stream = torch._C._cuda_getCurrentRawStream(device)
        runtime = triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        metadata = None
        if enter.calls or leave.calls:  # a profiler looks
            metadata = made.launch_metadata((grid,), stream, *structs, self.spec)
        else:
            enter = leave = None
        made.run(
            grid, 1, 1, stream, made.function, made.packed_metadata, metadata, enter, leave, *values, None
        )  # fmt: skip
        return made

    def prepare(self, grid: int, structs: Sequence[Any], *numbers: Any) -> PreparedLaunch:
        """A launch with this grid and these last structs, to be made again and again with other tensors for its first `structs`."""
        return PreparedLaunch(self, grid, structs, numbers)

    def _compiled(self, grid: int, structs: Sequence[Any]) -> Any:
        """The code for arguments of this kind."""
        like = [_stand_in(x, loose) for x, loose in zip(structs, self._loose, strict=False)]
        return self.kernel.run(*like, self.spec, grid=(grid,), warmup=True, **self.options)


class PreparedLaunch:
    """A launch whose grid and numbers stay; a call hands over the tensors, one tuple for each of its first `structs`, and launches.

    The tensors of later calls must be like those of the first: the same dtypes, the same ones None, and where the kernel is specialised
    for their alignment, aligned as they were. The first call is an ordinary launch, later ones hand its code new addresses.
    """

    def __init__(self, kernel: Kernel, grid: int, structs: Sequence[Any], numbers: Sequence[Any]) -> None:
        self.kernel, self.grid, self.structs, self.numbers = kernel, grid, structs, numbers
        self._launch: Any = None

    def __call__(self, device: torch.device, *tensors: tuple[Tensor | None, ...]) -> None:
        runtime = triton.knobs.runtime
        if (
            self._launch is None
            or device.index != torch.cuda.current_device()
            or runtime.launch_enter_hook.calls
            or runtime.launch_exit_hook.calls
        ):
            with gpu.on(device):
                named = [struct(*given) for struct, given in zip(self.structs, tensors, strict=True)]
                self._keep(self.kernel(self.grid, *named, *self.numbers))
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        addresses = []
        for given in tensors:  # at every call: a nested comprehension takes longer
            addresses.append(tuple([None if t is None else t.data_ptr() for t in given]))
        self._launch(self.grid, 1, 1, stream, *self._code, *addresses, *self._rest)

    def _keep(self, made: Any) -> None:
        """Keeps the driver's function and its arguments, unless the code takes memory of its own for each launch."""
        if made is None or made.run.global_scratch_size or made.run.profile_scratch_size:
            return
        flags = (made.run.launch_cooperative_grid, made.run.launch_pdl)
        self._code = (made.function, *flags, None, None, made.packed_metadata, None, None, None)
        self._rest = (*[_lowered(x, (True, True), []) for x in self.numbers], None)
        self._launch = made.run.launch  # last: another thread may be looking


def _lowered(value: Any, loose: tuple[bool, bool], kinds: list[Any]) -> Any:
    """What the driver takes for `value`; appends to `kinds` what its code depends on."""
    if value is None:
        kinds.append(None)
        return None
    if isinstance(value, tuple):
        return tuple([_lowered(part, loose, kinds) for part in value])
    if isinstance(value, Tensor):
        address = value.data_ptr()
        kinds.append((value.dtype, loose[1] or address % 16 == 0))
        return address
    if isinstance(value, int):
        big = not -(2**31) <= value < 2**31
        kinds.append(big if loose[0] else (big, value == 1, value % 16 == 0))
        return value
    if isinstance(value, TensorDescriptor):
        kinds.append((value.base.dtype, tuple(value.block_shape)))
    else:
        kinds.append(float)
    return value


def _stand_in(value: Any, loose: tuple[bool, bool]) -> Any:
    """An argument of the same kind, for compiling: nothing in it is specialised for that must not be."""
    if isinstance(value, tuple):
        parts = [_stand_in(part, loose) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tensor):
        return Address(value.dtype, not loose[1] and value.data_ptr() % 16 == 0)
    if isinstance(value, int) and loose[0]:
        return ORDINARY if -(2**31) <= value < 2**31 else 2**32 + ORDINARY
    return value


@lru_cache(maxsize=4096)
def bound(kernel: Any, spec: Any, **options: Any) -> Kernel:
    """The kernel with its spec and options, made once: for ops that keep no plan of their own."""
    return Kernel(kernel, spec, **options)
