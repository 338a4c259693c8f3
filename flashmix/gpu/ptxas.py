"""Which ptxas makes our matrix products. Importing this module imports no triton.

Triton 3.6 brings two: 12.8, which it takes up to Hopper, and 12.9 for Blackwell. ptxas 12.8 can lose where an operand of a Hopper product
lies: the upper half of its descriptor comes from a register that holds something else, and gradients are wrong without a word.
12.9 is not known to, and its code is as fast. So kernels with products are compiled with that one (docs/lab_notes.md tells how it was
found, `tests/compilers/ptxas_descriptors.py` looks for it in every kernel).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from flashmix.gpu.compiling import replace

Kernel = TypeVar("Kernel")
SOUND = (12, 9)
BLACKWELL = 100  # the least compute capability, times ten, for which Triton takes its other ptxas


class Compiling(threading.local):
    """How many times this thread is within `sound_ptxas`. Others compile at the same time, with the ptxas that Triton takes."""

    depth = 0


_compiling = Compiling()


def needed() -> str | None:
    """The path of a sound ptxas that Triton has but would not take; None if it takes one, or one was chosen by the user."""
    import triton

    nvidia: Any = triton.knobs.nvidia
    other = getattr(nvidia, "ptxas_blackwell", None)
    if os.environ.get("TRITON_PTXAS_PATH") or other is None:
        return None
    return other.path if _version(nvidia.ptxas) < SOUND <= _version(other) else None


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in tool.version.split("."))


@contextmanager
def sound_ptxas() -> Iterator[None]:
    """Within it this thread compiles for every card with a ptxas that is not known to lose descriptors, if Triton has one."""
    if needed() is None:
        yield
        return
    _ask_this_thread()
    _compiling.depth += 1
    try:
        yield
    finally:
        _compiling.depth -= 1


def _ask_this_thread() -> None:
    """Has Triton's functions that choose a ptxas, and name its version, look at the thread that calls them."""
    from triton.backends.nvidia import compiler

    for name in ("get_ptxas", "get_ptxas_version"):  # the version is part of the name that compiled code is kept under
        replace(compiler, name, _as_for_blackwell)


def _as_for_blackwell(theirs: Callable[[int], Any]) -> Callable[[int], Any]:
    def chosen(arch: int = 80) -> Any:
        return theirs(max(arch, BLACKWELL) if _compiling.depth else arch)

    return chosen


def with_sound_ptxas(kernel: Kernel) -> Kernel:
    """For a kernel with matrix products, above `triton.jit`."""
    compile_it = getattr(kernel, "_do_compile", None)
    if compile_it is not None:  # the interpreter compiles nothing

        def compile_soundly(*args: Any, **options: Any) -> Any:
            with sound_ptxas():
                return compile_it(*args, **options)

        kernel._do_compile = compile_soundly  # type: ignore[attr-defined]
    return kernel
