"""Which ptxas makes our matrix products. Importing this module imports no triton.

Triton 3.6 brings two: 12.8, which it takes up to Hopper, and 12.9 for Blackwell. ptxas 12.8 can lose where an operand of a Hopper product
lies: the upper half of its descriptor comes from a register that holds something else, and gradients are wrong without a word.
12.9 is not known to, and its code is as fast. So kernels with products are compiled with that one (docs/lab_notes.md tells how it was
found, `tests/compilers/ptxas_descriptors.py` looks for it in every kernel).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Kernel = TypeVar("Kernel")
SOUND = (12, 9)
_lock = threading.Lock()
_within: list[Any] = []  # Triton's settings for the whole process, once for each thread that compiles


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
    """Within it Triton compiles for every card with a ptxas that is not known to lose descriptors, if it has one."""
    import triton
    from triton.backends.nvidia import compiler

    with _lock:
        if not _within:
            scope, path = triton.knobs.nvidia.scope(), needed()
            scope.__enter__()
            if path is not None:
                triton.knobs.nvidia.ptxas = path
                compiler.get_ptxas_version.cache_clear()  # the version is part of the name that compiled code is kept under
        else:
            scope = _within[0]
        _within.append(scope)
    try:
        yield
    finally:
        with _lock:
            _within.pop()
            if not _within:
                scope.__exit__(None, None, None)
                compiler.get_ptxas_version.cache_clear()


def with_sound_ptxas(kernel: Kernel) -> Kernel:
    """For a kernel with matrix products, above `triton.jit`."""
    compile_it = getattr(kernel, "_do_compile", None)
    if compile_it is not None:  # the interpreter compiles nothing

        def compile_soundly(*args: Any, **options: Any) -> Any:
            with sound_ptxas():
                return compile_it(*args, **options)

        kernel._do_compile = compile_soundly  # type: ignore[attr-defined]
    return kernel
