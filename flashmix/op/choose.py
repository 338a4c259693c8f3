"""Which implementation runs a problem, and why: `impl="auto"`, an explicit `impl`, and `explain`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

Problem = TypeVar("Problem")
# The implementations that "auto" leaves out, separated by commas or spaces: a way around a faulty one for whole models.
AVOID = "FLASHMIX_AVOID"
AVOIDED = frozenset(os.environ.get(AVOID, "").replace(",", " ").split()) - {"portable"}  # which runs everything


@dataclass(frozen=True)
class Implementation(Generic[Problem]):
    """One way to compute an op.

    `supports(problem)` is None when it can run the problem, else the reason why not; it imports nothing heavy and touches
    no GPU. `module` is imported when the implementation is first used. `formula(call) -> outputs` is given where torch
    differentiates all of it: an op then calls that, and adds no backward of its own. It is None of calls that `module` runs.
    """

    name: str
    module: str
    supports: Callable[[Problem], str | None]
    formula: Callable[[Problem], tuple[torch.Tensor, ...] | None] | None = None

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the op, the implementation it takes (None: no one can), and what the others refuse for.

    `exchange`: over a `Shard`, what this rank exchanges with others, and the bytes that it receives.
    """

    op: str
    choice: str | None
    reasons: dict[str, str | None]
    exchange: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.choice or 'no implementation can run this'}"]
        for name, reason in self.reasons.items():
            taken = "taken" if name == self.choice else "can run this, but an earlier one is taken"
            lines.append(f"  {name}: {taken if reason is None else 'cannot run this: ' + reason}")
        if self.exchange is not None:
            lines.append(f"  exchange: {self.exchange}")
        return "\n".join(lines)


class _Explained(BaseException):
    """Carries the explanation out of an op that was called by `explain`; nothing after the choice runs."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


_explaining: ContextVar[bool] = ContextVar("flashmix_explaining", default=False)


# Whether `explain` is asking: then an op must come to its `choose`, whatever it knows from calls before.
explaining = _explaining.get


def preparing() -> AbstractContextManager[None]:
    """A context for the ops that run before or beside another one, which `explain` is about: they are not asked."""
    if torch.compiler.is_compiling() or not _explaining.get():
        return nullcontext()
    return _unasked()


@contextmanager
def _unasked() -> Iterator[None]:
    token = _explaining.set(False)
    try:
        yield
    finally:
        _explaining.reset(token)


def choose(
    op: str,
    implementations: Sequence[Implementation[Problem]],
    problem: Problem,
    impl: str = "auto",
    exchange: Callable[[], object] | None = None,
) -> Implementation[Problem]:
    """The first implementation that supports `problem`, or the one named by `impl`, which never falls back.

    `exchange()` is asked by `explain` alone, of a call over several ranks.

    Raises ValueError: `impl` is unknown, or cannot run the problem (with its reason).
    """
    asked = not torch.compiler.is_compiling() and _explaining.get()
    if impl == "auto":
        candidates = implementations
    else:
        candidates = [implementation for implementation in implementations if implementation.name == impl]
        if not candidates:
            names = ", ".join(repr(implementation.name) for implementation in implementations)
            raise ValueError(f"impl must be one of 'auto', {names}, got {impl!r}")
    if asked:
        reasons = {i.name: _refuses(i, problem, impl) for i in candidates}
        choice = next((name for name, reason in reasons.items() if reason is None), None)
        raise _Explained(Explanation(op, choice, reasons, None if exchange is None else str(exchange())))
    reason = None
    for implementation in candidates:
        reason = _refuses(implementation, problem, impl)
        if reason is None:
            return implementation
    raise ValueError(f"impl={impl!r} cannot run this: {reason}")


def chosen(implementations: Sequence[Implementation[Problem]], problem: Problem, impl: str = "auto") -> str | None:
    """The name of what `choose` returns, None where it raises; `explain` does not hear of it."""
    able = (i.name for i in implementations if impl in ("auto", i.name) and _refuses(i, problem, impl) is None)
    return next(able, None)


def _refuses(implementation: Implementation[Problem], problem: Problem, impl: str) -> str | None:
    """Why the implementation is not taken: the user leaves it out, or it cannot run the problem."""
    if AVOIDED and impl == "auto" and implementation.name in AVOIDED:
        return f"the environment variable {AVOID} names it"
    return implementation.supports(problem)


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation `op(*args, **kwargs)` would take, and why; the op itself does not run.

    The arguments are checked as in a call and raise the same errors.

    Example:
        >>> import torch, flashmix
        >>> q = k = v = torch.randn(1, 8, 2, 16, dtype=torch.float64)
        >>> print(flashmix.explain(flashmix.linear_attention, q, k, v))
        linear_attention: portable
          gluon: cannot run this: its tiles hold head dimensions of 33 to 128, ..., got K = 16 and V = 16
          triton: cannot run this: its kernels take float32, bfloat16 and float16, got torch.float64
          native: cannot run this: it computes in float32, got float64
          portable: taken
    """
    token = _explaining.set(True)
    try:
        op(*args, **kwargs)
    except _Explained as found:
        return found.explanation
    finally:
        _explaining.reset(token)
    raise TypeError(f"{getattr(op, '__name__', op)!r} is not a flashmix op: it chose no implementation")
