"""The record of a mechanism's paper in `tests/papers/`, and its token loop over sequences and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

T, H, K = 6, 2, 8  # of the calls that `tests/test_errors.py` makes


@dataclass(frozen=True)
class Mechanism:
    """A loop, the shapes of its arguments by name, and how the loops above differ in what they take.

    Axes: sequences `B` (of states `N`), tokens `T`, steps of a token `n`, heads of keys `H` and of values `HV`, channels `K` and
    `V`, slots or memories `M`, rotated pairs `R`, levels `L`, features `F`, `one` and `two` numbers.
    """

    loop: Callable[..., tuple[Tensor, Any]]
    shapes: dict[str, str]
    optional: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None  # the documented default; None: K^-0.5
    values_first: bool = False  # the paper's state is V x K
    by_head: bool = False  # the loop wants to know which head it is
    grouped: bool = True  # more heads of values than of keys are allowed
    states: tuple[str, ...] = ("N HV K V",)  # several: the loop takes and returns a tuple
    logarithms: tuple[int, ...] = ()  # which states are logarithms of a sum
    unit: tuple[str, ...] = ("k",)  # of length 1 where there is a beta
    draw: dict[str, float] = field(default_factory=dict)  # arguments of unit length times this number
    rare: bool = False  # no published model runs it: its slow tests run with -m whole
    weak: bool = False  # beta up to 1 instead of 2
    routing: tuple[str, ...] = ()  # between 0 and 1, some of them 0
    slots: int = K  # the axis M in the calls of `tests/test_errors.py`
    features: Callable[[int], int] = lambda K: 1  # how many there are of K channels, the axis F of states
    positive: tuple[str, ...] = ()  # between 0 and 1; such an op has no scale
    layers: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # options of the layers that the tests run, by their name
    layer: Callable[[Any, Tensor], Tensor] | None = (
        None  # the output of a layer for an input [T, width], from its weights
    )
    errors: list[tuple[dict[str, Any], type[Exception], str]] = field(
        default_factory=list
    )  # wrong arguments, error, its text


QKV = {"q": "B T H K", "k": "B T H K", "v": "B T HV V"}
RKV = {"r": "B T H K", "k": "B T H K", "v": "B T HV V"}
STEPS = {"q": "B T H K", "k": "B T n H K", "v": "B T n HV V", "beta": "B T n HV", "log_decay": "B T HV"}
MAMBA = {"x": "B T HV V", "dt": "B T HV", "A_log": "HV", "B": "B T H K", "C": "B T H K", "D": "HV"}
RWKV7 = {"r": "B T H K", "log_decay": "B T HV K", "k": "B T H K", "v": "B T HV V", "kk": "B T H K", "a": "B T H K"}
CURVATURE = {"curvature_beta": "B T H", "curvature_log_decay": "B T H", "log_scale": "H"}
# Arguments that are float32 whatever the dtype of the rest, as models have them
WIDE = (
    "beta",
    "log_decay",
    "log_forget",
    "log_write",
    "dt",
    "A_log",
    "D",
    "bonus",
    "curvature_beta",
    "curvature_log_decay",
    "log_scale",
    "gradient_beta",
    "norm_weight",
    "norm_bias",
    "momentum_log_decay",
    "A_imag",
    "nu_log",
    "theta_log",
    "gamma_log",
)
BETA, BY_TOKEN, BY_CHANNEL = {"beta": "B T HV"}, {"log_decay": "B T HV"}, {"log_decay": "B T HV K"}


def kind_of(mechanism: Mechanism, name: str) -> str:
    """What numbers an argument has: vectors of a given length ("scaled", "unit"), or the name of the way to draw them."""
    if name in mechanism.draw:
        return "scaled"
    if name in mechanism.routing:
        return "routing"
    if name == "ridge":
        return "ridge"
    if name in mechanism.positive:
        return "positive"
    if name.endswith("log_decay") or name == "log_forget":
        return "decay"
    if name in ("beta", "dt", "a", "curvature_beta", "gradient_beta") or name.endswith("_gate"):
        return "strength"
    return "unit" if name == "kk" or ("beta" in mechanism.shapes and name in mechanism.unit) else "normal"


def kind_of_state(mechanism: Mechanism, name: str, axes: str) -> str:
    """What numbers an initial state has: "count" (of tokens), "positive" (a sum of squares or weights), "outer" (products) or "normal"."""
    if axes == "N one":
        return "count"
    if axes in ("N H K", "N H F") or name in mechanism.positive:
        return "positive"
    return "outer" if axes == "N HV K K" else "normal"


def householder(k: Tensor, beta: Tensor) -> Tensor:
    """I - beta k k^T."""
    return torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)


def rows(o: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(o) if o else like[:0]


def zeros(*shape: int, **kind: Any) -> Tensor:
    return torch.zeros(shape, **kind)


def run_loop(
    mechanism: Mechanism, x: dict[str, Tensor], lengths: tuple[int, ...] | None = None, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Output `[B, T, HV, V]` and states of the paper's loop over every sequence and head of the tensors `x`."""
    axes = {name: shape.split() for name, shape in mechanism.shapes.items()}
    main = next(
        name
        for name, shape in mechanism.shapes.items()
        if shape.endswith("HV V") and name not in ("log_decay", "write_gate")
    )
    B, T, HV, V = x[main].shape[0], x[main].shape[1], *x[main].shape[-2:]
    if scale is None:
        scale = mechanism.scale
    if scale is None:
        scale = x[next(n for n, shape in mechanism.shapes.items() if shape == "B T H K")].shape[-1] ** -0.5
    parts = (
        [(n, 0, T) for n in range(B)]
        if lengths is None
        else [(0, *ends) for ends in pairwise(accumulate((0, *lengths)))]
    )
    first_states = first_states_of(mechanism, x, len(parts))
    outputs: list[Tensor] = []
    states: list[list[Tensor]] = [[] for _ in first_states]
    for n, (row, first, last) in enumerate(parts):
        heads, found = [], []
        for h in range(HV):
            own = {name: of_head(t, axes[name], row, first, last, h, HV) for name, t in x.items() if name in axes}
            S = [state[n, h // (HV // state.shape[1])] for state in first_states]
            S = [state.T for state in S] if mechanism.values_first else S
            which = {"head": h, "heads": HV} if mechanism.by_head else {}
            o, S = mechanism.loop(**own, **mechanism.options, **which, S=tuple(S) if len(S) > 1 else S[0], scale=scale)
            heads.append(o)
            found.append(S if isinstance(S, tuple) else (S.T if mechanism.values_first else S,))
        outputs.append(torch.stack(heads, 1))
        for place, state in enumerate(first_states):  # heads that share a state agree on it: the first one tells
            states[place].append(torch.stack([S[place] for S in found[:: HV // state.shape[1]]]))
    if not parts:
        return x[main].new_zeros(B, T, HV, V), *first_states
    o = torch.stack(outputs) if lengths is None else torch.cat(outputs)[None]
    return o, *(torch.stack(state) for state in states)


def loop(mechanism: Mechanism, scale: float = 1.0, **arguments: Tensor) -> Tensor:
    """The paper's output `[T, HV, V]` of arguments of one sequence; those of weights have no token axis."""
    weights = tuple(name for name, axes in mechanism.shapes.items() if not axes.startswith("B"))
    return run_loop(mechanism, {n: t if n in weights else t[None] for n, t in arguments.items()}, scale=scale)[0][0]


def first_states_of(mechanism: Mechanism, x: dict[str, Tensor], sequences: int) -> list[Tensor]:
    """The initial states among `x`, or those of a sequence that begins: zeros, the logarithm of a sum -inf."""
    given = [x[n] for n in sorted(x) if n.startswith("initial_state")]
    if given:
        return given
    sizes = {
        axis: size
        for name, shape in mechanism.shapes.items()
        if name in x
        for axis, size in zip(shape.split(), x[name].shape, strict=True)
    }
    like = next(iter(x.values()))
    sizes |= {"N": sequences, "one": 1, "F": mechanism.features(sizes.get("K", 1))}
    shapes = [[sizes[axis] for axis in state.split()] for state in mechanism.states]
    return [
        like.new_full(shape, -math.inf if place in mechanism.logarithms else 0.0) for place, shape in enumerate(shapes)
    ]


def of_head(t: Tensor, axes: list[str], row: int, first: int, last: int, head: int, heads: int) -> Tensor:
    """What one head of one sequence sees of a tensor with these axes."""
    if {"H", "HV"} & set(axes):
        axis = axes.index("HV") if "HV" in axes else axes.index("H")
        t = t.select(axis, head // (heads // t.shape[axis]))
    return t[row, first:last] if axes[0] == "B" else t
