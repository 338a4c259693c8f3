"""The step kernels compile for every target, without a GPU, within its shared memory and without spilling."""

from __future__ import annotations

import os

import pytest
import torch
from samples import every, sample, thinned
from step_cases import StepCase, make_history, make_inputs, run_op
from test_delta_net_step import Case, options
from test_delta_net_step import make_inputs as make_layer_inputs
from test_step import operands

import flashmix

pytest.importorskip("triton")
from kernels import TARGETS, compile_launch, recording

EVERYTHING = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"
SIZES = ((128, 128), (256, 256), (64, 64), (96, 80), (7, 5), (1, 1)) if EVERYTHING else ((128, 128), (256, 256), (7, 5))
STACK = 0  # bytes: nothing is spilled


def launches(case: StepCase, capability: tuple[int, int], state: torch.dtype = torch.float32) -> list:
    x = make_inputs(case, torch.bfloat16, state)
    with recording(capability) as found, torch.no_grad():
        run_op(case, x, "triton", make_history(case, x))
    return found


def assert_fits(found: list, count: int) -> None:
    assert len(found) == count
    for launch in found:
        made = compile_launch(launch)
        assert made.shared <= 48 * 1024 and made.stack <= STACK, (launch.key, made.shared, made.stack)


@pytest.mark.parametrize("capability", sample(TARGETS, [(9, 0)]), ids=str)
def test_a_step_compiles_for_every_target(capability: tuple[int, int]) -> None:
    for K, V in SIZES:
        assert_fits(launches(StepCase("", "delta", "channel", B=1, K=K, V=V), capability), 1)


RULES = ("linear", "read_before", "delta", "erase", "write", "untied", "dplr")
GATES = ("none", "head", "token", "channel") if EVERYTHING else ("head", "channel")


@pytest.mark.parametrize(("rule", "gate"), thinned(1 if EVERYTHING else 3, RULES, GATES))
def test_every_rule_compiles(rule: str, gate: str) -> None:
    assert_fits(launches(StepCase("", rule, gate, B=1, K=128, V=128), (9, 0)), 1)


@pytest.mark.parametrize("rule", RULES if EVERYTHING else every(3, RULES))
def test_every_rule_compiles_for_a_pool_of_states(rule: str) -> None:
    pool = StepCase("", rule, "token", T=3, K=256, V=256, slots=(0, 1), kept=2)
    assert_fits(launches(pool, (9, 0), torch.bfloat16), 1)


def test_a_state_whose_keys_lie_side_by_side_is_not_copied() -> None:
    """A Mamba-2 cache of transformers, `[B, H, P, N]`: one launch."""
    for K, V in ((128, 64), (16, 8)):
        case = StepCase("", "linear", "token", B=1, K=K, V=V)
        x = make_inputs(case, torch.bfloat16, torch.float32)
        x["state"] = x["state"].mT.contiguous().mT
        with recording((9, 0)) as found, torch.no_grad():
            run_op(case, x, "triton")
        assert_fits(found, 1)


def test_sizes_of_the_batch_do_not_recompile() -> None:
    """Batch, tokens past one, slots, kept states: one kernel serves them all."""
    keys = set()
    for B, T, pool, kept in ((2, 2, 5, 1), (3, 7, 3, 4), (1, 16, 9, 16), (64, 3, 64, 1)):
        case = StepCase("", "delta", "token", B=B, T=T, slots=tuple(range(B)), pool=max(pool, B), kept=kept, K=32, V=32)
        keys |= {launch.key for launch in launches(case, (9, 0))}
    assert len(keys) == 1
    keys = {launch.key for B in (1, 2, 3, 16) for launch in launches(StepCase("", "delta", "token", B=B), (9, 0))}
    assert len(keys) == 1


def layer_launches(case: Case, capability: tuple[int, int]) -> list:
    x = make_layer_inputs(case, torch.bfloat16)
    with recording(capability) as found, torch.no_grad():
        flashmix.delta_net_step(**x, **options(case), impl="triton")  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("capability", sample(TARGETS, [(9, 0)]), ids=str)
def test_the_step_of_a_layer_compiles_for_every_target(capability: tuple[int, int]) -> None:
    for K, V in SIZES:
        assert_fits(layer_launches(Case("", "channel", "sigmoid", B=1, HV=4, K=K, V=V), capability), 2)


def test_every_form_of_a_layer_compiles() -> None:
    for decay, gate in (("none", None), ("token", "silu"), ("bounded", "sigmoid")):
        assert_fits(layer_launches(Case("", decay, gate, B=1, K=64, V=64, bias=True, slots=(0,)), (9, 0)), 2)


def test_the_batch_of_a_layer_does_not_recompile() -> None:
    cases = [Case("", "token", "silu", B=B, slots=tuple(range(B)), pool=pool) for B, pool in ((1, 1), (2, 7), (16, 16))]
    assert len({launch.key for case in cases for launch in layer_launches(case, (9, 0))}) == 2


@pytest.mark.parametrize("rule", every(2, ["linear", "delta", "untied", "dplr"]))
def test_the_step_to_a_new_state_compiles(rule: str) -> None:
    from flashmix.ops.recurrence.step.triton_gpu import step

    for gate, states in (("token", True), ("channel", False)):
        with recording((9, 0)) as found:
            step(operands(rule, gate, states, torch.bfloat16))
        assert_fits(found, 1)
