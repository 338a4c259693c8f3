"""Options that a function hands on to another one, declared only there and shown in the signatures of both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def hands_on(
    source: Callable[..., Any], names: Iterable[str] | None = None, *, first: bool = False
) -> Callable[[F], F]:
    """Decorates a function that ends in `**options` and calls `source` with them: its signature shows their names and defaults.

    Another keyword raises TypeError, as in any function.

    Args:
        source: the function that takes the options as keywords.
        names: the options that are handed on; default all that the function does not take itself.
        first: whether the signature shows them before the function's own keywords.

    Example:
        >>> def scaled(x, *, by=2, times=1):
        ...     return x * by * times
        >>> @hands_on(scaled)
        ... def negated(x, **options):
        ...     return -scaled(x, **options)
        >>> inspect.signature(negated), negated(3, times=2)
        (<Signature (x, *, by=2, times=1)>, -12)
    """
    keywords = [p for p in inspect.signature(source).parameters.values() if p.kind is p.KEYWORD_ONLY]

    def shown(function: F) -> F:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        handed = [p for p in keywords if p.name not in signature.parameters and (names is None or p.name in names)]
        place = sum(p.kind is not p.KEYWORD_ONLY for p in own) if first else len(own)
        parameters = [*own[:place], *handed, *own[place:]]
        known = tuple(p.name for p in parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
            return function(*args, **options)

        call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return cast(F, call)

    return shown
