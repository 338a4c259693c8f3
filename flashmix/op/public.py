"""The check of options that every public op shares: a number, a count or a flag is one before anything is computed."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
Check = Callable[[str, Any], Any]
LARGEST_FLOAT, LARGEST_INT = torch.finfo(torch.float32).max, 2**63 - 1  # more is infinite to a kernel
LEAST = {"eps": 0.0, "divisor_eps": 0.0, "conv_width": 0}  # bounds of numbers that mean the same in every op
# Sizes of modules and layers, and numbers there that are more than 0.
SIZES = {
    "active",
    "channels",
    "dim",
    "experts",
    "groups",
    "head_dim",
    "heads",
    "hidden",
    "inner",
    "kv_heads",
    "kv_rank",
    "norm_groups",
    "out",
    "query_rank",
    "rank",
    "slots",
    "value_dim",
    "value_heads",
    "width",
}
POSITIVE = frozenset({"base", "temperature"})


def public(op: Function, check_of: Callable[[inspect.Parameter], Check | None] | None = None) -> Function:
    """A public op: its arguments annotated `bool`, `int`, `float`, `str` and `Tensor` are checked before it is called.

    An option that is not given is not looked at. A tensor is no number, with a gradient or without: as one it would be cut from the graph.
    The op receives numbers as `float` and `int`, whatever library they are of.

    Raises TypeError: an option is of another type, or a tensor that is not optional is None. ValueError: a number is infinite or NaN, or
    `eps` is negative.
    """
    named: dict[str, Check] = {}
    placed: list[tuple[int, str, Check]] = []
    for place, parameter in enumerate(inspect.signature(op).parameters.values()):
        check = _CHECKS.get(parameter.annotation) if check_of is None else check_of(parameter)
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
            if place >= given:
                break
            value = args[place]
            if value is not None and check is check_given:  # most are, and a call costs
                continue
            if (found := check(name, value)) is not value:
                args = (*args[:place], found, *args[place + 1 :])
        return op(*args, **options)

    return checked  # type: ignore[return-value]


class Public:
    """A class whose constructor is checked as a public op is, and so are those of its subclasses; sizes are positive there."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = public(cls.__init__, _check_of_module)  # type: ignore[method-assign]


def check_number(name: str, value: Any) -> Any:
    """The number `value` as a float, finite in float32 too."""
    if type(value) is float and LEAST.get(name, -LARGEST_FLOAT) <= value <= LARGEST_FLOAT:
        return value
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_FLOAT:
        raise ValueError(f"{name} must be finite, got {value}")
    if number < LEAST.get(name, number):
        raise ValueError(f"{name} must be at least {LEAST[name]}, got {value}")
    return number


def check_integer(name: str, value: Any) -> Any:
    """The integer `value`, which fits 64 bits."""
    if type(value) is int and LEAST.get(name, -LARGEST_INT) <= value <= LARGEST_INT:
        return value
    if isinstance(value, torch.SymInt):
        return value
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not -LARGEST_INT <= int(value) <= LARGEST_INT:
        raise ValueError(f"{name} must be an integer of at most 64 bits, got {value}")
    if value < LEAST.get(name, value):
        raise ValueError(f"{name} must be at least {LEAST[name]}, got {value}")
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


def check_tensor_or_number(name: str, value: Any) -> Any:
    """`value`, a tensor, which the op checks, or a finite number."""
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a torch.Tensor or a number, got {type(value).__name__}")
    return check_number(name, value)


def check_string(name: str, value: Any) -> Any:
    """`value`, a string; which one, the op checks."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {type(value).__name__}")
    return value


def check_numbers(name: str, value: Any, count: int, kind: type = numbers.Real) -> Any:
    """`value`, a tuple or list of `count` numbers of a kind, none of them NaN."""
    whole = isinstance(value, (tuple, list)) and len(value) == count
    if not whole or not all(isinstance(x, kind) and not isinstance(x, bool) for x in value):
        shown = repr(value) if isinstance(value, (tuple, list, str)) else type(value).__name__
        raise TypeError(f"{name} must be {count} {'integers' if kind is numbers.Integral else 'numbers'}, got {shown}")
    if any(x != x for x in value):
        raise ValueError(f"{name} must be {count} numbers, got {value}")
    return value


def _check_of_module(parameter: inspect.Parameter) -> Check | None:
    """The check of an argument of a module's or layer's constructor, by its annotation and name."""
    kind, name = parameter.annotation, parameter.name
    if not isinstance(kind, str):
        return None
    plain = kind.removesuffix(" | None")
    members = plain.removeprefix("tuple[").removesuffix("]").split(", ")
    if plain.startswith("tuple[") and set(members) <= {"int", "float"}:
        only = numbers.Integral if members[0] == "int" else numbers.Real

        def check(name: str, value: Any) -> Any:
            return check_numbers(name, value, len(members), only)

    elif plain == "int" and name in SIZES:
        check = _at_least_1
    elif plain == "float" and name in POSITIVE:
        check = _above_0
    else:
        return _CHECKS.get(kind)
    return check if plain == kind else _or_none(check)


def _at_least_1(name: str, value: Any) -> Any:
    if (value := check_integer(name, value)) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _above_0(name: str, value: Any) -> Any:
    if (value := check_number(name, value)) <= 0:
        raise ValueError(f"{name} must be more than 0, got {value}")
    return value


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Check] = {
    "Tensor": check_given,
    "Tensor | float": check_tensor_or_number,
    "bool": check_flag,
    "str": check_string,
    "str | None": _or_none(check_string),
}
for _annotation, _check in (("int", check_integer), ("float", check_number)):
    _CHECKS |= {_annotation: _check, f"{_annotation} | None": _or_none(_check)}
