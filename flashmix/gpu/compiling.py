"""Names of compiled code that every process finds again, and turns of front ends, which Triton's compiler leaves to its callers; what
changes a function of that compiler.

Importing this module imports no triton.
"""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any


class Turn(threading.local):
    """Of the kernel that this thread compiles: when its front end may begin, and what tells that it has ended."""

    events: tuple[threading.Event, threading.Event] | None = None


_naming = threading.Lock()
_turn = Turn()


def replace(module: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts what `by` makes of a function of Triton in its place, once for each `by`."""
    theirs = getattr(module, name)
    done = getattr(theirs, "replaced_by", ())
    if by not in done:
        ours = wraps(theirs)(by(theirs))
        ours.replaced_by = (*done, by)  # type: ignore[attr-defined]
        setattr(module, name, ours)


def hash_triton() -> None:
    """Finds the hash of Triton's own files, which is in all names: threads that ask for it at once would each read all of them, 0.4 GB."""
    from triton.runtime.cache import triton_key

    triton_key()


def name(kernel: Any) -> None:
    """Finds the name of what a kernel is compiled to, before Triton does.

    Up to Triton 3.6 constants of a function that it calls are in it only if that function has its own name by then: names depended on what
    was compiled before, other processes compiled again, and a constant that changed could have left old code in use.
    """
    with _naming:
        if kernel.hash is None:
            for function in functions_of(kernel):
                _ = function.cache_key


def length(kernel: Any) -> int:
    """Bytes of Python code of a kernel and of all that it calls, by which it is guessed which of several compiles longest."""
    return sum(len(function.fn.__code__.co_code) for function in functions_of(kernel))


def functions_of(kernel: Any) -> list[Any]:
    """What a kernel calls, each function behind those that it calls itself; the kernel is last."""
    found: dict[int, Any] = {}
    entered = set()

    def enter(function: Any) -> None:
        if id(function) not in entered:
            entered.add(id(function))
            for called in _called(function):
                enter(called)
            found[id(function)] = function

    enter(kernel)
    return list(found.values())


def _called(function: Any) -> Iterator[Any]:
    """The functions of Triton that the code of one mentions, by themselves or as part of a module."""
    code = function.fn.__code__
    scope = {**function.__globals__, **inspect.getclosurevars(function.fn).nonlocals}
    found = [scope[name] for name in (*code.co_names, *code.co_freevars) if name in scope]
    modules = [x for x in found if isinstance(x, ModuleType)]
    found += [getattr(module, name) for module in modules for name in code.co_names if hasattr(module, name)]
    return (x for x in found if hasattr(type(x), "cache_key"))


@contextmanager
def in_turn(begin: threading.Event, end: threading.Event) -> Iterator[None]:
    """Within it this thread compiles a kernel whose front end waits for `begin`, and sets `end` when it is done.

    A front end is Python, of which one thread runs at a time: where several begin together none ends before most of their work is done. In
    turns, native passes of the first kernel run beside the front end of the second.
    """
    from triton.compiler import code_generator

    replace(code_generator, "ast_to_ttir", _waiting)
    _turn.events = begin, end
    try:
        yield
    finally:
        _turn.events = None
        end.set()


def _waiting(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's front end, which waits for its turn, and collects no garbage then: that would be a quarter of its time."""

    def front_end(*args: Any, **options: Any) -> Any:
        if _turn.events is None:
            return theirs(*args, **options)
        begin, end = _turn.events
        begin.wait()
        collects = gc.isenabled()
        gc.disable()
        try:
            return theirs(*args, **options)
        finally:
            if collects:
                gc.enable()
            end.set()

    return front_end
