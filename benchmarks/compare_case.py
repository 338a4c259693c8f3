"""Cases of `compare.py`: what makes tensors once, and the parts that are timed over them.

Makers run under `torch.device(...)` and a fixed seed, so that both checkouts compute with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import timing
import torch
from torch import Tensor

BF16, WIDE = torch.bfloat16, torch.float32
Run = Callable[[], Any]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """What is timed: `run` makes `calls` calls. Kinds: "device" (time of the device), "host" (time until the call returns, without
    waiting for a GPU) and "value" (`run` returns milliseconds itself).
    """

    run: Run
    kind: str = "device"
    calls: int = 1


@dataclass(frozen=True)
class Case:
    """Names of the parts and what makes them. A case that is not `precompiled` needs much memory and no kernel of its own."""

    parts: tuple[str, ...]
    make: Callable[[], dict[str, Part]]
    precompiled: bool = True


Cases = dict[str, Case]


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def quiet(run: Run) -> Run:
    return torch.no_grad()(run)


def results_of(got: Any) -> list[Tensor]:
    """The tensors that a call returns, without the states that it was not asked for."""
    return [t for t in (got if isinstance(got, tuple) else (got,)) if t is not None]


def trained(call: Call, inputs: Sequence[Tensor], kind: str = "device") -> dict[str, Part]:
    """Forward without gradients, and forward + backward to all inputs that ask for gradients (all of them where none does)."""
    if not any(t.requires_grad for t in inputs):
        inputs = [t.requires_grad_() for t in inputs]
    leaves = [t for t in inputs if t.requires_grad]
    flows: list[Tensor] = []

    def both() -> None:
        results = results_of(call(*inputs))
        if not flows:
            flows.extend(torch.randn_like(y) for y in results)
        torch.autograd.grad(results, leaves, flows)

    return {"forward": Part(quiet(lambda: call(*inputs)), kind), "both": Part(both, kind)}


def op(call: Call, *shapes: tuple[int, ...], kind: str = "device", dtype: torch.dtype = BF16) -> Case:
    """A case of normal inputs of these shapes."""
    return Case(("forward", "both"), lambda: trained(call, [normal(*shape, dtype=dtype) for shape in shapes], kind))


def untrained(make: Callable[[], Part], part: str, precompiled: bool = True) -> Case:
    return Case((part,), lambda: {part: make()}, precompiled)


def graph(calls: list[Run]) -> Part:
    """A CUDA graph of the calls, without gradients."""
    with torch.no_grad():
        graph = timing.graph_of(calls)
    return Part(graph.replay, calls=len(calls))
