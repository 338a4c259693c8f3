"""The check of options that every public op shares: a number, a count or a flag is one before anything is computed."""

from __future__ import annotations

import functools
import inspect
import numbers
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
LARGEST_FLOAT, LARGEST_INT = sys.float_info.max, 2**63 - 1
LEAST = {"eps": 0.0}  # bounds of numbers that mean the same in every op


def public(op: Function) -> Function:
    """A public op: its arguments annotated `bool`, `int`, `float` and `Tensor` are checked before it is called.

    An option that is not given is not looked at. A tensor is no number, with a gradient or without: as one it would be cut from the graph.
    The op receives numbers as `float` and `int`, whatever library they are of.

    Raises TypeError: an option is of another type, or a tensor that is not optional is None. ValueError: a number is infinite or NaN, or
    `eps` is negative.
    """
    named: dict[str, Callable[[str, Any], Any]] = {}
    placed: list[tuple[int, str, Callable[[str, Any], Any]]] = []
    for place, parameter in enumerate(inspect.signature(op).parameters.values()):
        check = _CHECKS.get(parameter.annotation)
        if check is not None:
            named[parameter.name] = check
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                placed.append((place, parameter.name, check))

    @functools.wraps(op)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name in named:
                options[name] = named[name](name, options[name])
        given = len(args)
        for place, name, check in placed:
            if place < given:
                check(name, args[place])
        return op(*args, **options)

    return checked  # type: ignore[return-value]


def check_number(name: str, value: Any) -> Any:
    """The finite number `value` as a float."""
    if type(value) is float and LEAST.get(name, -LARGEST_FLOAT) <= value <= LARGEST_FLOAT:
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not -LARGEST_FLOAT <= value <= LARGEST_FLOAT:  # type: ignore[operator]
        raise ValueError(f"{name} must be finite, got {value}")
    if value < LEAST.get(name, value):
        raise ValueError(f"{name} must be at least {LEAST[name]}, got {value}")
    return float(value)


def check_integer(name: str, value: Any) -> Any:
    """The integer `value`, which fits 64 bits."""
    if type(value) is int and -LARGEST_INT <= value <= LARGEST_INT:
        return value
    if isinstance(value, torch.SymInt):
        return value
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not -LARGEST_INT <= int(value) <= LARGEST_INT:
        raise ValueError(f"{name} must be an integer of at most 64 bits, got {value}")
    return int(value)


def check_flag(name: str, value: Any) -> Any:
    """`value`, which is True or False."""
    if type(value) is not bool and not isinstance(value, torch.SymBool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def check_given(name: str, value: Any) -> Any:
    """`value`, which is not None; whether it is a tensor, and which, the op checks."""
    if value is None:
        raise TypeError(f"{name} must be a torch.Tensor, got NoneType")
    return value


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {"Tensor": check_given, "bool": check_flag}
for _annotation, _check in (("int", check_integer), ("float", check_number)):
    _CHECKS |= {_annotation: _check, f"{_annotation} | None": _or_none(_check)}
