"""Kinds of calls: those like one that ran are neither checked nor is their implementation chosen again.

On a GPU the host's part of a short call is longer than the GPU's. More than a third of it went to checks and choices, which depend on
sizes, dtypes, devices, strides, options and which tensors want a gradient alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flashmix.gpu import device as gpu
from flashmix.op.autograd import run_eager
from flashmix.op.call import Op, Outputs, given
from flashmix.op.checks import contents_everywhere
from flashmix.op.choose import choose, explaining

MOST = 1024  # entries that `keep` leaves in a dict


class CallKind:
    """Calls with the same `features` and options. Implementations keep by it, as `Call.of_kind`, what follows from these.

    `implementation` that runs them and its `module`; `names` of the given tensors, which may all be `contiguous`; `saves`: autograd records
    the calls; `options`: fields of a checked call that are no tensors.
    """

    __slots__ = ("contiguous", "implementation", "module", "names", "options", "saves")

    def __init__(self, implementation: str, module: Any, call: Any) -> None:
        self.implementation, self.module = implementation, module
        self.names, tensors, _, gradient = given(call)
        self.contiguous = all(t.is_contiguous() for t in tensors)
        self.saves = gradient and torch.is_grad_enabled()
        self.options = {name: getattr(call, name) for name in call.options} | {"of_kind": self}


class ByKind:
    """An op whose calls are checked once for each kind, by `fit(values)`: the fields of a call become those that the op takes; it raises
    where they do not fit.
    """

    def __init__(self, op: Op, fit: Callable[[dict[str, Any]], None]) -> None:
        self.op, self.fit = op, fit
        self.known: dict[tuple[Any, ...], CallKind] = {}

    def __call__(self, values: dict[str, Any], impl: str, asked: str) -> Outputs:
        """The outputs of the unchecked call of these fields, a dict that is changed; `asked` is the public function."""
        op = self.op
        key = None if torch.compiler.is_compiling() else self._key(values, impl, asked)
        kind = None if key is None else self.known.get(key)
        if kind is not None:
            values.update(kind.options)
            call = op.call.make(values)
            if kind.saves:
                return run_eager(op, call, kind.implementation, kind.names, [values[name] for name in kind.names])
            outputs: Outputs = kind.module.forward(call, False)[0]
            return outputs
        unchecked = values if key is None else {**values}
        self.fit(values)
        call = op.call.make(values)
        outputs = op(call, impl, asked)
        if key is not None and all(values[name] is unchecked[name] for name in op.call.names):
            self._note(key, call, impl, asked)
        return outputs

    def _key(self, values: dict[str, Any], impl: str, asked: str) -> tuple[Any, ...] | None:
        """All that the checks and the choice depend on; None where that is not known, of packed calls for one."""
        call = self.op.call
        for name in call.packings:
            if values[name] is not None:
                return None
        seen = features(values, call.names)
        return None if seen is None else (impl, asked, *[values[name] for name in call.options], *seen)

    def _note(self, key: tuple[Any, ...], call: Any, impl: str, asked: str) -> None:
        """Notes who runs calls like this one, unless that is a formula, which torch differentiates."""
        implementation = choose(asked, self.op.implementations, call, impl)
        if implementation.formula is None:
            module = self.op.module(implementation.name)
            keep(self.known, key, CallKind(implementation.name, module, call))


def features(values: Mapping[str, Any], names: Sequence[str]) -> list[Any] | None:
    """All that checks and choices look at in the tensors `names`: dtypes, devices, sizes, strides, and which want a gradient; None where
    that may not be all, or the call is not one for the current GPU.
    """
    first, gradient = values[names[0]], torch.is_grad_enabled()
    if type(first) is not Tensor or not gpu.is_current(first) or torch.is_autocast_enabled("cuda") or not ordinary():
        return None
    found: list[Any] = []
    try:
        for name in names:
            t = values[name]
            if t is None:
                found.append(None)
            elif (type(t) is Tensor or type(t) is Parameter) and not t.is_neg():
                found += (t.shape, t.dtype, t.device, gradient and t.requires_grad)
                if not t.is_contiguous():
                    found += (t.stride(), t.layout)
            else:
                return None
    except RuntimeError:  # of nested and sparse tensors, which the checks refuse
        return None
    return found


def ordinary() -> bool:
    """Whether a call runs for its results alone: neither `explain` nor a transform asks for it, and no contents are checked."""
    if explaining() or contents_everywhere():
        return False
    return not (forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active())


def keep(found: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps `value`; forgets all where sizes change without end."""
    if len(found) >= MOST:
        found.clear()
    found[key] = value
