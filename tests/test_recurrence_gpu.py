"""The recurrence's kernels: every case within the error budget on a GPU, a few of them in the interpreter on any machine."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import replace

import pytest
import test_recurrence as laws
import torch
from budget import assert_within_budget
from cases import CASES, Case, make_inputs, run_op
from chunk_form import run_chunks
from samples import sample, sample_of_rows
from test_recurrence import BASE, CORRELATED, STAGES, evaluate, named, references, same_bits

YARDSTICK_STEPS = 1024  # of float64: reflections forget no rounding
HALF_CASES = [case for case in CASES if case in BASE or case.name.endswith(("resets", "packed", "grouped"))]
WIDE = {
    "": {},
    "-T2": {"T": 2},
    "-T33": {"T": 33},
    "-T64": {"T": 64},
    "-T129": {"T": 129},
    "-K96V80": {"K": 96, "V": 80},
    "-K72V120": {"K": 72, "V": 120},
    "-grouped": {"HV": 6},
    "-stateless": {"states": False},
    "-packed": {"B": 1, "T": 237, "H": 1, "lengths": (5, 0, 64, 65, 1, 0, 33, 69, 0)},
    "-packed-K96": {"B": 1, "T": 237, "H": 1, "K": 96, "lengths": (5, 0, 64, 65, 1, 0, 33, 69, 0)},
}
MIXED = ((128, 64), (64, 128))
DECAYS = ("zero", "-20", "-1e4", "-inf", "resets")
HOPPER_CASES = [
    *(
        Case(f"hopper-{gate}{n}", "delta", gate, **{"K": 128, "V": 128} | more)
        for gate in ("none", "head", "token", "channel")
        for n, more in WIDE.items()
    ),
    *(
        Case(f"hopper-linear-{gate}{n}", "linear", gate, **{"K": 128, "V": 128} | more)
        for gate, names in {
            "none": ("-T129", "-packed"),
            "head": ("", "-packed-K96"),
            "token": WIDE,
            "channel": WIDE,
        }.items()
        for n, more in WIDE.items()
        if n in names
    ),
    # Between e^-20 and 0 a per-channel decay's gradient is lost in pairs that are added and taken off again (docs/chunk_algorithm.md, 13).
    *(
        Case(f"hopper-{gate}-decay{d}", "delta", gate, K=128, V=128, decay=d)
        for gate in ("token", "channel")
        for d in DECAYS
        if (gate, d) != ("channel", "-20")
    ),
    *(
        Case(f"hopper-linear-{gate}-decay{d}", "linear", gate, K=128, V=128, decay=d)
        for gate in ("token", "channel")
        for d in DECAYS
        if (gate, d) != ("channel", "-20")
    ),
    # A chunk decays by 2^-130, within one pass about the middle of its decay, and by 2^-190, beyond it.
    *(
        Case(f"hopper-{rule}-channel-decay{d}", rule, "channel", K=128, V=128, decay=d)
        for rule in ("delta", "linear")
        for d in ("-1.4", "-2.1")
    ),
    *(Case(f"hopper-beta{beta:g}", "delta", "token", K=128, V=128, beta=beta) for beta in (0.0, 1.0, 2.0)),
    *(
        Case(f"hopper-64-{rule}-{gate}{n}", rule, gate, **{"K": 64, "V": 64} | more)
        for rule in ("delta", "linear")
        for gate in ("none", "head", "token")
        for n, more in WIDE.items()
        if "K" not in more and (rule == "delta" or gate == "token" or n in ("-T129", "-packed"))
    ),
    *(
        Case(f"hopper-64-{rule}-decay{d}", rule, "token", K=64, V=64, decay=d)
        for rule in ("delta", "linear")
        for d in DECAYS
    ),
    *(Case(f"hopper-64-beta{beta:g}", "delta", "token", K=64, V=64, beta=beta) for beta in (0.0, 2.0)),
    *(
        Case(f"hopper-256-{gate}{n}", "delta", gate, **{"K": 256, "V": 256} | more)
        for gate in ("none", "head", "token")
        for n, more in WIDE.items()
        if "K" not in more and (gate == "token" or n in ("-T129", "-packed"))
    ),
    *(Case(f"hopper-256-decay{d}", "delta", "token", K=256, V=256, decay=d) for d in DECAYS),
    *(
        Case(f"hopper-256-linear-{gate}{n}", "linear", gate, **{"K": 256, "V": 256} | more)
        for gate in ("none", "head", "token")
        for n, more in WIDE.items()
        if "K" not in more and (gate == "token" or n in ("-T129", "-packed"))
    ),
    *(Case(f"hopper-256-linear-decay{d}", "linear", "token", K=256, V=256, decay=d) for d in DECAYS),
    *(
        Case(f"hopper-{K}-{V}-{rule}-{gate}{n}", rule, gate, **{"K": K, "V": V} | more)
        for K, V in MIXED
        for rule in ("delta", "linear")
        for gate in ("none", "head", "token")
        for n, more in WIDE.items()
        if "K" not in more and (gate == "token" or n in ("-T129", "-packed"))
    ),
    *(
        Case(f"hopper-{K}-{V}-{rule}-decay{d}", rule, "token", K=K, V=V, decay=d)
        for K, V in MIXED
        for rule in ("delta", "linear")
        for d in DECAYS
    ),
    *(Case(f"hopper-{K}-{V}-beta2", "delta", "token", K=K, V=V, beta=2.0) for K, V in MIXED),
    *(
        Case(f"hopper-mixed-{K}-{V}-{rule}", rule, "token", HV=6, K=K, V=V)
        for K, V in ((96, 64), (64, 80), (48, 40), (40, 128), (128, 56))
        for rule in ("delta", "linear")
    ),
    *(Case(f"hopper-256-beta{beta:g}", "delta", "token", K=256, V=256, beta=beta) for beta in (0.0, 2.0)),
]
# Pairs by the Hopper kernels, which take a and b with heads of their own; above 64 and up to 128 channels the state passes and the
# backward of the output too; all else by Triton's.
DPLR_CASES = [
    *(Case(f"hopper-dplr{n}", "dplr", "channel", **{"K": 128, "V": 128} | more) for n, more in WIDE.items()),
    *(Case(f"hopper-dplr-decay{d}", "dplr", "channel", K=128, V=128, decay=d) for d in DECAYS if d != "-20"),
    *(
        Case(f"hopper-dplr-64{n}", "dplr", "channel", **{"K": 64, "V": 64} | more)
        for n, more in WIDE.items()
        if "K" not in more
    ),
    *(Case(f"hopper-dplr-{K}-{V}", "dplr", "channel", K=K, V=V, decay="resets") for K, V in ((48, 200), (104, 24))),
]
INTERPRETED = (
    *("linear-channel", "delta-token", "delta-channel-T33", "dplr-token-T1", "untied-token-packed-none"),
    "delta-none-nearly_parallel-betauniform",
    *("linear-value-grouped", "read_before-value-decayresets"),
)
INTERPRETED_LATER = ("linear-channel", "linear-value-grouped")
INTERPRETED_CASES = [case for case in CASES if case.name in INTERPRETED]
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def assert_kernels_within_budget(case, dtype, impl="triton"):
    """As the portable implementation's, with rounding steps of the dtype that operands are rounded to; a gradient passes the
    stages of the forward and as many of the backward.
    """
    inputs = make_inputs(case, dtype)
    exact, plain = references(case, inputs)
    times = 2 if case.keys == "random" else CORRELATED
    if (
        times == CORRELATED and dtype != torch.float32
    ):  # a token loop rounds less than 16-bit products must (chunk_form.py)
        wide = {n: t.double() for n, t in inputs.items()}
        times, plain = 2, evaluate(run_chunks, case, wide, dtype, dtype=dtype)
    for name, got in evaluate(run_op, case, {n: t.to(DEVICE) for n, t in inputs.items()}, impl).items():
        steps = 2 * STAGES if name.startswith("d") else STAGES
        baseline = plain[name].to(got.dtype)
        assert_within_budget(f"{case.name} {name}", got.cpu(), exact[name], baseline, dtype, steps, times)


@pytest.mark.gpu
@named(CASES)
def test_float32_is_within_budget(case):
    assert_kernels_within_budget(case, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@named(HALF_CASES)
def test_half_precision_is_within_budget(case, dtype):
    assert_kernels_within_budget(case, dtype)


@pytest.mark.gpu
@named(HOPPER_CASES)
def test_the_kernels_of_hopper_are_within_budget(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they need compute capability 9.0")
    assert_kernels_within_budget(case, torch.bfloat16, "gluon")


@pytest.fixture
def fused_backward(monkeypatch):
    """Turns the backward of the output in the walk of the states on and off, in calls of any size."""

    def turn(on):
        monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.FILLED", 0 if on else math.inf)
        monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.BACKWARD", {})

    return turn


WALKED = [
    case for case in HOPPER_CASES if case.gate != "channel" and min(case.K, case.V) > 64 and max(case.K, case.V) <= 128
]
FUSED_CASES = [
    replace(case, name=case.name.replace("hopper", "hopper-fused"), HV=case.H)
    for case in WALKED
    if not case.name.endswith("-grouped")
]
FUSED_CASES.append(Case("hopper-fused-segments", "delta", "token", B=1, T=8192, H=1, HV=1, K=128, V=128))
GROUPED_CASES = [
    *(
        replace(case, name=case.name.replace("hopper", "hopper-fused-grouped"))
        for case in WALKED
        if case.HV > case.H and (case.gate == "token" or case.name.endswith(("-T129", "-packed")))
    ),
    *(
        Case(
            f"hopper-fused-grouped-{rule}-{group}", rule, "token", T=200, H=2, HV=2 * group, K=128, V=128, decay="-0.02"
        )
        for rule in ("delta", "linear")
        for group in (3, 4, 5, 8)
    ),
]
GROUPED_LONG = Case("hopper-fused-grouped-segments", "delta", "token", B=1, T=8192, H=1, HV=4, K=128, V=128)


@pytest.mark.gpu
@named(FUSED_CASES)
def test_the_fused_backward_is_within_budget_and_has_the_bits_of_the_kernels_that_it_joins(case, fused_backward):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs compute capability 9.0")
    inputs = {n: t.to(DEVICE) for n, t in make_inputs(case, torch.bfloat16).items()}
    fused_backward(False)
    wanted = evaluate(run_op, case, inputs, "gluon")
    fused_backward(True)
    for name, got in evaluate(run_op, case, inputs, "gluon").items():
        same_bits(got, wanted[name], name)
    if case.T < 8192:
        assert_kernels_within_budget(case, torch.bfloat16, "gluon")


@pytest.mark.gpu
@named(GROUPED_CASES)
def test_the_fused_backward_of_value_heads_that_share_a_key_head_is_within_budget(case, fused_backward):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs compute capability 9.0")
    fused_backward(True)
    assert_kernels_within_budget(case, torch.bfloat16, "gluon")


@pytest.mark.gpu
@named([GROUPED_LONG, *(case for case in GROUPED_CASES if case.name.endswith(("-packed", "-8")))])
def test_the_fused_backward_of_value_heads_that_share_a_key_head_adds_in_one_order(case, fused_backward):
    """The same bits again and again; and each gradient is nearly that of the kernels that sum value heads in registers."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs compute capability 9.0")
    inputs = {n: t.to(DEVICE) for n, t in make_inputs(case, torch.bfloat16).items()}
    fused_backward(False)
    summed = evaluate(run_op, case, inputs, "gluon")
    fused_backward(True)
    first = evaluate(run_op, case, inputs, "gluon")
    for name, got in first.items():
        error = (got.double() - summed[name].double()).square().mean().sqrt()
        assert error <= 0.01 * summed[name].double().square().mean().sqrt(), name
    for _ in range(20):
        for name, got in evaluate(run_op, case, inputs, "gluon").items():
            same_bits(got, first[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("T", (4096, 4200))
def test_a_backward_in_two_stretches_has_the_bits_of_one(T, monkeypatch):
    """That of linear attention with 256 channels, of one sequence of many chunks."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("it needs compute capability 9.0")
    case = Case("stretches", "linear", "token", B=1, T=T, H=2, HV=4, K=256, V=256)
    inputs = {n: t.to(DEVICE) for n, t in make_inputs(case, torch.bfloat16).items()}
    found = evaluate(run_op, case, inputs, "gluon")
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.memory.STRETCHED", math.inf)
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.BACKWARD", {})
    for name, wanted in evaluate(run_op, case, inputs, "gluon").items():
        same_bits(found[name], wanted, name)


@pytest.mark.gpu
@named(DPLR_CASES)
def test_the_pairs_of_dplr_on_hopper_are_within_budget(case):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they need compute capability 9.0")
    assert_kernels_within_budget(case, torch.bfloat16, "gluon")


@named([case for case in CASES if case.keys == "nearly_parallel" and (case.beta is None or case.gate == "channel")])
def test_the_yardstick_of_half_precision_is_the_recurrence(case):
    """Where nothing is rounded it is the definition, gradients too."""
    wide = make_inputs(case, torch.float64)
    exact, _ = references(case, wide)
    for name, got in evaluate(run_chunks, case, wide, torch.float64).items():
        assert_within_budget(f"{case.name} {name}", got, exact[name], exact[name], steps=YARDSTICK_STEPS)


@pytest.mark.gpu
@named([case for case in CASES if case.keys != "random"])
def test_correlated_keys_in_bfloat16(case):
    assert_kernels_within_budget(case, torch.bfloat16)


@pytest.mark.gpu
@named(BASE + [case for case in CASES if case.name.endswith(("resets", "packed"))])
def test_the_portable_implementation_on_a_gpu(case):
    inputs = make_inputs(case, torch.float32)
    exact, plain = references(case, inputs)
    for name, got in evaluate(run_op, case, {n: t.cuda() for n, t in inputs.items()}, "portable").items():
        assert_within_budget(f"{case.name} {name}", got.cpu(), exact[name], plain[name], steps=STAGES)


@pytest.mark.gpu
@named([case for case in CASES if case.name.endswith("-grouped")])
def test_the_same_bits_again(case):
    inputs = {name: t.cuda() for name, t in make_inputs(case, torch.bfloat16).items()}
    first = evaluate(run_op, case, inputs, "triton")
    for name, got in evaluate(run_op, case, inputs, "triton").items():
        same_bits(got, first[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    "rule, gate, K, V",
    [
        ("delta", "token", 256, 24),
        ("dplr", "channel", 200, 16),
        ("linear", "token", 40, 72),
        ("linear", "value", 72, 40),
        ("delta", "token", 96, 128),
        ("delta", "token", 128, 64),
        ("linear", "token", 64, 128),
        ("delta", "token", 256, 256),
        ("linear", "token", 256, 256),
        ("dplr", "channel", 128, 128),
    ],
)
def test_segments_are_within_budget(rule, gate, K, V, dtype):
    """Long enough, with one head, to be cut; against the portable implementation in float64."""
    case = Case(f"{rule} {K} {V}", rule, gate, B=1, T=8192, H=1, HV=1, K=K, V=V)
    x = {n: t.to(DEVICE) for n, t in make_inputs(case, dtype).items()}
    portable = functools.partial(run_op, impl="portable")
    exact = evaluate(portable, case, {n: t.double() for n, t in x.items()}, dtype=dtype)
    plain = evaluate(portable, case, {n: t.float() for n, t in x.items()}, dtype=dtype)
    for name, got in evaluate(run_op, case, x, "auto").items():
        steps = 2 * STAGES if name.startswith("d") else STAGES
        assert_within_budget(f"{case.name} {name}", got, exact[name], plain[name].to(got.dtype), dtype, steps)


@pytest.mark.interpreted
@named(sample(INTERPRETED_CASES, [case for case in INTERPRETED_CASES if case.name not in INTERPRETED_LATER]))
def test_kernels_in_the_interpreter(case):
    """One sequence, since the interpreter runs program after program; two with one decay per token."""
    B = case.B if case.name == "delta-token" else 1
    assert_kernels_within_budget(replace(case, B=B), torch.float32)


CORRELATED_CASES = (
    *("delta-none-nearly_parallel-beta1.999", "untied-none-parallel-beta1.999"),
    "dplr-channel-nearly_parallel-beta2",
)


@pytest.mark.interpreted
@named([case for case in CASES if case.name in CORRELATED_CASES])
def test_float32_kernels_of_correlated_keys(case):
    assert_kernels_within_budget(case, torch.float32)


@pytest.mark.interpreted
@named([case for case in CASES if case.name == "delta-none-nearly_parallel-beta2"])
def test_the_kernels_keep_their_bits_where_correlated_keys_begin(case, monkeypatch):
    monkeypatch.setattr(laws, "run_op", lambda case, x: run_op(case, x, "triton"))
    laws.test_laws_hold_where_correlated_keys_begin(case)


ONE_PASS = [
    (rule, gate, decay)
    for decay in ("-0.02", "-0.2", "-0.6")
    for rule, gate in (
        *((rule, "channel") for rule in ("linear", "read_before", "delta", "untied", "dplr")),
        ("linear", "value"),
    )
]
BOTH_KINDS = (("linear", "value", "-0.2"), ("dplr", "channel", "-0.2"))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "rule, gate, decay",  # all numbers of passes by one rule; with both kinds of rows by the value axis and with low rank
    sample_of_rows(ONE_PASS, [one for one in ONE_PASS if one[:2] == ("delta", "channel") or one in BOTH_KINDS]),
)
def test_one_pass_over_pairs_in_the_interpreter(rule, gate, decay, room_for_factors):
    """For all rows, or for the first ones, the others in more. It serves bfloat16, which the interpreter does not have."""
    room_for_factors(5)
    case = Case(f"{rule}-{gate}-one-pass", rule, gate, B=1, H=1, HV=2, decay=decay)
    assert_kernels_within_budget(case, torch.float16)
