"""Correlated keys in float32 beside the token loop: every rule that corrects, few and many channels, each kind of decay."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from budget import assert_within_budget
from cases import Case, make_inputs, run_op
from test_recurrence import CORRELATED, IMPLS, evaluate, references

KEYS = ("parallel", "nearly_parallel", "repeated", "orthogonal")


def correlated_case(rule: str, gate: str, K: int, keys: str, beta: float | None) -> Case:
    """Two whole chunks and a rest, nearly no decay; a `beta` of None is uniform in (0, 2).

    The gradient of a decay per head is one number per head. Of two numbers the loop's error may be little by luck; of 16 it is typical.
    """
    name = f"{rule}-{gate}-K{K}-{keys}-beta{'uniform' if beta is None else beta}"
    H, HV = (8, 16) if gate == "head" else (1, 2)
    return Case(name, rule, gate, B=1, T=130, H=H, HV=HV, K=K, V=K // 2, keys=keys, beta=beta, decay="-1e-3")


WHOLE = [
    correlated_case(rule, gate, K, keys, beta)
    for rule, gate, K, keys, beta in product(
        ("delta", "untied", "dplr"), ("none", "head", "token", "channel"), (32, 64, 128), KEYS, (1.999, 2.0, None)
    )
]
# What was over the budget, at up to 19 times the loop's error, and one of each other kind.
SAMPLE = [
    correlated_case("delta", "none", 128, "parallel", 1.999),
    correlated_case("untied", "none", 128, "nearly_parallel", 2.0),
    correlated_case("untied", "none", 128, "parallel", None),
    correlated_case("dplr", "none", 128, "parallel", None),
    correlated_case("delta", "none", 64, "repeated", None),
    correlated_case("delta", "token", 128, "nearly_parallel", 1.999),
    correlated_case("untied", "token", 64, "parallel", 1.999),
    correlated_case("dplr", "token", 128, "nearly_parallel", 2.0),
    correlated_case("delta", "token", 32, "orthogonal", 2.0),
    correlated_case("untied", "channel", 128, "parallel", None),
    correlated_case("untied", "head", 32, "orthogonal", 1.999),
]


def sampled() -> list:
    left = [case for case in WHOLE if case not in SAMPLE]
    return [pytest.param(case, id=case.name) for case in SAMPLE] + [
        pytest.param(case, id=case.name, marks=pytest.mark.whole) for case in left
    ]


@pytest.mark.parametrize("case", sampled())
def test_error_is_within_six_of_the_token_loop(case: Case) -> None:
    inputs = make_inputs(case, torch.float32)
    exact, plain = references(case, inputs)
    for impl in IMPLS:
        for name, got in evaluate(run_op, case, inputs, impl).items():
            what = f"{impl} {case.name} {name}"
            assert_within_budget(what, got, exact[name], plain[name], steps=0, times=CORRELATED)
