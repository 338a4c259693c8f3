"""The recurrence's kernels over a shard: the halves of a call, before and after the exchange, interpreted and compiled."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import shard_cases
import threads_as_ranks
import torch
from budget import assert_within_budget
from cases import Case, make_inputs, run_op
from samples import sample
from shard_cases import recurrence

from flashmix.gpu.arch import SHARED_MEMORY_KIB
from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.op import RECURRENCE
from flashmix.ops.recurrence.sharded import shapes
from flashmix.parallel.halves import Pieces
from flashmix.parallel.shard import Shard

pytest.importorskip("triton")
from kernels import Launch, compile_launch, recording
from test_recurrence_kernels import HOPPER_REGISTERS, HOPPER_STACK, launches

# rule, decay, ranks, layout, lengths, segments of a rank's pieces
JOBS = [
    ("tied", "token", 2, "zigzag", (264,), 3),
    ("linear", "channel", 2, "uneven", (20, 0, 31), 1),
    *(
        pytest.param(job, marks=pytest.mark.whole)
        for job in (
            ("tied", "token", 2, "zigzag", (136,), 1),
            ("tied", "head", 3, "uneven", (70, 0, 121), 1),
            ("untied", "none", 3, "zigzag", (300,), 1),
            ("tied", "channel", 3, "zigzag", (300,), 2),
            ("untied", "token", 3, "contiguous", (300,), 3),
            ("dplr", "channel", 3, "arbitrary", (100, 91), 1),
            ("linear", "token", 3, "contiguous", (300,), 3),
            ("linear", "channel", 3, "contiguous", (300,), 2),
            ("linear", "value", 3, "contiguous", (99,), 1),
        )
    ),
]


@pytest.mark.interpreted
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_ranks_are_one_process(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, kind, ranks, order, lengths, segments = job
    whole = Packing.from_lengths(lengths)
    ranges = shard_cases.layout(order, whole.total, ranks)
    kernels, formula = (recurrence(rule, kind, states=True, impl=impl) for impl in ("triton", "portable"))
    want = shard_cases.evaluate(formula, whole, 0, None, torch.float32, exact=True)
    baseline = shard_cases.evaluate(formula, whole, 0, None, torch.float32)

    def work(group: Any) -> dict[str, Any]:
        shard = Shard(whole.on_host(), ranges, group, whole.cu_seqlens)
        return shard_cases.evaluate(kernels, shard, 0, shard.pieces[shard.rank], torch.float32)

    plan = importlib.import_module("flashmix.ops.recurrence.triton_gpu.plan")
    monkeypatch.setattr(plan, "segments_of", lambda call, kind: 1 if call.packed else segments)
    have = shard_cases.together(threads_as_ranks.run(ranks, work), list(lengths), ranges)
    for name, (expected, _) in want.items():
        assert_within_budget(name, have[name], expected, baseline[name][0], torch.float32)


def halves_of(impl: str, rule: str, kind: str, packed: bool, capability: tuple[int, int]) -> list[Launch]:
    """What both halves of a call launch, forward and backward, with a piece of each kind."""
    case = case_to_compile(rule, kind, packed)
    operands = make_inputs(case, torch.bfloat16)
    with recording(capability) as found:
        call = call_of(case, operands)
        halves: Any = RECURRENCE.module(impl).halves(call)
        pieces = Pieces((0,), (1,), (1, 2))
        forward = halves.forward(call)
        forward.maps(pieces, shapes(call))
        state = torch.zeros(3, 2, 128, 128)
        (o, _), kept = forward.outputs(state, True)
        backward = halves.backward(call.but(initial_state=state), kept, o)
        backward.entering(state, pieces)
        backward.gradients(state, frozenset(call.names))
    return found


def case_to_compile(rule: str, kind: str, packed: bool) -> Case:
    case = Case("", rule, kind, B=3, H=2, HV=2, T=130, K=128, V=128)
    return replace(case, B=1, T=390, lengths=(130, 130, 130)) if packed else case


def call_of(case: Case, operands: dict[str, torch.Tensor]) -> RecurrenceCall:
    """The call that a case makes."""
    calls: list[RecurrenceCall] = []

    def kept(op: Any, call: RecurrenceCall, *rest: str) -> Any:
        calls.append(call)
        return call.results()

    with mock.patch.object(type(RECURRENCE), "__call__", kept):
        run_op(case, operands, "auto")
    return calls[0]


@pytest.mark.parametrize("rule", sample(["delta", "linear"], ["delta"]))
def test_joins_of_segments_compile(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pieces over ranks, which have the products of maps beside them, and what enters after the exchange."""
    plan = importlib.import_module("flashmix.ops.recurrence.triton_gpu.plan")
    monkeypatch.setattr(plan, "segments_of", lambda call, kind: 2)
    found = [launch for launch in halves_of("gluon", rule, "token", False, (9, 0)) if "segments" in launch.name]
    assert {launch.name for launch in found} == {
        "segments_forward_kernel",
        "segments_backward_kernel",
        "enter_segments_kernel",
    }
    for launch in {launch.key: launch for launch in found}.values():
        made = compile_launch(launch)
        assert made.shared <= SHARED_MEMORY_KIB[(9, 0)] * 1024 and made.stack == 0, (
            launch.name,
            made.shared,
            made.stack,
        )


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.whole)], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "impl, rule, kind, capability",
    [
        pytest.param("gluon", "delta", "token", (9, 0), marks=pytest.mark.whole),
        ("gluon", "delta", "channel", (9, 0)),
        pytest.param("gluon", "linear", "token", (9, 0), marks=pytest.mark.whole),
        pytest.param("gluon", "linear", "channel", (9, 0), marks=pytest.mark.whole),
        pytest.param("triton", "delta", "channel", (9, 0), marks=pytest.mark.whole),
        pytest.param("triton", "linear", "channel", (8, 0), marks=pytest.mark.whole),
        pytest.param("triton", "dplr", "channel", (10, 0), marks=pytest.mark.whole),
        pytest.param("triton", "delta", "token", (8, 0), marks=pytest.mark.whole),
    ],
)
def test_halves_compile(impl: str, rule: str, kind: str, capability: tuple[int, int], packed: bool) -> None:
    """The passes that only halves launch compile without products that are awaited where they need not be."""
    case = case_to_compile(rule, kind, packed)
    ordinary = {launch.key for launch in launches(case, torch.bfloat16, capability, impl)}
    own = [launch for launch in halves_of(impl, rule, kind, packed, capability) if launch.key not in ordinary]
    assert own
    for launch in own:
        made = compile_launch(launch)
        assert made.shared <= SHARED_MEMORY_KIB[capability] * 1024
        if impl == "gluon":
            assert made.registers <= HOPPER_REGISTERS[launch.name], (launch.name, made.registers)
            assert made.stack <= HOPPER_STACK.get(launch.name, 0) and not made.advice, (launch.name, made.stack)
