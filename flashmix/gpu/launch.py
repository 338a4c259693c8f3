"""The one launcher of Triton kernels: structs of tensors in, compiled code kept, little cost to the host.

A kernel is `kernel(x, out, ..., n, S)`: named tuples of tensors and strides, absent tensors None, and one compile-time spec `S`.
Triton's own launcher looks at every argument at every launch (18 us for 12 pointers on the host of an H200); here the compiled code
is kept by what it was compiled for (5.3 us of Python for 12 tensors in two structs and 3 numbers, without the driver, on a CPU machine).

Triton specialises code for integers that are 1 or multiples of 16, and for pointers aligned to 16 bytes. In a struct it does so even where
the kernel says `do_not_specialize` or `do_not_specialize_on_alignment`; this launcher holds to both, for all of the parameter.

A tensor that TMA moves is an argument of its own, `Tiles`: Triton takes no descriptors in structs, and makes them anew at each launch.

Calls of one kind that make the same launches again do so by a `LaunchSeries` (flashmix/gpu/series.py), which notes them here.

Where code is missing, the op that launches is asked for all of its launches, those of its backward too, and all that they need is compiled
side by side; each launch waits for its own code alone, so that a backward's is made while forwards run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter

from flashmix.gpu.ahead import gathering, running
from flashmix.gpu.compiling import hash_triton, in_turn, length, name
from flashmix.gpu.passes import without_llvm_passes
from flashmix.gpu.tma import Maps, Tiles, make_context_current, without_descriptors

RELEASE = tuple(int(part) for part in triton.__version__.split(".")[:2])
DIRECT = (3, 6) <= RELEASE <= (3, 9)  # the releases whose launcher this file knows
FLAT = RELEASE < (3, 7)  # whose launch function takes a kernel's arguments one by one; later ones take them in a tuple
ORDINARY = 3  # an integer for which Triton does not specialise
THREADS = max(2, min(16, os.cpu_count() or 2))  # that compile
UNALIGNED, LONG = "unaligned", "long"  # marks of a pointer and of an integer in what code is kept by


class Address:
    """Stands for a tensor where a kernel is compiled: its dtype, and an address that is aligned or not."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype, self._address = dtype, 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address


class Kernel:
    """A kernel with its spec and launch options (`num_warps`, `num_stages`, `maxnreg`): call it with a grid and its structs. `llvm_passes`:
    see `flashmix/gpu/passes.py`.

    There is one compiled code for each kind of arguments: dtypes, which tensors are None, which are aligned, which integers need 64 bits,
    and what Triton specialises strides for.
    """

    def __init__(self, kernel: Any, spec: Any, *, llvm_passes: bool = True, **options: Any) -> None:
        self.kernel, self.spec, self.llvm_passes = kernel, spec, llvm_passes
        # Triton's default until 3.9, which warns where it is not given
        self.options = {"enable_fp_fusion": True, **options}
        parameters = getattr(kernel, "params", ())  # the interpreter specialises nothing and has none
        self._loose = tuple((p.do_not_specialize, p.do_not_specialize_on_alignment) for p in parameters)
        self._made: dict[tuple[Any, ...], Any] = {}
        self._coming: dict[tuple[Any, ...], Future[Code | None]] = {}  # from other threads

    def __call__(self, grid: int, *structs: Any) -> Code | None:
        """Launches `grid` programs, none if it is 0; returns the compiled code where there is one."""
        if grid == 0:
            return None
        if not DIRECT or not self._loose:
            if gathering.wanted is not None:
                return None
            gluon = bool(self._loose) and self.kernel.is_gluon()
            described = [x.described(gluon) if type(x) is Tiles else x for x in structs]
            _noted(None)
            self.kernel[(grid,)](*described, self.spec, **self.options)
            return None
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        kinds: list[Any] = [device]
        values = [_lowered((x,), loose, kinds)[0] for x, loose in zip(structs, self._loose, strict=False)]
        key = tuple(kinds)
        made = self._made.get(key)
        if gathering.wanted is not None:
            if made is None and key not in self._coming:
                gathering.wanted[self, key] = self._like(structs)
            return made
        if made is None:
            made = self._compiled(key, structs)
            if made is None:  # a test records launches
                _noted(None)
                return None
            self._made[key] = made
        stream = torch._C._cuda_getCurrentRawStream(device)
        if made.direct is not None and not hooked():
            launch, code = made.direct
            if made.maps is not None:
                values = made.maps.place(values)
            arguments = all_arguments(code, values)
            launch(grid, 1, 1, stream, *arguments)
            if noting.launches is not None:
                noting.launches.append(Launched(made, grid, structs, arguments))
        else:
            _noted(None)
            made.launch(grid, stream, structs, (*values, None))
        return made

    def _compiled(self, key: tuple[Any, ...], structs: Sequence[Any]) -> Code | None:
        """The code for arguments of this kind, with all else that the op needs on its way."""
        if key not in self._coming and running.again is not None:
            compile_ahead()
        coming = self._coming.pop(key, None)
        return self._compile(self._like(structs)) if coming is None else coming.result()

    def _like(self, structs: Sequence[Any]) -> list[Any]:
        """Arguments of the same kind for compiling, without the tensors."""
        gluon = self.kernel.is_gluon()
        return [_stand_in(x, loose, gluon) for x, loose in zip(structs, self._loose, strict=False)]

    def _compile(self, like: Sequence[Any]) -> Code | None:
        """The code, loaded, with its launcher, for which Triton calls a C compiler; any thread may ask for it."""
        name(self.kernel)
        with nullcontext() if self.llvm_passes else without_llvm_passes():
            made = self.kernel.run(*like, self.spec, grid=(1,), warmup=True, **self.options)
        return None if made is None else Code(made, self.kernel.is_gluon())


class Code:
    """Compiled code of a kernel; `direct` is the driver's own launch function and what it takes before a kernel's arguments."""

    def __init__(self, made: Any, gluon: bool) -> None:
        self.made, self.gluon, launcher = made, gluon, made.run  # `run` loads the code
        if made.module is None:  # an earlier load failed, for want of memory say: `run` would not try again
            made._init_handles()
        self.direct: tuple[Any, tuple[Any, ...]] | None = None
        described = any(str(kind).startswith("tensordesc") for kind in made.src.signature.values())
        self.maps = Maps(made.metadata.tensordesc_meta) if described else None
        ordinary = not launcher.global_scratch_size and not launcher.profile_scratch_size
        if ordinary and not getattr(launcher, "gsan_enabled", False):  # Triton's sanitizer adds arguments
            launch = without_descriptors(launcher.launch) if described else launcher.launch
            flags = launcher.launch_cooperative_grid, launcher.launch_pdl
            scratch, hooks = (None, None), (None, None, None)  # the first hook is what it would be told
            if FLAT:
                last: tuple[Any, ...] = *scratch, made.packed_metadata, *hooks
            else:
                last = made.packed_metadata, *hooks, *scratch, launcher.arg_annotations, launcher.kernel_signature
            self.direct = launch, (made.function, *flags, *last)

    def launch(self, grid: int, stream: int, structs: Sequence[Any], values: Sequence[Any]) -> None:
        """A launch through Triton's own launcher: it takes memory of its own, or a profiler looks."""
        made, runtime = self.made, triton.knobs.runtime
        metadata = made.launch_metadata((grid,), stream, *structs) if hooked() else None
        hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook) if hooked() else (None, None)
        values = [x.described(self.gluon) if type(x) is Tiles else x for x in values]
        if self.maps is not None:
            make_context_current()  # Triton's launcher makes tensor maps before it sees to that
        made.run(grid, 1, 1, stream, made.function, made.packed_metadata, metadata, *hooks, *values)


def all_arguments(code: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
    """What the driver's launch function takes behind grid and stream: what `Code.direct` has, the kernel's arguments, None for its spec."""
    return (*code, *values, None) if FLAT else (*code, (*values, None))


class Launched(NamedTuple):
    """A launch as it was made: what makes it again, with other tensors in place of those in `structs`."""

    code: Code
    grid: int
    structs: Sequence[Any]
    arguments: tuple[Any, ...]


class Noting(threading.local):
    """The launches of the series that is being made on this thread; None among them: one that cannot be made again."""

    launches: list[Launched | None] | None = None


noting = Noting()


def compile_ahead(make: Callable[[], object] | None = None) -> None:
    """Begins to compile what the op that runs here would launch, else `make()`, on threads: half of the work is not Python's.

    Not while a graph is captured, which would hold what these ask of torch. Where they raise, for want of memory say, so will the call
    that needs the code.
    """
    again, running.again = running.again, None
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    if device is not None and again is not None:
        make = again
    if make is None or (device is not None and torch.cuda.is_current_stream_capturing()):
        return
    wanted: dict[tuple[Kernel, tuple[Any, ...]], list[Any]] = {}
    gathering.wanted = wanted
    noted, noting.launches = noting.launches, []  # so that no series within makes its own
    try:
        with suppress(Exception):
            make()
    finally:
        gathering.wanted, noting.launches = None, noted
    if len(wanted) < 2:
        return

    def compiled(kernel: Kernel, like: list[Any], *turn: threading.Event) -> Code | None:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        with in_turn(*turn):
            return kernel._compile(like)

    hash_triton()
    pool = ThreadPoolExecutor(min(len(wanted), THREADS), "flashmix-compile")
    begin = threading.Event()
    begin.set()
    # the longest first: behind the front ends of all others it would be the last one to be done
    for (kernel, key), like in sorted(wanted.items(), key=lambda x: length(x[0][0].kernel), reverse=True):
        end = threading.Event()
        kernel._coming[key] = pool.submit(compiled, kernel, like, begin, end)
        begin = end
    pool.shutdown(wait=False)


def _noted(launched: Launched | None) -> None:
    if noting.launches is not None:
        noting.launches.append(launched)


def hooked() -> bool:
    """Whether a profiler wants to see launches."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _lowered(struct: Sequence[Any], loose: tuple[bool, bool], kinds: list[Any]) -> tuple[Any, ...]:
    """What the driver takes for the members of `struct`; appends to `kinds` what their code depends on."""
    values: list[Any] = []
    for x in struct:
        kind: Any = type(x)
        if kind is Tensor or kind is Parameter:
            x, kind = x.data_ptr(), x.dtype
            if x & 15 and not loose[1]:
                kinds.append(UNALIGNED)
        elif kind is int:
            kind = kind if loose[0] else (x == 1, x % 16 == 0)
            if not -(2**31) <= x < 2**31:
                kinds.append(LONG)
        elif isinstance(x, tuple):
            x, kind = _lowered(x, loose, kinds), len(x)
        elif kind is Tiles:
            kind = x.kind
        values.append(x)
        kinds.append(kind)
    return tuple(values)


def _stand_in(value: Any, loose: tuple[bool, bool], gluon: bool = False) -> Any:
    """An argument of the same kind, for compiling: nothing in it is specialised for that must not be."""
    if isinstance(value, tuple):
        parts = [_stand_in(part, loose) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Tiles):
        return value.described(gluon, Address(value.tensor.dtype, True))
    if isinstance(value, Tensor):
        return Address(value.dtype, not loose[1] and value.data_ptr() % 16 == 0)
    if isinstance(value, int) and loose[0]:
        return ORDINARY if -(2**31) <= value < 2**31 else 2**32 + ORDINARY
    return value


@lru_cache(maxsize=4096)
def bound(kernel: Any, spec: Any, **options: Any) -> Kernel:
    """The kernel with its spec and options, made once: for ops that keep no plan of their own."""
    return Kernel(kernel, spec, **options)
