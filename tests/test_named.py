"""Each published mechanism equals its paper's own token loop: values, states, gradients, packed, split, in steps."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from budget import assert_within_budget, relative_errors
from paper_loops import MECHANISMS, run_loop
from torch import Tensor

import flashmix
from flashmix.ops import named

# What an implementation rounds where the loop does not: after scores, transform, state and output, and, for mechanisms
# that compute an operand of the engine from their arguments, this operand.
STAGES = 5
SIZES = {"B": 2, "T": 37, "n": 2, "H": 2, "HV": 2, "K": 6, "V": 5}
NAMES = list(MECHANISMS)
GROUPED = [name for name in NAMES if MECHANISMS[name].grouped]
# float32 whatever the dtype of the rest, as models have them
WIDE = ("beta", "log_decay", "log_forget", "dt", "A_log", "D", "bonus", "initial_state")
EPS64, EPS32 = torch.finfo(torch.float64).eps, torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: a second thread would only be waited for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_inputs(
    name: str, dtype: torch.dtype, sequences: int | None = None, optional: bool = True, **sizes: int
) -> dict[str, Tensor]:
    """The arguments of a mechanism by name, and an initial state; keys of delta rules have length 1, decays are at most 0."""
    size = SIZES | sizes
    generator = torch.Generator().manual_seed(0)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    mechanism, x = MECHANISMS[name], {}
    unit_keys = "beta" in mechanism.shapes
    for argument, axes in mechanism.shapes.items():
        shape = tuple(size[axis] for axis in axes.split())
        if argument in mechanism.optional and not optional:
            continue
        if argument in ("log_decay", "log_forget"):
            x[argument] = -uniform(shape)
        elif argument in ("beta", "dt", "a"):
            x[argument] = uniform(shape) * (2 if argument == "beta" else 1)
        elif argument == "kk" or (argument == "k" and unit_keys):
            x[argument] = torch.nn.functional.normalize(normal(shape), dim=-1)
        else:
            x[argument] = normal(shape)
    x["initial_state"] = normal((size["B"] if sequences is None else sequences, size["HV"], size["K"], size["V"]))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {argument: t.to(wide if argument in WIDE else dtype) for argument, t in x.items()}


def run_op(name: str, x: dict[str, Tensor], lengths: tuple[int, ...] | None = None, **options: Any) -> Any:
    cu_seqlens = None if lengths is None else flashmix.Packing.from_lengths(lengths)
    return getattr(named, name)(**x, **MECHANISMS[name].options, return_state=True, cu_seqlens=cu_seqlens, **options)


def evaluate(run: Any, name: str, inputs: dict[str, Tensor], *args: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, state and the gradient of every argument; what flows back are numbers that `dtype` holds exactly."""
    leaves = {argument: t.detach().clone().requires_grad_() for argument, t in inputs.items()}
    outputs = run(name, leaves, *args)
    generator = torch.Generator().manual_seed(1)
    flows = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t) for t in outputs]
    pairs = [(t, flow) for t, flow in zip(outputs, flows, strict=True) if t.requires_grad]  # none: nothing was packed
    grads = torch.autograd.grad(
        [t for t, _ in pairs], list(leaves.values()), [flow for _, flow in pairs], materialize_grads=True
    )
    found = {"o": outputs[0].detach(), "state": outputs[1].detach()}
    return found | {f"d_{argument}": grad for argument, grad in zip(leaves, grads, strict=True)}


def references(name: str, inputs: dict[str, Tensor], *args: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], ...]:
    """The paper's loop in float64, and as baseline in float32."""
    exact = evaluate(run_loop, name, {n: t.double() for n, t in inputs.items()}, *args, dtype=dtype)
    plain = evaluate(run_loop, name, {n: t.float() for n, t in inputs.items()}, *args, dtype=dtype)
    return exact, plain


def assert_float64(name: str, got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Errors are those of the loop in float32, as much smaller as float64 is finer, and a rounding step a stage."""
    assert got.keys() <= exact.keys()
    for key, value in got.items():
        assert torch.isfinite(value).all() and value.dtype == torch.float64
        allowed = relative_errors(plain[key], exact[key])
        for have, base in zip(relative_errors(value, exact[key]), allowed, strict=True):
            budget = 2 * (2 * base * EPS64 / EPS32 + STAGES * EPS64)  # twice: the reference rounds as well
            assert have <= budget, f"{name} {key}: error {have:.2e} is over the budget {budget:.2e}"


def test_every_mechanism_has_a_loop() -> None:
    public = {name for name, f in inspect.getmembers(named, inspect.isfunction) if f.__module__ == named.__name__}
    assert {name for name in public if not name.startswith("_")} == set(MECHANISMS)


@pytest.mark.parametrize("state", [True, False], ids=["state", "no state"])
@pytest.mark.parametrize("name", NAMES)
def test_float64_is_the_papers_loop(name: str, state: bool) -> None:
    """With an initial state; without one also without the optional arguments."""
    inputs = make_inputs(name, torch.float64, optional=state)
    if not state:
        del inputs["initial_state"]
    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize("name", GROUPED)
def test_more_heads_of_values_than_of_keys(name: str) -> None:
    inputs = make_inputs(name, torch.float64, B=1, HV=6, T=9)
    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_narrow_dtypes_are_within_budget(name: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(name, dtype, B=1)
    exact, plain = references(name, inputs, dtype=dtype)
    for key, got in evaluate(run_op, name, inputs, dtype=dtype).items():
        baseline = plain[key].to(got.dtype)
        assert_within_budget(f"{name} {key}", got, exact[key], baseline, dtype, steps=STAGES)


@pytest.mark.parametrize("lengths", [(5, 0, 1, 34, 0, 3), (0, 0), ()], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_packed_is_the_loop_over_each_sequence(name: str, lengths: tuple[int, ...]) -> None:
    inputs = make_inputs(name, torch.float64, sequences=len(lengths), B=1, T=sum(lengths))
    exact, plain = references(name, inputs, lengths, dtype=torch.float64)
    assert_float64(name, evaluate(run_op, name, inputs, lengths, dtype=torch.float64), exact, plain)


def part_of(name: str, inputs: dict[str, Tensor], first: int, last: int, state: Tensor) -> dict[str, Tensor]:
    per_token = {argument for argument, axes in MECHANISMS[name].shapes.items() if axes.startswith("B T")}
    part = {argument: t[:, first:last] if argument in per_token else t for argument, t in inputs.items()}
    return part | {"initial_state": state}


@pytest.mark.parametrize("cuts", [(0, 33, 37), tuple(range(13))], ids=["in two", "in steps"])
@pytest.mark.parametrize("name", NAMES)
def test_parts_with_the_carried_state_are_the_whole(name: str, cuts: tuple[int, ...]) -> None:
    inputs = make_inputs(name, torch.float64, T=cuts[-1])
    exact = dict(zip(("o", "state"), run_loop(name, inputs), strict=True))
    plain = dict(zip(("o", "state"), run_loop(name, {n: t.float() for n, t in inputs.items()}), strict=True))
    state, outputs = inputs["initial_state"], []
    for first, last in pairwise(cuts):
        o, state = run_op(name, part_of(name, inputs, first, last, state))
        outputs.append(o)
    assert_float64(name, {"o": torch.cat(outputs, 1), "state": state}, exact, plain)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_a_carried_state(name: str) -> None:
    inputs = make_inputs(name, torch.float64, T=12)

    def in_two(name: str, x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        first, state = run_op(name, part_of(name, x, 0, 11, x["initial_state"]))
        second, state = run_op(name, part_of(name, x, 11, 12, state))
        return torch.cat([first, second], 1), state

    exact, plain = references(name, inputs, dtype=torch.float64)
    assert_float64(name, evaluate(in_two, name, inputs, dtype=torch.float64), exact, plain)


@pytest.mark.parametrize("name", NAMES)
def test_scale(name: str) -> None:
    """The default is the documented one (1 where the paper scales nothing, else K^-0.5), and a given one is used."""
    inputs = make_inputs(name, torch.float64, T=5)
    paper = MECHANISMS[name].scale
    assert inspect.signature(getattr(named, name)).parameters["scale"].default == paper
    o, state = run_op(name, inputs)
    same, same_state = run_op(name, inputs, scale=SIZES["K"] ** -0.5 if paper is None else paper)
    assert torch.equal(o, same) and torch.equal(state, same_state)
    o, other_state = run_op(name, inputs, scale=0.7)
    assert torch.equal(other_state, state), "the scale is no part of the state"
    exact, plain = (
        run_loop(name, {n: t.to(dtype) for n, t in inputs.items()}, scale=0.7)[0]
        for dtype in (torch.float64, torch.float32)
    )
    assert_float64(name, {"o": o}, {"o": exact}, {"o": plain})


@pytest.mark.parametrize("name", NAMES)
def test_no_state_unless_asked_for(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=3)
    before = {argument: t.clone() for argument, t in inputs.items()}
    o, state = getattr(named, name)(**inputs, **MECHANISMS[name].options)
    assert state is None and o.shape == (2, 3, 2, 5) and o.dtype == torch.float32
    for argument, t in inputs.items():
        assert torch.equal(t, before[argument]), f"{argument} was changed"


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=0)
    o, state = run_op(name, inputs)
    assert o.shape == (2, 0, 2, 5) and torch.equal(state, inputs["initial_state"])


@pytest.mark.parametrize("name", NAMES)
def test_compiles_as_one_graph(name: str) -> None:
    inputs = make_inputs(name, torch.float32, T=5)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run_op(name, x), fullgraph=True, backend="eager")
    for got, expected in zip(compiled(inputs), run_op(name, inputs), strict=True):
        assert torch.equal(got, expected)
