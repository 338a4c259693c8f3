"""One token at a time: every rule and gate within the budget, pools, idle slots, drafted tokens, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from budget import assert_within_budget, relative_errors
from cases import GATES, Case
from cases import make_inputs as recurrence_inputs
from step_cases import CASES, RULES, StepCase, expected_history, make_history, make_inputs, run_definition, run_op
from torch import Tensor

import flashmix
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.step import op as step_op
from flashmix.ops.recurrence.step.call import StepCall
from flashmix.ops.recurrence.step.op import IMPLEMENTATIONS, STEP
from flashmix.ops.recurrence.step.portable.token import step as portable_step

STAGES = 2  # what is read of the state, and what is written
IMPLS = [implementation.name for implementation in IMPLEMENTATIONS]
HALF = [case for case in CASES if case.name in {f"{rule}-{gate}" for rule in RULES for gate in GATES}]


def named(cases: list[StepCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def check(
    case: StepCase, dtype: torch.dtype, impl: str, device: str = "cpu", state_dtype: torch.dtype | None = None
) -> None:
    """Output, states and history of a case are within the budget; slots of no sequence keep their bits."""
    inputs = make_inputs(case, dtype, state_dtype)
    x = {name: t.to(device) for name, t in inputs.items()}
    exact = run_definition(case, inputs, torch.float64)
    plain = run_definition(case, inputs, torch.float32)
    history = make_history(case, x)
    o = run_op(case, x, impl, history)
    got = {"o": o.cpu(), "state": x["state"].cpu()}
    wanted = {"o": (exact[0], plain[0]), "state": (exact[1], plain[1])}
    if history is not None:
        got["history"] = history.cpu()
        wanted["history"] = (expected_history(case, inputs, exact[2]), expected_history(case, inputs, plain[2]))
    for name, value in got.items():
        reference, baseline = wanted[name]
        assert_within_budget(f"{case.name} {name}", value, reference, baseline.to(value.dtype), steps=STAGES)
    assert got["o"].dtype == dtype
    idle = [n for n, slot in enumerate(case.slots or ()) if not 0 <= slot < case.pool]
    assert not got["o"][idle].any()
    free = [p for p in range(len(inputs["state"])) if case.slots is not None and p not in case.slots]
    assert torch.equal(got["state"][free], inputs["state"][free])


@named(CASES)
def test_float32_is_within_budget(case: StepCase) -> None:
    check(case, torch.float32, "portable")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@named(HALF)
def test_half_precision_is_within_budget(case: StepCase, dtype: torch.dtype) -> None:
    check(case, dtype, "portable")


@named(HALF)
def test_float64_is_as_much_better_as_its_dtype(case: StepCase) -> None:
    x = make_inputs(case, torch.float64)
    exact, plain = (run_definition(case, x, dtype) for dtype in (torch.float64, torch.float32))
    step = torch.finfo(torch.float64).eps
    o = run_op(case, x)
    for got, reference, baseline in zip((o, x["state"]), exact, plain, strict=False):
        allowed = relative_errors(baseline, reference)
        for have, base in zip(relative_errors(got, reference), allowed, strict=True):
            base = base * step / torch.finfo(torch.float32).eps
            assert have <= 2 * (2 * base + STAGES * step)  # twice: the reference rounds as well


@named(HALF)
def test_states_in_bfloat16_are_rounded_once(case: StepCase) -> None:
    check(case, torch.bfloat16, "portable", state_dtype=torch.bfloat16)


INTERPRETED = [c for c in CASES if c.name.endswith(("-idle-T4-kept3", "-grouped"))] + HALF[::3]


@pytest.mark.interpreted
@named(INTERPRETED)
def test_interpreted(case: StepCase) -> None:
    check(case, torch.float32, "triton")


@pytest.mark.interpreted
def test_interpreted_states_that_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state whose matrices are not in one piece, or lie [V, K], operands whose channels are apart, a pool that is part of another."""
    case = StepCase("", "delta", "channel", T=2, kept=2, slots=(1, -1), pool=3)
    inputs = make_inputs(case, torch.float32)
    plain, history = dict(inputs, state=inputs["state"].clone()), make_history(case, inputs)
    o = run_op(case, plain, "triton", history)
    apart = {n: torch.stack([t, t], -1)[..., 0] if t.is_floating_point() else t for n, t in inputs.items()}
    other = torch.stack([make_history(case, inputs)] * 2, -1)[..., 0]  # type: ignore[list-item]
    assert torch.equal(run_op(case, apart, "triton", other), o)
    assert torch.equal(apart["state"], plain["state"]) and torch.equal(other, history)
    v_first = dict(inputs, state=inputs["state"].mT.contiguous().mT)
    triton_gpu = import_module("flashmix.ops.recurrence.step.triton_gpu")  # which has no Triton everywhere
    monkeypatch.setattr(triton_gpu, "_with_gaps", lambda call: [])  # such a state is not copied
    other = make_history(case, inputs)
    assert torch.equal(run_op(case, v_first, "triton", other), o)
    assert torch.equal(v_first["state"], plain["state"]) and torch.equal(other, history)
    layers = torch.stack([inputs["state"], inputs["state"]], 1)
    assert torch.equal(run_op(case, inputs | {"state": layers[:, 1]}, "triton"), o)
    assert torch.equal(layers[:, 1], plain["state"]) and torch.equal(layers[:, 0], inputs["state"])


def test_calls_of_one_kind_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a state does not begin on 16 bytes, as in caches of others; another kind, or slots to look at, are checked."""
    checked, ready, case = [], step_op._ready, StepCase("", "linear", "token", K=5, V=3)
    monkeypatch.setattr(step_op, "_ready", lambda call: checked.append(1) or ready(call))  # type: ignore[func-returns-value]
    x = make_inputs(case, torch.float32)
    wide = torch.zeros(x["state"].numel() + 1)
    states = [x["state"], x["state"].clone(), wide[1:].view(x["state"].shape).copy_(x["state"])]
    results = [run_op(case, x | {"state": state}) for state in states]
    assert len(checked) == 1
    assert all(torch.equal(o, results[0]) and torch.equal(s, states[0]) for o, s in zip(results, states, strict=True))
    with pytest.raises(ValueError, match="state must have shape"):
        run_op(case, x | {"state": x["state"][:1]})
    slots = replace(case, slots=(0, 1))
    for _ in range(2):
        run_op(slots, make_inputs(slots, torch.float32))
    assert len(checked) == 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_op(case, make_inputs(case, torch.float32)).dtype == torch.bfloat16


@named(HALF)
def test_tokens_together_are_tokens_one_by_one(case: StepCase) -> None:
    """Bit for bit: what is drafted and accepted is what would have been generated."""
    together = StepCase("", case.rule, case.gate, T=4)
    x = make_inputs(together, torch.float32)
    one = {n: t.clone() for n, t in x.items()}
    history = torch.empty(2, 4, *x["state"].shape[1:])
    o = run_op(together, x, history=history)
    for t in range(4):
        part = {n: v if v.dim() == 1 or n == "state" else v[:, t : t + 1] for n, v in one.items()}
        assert torch.equal(run_op(together, part), o[:, t : t + 1])
        assert torch.equal(one["state"], history[:, t])
    assert torch.equal(one["state"], x["state"])


@named([case for case in HALF if case.rule in ("linear", "delta", "untied", "dplr") and case.gate == "token"])
def test_a_sequence_does_not_depend_on_the_batch(case: StepCase) -> None:
    wide = StepCase("", case.rule, case.gate, B=5)
    x = make_inputs(wide, torch.float32)
    parts = [{n: t if t.dim() == 1 else t[i : i + 1].clone() for n, t in x.items()} for i in range(5)]
    o = run_op(wide, x)
    for i, part in enumerate(parts):
        assert torch.equal(run_op(wide, part), o[i : i + 1]) and torch.equal(part["state"], x["state"][i : i + 1])


def delta_call(**change: Tensor | None) -> dict[str, Tensor | None]:
    return make_inputs(StepCase("", "delta", "token"), torch.float32) | change


def test_what_is_refused() -> None:
    call, zeros = flashmix.delta_rule_step, torch.zeros
    state = delta_call()["state"]
    for change, error, text in (
        ({"state": zeros(3, 4, 16, 8)}, ValueError, "state must have shape [2, 4, 16, 8], got [3, 4, 16, 8]"),
        ({"state": zeros(2, 4, 16, 8).half()}, TypeError, "state must have dtype float32 or bfloat16, got float16"),
        ({"state": zeros(4, 16, 8).expand(2, 4, 16, 8)}, ValueError,
         "state must have memory of its own for each number, got strides [0, 128, 8, 1]"),
        ({"state_indices": torch.tensor([0])}, ValueError, "state_indices must have shape [2], got [1]"),
        ({"state_indices": torch.tensor([0, 1]).short()}, TypeError, "state_indices must have dtype int32 or int64, got int16"),
        ({"state_indices": torch.tensor([0, 2])}, ValueError, "state_indices must be between -1 and 1, got 2"),
        ({"state_indices": torch.tensor([1, 1])}, ValueError, "state_indices must name each slot at most once, got 1 twice"),
        ({"history": zeros(2, 2, 4, 16, 8)}, ValueError, "history must hold between 1 and 1 tokens, those of the call, got 2"),
        ({"history": zeros(2, 1, 4, 8, 16)}, ValueError, "history must have shape [2, 1, 4, 16, 8], got [2, 1, 4, 8, 16]"),
        ({"history": zeros(2, 1, 4, 16, 8).double()}, TypeError, "history must have dtype float32 like state, got float64"),
    ):  # fmt: skip
        with pytest.raises(error) as raised:
            call(**delta_call(**change))
        assert str(raised.value) == text
    many = make_inputs(StepCase("", "delta", "none", T=17), torch.float32)
    with pytest.raises(ValueError, match="the number of tokens must be between 1 and 16, got 17"):
        call(**many)
    with pytest.raises(RuntimeError, match="delta_rule_step has no gradient, it writes its state in place"):
        call(**delta_call(state=state.requires_grad_()))


def test_writing_a_state_is_known_to_autograd() -> None:
    x = delta_call()
    weight = torch.ones_like(x["state"], requires_grad=True)
    kept = (weight * x["state"]).sum()
    with torch.no_grad():
        flashmix.delta_rule_step(**x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@pytest.mark.parametrize(
    "case", [HALF[1], *[c for c in CASES if c.name.endswith("idle-T4-kept3")]], ids=lambda c: c.name
)
def test_compiles_as_one_graph(case: StepCase) -> None:
    x = make_inputs(case, torch.float32)
    other = {n: t.clone() for n, t in x.items()}
    history, other_history = make_history(case, x), make_history(case, x)
    expected = run_op(case, x, history=history)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, history: run_op(case, x, history=history), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(other, other_history), expected)
    assert torch.equal(other["state"], x["state"])
    assert history is None or torch.equal(other_history, history)


@pytest.mark.parametrize("kept", [0, 2])
def test_opcheck(kept: int) -> None:
    case = StepCase("", "delta", "token", T=2, kept=kept, slots=(1, -1))
    x = make_inputs(case, torch.float32)
    names = ("q", "k", "v", "a", "b", "beta", "log_decay", "state", "state_indices")
    tensors = {name: x.get(name) for name in names}
    call = StepCall(**tensors, history=make_history(case, x), scale=0.5, read_before=False, minus_a=False)  # type: ignore[arg-type]
    torch.library.opcheck(STEP.operator, (*STEP.flat(call), False, "portable"))


def test_autocast_lowers_the_operands_and_keeps_gates_and_states() -> None:
    x = delta_call()
    low = {n: t.bfloat16() if n in ("q", "k", "v") else t.clone() for n, t in x.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = flashmix.delta_rule_step(**x)
    assert o.dtype == torch.bfloat16 and torch.equal(flashmix.delta_rule_step(**low), o)
    assert torch.equal(low["state"], x["state"])


def test_a_state_in_bfloat16_over_many_tokens() -> None:
    """Each token rounds the state: with decay the errors fade, and stay some roundings large."""
    case = StepCase("", "delta", "token", K=64, V=64)
    wide, narrow = make_inputs(case, torch.float32), make_inputs(case, torch.float32)
    narrow["state"] = narrow["state"].bfloat16()
    for seed in range(200):
        torch.manual_seed(seed)
        x = {n: torch.nn.functional.normalize(torch.randn(2, 1, 2, 64), dim=-1) for n in ("q", "k")}
        x |= {"v": torch.randn(2, 1, 4, 64), "beta": torch.rand(2, 1, 4), "log_decay": -0.1 * torch.rand(2, 1, 4)}
        for state in (wide, narrow):
            flashmix.delta_rule_step(**(state | x))
    rms, _ = relative_errors(narrow["state"], wide["state"])
    assert rms < 4 * torch.finfo(torch.bfloat16).eps


def operands(rule: str, gate: str, states: bool, dtype: torch.dtype) -> RecurrenceCall:
    case = Case("", rule, gate, T=1, states=states)
    x = recurrence_inputs(case, dtype)
    if rule == "untied":
        x |= {"a": -x["erase"], "b": x["write"]}
    names = ("q", "k", "v", "a", "b", "beta", "log_decay", "initial_state")
    return RecurrenceCall(**{name: x.get(name) for name in names}, scale=0.3)  # type: ignore[arg-type]


@pytest.mark.interpreted
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", ["linear", "delta", "untied", "dplr"])
def test_interpreted_step_to_a_new_state(rule: str, gate: str, states: bool) -> None:
    """The phase of the engine: one token, a new state, nothing written in place."""
    from flashmix.ops.recurrence.step.triton_gpu import step

    for before in (False, True):
        x = operands(rule, gate, states, torch.float32).but(read_before=before)
        start = None if x.initial_state is None else x.initial_state.clone()
        wide = operands(rule, gate, states, torch.float64).but(read_before=before)
        exact, plain = portable_step(wide, torch.float64), portable_step(x, torch.float32)
        for name, got, reference, baseline in zip(("o", "state"), step(x), exact, plain, strict=True):
            assert_within_budget(name, got, reference, baseline, steps=STAGES)
        assert start is None or torch.equal(x.initial_state, start)  # type: ignore[arg-type]


@pytest.mark.interpreted
def test_interpreted_step_with_a_decay_of_the_value_axis() -> None:
    from flashmix.ops.recurrence.step.triton_gpu import step

    def values(dtype: torch.dtype) -> RecurrenceCall:
        x = operands("linear", "none", True, dtype)
        return replace(x, log_decay=-x.v.abs(), value_decay=True, scale=1.0)

    exact = portable_step(values(torch.float64), torch.float64)
    plain = portable_step(values(torch.float32), torch.float32)
    for name, got, reference, baseline in zip(("o", "state"), step(values(torch.float32)), exact, plain, strict=True):
        assert_within_budget(name, got, reference, baseline, steps=STAGES)
