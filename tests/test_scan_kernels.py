"""The kernels of the scan: in Triton's interpreter against the definition, and compiled for every kind of GPU without one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from budget import assert_within_budget
from kernels import compile_launch, recording
from rowwise_cases import random
from scan_cases import CASES, COUPLED, Case, assert_scans

from flashmix import scan
from flashmix.ops.scan import scan_max
from flashmix.ops.scan.call import ScanCall
from flashmix.ops.scan.triton_gpu import plan as plans

STACK = 8  # bytes that ptxas takes with registers to spare (72 of 255)
FEW = [
    *(Case((1, 5, 2, 3), decay, read_before=late) for decay in ("token", "head", "constant") for late in (False, True)),
    Case((1, 12, 2, 4), "head", (5, 0, 3, 1, 0, 3), read_before=True),
    Case((1, 9, 33), "token", (0, 5, 0, 4)),
    Case((1, 6, 4), lengths=(0, 0, 6), state=False),
    Case((1, 6, 7), strength=0.0),
    Case((2, 0, 7)),
    Case((1, 0, 4), lengths=(0, 0)),
    Case((2, 0, 2, 3), "constant"),
]
SEGMENTED = [
    *(
        Case((1, 33, 1, 3), decay, read_before=late)
        for decay in ("token", "head", "constant")
        for late in (False, True)
    ),
    Case((1, 41, 5), "token", (3, 0, 36, 1, 1), read_before=True),
    Case((1, 41, 1, 2), "constant head", (3, 0, 36, 2)),
    Case((1, 33, 3), coupling="root"),
]


FEW_COUPLED = [
    case
    for coupling in ("complement", "root", "logit")
    for case in (
        Case((1, 6, 2, 3), "token", coupling=coupling),
        Case((1, 5, 2, 3), "constant", read_before=True, coupling=coupling),
        Case((1, 9, 2, 4), "head", (5, 0, 4), coupling=coupling),
        Case((1, 6, 7), strength=0.0, coupling=coupling),
        Case((1, 6, 7), strength=1e-6, coupling=coupling),
    )
]


COMPLEX = [  # case, and whether the decay is complex
    (Case((1, 5, 2, 2), "token"), True),
    (Case((1, 4, 2, 2), "head", read_before=True), False),
    (Case((1, 5, 2, 2), "constant head", (3, 0, 2), read_before=True), True),
]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a few tokens, of which short sequences have several."""
    for name in ("GROUP", "GROUP_SEGMENTED", "GROUP_BACKWARD"):
        monkeypatch.setattr(plans, name, 4)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", [*FEW, *FEW_COUPLED], ids=str)
def test_the_kernels_are_the_definition(case: Case, small_tiles: None) -> None:
    assert_scans(case, torch.float32, "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_the_kernels_with_segments(case: Case, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SEGMENT", 4 if case.lengths else 16)
    assert_scans(case, torch.float32, "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("case, turning", COMPLEX, ids=str)
def test_complex_numbers(case: Case, turning: bool, small_tiles: None) -> None:
    assert_scans(case, torch.complex64, "triton", complex_decay=turning)


@pytest.mark.interpreted
def test_complex_numbers_with_segments(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SEGMENT", 4)
    assert_scans(Case((1, 9, 1, 2), "constant", (3, 0, 6)), torch.complex64, "triton", complex_decay=True)


@pytest.mark.interpreted
def test_the_kernels_in_16_bits(small_tiles: None) -> None:
    assert_scans(FEW[1], torch.bfloat16, "triton")
    for case in FEW_COUPLED[4::5]:
        assert_scans(case, torch.bfloat16, "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("segments", [False, True])
def test_the_running_maximum(segments: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SEGMENT", 16 if segments else 512)
    assert_maxima("cpu")


def assert_maxima(device: str) -> None:
    """A maximum rounds nothing: without a decay the bits are those of plain PyTorch."""
    x, state = random(1, 75, 2, 3), random(3, 2, 3, seed=1)
    for late in (False, True):
        options: dict[str, Any] = {"return_state": True, "read_before": late}
        packed = options | {"cu_seqlens": torch.tensor([0, 5, 5, 75]), "initial_state": state}
        for given in (options, packed):
            want = scan_max(x, impl="portable", **given)
            moved = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in given.items()}
            for have, one in zip(scan_max(x.to(device), impl="triton", **moved), want, strict=True):
                assert have is not None and one is not None and torch.equal(have.cpu(), one)


@pytest.mark.interpreted
@pytest.mark.parametrize("segments", [False, True])
def test_the_running_maximum_of_a_long_sequence(
    segments: bool, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SEGMENT", 64 if segments else 512)
    assert_a_long_maximum(500, "cpu")


def assert_a_long_maximum(tokens: int, device: str) -> None:
    """Rounds once, however many decays lie between: a sum of equal ones errs to one side at each."""
    x, g = random(1, tokens, 1, 4), -1e-3 * random(1, 4, seed=1).abs()
    want, last = scan_max(x.double(), g.double(), return_state=True, impl="portable")
    m, state = scan_max(x.to(device), g.to(device), return_state=True, impl="triton")
    assert last is not None and state is not None
    assert_within_budget("m", m.cpu(), want, want)
    assert_within_budget("last", state.cpu(), last, last)


def test_segments_follow_from_the_sizes() -> None:
    for sizes, segments in (((8, 4096, 4096), False), ((1, 131072, 512), True), ((1, 400, 64), False)):
        x = torch.empty(sizes, device="meta")
        call: Any = ScanCall(x, x, None, None, False)
        plan = plans.plan_of(call)
        assert segments is plan.spec.SEGMENTS
        assert plan.each * plan.segment >= sizes[1] > (plan.each - 1) * plan.segment or not segments


def calls(decay: str, dtype: torch.dtype, lengths: Sequence[int], tokens: int, width: int) -> None:
    """A scan forward and backward; contents are never looked at. A decay of complex numbers is complex."""
    sizes = {"token": (1, tokens, 4, width), "head": (1, tokens, 4), "constant": (4, width)}[decay]
    wide = torch.complex64 if dtype.is_complex else torch.float32
    starts = torch.zeros(len(lengths) or 1, 4, width, dtype=wide)
    leaves = torch.empty(1, tokens, 4, width, dtype=dtype), torch.zeros(sizes, dtype=wide), starts
    x, g, state = (t.requires_grad_() for t in leaves)
    ends = torch.tensor([0, *lengths]).cumsum(0) if lengths else None
    for late in (False, True) if ALL else (False,):
        given: Tensor | None = None if late else state
        outputs = scan(x, g, initial_state=given, return_state=True, cu_seqlens=ends, read_before=late, impl="triton")
        wanted = (x, g) if late else (x, g, state)
        torch.autograd.grad(outputs, wanted, [torch.empty_like(y) for y in outputs])
    for coupling in () if dtype.is_complex else ("complement", "root", "logit") if ALL else ("complement",):
        h, _ = scan(x, g, cu_seqlens=ends, coupling=coupling, impl="triton")
        torch.autograd.grad(h, (x, g), torch.empty_like(h))
    if not dtype.is_complex:
        scan_max(x.detach(), g.detach(), cu_seqlens=ends, impl="triton")


ALL = (
    os.environ.get("FLASHMIX_ALL_KERNELS") == "1"
)  # otherwise for a Hopper card, and of each kernel one way of decaying


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)] if ALL else [(9, 0)], ids=str)
@pytest.mark.parametrize("decay", ["token", "head", "constant"] if ALL else ["head"])
def test_the_kernels_compile_without_spills(decay: str, capability: tuple[int, int]) -> None:
    shapes = [((), 70, 64), ((3, 67), 70, 33), ((), 2048, 16), ((1000, 1048), 2048, 16)] if ALL else [((), 70, 64)]
    for dtype in (torch.bfloat16, torch.float32, torch.complex64) if ALL else (torch.bfloat16,):
        with recording(capability) as launches:
            for lengths, tokens, width in shapes:
                calls(decay, dtype, lengths, tokens, width)
        names = {launch.name for launch in launches}
        assert names == {"scan_kernel", "scan_backward_kernel"}
        for launch in launches:
            compiled = compile_launch(launch)
            assert compiled.stack <= STACK, (launch.name, compiled.stack)


def test_complex_kernels_compile_without_spills() -> None:
    with recording((9, 0)) as launches:
        calls("constant", torch.complex64, (), 60, 8)
    assert all(launch.args[-1].TURNING for launch in launches)
    assert all(compile_launch(launch).stack <= STACK for launch in launches[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("turning", [False, True])
@pytest.mark.parametrize("case", [c for c in (*CASES[::3], *SEGMENTED) if c.coupling is None], ids=str)
def test_complex_numbers_on_the_device(case: Case, turning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if case in SEGMENTED:
        monkeypatch.setattr(plans, "SEGMENT", 4)
    assert_scans(case, torch.complex64, "triton", "cuda", complex_decay=turning)


@pytest.mark.gpu
def test_the_running_maximum_on_the_device() -> None:
    assert_maxima("cuda")
    assert_a_long_maximum(20_000, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, *COUPLED, *SEGMENTED, Case((1, 9000, 40), strength=0.01), Case((3, 513, 2, 100))], ids=str
)
def test_on_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case in SEGMENTED:
        monkeypatch.setattr(plans, "SEGMENT", 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_scans(case, dtype, "triton", "cuda")
