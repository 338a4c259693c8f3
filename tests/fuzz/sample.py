"""One random call of an op: its tensors and options, what the results are, and the definition that says what they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import flashmix
from flashmix.capabilities import public_ops

from .draw import Layout

OPS = public_ops()
Tensors = dict[str, Tensor]


@dataclass
class Sample:
    """A call of `op` with plain tensors on the CPU; `layouts` says how they lie in memory when the op sees them.

    `means(tensors)` gives the results in the op's order, computed in whatever dtype the tensors have; of packed sequences it is asked one
    after the other, unless it `packs` itself. `axes` names what the first
    axes of each result are: "token" `[B, T, ...]`, "state" `[N, ...]`, "row" `[B, ...]`, "whole". `per_token` and `per_row` are the
    arguments with a token axis 1 and with a batch axis 0 (states apart).
    """

    op: str
    dtype: torch.dtype
    tensors: Tensors
    means: Callable[[Tensors], Sequence[Tensor]]
    axes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    per_token: frozenset[str] = frozenset()
    per_row: frozenset[str] = frozenset()
    states: tuple[str, ...] = ()  # arguments that are states, in the order of the results
    lengths: tuple[int, ...] | None = None
    gradient: bool = True
    fixed: frozenset[str] = frozenset()  # arguments that get no gradient
    written: tuple[str, ...] = ()  # arguments that are written, results too
    plain_dtype: torch.dtype | None = None  # the baseline's dtype; None: that of the call
    steps: int = 1  # rounding steps that an implementation may take more than the baseline
    own_dtype: bool = False  # the budget of a result is by the result's dtype, not by the call's
    causal: bool = True  # later tokens do not reach earlier ones
    laws: frozenset[str] = frozenset()  # those that hold bit for bit in plain PyTorch and C
    loose: frozenset[str] = frozenset()  # of these laws, those that plain PyTorch keeps within the budget only
    bound: float = 1.0  # how many budgets an error may be
    impl: str = ""  # the one implementation that is looked at; all of them by default
    packs: bool = False  # `means` takes packed sequences as they are

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """The keyword arguments of the public op for these tensors: several initial states are one tuple."""
        call: dict[str, Any] = {n: t for n, t in tensors.items() if n not in self.states or len(self.states) == 1}
        if len(self.states) > 1 and self.states[0] in tensors:
            call["initial_state"] = tuple(tensors[n] for n in self.states)
        elif self.states and self.states[0] in call:
            call["initial_state"] = call.pop(self.states[0])
        if self.lengths is not None:
            device = next(iter(tensors.values())).device
            call["cu_seqlens"] = flashmix.Packing.from_lengths(self.lengths, device=device)
        return call | self.options

    def meaning(self, tensors: Tensors) -> list[Tensor]:
        """The results that the definition gives."""
        if self.lengths is None or self.packs:
            return list(self.means(tensors))
        return by_sequence(self.means, tensors, self.lengths, self.per_token, self.states, self.axes)

    def run(self, tensors: Tensors, impl: str) -> list[Tensor]:
        """The results of the public op, then the arguments that it has written."""
        got = OPS[self.op](**self.arguments(tensors), impl=impl)
        return flattened(got) + [tensors[name] for name in self.written]

    def place(self, device: str = "cpu", contiguous: bool = False) -> tuple[Tensors, Tensors]:
        """The tensors on a device, laid out, and the memory that they are part of."""
        placed, bases = {}, {}
        for name, t in self.tensors.items():
            layout = Layout() if contiguous else self.layouts.get(name, Layout())
            placed[name], bases[name] = layout.place(t.to(device))
        return placed, bases

    def cut(self, rows: slice | None = None, tokens: slice | None = None, states: slice | None = None) -> Sample:
        """The same call of some rows and tokens."""
        tensors = {}
        for name, t in self.tensors.items():
            t = t[rows] if rows is not None and name in self.per_row else t
            t = t[:, tokens] if tokens is not None and name in self.per_token else t
            t = t[states] if states is not None and name in self.states else t
            tensors[name] = t
        return replace(self, tensors=tensors)


def flattened(got: Any) -> list[Tensor]:
    """The tensors of a result, however it nests them; None is left out."""
    if isinstance(got, Tensor):
        return [got]
    return [] if got is None else [t for part in got for t in flattened(part)]


def by_sequence(
    means: Callable[[Tensors], Sequence[Tensor]],
    tensors: Tensors,
    lengths: tuple[int, ...],
    per_token: frozenset[str],
    states: Sequence[str],
    axes: Sequence[str],
) -> list[Tensor]:
    """The meaning of packed sequences: one after the other, results per token joined and states stacked."""
    if not lengths:  # no sequence: tokens and states of none
        found = means({name: t for name, t in tensors.items() if name not in states})
        return [t if axis == "token" else t[:0] for axis, t in zip(axes, found, strict=True)]
    parts = []
    for n, (first, last) in enumerate(pairwise(accumulate((0, *lengths)))):
        own = {name: t[:, first:last] if name in per_token else t for name, t in tensors.items()}
        own |= {name: tensors[name][n : n + 1] for name in states if name in tensors}
        parts.append(means(own))
    return [
        torch.cat(list(found), 1 if axis == "token" else 0)
        for axis, found in zip(axes, zip(*parts, strict=True), strict=True)
    ]


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Floating tensors in another dtype."""
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
