"""The kernels of the selective scan and its step: in Triton's interpreter against the definition, and compiled without a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from budget import assert_within_budget
from kernels import compile_launch, recording
from rowwise_cases import random
from selective_cases import CASES, STAGES, assert_scans, inputs

from flashmix import Packing, selective_scan, selective_scan_step
from flashmix.ops.selective_scan.call import SelectiveScanCall
from flashmix.ops.selective_scan.step.definition import selective_scan_step as define_step
from flashmix.ops.selective_scan.triton_gpu import plan as plans

STACK = 256  # bytes that spill in the backward, whose states and gradients take all registers
FEW: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((1, 5, 4, 3, 2), ()),
    ((1, 6, 34, 2, 0), (5, 0, 1)),
    ((1, 0, 4, 2, 1), (0, 0)),
]
SEGMENTED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((1, 150, 6, 2, 1), ()), ((1, 136, 4, 2, 1), (5, 0, 131))]


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes, lengths", FEW, ids=str)
def test_the_kernels_are_the_definition(sizes: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    for extras in (True, False):
        assert_scans(sizes, lengths, torch.float32, "triton", extras)
    assert_scans(sizes, lengths, torch.bfloat16, "triton", True)


@pytest.mark.interpreted
@pytest.mark.whole
@pytest.mark.parametrize("sizes, lengths", SEGMENTED, ids=str)
def test_the_kernels_with_segments(
    sizes: tuple[int, ...], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SEGMENT", 64)
    assert_scans(sizes, lengths, torch.float32, "triton", True)


def assert_steps(dtype: torch.dtype, pooled: bool, device: str) -> None:
    x = inputs((3, 2, 8, 5, 2), dtype, 3)
    pool = random(6, 8, 5, seed=9) if pooled else x["initial_state"]
    del x["initial_state"]
    slots = torch.tensor([4, -1, 0]) if pooled else None
    exact, after = define_step(
        **{n: t.double() for n, t in x.items()}, state=pool.double(), state_indices=slots, softplus=True
    )
    plain, _ = define_step(**{n: t.float() for n, t in x.items()}, state=pool, state_indices=slots, softplus=True)
    state = pool.to(device)
    y = selective_scan_step(
        **{n: t.to(device) for n, t in x.items()},
        state=state,
        state_indices=None if slots is None else slots.to(device),
        softplus=True,
        impl="triton",
    ).cpu()
    assert_within_budget("y", y, exact, plain.to(dtype), steps=STAGES)
    assert_within_budget("state", state.cpu(), after, after.float(), dtype, steps=STAGES)
    assert not pooled or (not y[1].any() and torch.equal(state.cpu()[[1, 2, 3, 5]], pool[[1, 2, 3, 5]]))


@pytest.mark.interpreted
@pytest.mark.parametrize("pooled", [False, True])
def test_the_step_is_its_definition(pooled: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_steps(dtype, pooled, "cpu")


def test_segments_follow_from_the_sizes() -> None:
    for sizes, segments in (((8, 2048, 4096), False), ((1, 16384, 4096), True), ((1, 400, 64), False)):
        u, weights = torch.empty(sizes, device="meta"), torch.empty(*sizes[:2], 1, 16, device="meta")
        call = SelectiveScanCall(u, u, torch.empty(sizes[2], 16, device="meta"), weights, weights, None, None)
        plan = plans.plan_of(call)
        assert segments is plan.spec.SEGMENTS
        assert plan.each * plan.segment >= sizes[1] > (plan.each - 1) * plan.segment or not segments


def calls(dtype: torch.dtype, lengths: Sequence[int], tokens: int, width: int, extras: bool) -> None:
    """A selective scan forward and backward, and its step; contents are never looked at."""
    x = inputs((1, tokens, width, 16, 1), dtype, len(lengths) or 1, extras)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    packing = Packing.from_lengths(lengths) if lengths else None
    outputs = selective_scan(**leaves, softplus=extras, return_state=True, cu_seqlens=packing, impl="triton")
    torch.autograd.grad(outputs, list(leaves.values()), [torch.empty_like(y) for y in outputs])
    del x["initial_state"]
    token = {n: t.detach() if n in ("A", "D", "dt_bias") else t.detach()[:, :1] for n, t in x.items()}
    selective_scan_step(**token, state=torch.zeros(1, width, 16), softplus=extras, impl="triton")


ALL = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"  # otherwise for a Hopper card, and one kind of call


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)] if ALL else [(9, 0)], ids=str)
def test_the_kernels_compile(capability: tuple[int, int]) -> None:
    """In float32 spills are allowed: the polynomials of exact exponentials want what registers are left."""
    shapes = [((), 40, 64, True), ((3, 637), 640, 34, False), ((), 640, 64, True)] if ALL else [((), 640, 64, True)]
    for dtype in (torch.bfloat16, torch.float32) if ALL else (torch.bfloat16,):
        with recording(capability) as launches:
            for lengths, tokens, width, extras in shapes:
                calls(dtype, lengths, tokens, width, extras)
        for launch in launches:
            if "backward" in launch.name and not ALL:
                continue  # it takes as long as all others together
            compiled = compile_launch(launch)
            assert compiled.stack <= STACK or dtype == torch.float32, (launch.name, compiled.stack)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, lengths", [*CASES, *SEGMENTED, ((2, 300, 70, 16, 1), ())], ids=str)
def test_on_the_device(sizes: tuple[int, ...], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if (sizes, lengths) in SEGMENTED:
        monkeypatch.setattr(plans, "SEGMENT", 64)
    for dtype in (torch.float32, torch.bfloat16):
        for extras in (True, False):
            assert_scans(sizes, lengths, dtype, "triton", extras, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("pooled", [False, True])
def test_the_step_on_the_device(pooled: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_steps(dtype, pooled, "cuda")
