"""Oja's rule over many tokens: neither its state nor its outputs drift, whatever the dtype and wherever the sequence is cut."""

from __future__ import annotations

import pytest
import torch
from budget import assert_within_budget
from paper_loops import run_loop
from test_named import STAGES, call, make_inputs, part_of, run_op
from torch import Tensor

import flashmix
from flashmix.gpu import device as gpu

CUT = 64


@pytest.fixture(scope="module", params=[1024, pytest.param(4096, marks=pytest.mark.whole)])
def long(request: pytest.FixtureRequest) -> dict[str, Tensor]:
    return make_inputs("oja", torch.bfloat16, optional=False, T=request.param, B=1, H=1, HV=1, K=32, V=8)


@pytest.fixture(scope="module")
def loops(long: dict[str, Tensor]) -> list[tuple[Tensor, ...]]:
    """The paper's loop in float64 and in float32."""
    return [run_loop("oja", {n: t.to(dtype) for n, t in long.items()}) for dtype in (torch.float64, torch.float32)]


@pytest.mark.parametrize("impl", ["native", "portable"])
def test_the_state_does_not_drift(impl: str, long: dict[str, Tensor], loops: list[tuple[Tensor, ...]]) -> None:
    o, state = run_op("oja", long, impl=impl)
    (exact_o, exact), (plain_o, plain) = loops
    assert_within_budget("state", state, exact, plain, torch.float32, STAGES)
    assert_within_budget("output", o, exact_o, plain_o.bfloat16())


def test_a_cut_leaves_no_trace(long: dict[str, Tensor], loops: list[tuple[Tensor, ...]]) -> None:
    states, outputs = (long["initial_state"],), []
    for first in range(0, long["q"].shape[1], CUT):
        o, *states = run_op("oja", part_of("oja", long, first, first + CUT, tuple(states)))
        outputs.append(o)
    (exact_o, exact), (plain_o, plain) = loops
    assert_within_budget("state", states[0], exact, plain, torch.float32, STAGES)
    assert_within_budget("output", torch.cat(outputs, 1), exact_o, plain_o.bfloat16())


def test_kernels_take_float32_in_place_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of corrected keys in 16 bits drifts; a GPU has no other way to add them up."""
    monkeypatch.setattr(gpu, "refuses", lambda device, dtype: None if dtype == torch.float32 else f"got {dtype}")
    x = {n: t.to("meta") for n, t in make_inputs("oja", torch.bfloat16).items()}
    assert flashmix.explain(call, "oja", x).choice == "triton"


def test_autocast_rounds_the_arguments_alone() -> None:
    x = make_inputs("oja", torch.float32)
    rounded = x | {n: x[n].bfloat16() for n in "qkv"}
    with torch.autocast("cpu", torch.bfloat16):
        o, state = run_op("oja", x)
    assert all(map(torch.equal, (o, state), run_op("oja", rounded)))
