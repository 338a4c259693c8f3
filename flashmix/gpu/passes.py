"""LLVM's passes, left out of kernels that are faster without them. Importing this module imports no triton.

Triton has LLVM optimise a kernel before it makes PTX of it, which ptxas optimises once more. What LLVM takes out of loops, or computes
once for several places, waits in registers: some kernels spill for it, and all compile longer. Others are faster with it, by up to a
quarter (docs/lab_notes.md), so a kernel says whether it leaves them out (`flashmix.gpu.launch.Kernel`). Results had the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flashmix.gpu.compiling import replace


class LeftOut(threading.local):
    """Whether this thread is within `without_llvm_passes`. Others compile at the same time."""

    without = False


_left_out = LeftOut()


def left_out() -> bool:
    """Whether this thread is within `without_llvm_passes`."""
    return _left_out.without


@contextmanager
def without_llvm_passes() -> Iterator[None]:
    """Within it Triton compiles on this thread without LLVM's passes, and keeps the code under another name. With a Triton whose functions
    have other names nothing changes.
    """
    before, _left_out.without = _left_out.without, _ask_this_thread()
    try:
        yield
    finally:
        _left_out.without = before


def _ask_this_thread() -> bool:
    """Has Triton's function that calls the passes, and that which names ptxas's version, look at the thread that calls them; whether both
    are there."""
    from triton._C.libtriton import llvm
    from triton.backends.nvidia import compiler

    # the version is part of the name that compiled code is kept under
    changes = (llvm, "optimize_module", _unless_left_out), (compiler, "get_ptxas_version", _and_passes)
    known = all(hasattr(module, name) for module, name, _ in changes)
    if known:
        for module, name, by in changes:
            replace(module, name, by)
    return known


def _unless_left_out(theirs: Callable[..., None]) -> Callable[..., None]:
    def optimised(*given: Any, **named: Any) -> None:
        if not left_out():
            theirs(*given, **named)

    return optimised


def _and_passes(theirs: Callable[..., str]) -> Callable[..., str]:
    def version(*given: Any, **named: Any) -> str:
        return theirs(*given, **named) + (" without LLVM's passes" if left_out() else "")

    return version
