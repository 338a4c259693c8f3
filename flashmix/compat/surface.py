"""Declarations of another library's functions: their arguments, which of them only tune speed, and which are not there."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

IGNORED, REFUSED = "~", "!"
Function = Callable[..., Any]


class Surface:
    """The names of one library that flashmix has, and those that it knows and has not.

    Attributes:
        library: the import name of the original.
        names: every function and class by its name.
        missing: names of the original that are not here, with the reason.
        options: the arguments of each function.
        limits: what each name raises for besides its refused arguments.
    """

    def __init__(self, library: str, missing: dict[str, str] | None = None) -> None:
        self.library = library
        self.names: dict[str, Any] = {}
        self.missing = missing or {}
        self.options: dict[str, Arguments] = {}
        self.limits: dict[str, str] = {}

    def function(self, names: str, arguments: str, limits: str = "") -> Callable[[Function], Function]:
        """Declares functions that call the decorated body.

        `arguments` is the original signature in one line of words: `q k v scale=None`. A word after `~` only tunes speed: it is accepted
        and ignored. One after `!` would change the result and is not there: any value but its default raises. After `*` they are keywords.
        The body receives all others by keyword. `limits` names what else raises, for the table.
        """
        declared = Arguments(arguments)

        def declare(body: Function) -> Function:
            for name in names.split():
                self.options[name] = declared
                self.limits[name] = limits
                self.names[name] = self._call(name, declared, body)
            return body

        return declare

    def add(self, name: str, thing: Any, limits: str = "") -> None:
        """Declares a class; `limits` names what raises, for the table."""
        self.names[name] = thing
        self.limits[name] = limits

    def rows(self) -> list[tuple[str, str]]:
        """Each name with what of it raises, the functions and classes that are here first, then the missing ones."""
        here = []
        for name in sorted(self.names):
            refused = self.options[name].marked(REFUSED) if name in self.options else []
            limits = [*(f"`{option}`" for option in refused), *filter(None, [self.limits[name]])]
            here.append((name, "there" + (f"; raises for {', '.join(limits)}" if limits else "")))
        return here + [(name, f"raises: {self.missing[name]}") for name in sorted(self.missing)]

    def _call(self, name: str, declared: Arguments, body: Function) -> Function:
        label = f"{self.library}.{name}"

        def call(*args: Any, **options: Any) -> Any:
            return body(**declared.bind(label, args, options))

        call.__name__ = call.__qualname__ = name
        call.__module__ = f"flashmix.compat.{self.library}"
        call.__doc__ = f"{inspect.getdoc(body)}\n\n{declared.describe()}".strip()
        call.__signature__ = declared.signature  # type: ignore[attr-defined]
        return call

    def lookup(self, name: str) -> Any:
        """For a module's `__getattr__`: raises AttributeError with the reason why `name` is not here."""
        reason = self.missing.get(name)
        known = f"is not in flashmix: {reason}" if reason else "is not a name that flashmix.compat knows"
        raise AttributeError(f"{self.library}.{name} {known}")


class Arguments:
    """One signature: the names in their order, the defaults, and the marks."""

    def __init__(self, text: str) -> None:
        self.places: list[str] = []
        self.defaults: dict[str, Any] = {}
        self.marks: dict[str, str] = {}
        parameters: list[inspect.Parameter] = []
        kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
        for word in text.split():
            if word == "*":
                kind = inspect.Parameter.KEYWORD_ONLY
                continue
            mark = word[0] if word[0] in (IGNORED, REFUSED) else ""
            name, given, default = word.removeprefix(mark).partition("=")
            value: Any = ast.literal_eval(default) if given else inspect.Parameter.empty
            self.marks[name] = mark
            if given:
                self.defaults[name] = value
            if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                self.places.append(name)
            parameters.append(inspect.Parameter(name, kind, default=value))
        self.signature = inspect.Signature(parameters)

    def bind(self, label: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the body; raises TypeError as Python does, and NotImplementedError for what is not there."""
        if len(args) > len(self.places):
            raise TypeError(f"{label}() takes at most {len(self.places)} positional arguments, got {len(args)}")
        given = dict(zip(self.places, args, strict=False))
        for name, value in options.items():
            if name not in self.marks:
                raise TypeError(f"{label}() got an unexpected keyword argument {name!r}")
            if name in given:
                raise TypeError(f"{label}() got multiple values for argument {name!r}")
            given[name] = value
        bound = {}
        for name, mark in self.marks.items():
            if name not in given and name not in self.defaults:
                raise TypeError(f"{label}() missing a required argument: {name!r}")
            value = given.get(name, self.defaults.get(name))
            if not mark:
                bound[name] = value
            elif mark == REFUSED and name in given and not _same(value, self.defaults.get(name)):
                raise NotImplementedError(f"{label}: flashmix has no {name}")
        return bound

    def marked(self, mark: str) -> list[str]:
        """The names with this mark."""
        return [name for name, found in self.marks.items() if found == mark]

    def describe(self) -> str:
        """Lines for a docstring: what is ignored and what raises."""
        lines = [
            f"{text}: {', '.join(self.marked(mark))}."
            for text, mark in (
                ("Accepted and ignored", IGNORED),
                ("Raises NotImplementedError, if other than the default", REFUSED),
            )
            if self.marked(mark)
        ]
        return "\n".join(lines)


def _same(value: Any, default: Any) -> bool:
    """Whether `value` is the default, or as good as off: None, False and 0 are one where the default is one of them."""
    if isinstance(value, (bool, int, float, str, tuple)) or value is None:
        return value == default or (not value and not default)
    return False


def refuse(name: str, what: str, unless: bool) -> None:
    """Raises NotImplementedError unless a value, which an option may have here, is one that is there."""
    if not unless:
        raise NotImplementedError(f"{name}: flashmix has no {what}")
