"""Each mechanism of `flashmix.mechanisms` as its paper writes it: one sequence, one head, one token at a time.

Written from the papers, not from the library, with every matrix written out, in `tests/papers/`. `S` is the state in the paper's
own layout: `K x V` where vectors are rows (`o = q S`), `V x K` where they are columns (`o = S q`). Run the loops in float64.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import paper_cases
from paper_cases import Mechanism
from torch import Tensor

MECHANISMS: dict[str, Mechanism] = {}
for path in sorted((Path(__file__).parent / "papers").glob("*.py")):
    MECHANISMS |= import_module(f"papers.{path.stem}").CASES


def run_loop(
    name: str, x: dict[str, Tensor], lengths: tuple[int, ...] | None = None, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Output `[B, T, HV, V]` and states of the paper's loop over every sequence and head of the tensors `x`."""
    return paper_cases.run_loop(MECHANISMS[name], x, lengths, scale)


def state_names(name: str) -> list[str]:
    """What the tests call the initial states of a mechanism."""
    count = len(MECHANISMS[name].states)
    return ["initial_state"] if count == 1 else [f"initial_state{place}" for place in range(count)]
