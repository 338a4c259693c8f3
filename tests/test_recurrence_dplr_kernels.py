"""The Hopper kernels of DPLR (pairs, state passes, backward of `output`) compile without a GPU, and serve by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import make_inputs

from flashmix.gpu.arch import SHARED_MEMORY_KIB

pytest.importorskip("triton")
from kernels import compile_launch
from test_recurrence_kernels import WIDE, gluon_kernels, launches

LOW_RANK = replace(WIDE, rule="dplr", gate="channel")
DPLR = {
    "two value heads": LOW_RANK,
    "64 channels, packed": replace(LOW_RANK, K=64, V=64, lengths=(60, 0, 70)),
    "many heads": replace(LOW_RANK, H=80, HV=80),
    "packed": replace(LOW_RANK, lengths=(60, 0, 70)),
    "narrow": replace(LOW_RANK, K=96, V=80),
    "segments": replace(LOW_RANK, T=8192, states=False),
}


def test_pairs_of_dplr_on_hopper_are_taken_with_a_decay_per_channel_alone():
    assert {"dplr_scores_kernel", "dplr_output_kernel"} <= gluon_kernels(LOW_RANK)
    other = replace(LOW_RANK, gate="token")
    with pytest.raises(ValueError, match="and DPLR with a decay per channel"):
        launches(other, torch.bfloat16, (9, 0), "gluon")
    assert not gluon_kernels(other)


@pytest.mark.parametrize("K, V, dtype", [(32, 64, torch.bfloat16), (136, 64, torch.bfloat16), (64, 64, torch.float16)])
def test_pairs_of_dplr_that_hopper_kernels_leave(K, V, dtype):
    with pytest.raises(ValueError, match=r"K of 33 to 128|float16"):
        launches(replace(LOW_RANK, K=K, V=V), dtype, (9, 0), "gluon")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.whole] * (name != "two value heads"))
        for name, case in DPLR.items()
    ],
)
def test_pairs_of_dplr_on_hopper_compile(case):
    """Within shared memory for two programs a multiprocessor, without spills, lost descriptors or products awaited early."""
    found = launches(case, torch.bfloat16, (9, 0), "gluon")
    made = {launch.name for launch in found}
    assert {"dplr_scores_kernel", "channel_far_rows_kernel", "channel_inverse_kernel"} <= made
    assert not {"decay_sums_kernel", "scores_forward_kernel"} & made
    for launch in found:
        if launch.name in ("dplr_scores_kernel", "channel_far_rows_kernel", "channel_inverse_kernel"):
            made = compile_launch(launch)
            assert 2 * (made.shared + 1024) <= (SHARED_MEMORY_KIB[9, 0] + 1) * 1024, (launch.name, made.shared)
            assert made.stack == 0, (launch.name, made.stack)
            assert not made.advice, (launch.name, made.advice)


OUTPUT = {name: case for name, case in DPLR.items() if case.K > 64} | {
    "decays in bfloat16": LOW_RANK,
    "heads shared": replace(LOW_RANK, HV=4),
}


STACK = {"dplr_output_kernel": 32, "dplr_state_forward_kernel": 0, "dplr_state_backward_kernel": 0}  # bytes
REGISTERS = {"dplr_output_kernel": 128, "dplr_state_forward_kernel": 168, "dplr_state_backward_kernel": 168}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] * (name != "many heads")) for name in OUTPUT]
)
def test_state_passes_and_the_backward_of_the_output_of_dplr_on_hopper_compile(name, monkeypatch):
    """Within registers and shared memory, with known spills, no lost descriptor, and no product awaited early."""
    dtype = torch.bfloat16 if name == "decays in bfloat16" else torch.float32
    monkeypatch.setattr("test_recurrence_kernels.make_inputs", with_decays_of(dtype))
    found = launches(OUTPUT[name], torch.bfloat16, (9, 0), "gluon")
    own = [launch for launch in found if launch.name in STACK]
    assert sorted(launch.name for launch in own) == sorted([*STACK, "dplr_state_forward_kernel"])
    triton = {"output_backward_kernel", "state_backward_kernel"}  # of segments Triton makes the maps
    assert not triton & {launch.name for launch in found} or name == "segments"
    for launch in own:
        made = compile_launch(launch)
        assert made.shared <= SHARED_MEMORY_KIB[9, 0] * 1024, (launch.name, made.shared)
        assert made.registers <= REGISTERS[launch.name], (launch.name, made.registers)
        stack = 64 if name == "decays in bfloat16" and launch.name == "dplr_output_kernel" else STACK[launch.name]
        assert made.stack <= stack, (launch.name, made.stack)
        assert not made.advice, (launch.name, made.advice)


def with_decays_of(dtype):
    def made(case, inputs):
        x = make_inputs(case, inputs)
        return x | {"log_decay": x["log_decay"].to(dtype)}

    return made


@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 64), (128, 136), (72, 76)])
def test_phases_of_dplr_that_hopper_kernels_leave(K, V):
    names = {launch.name for launch in launches(replace(LOW_RANK, K=K, V=V), torch.bfloat16, (9, 0), "gluon")}
    assert {"output_backward_kernel", "state_forward_kernel", "state_backward_kernel"} <= names
    assert not set(STACK) & names


def test_state_passes_of_dplr_are_left_to_triton_in_one_place(monkeypatch):
    monkeypatch.setattr("flashmix.ops.recurrence.gluon_hopper.dplr.has_states", lambda call: False)
    names = {launch.name for launch in launches(LOW_RANK, torch.bfloat16, (9, 0), "gluon")}
    assert {"dplr_scores_kernel", "dplr_output_kernel", "state_forward_kernel", "state_backward_kernel"} <= names
    assert not {"dplr_state_forward_kernel", "dplr_state_backward_kernel", "output_backward_kernel"} & names
