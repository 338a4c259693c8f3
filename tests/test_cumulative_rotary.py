"""Rotations by summed angles against their definition: in plain PyTorch, in Triton's interpreter, compiled without a GPU, and on a card."""

from __future__ import annotations

import math
from dataclasses import dataclass

import definitions
import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import (
    assert_laws_on_the_device,
    assert_rows_do_not_meet,
    assert_same_bits,
    assert_sound_operator,
    random,
)
from samples import sample
from torch import Tensor

import flashmix
from flashmix import Packing
from flashmix.ops.cumulative_rotary import CumulativeRotaryCall
from flashmix.ops.cumulative_rotary.op import CUMULATIVE_ROTARY

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUTS = ("q", "late_k", "theta", "last_k", "last_own")
NARROW = ("B", "C")  # in the dtype of the call; the others in that of states


@dataclass(frozen=True)
class Case:
    """Sizes of a call; `ranks` 0: no axis of ranks; `lengths`: of packed sequences."""

    batch: int
    tokens: int
    ranks: int
    groups: int
    heads: int
    keys: int
    angles: int
    lengths: tuple[int, ...] = ()
    state: bool = False

    def inputs(self) -> dict[str, Tensor | None]:
        tokens, ranks = (self.batch, self.tokens), (self.ranks,) if self.ranks else ()
        count, gates = len(self.lengths) or self.batch, (*tokens, self.heads)
        return {
            "B": random(*tokens, *ranks, self.groups, self.keys, seed=0),
            "C": random(*tokens, *ranks, self.groups, self.keys, seed=1),
            "angles": math.pi * torch.tanh(random(*gates, self.angles, seed=2)),
            "dt": random(*gates, seed=3).abs(),
            "log_decay": -random(*gates, seed=4).abs(),
            "trapezoid_gate": torch.sigmoid(random(*gates, seed=5)),
            "theta": random(count, self.heads, self.angles, seed=6) if self.state else None,
            "last_k": random(count, *ranks, self.heads, self.keys, seed=7) if self.state else None,
        }


CASES = [
    Case(2, 5, 0, 1, 2, 6, 2),
    Case(1, 70, 0, 1, 3, 16, 4, state=True),
    Case(1, 40, 0, 2, 4, 8, 4, (3, 0, 33, 4, 0), state=True),
    Case(1, 37, 2, 2, 2, 5, 1, (35, 2)),
    Case(1, 3, 2, 1, 2, 6, 0, state=True),
    Case(7, 1, 3, 1, 2, 5, 2, state=True),
    Case(2, 0, 0, 1, 2, 6, 2, state=True),
]
LONG = [
    Case(4, 300, 0, 1, 32, 128, 32),
    Case(1, 3000, 0, 2, 4, 64, 32, (1, 0, 2700, 299), state=True),
    Case(2, 70, 0, 1, 3, 256, 128, state=True),
    Case(2, 65, 4, 1, 8, 100, 7, state=True),
]


def results(
    case: Case, x: dict[str, Tensor | None], dtype: torch.dtype, impl: str, device: str = "cpu"
) -> dict[str, Tensor]:
    """Outputs and gradients of every tensor, for random gradients of all outputs; `impl` "definition" takes one sequence at a time."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {
        name: None if t is None else t.to(device, dtype if name in NARROW else wide).requires_grad_()
        for name, t in x.items()
    }
    if impl == "definition":
        outputs = by_definition(case, leaves)
    else:
        packing = Packing.from_lengths(case.lengths, device) if case.lengths else None
        outputs = CUMULATIVE_ROTARY(CumulativeRotaryCall(**leaves, packing=packing), impl)  # type: ignore[arg-type]
    flows = [random(*y.shape, seed=10 + i).to(device, y.dtype) for i, y in enumerate(outputs)]
    given = {name: t for name, t in leaves.items() if t is not None}
    grads = torch.autograd.grad(outputs, list(given.values()), flows, materialize_grads=True)
    names = (*OUTPUTS, *(f"d{name}" for name in given))
    return {name: t.detach().cpu() for name, t in zip(names, (*outputs, *grads), strict=True)}


def by_definition(case: Case, x: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
    """Sequence by sequence, with the last angle within a turn."""
    if not case.lengths:
        found = definitions.cumulative_rotary(**x)  # type: ignore[arg-type]
    else:
        parts, first = [], 0
        for n, length in enumerate(case.lengths):
            tokens = slice(first, first + length)
            part = {name: t if t is None or name in ("theta", "last_k") else t[:, tokens] for name, t in x.items()}
            part |= {name: None if (t := x[name]) is None else t[n : n + 1] for name in ("theta", "last_k")}
            parts.append(definitions.cumulative_rotary(**part))  # type: ignore[arg-type]
            first += length
        found = tuple(torch.cat(t, 1 if i < 2 else 0) for i, t in enumerate(zip(*parts, strict=True)))
    q, late_k, theta, *rest = found
    turns = (theta / (2 * math.pi)).detach().floor() * 2 * math.pi
    empty = torch.tensor(case.lengths or [case.tokens] * case.batch)[:, None, None] == 0
    return q, late_k, torch.where(empty, theta, theta - turns), *rest


def assert_matches(case: Case, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    x = case.inputs()
    x |= {name: t.to(dtype).to(t.dtype) for name in NARROW if (t := x[name]) is not None}
    want, plain = results(case, x, torch.float64, "definition"), results(case, x, dtype, "portable")
    for name, have in results(case, x, dtype, impl, device).items():
        assert_within_budget(f"{case}: {name}", have, want[name], plain[name], dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_pytorch_is_the_definition(case: Case) -> None:
    x = case.inputs()
    have, want = results(case, x, torch.float64, "portable"), results(case, x, torch.float64, "definition")
    for name, t in have.items():
        torch.testing.assert_close(t, want[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_the_definition(case: Case) -> None:
    assert_matches(case, torch.float32, "triton")


@pytest.mark.interpreted
def test_the_kernels_in_16_bits() -> None:
    assert_matches(CASES[2], torch.float16, "triton")


@pytest.mark.interpreted
def test_sums_of_turns_are_those_of_plain_pytorch() -> None:
    """Whole numbers: the last angle has the same bits, after many turns too."""
    case = Case(1, 100, 0, 1, 2, 4, 2)
    x = case.inputs()
    x["angles"] = 1e6 * random(1, 100, 2, 2, seed=2)
    plain, found = (results(case, x, torch.float32, impl)["theta"] for impl in ("portable", "triton"))
    assert_same_bits("theta", found, plain)


@pytest.mark.interpreted
def test_laws_of_the_kernels() -> None:
    """A token's bits do not depend on rows beside it and tokens after it, nor on what it is packed with."""
    assert_rows_do_not_meet(of_one_tensor, random(3, 19, 4, dtype=torch.float16), (2, 17))
    assert_packed_is_alone([3, 0, 33, 1], "cpu")


def of_one_tensor(x: Tensor) -> Tensor:
    """Queries and late keys whose angles and gates are made of `x [B, T, 4]` too."""
    wide = x.float().unsqueeze(2)
    gates = torch.sigmoid(wide[..., 0])
    call = CumulativeRotaryCall(
        x.unsqueeze(2), x.unsqueeze(2), wide[..., :1].contiguous(), gates, -gates, wide[..., 3], None, None, None
    )
    q, late_k, *_ = CUMULATIVE_ROTARY(call, "triton")
    return torch.cat([q, late_k], -1)


@pytest.mark.interpreted
@pytest.mark.parametrize("ranks", [0, 2])
def test_strided_tensors_are_read_where_they_lie(ranks: int) -> None:
    """Parts of a projection, and angles of one head for all."""
    case = Case(2, 5, ranks, 2, 4, 6, 2, state=True)
    x = {name: t for name, t in case.inputs().items() if t is not None}
    x["angles"] = x["angles"][:, :, :1].expand_as(x["angles"])
    strided = x | {name: torch.cat([x[name], x[name]], -1)[..., :6] for name in NARROW}
    found = []
    for t in (strided, {name: value.contiguous() for name, value in x.items()}):
        found.append(CUMULATIVE_ROTARY(CumulativeRotaryCall(**t, packing=None), "triton"))
    for name, have, want in zip(OUTPUTS, *found, strict=True):
        assert_same_bits(name, have, want)


def assert_packed_is_alone(lengths: list[int], device: str) -> None:
    case = Case(1, sum(lengths), 0, 1, 2, 6, 2, tuple(lengths), state=True)
    x = case.inputs()
    packed, first = results(case, x, torch.float32, "triton", device), 0
    flows = {"q": 0, "late_k": 0}
    for n, length in enumerate(lengths):
        tokens = slice(first, first + length)
        part = {
            name: t[n : n + 1] if name in ("theta", "last_k") else t[:, tokens]
            for name, t in x.items()
            if t is not None
        }
        call = CumulativeRotaryCall(**{name: t.to(device) for name, t in part.items()}, packing=None)
        for name, have in zip(OUTPUTS, CUMULATIVE_ROTARY(call, "triton"), strict=True):
            want = packed[name][:, tokens] if name in flows else packed[name][n : n + 1]
            assert_same_bits(f"{name} of sequence {n}", have.cpu(), want)
        first += length


@pytest.mark.interpreted
def test_boundaries_that_are_none_stay_within_the_row() -> None:
    from flashmix.ops.cumulative_rotary.triton_gpu import _places

    for wrong in ([0, 5, 3], [-7, 2, 9**9], [9, 9, 9], [0, 9, 0, 9]):
        blocks, sequences = _places(Packing.unchecked(torch.tensor(wrong), 9), 4)
        inside = (blocks[:, 1:] >= -1) & (blocks[:, 1:] <= 9)
        assert inside.all() and (sequences[:, 0] + sequences[:, 1] <= len(blocks)).all(), wrong


def keyword_call(case: Case, dtype: torch.dtype) -> CumulativeRotaryCall:
    x = {n: t if t is None else t.to(dtype if n in NARROW else torch.float32) for n, t in case.inputs().items()}
    packing = Packing.from_lengths(case.lengths) if case.lengths else None
    leaves = {n: t if t is None else t.requires_grad_() for n, t in x.items()}
    return CumulativeRotaryCall(**leaves, packing=packing)  # type: ignore[arg-type]


@pytest.mark.interpreted
@pytest.mark.whole
def test_the_operator_is_sound() -> None:
    assert_sound_operator(
        CUMULATIVE_ROTARY,
        keyword_call(Case(1, 3, 0, 1, 2, 4, 2, (2, 0, 1), state=True), torch.float32),
        "B",
        "angles",
        impl="triton",
    )


# Registers a thread of the kernels for a Hopper card, at most: two programs of the backward, 8 of the others to a multiprocessor.
REGISTERS = {
    "turns_forward_kernel": 64,
    "rotary_forward_kernel": 64,
    "rotary_backward_kernel": 128,
    "gates_backward_kernel": 64,
}


@pytest.mark.parametrize("packed", sample((False, True), (True,)))
def test_the_kernels_compile_without_spills(packed: bool) -> None:
    pytest.importorskip("triton")
    from kernels import COUNTED, compile_launch, recording

    from flashmix.gpu.launch import RELEASE

    case = Case(1, 100, 0, 1, 32, 128, 32, (60, 40), state=True) if packed else Case(4, 100, 0, 1, 32, 128, 32)
    with recording((9, 0)) as launches:
        outputs = CUMULATIVE_ROTARY(keyword_call(case, torch.bfloat16), "triton")
        torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    assert len(launches) == 6, [launch.name for launch in launches]
    for launch in launches:
        made = compile_launch(launch)
        assert made.stack == 0, launch.name
        assert RELEASE != COUNTED or made.registers <= REGISTERS.get(launch.name, 255), (launch.name, made.registers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_on_the_device(case: Case, dtype: torch.dtype) -> None:
    assert_matches(case, dtype, "triton", "cuda")


@pytest.mark.gpu
def test_laws_on_the_device() -> None:
    """Bits of rows alone, packed and of every run; in a graph; compiled; 100,000 sequences of one token."""
    assert_laws_on_the_device(of_one_tensor, random(3, 150, 4).bfloat16())
    assert_packed_is_alone([3, 0, 33, 1, 300], "cuda")
    for wrong in ([0, 5, 3], [-7, 2, 9**9], [9, 9, 9]):  # nothing outside the tensors
        call = keyword_call(Case(1, 9, 0, 1, 2, 6, 2, (4, 5)), torch.float32)
        tensors = {n: None if (t := getattr(call, n)) is None else t.detach().cuda() for n in call.names}
        packing = Packing.unchecked(torch.tensor(wrong).cuda(), 9)
        CUMULATIVE_ROTARY(CumulativeRotaryCall(**tensors, packing=packing), "triton")  # type: ignore[arg-type]
    torch.cuda.synchronize()
    short = random(100_000, 1, 4).cuda()
    packing = Packing.from_lengths([1] * 100_000, "cuda")
    gates = torch.sigmoid(short[..., :1])
    rest = short[..., None, :1], gates, -gates, gates
    rows = CUMULATIVE_ROTARY(
        CumulativeRotaryCall(short[:, :, None], short[:, :, None], *rest, None, None, None), "triton"
    )
    turned = [t.transpose(0, 1) for t in (short[:, :, None], short[:, :, None], *rest)]
    packed = CUMULATIVE_ROTARY(CumulativeRotaryCall(*turned, None, None, packing), "triton")
    for have, want in zip(packed[:2], rows[:2], strict=True):
        assert_same_bits("alone", have.transpose(0, 1), want)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [0, 2])
def test_mamba3_on_the_device(ranks: int) -> None:
    """The mechanism with the kernels and without, against float64."""
    axis = (ranks,) if ranks else ()

    def run(dtype: torch.dtype, impl: str) -> list[Tensor]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        x, B, C = (
            random(2, 90, *axis, *size, seed=i).to("cuda", dtype).requires_grad_()
            for i, size in enumerate(((4, 64), (1, 32), (1, 32)))
        )
        dt, gate, angles = (
            random(2, 90, 4, *size, seed=3 + i).abs().cuda().to(wide) for i, size in enumerate(((), (), (8,)))
        )
        dt.requires_grad_()
        y, _ = flashmix.mamba3(x, dt, -dt, torch.exp(-gate), B, C, angles, D=torch.ones(4, device="cuda"), impl=impl)
        return [
            y,
            *torch.autograd.grad(
                y, (x, B, C, dt), torch.cos(torch.arange(y.numel(), device="cuda")).view_as(y).to(dtype)
            ),
        ]

    for dtype in (torch.float32, torch.bfloat16):
        exact, plain, found = run(torch.float64, "portable"), run(dtype, "portable"), run(dtype, "triton")
        for i, (have, want, baseline) in enumerate(zip(found, exact, plain, strict=True)):
            assert_within_budget(f"{dtype} {i}", have.detach(), want.detach(), baseline.detach(), dtype, steps=3)
