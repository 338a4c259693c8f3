"""Cases of the scan: shapes, decays, states, packed sequences; and how each is compared with the definition, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from budget import assert_within_budget
from rowwise_cases import random
from torch import Tensor

from flashmix.ops.scan.definition import scan as define
from flashmix.ops.scan.op import scan

STAGES = 3  # the output, which the backward reads in place of the state; the product of a decay's gradient; its sum


@dataclass(frozen=True)
class Case:
    """One scan: sizes `[B, T, D]` or `[B, T, H, D]`, the axes of its decay, and what else it has."""

    sizes: tuple[int, ...]
    decay: str = "token"  # token, head, constant or constant head
    lengths: tuple[int, ...] = ()  # of packed sequences
    state: bool = True
    read_before: bool = False
    strength: float = 1.0  # of the decay; 0: -inf at some tokens
    coupling: str | None = None

    def __str__(self) -> str:
        marks = ["x".join(map(str, self.sizes)), self.decay, *[f"packed {len(self.lengths)}"] * bool(self.lengths)]
        marks += ["read_before"] * self.read_before + ["no state"] * (not self.state) + [f"decay {self.strength:g}"]
        return ", ".join([*marks, *[self.coupling] * (self.coupling is not None)])

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.sizes[0]

    def inputs(self, dtype: torch.dtype, complex_decay: bool = False) -> list[Tensor]:
        """`x`, the log decay, and if there is one the state."""
        wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
        sizes = self.sizes
        shapes = {"token": sizes, "head": sizes[:3], "constant": sizes[2:], "constant head": sizes[2:3]}
        g = -self.strength * random(*shapes[self.decay], dtype=wide.to_real(), seed=1).abs()
        if self.strength == 0:
            g = torch.where(random(*g.shape, seed=4) > 0.7, -torch.inf, -0.1).to(g.dtype)
        if self.coupling == "logit":
            g = torch.where(random(*g.shape, seed=6) > 0, g, -g)
        if complex_decay:
            g = torch.complex(g, random(*g.shape, dtype=g.dtype, seed=3))
        made = [_number(*sizes, dtype=dtype, seed=0), g]
        return [*made, _number(self.sequences, *sizes[2:], dtype=wide, seed=2)] if self.state else made


def _number(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    if not dtype.is_complex:
        return random(*shape, dtype=dtype, seed=seed)
    return torch.complex(*(random(*shape, dtype=dtype.to_real(), seed=seed + 10 * i) for i in range(2)))


DECAYS = ("token", "head", "constant", "constant head")
CASES = [
    *(Case((2, 150, 3, 5), decay, read_before=late) for decay in DECAYS for late in (False, True)),
    *(
        Case((1, 143, 2, 20), decay, (5, 0, 64, 1, 0, 73), read_before=late)
        for decay in DECAYS
        for late in (False, True)
    ),
    *(Case((2, tokens, 7), strength=2.0) for tokens in (0, 1, 2, 63, 64, 65, 129, 300)),
    *(Case((2, 9, 1), decay, state=False) for decay in ("token", "constant")),
    Case((1, 6, 40), lengths=(0, 0, 6), state=False),
    Case((1, 0, 4), lengths=(0, 0)),
    *(Case((2, 0, 2, 3), decay) for decay in ("constant", "constant head")),
    Case((1, 130, 4, 33), "head", state=False),
    *(Case((2, 200, 2, 16), decay, strength=strength) for decay in DECAYS for strength in (0.0, 0.001, 30.0)),
    Case((1, 200, 16), lengths=(100, 100), strength=0.0, read_before=True),
    Case((3, 70, 100), "token", read_before=True, state=False),
]
COUPLED = [
    case
    for coupling in ("complement", "root", "logit")
    for case in (
        *(Case((2, 70, 3, 5), decay, coupling=coupling) for decay in DECAYS),
        Case((1, 143, 2, 20), "token", (5, 0, 64, 1, 0, 73), read_before=True, coupling=coupling),
        Case((1, 70, 2, 20), "head", (5, 0, 65), state=False, coupling=coupling),
        *(Case((2, 70, 33), strength=strength, coupling=coupling) for strength in (0.0, 0.001, 30.0)),
        Case((2, 0, 2, 3), "constant", coupling=coupling),
    )
]


def results(op: str, case: Case, inputs: Sequence[Tensor], impl: str = "auto") -> dict[str, Tensor]:
    """Outputs and gradients by the op or, "definition", by the token loop, one sequence after the other."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    x, g, state = (*leaves, None)[:3]
    run = _defined if op == "definition" else _called
    outputs = run(case, x, g, state, impl)
    flows = [
        _number(*y.shape, dtype=torch.complex128 if y.is_complex() else torch.float64, seed=5).to(y) for y in outputs
    ]
    grads = torch.autograd.grad(outputs, leaves, flows, materialize_grads=True, allow_unused=True)
    names = ("h", "state", "dx", "dg", "d_state")
    return dict(zip(names, (*(y.detach() for y in outputs), *grads), strict=False))


def _called(case: Case, x: Tensor, g: Tensor, state: Tensor | None, impl: str) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(x.device) if case.lengths else None
    h, last = scan(
        x,
        g,
        initial_state=state,
        return_state=True,
        cu_seqlens=ends,
        read_before=case.read_before,
        coupling=case.coupling,
        impl=impl,
    )
    assert last is not None
    return h, last


def _defined(case: Case, x: Tensor, g: Tensor, state: Tensor | None, impl: str) -> tuple[Tensor, Tensor]:
    if not case.lengths:
        h, last = define(x, g, state, case.read_before, case.coupling)
        return h.to(x.dtype), last
    starts = None if state is None else state.split(1)
    parts, first = [], 0
    for n, length in enumerate(case.lengths):
        own = g[:, first : first + length] if g.dim() > 2 else g
        start = None if starts is None else starts[n]
        parts.append(define(x[:, first : first + length], own, start, case.read_before, case.coupling))
        first += length
    return torch.cat([h for h, _ in parts], 1).to(x.dtype), torch.cat([last for _, last in parts])


def references(case: Case, dtype: torch.dtype, inputs: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The definition in float64 and in `dtype`; for 64 bits the latter's errors are those of 32 bits, scaled."""
    exact = results("definition", case, [_wide(t) for t in inputs])
    if dtype.to_real() != torch.float64:
        return exact, results("definition", case, inputs)
    narrow = [t.to(torch.complex64 if t.is_complex() else torch.float32) for t in inputs]
    want, have = results("definition", case, [_wide(t) for t in narrow]), results("definition", case, narrow)
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return exact, {name: y + (have[name] - want[name]) * ratio for name, y in exact.items()}


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _reals(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def assert_scans(case: Case, dtype: torch.dtype, impl: str, device: str = "cpu", complex_decay: bool = False) -> None:
    """Outputs and gradients against the definition in float64; budget: the definition in `dtype`."""
    inputs = case.inputs(dtype, complex_decay)
    exact, plain = references(case, dtype, inputs)
    for name, have in results("scan", case, [t.to(device) for t in inputs], impl).items():
        want, baseline = _reals(exact[name]), _reals(plain[name].to(have.dtype))
        assert_within_budget(f"{case}: {name}", _reals(have).cpu(), want, baseline, dtype.to_real(), STAGES)
