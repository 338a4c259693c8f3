"""Calls of ops that write a state, made again at little cost to the host.

A step takes some microseconds of a GPU or a CPU, and Python as long to look at ten tensors. Checks, the choice of an implementation and
its launch depend on sizes, dtypes, strides and options alone, so they are done once for each set of them; the calls that follow compare
these, and run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flashmix.op.call import Op
from flashmix.op.choose import choose
from flashmix.op.kind import keep, ordinary

Tensors = Mapping[str, Any]  # the tensor fields of a call, absent ones None
Again = Callable[
    [Tensors], Tensor
]  # the output of a call with tensors like those it was made for; writes what the op writes


class Remembered:
    """An op with one output whose calls are remembered, where its implementation has a short way.

    The module of an implementation may have `prepare(call) -> Again | None`, all of whose decisions follow from `signature`s.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.written = op.call.written
        self.known: dict[Any, Again] = {}

    def __call__(
        self, asked: str, impl: str, ready: Callable[[Any], Any], tensors: dict[str, Any], options: dict[str, Any]
    ) -> Tensor:
        """The output of an unchecked call of the public function `asked`, whose fields are `tensors` and `options`.

        `ready(call)` is the call as the op takes it; it raises where its fields do not fit. Raises RuntimeError: a gradient is wanted.
        """
        key: Any = None
        if not torch.compiler.is_compiling() and rememberable(tensors):
            seen = signature(tensors)
            key = None if seen is None else (asked, impl, *options.values(), seen)
            known = self.known.get(key)
            if known is not None:
                output = known(tensors)
                for name in self.written:
                    t = tensors[name]
                    if t is not None:
                        increment_version(t)
                return output
        call = ready(self.op.call.make({**tensors, **options}))
        if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors()):
            raise RuntimeError(f"{asked} has no gradient, it writes its state in place: call it under torch.no_grad()")
        (output,) = self.op(call, impl, asked)
        if key is not None:
            prepare = getattr(choose(asked, self.op.implementations, call, impl).load(), "prepare", None)
            again = None if prepare is None else prepare(call)
            if again is not None:
                keep(self.known, key, again)
        return output


def rememberable(tensors: Tensors) -> bool:
    """Whether sizes, dtypes, strides and options tell all about a call: it has data and no gradient, and asks for no more checks."""
    first = next(iter(tensors.values()))
    if type(first) is not Tensor:
        return False
    if first.is_cuda:
        if torch.is_autocast_enabled("cuda"):
            return False
    elif not first.is_cpu or torch.is_autocast_enabled("cpu"):
        return False
    if not ordinary():
        return False
    if torch.is_grad_enabled():
        for t in tensors.values():
            if t is not None and (type(t) is not Tensor or t.requires_grad):
                return False
    return True


def signature(tensors: Tensors) -> Any:
    """What checks and choices depend on besides options: dtype, device and sizes of each tensor, and strides where they do not follow."""
    try:
        return tuple(
            [
                None if t is None else (t.dtype, t.device, t.shape, None if t.is_contiguous() else t.stride())
                for t in tensors.values()
            ]
        )
    except (AttributeError, RuntimeError):  # not a tensor, or one without strides: the checks will say so
        return None


def kinds(*tensors: Any) -> tuple[Any, ...] | None:
    """What checks depend on that look at sizes, dtypes and devices alone; None where a compiler traces or any is no plain tensor."""
    if torch.compiler.is_compiling():
        return None
    found: list[Any] = []
    for t in tensors:
        if t is None:
            found.append(None)
        elif type(t) is Tensor and not t.is_nested:
            found += (t.shape, t.dtype, t.device, t.layout)
        else:
            return None
    return tuple(found)


def by_signature(prepare: Callable[[Any], Again | None]) -> Callable[[Any], Again | None]:
    """`prepare` of an implementation, called once for each signature; None for calls that are not on a GPU."""
    found: dict[Any, Again | None] = {}

    @wraps(prepare)
    def prepared(call: Any) -> Again | None:
        if call.device.type != "cuda":
            return None
        key = (signature({n: getattr(call, n) for n in call.names}), *[getattr(call, n) for n in call.options])
        if key not in found:
            keep(found, key, prepare(call))
        return found[key]

    return prepared
