"""The running softmax against its definition: by scans, in Triton's interpreter, compiled without a GPU, and on a card."""

from __future__ import annotations

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
from samples import sample, sample_of_rows
from torch import Tensor

import flashmix
from flashmix import Packing
from flashmix.ops.running_softmax.call import RunningSoftmaxCall
from flashmix.ops.running_softmax.op import RUNNING_SOFTMAX

pytestmark = pytest.mark.usefixtures("one_thread")
OUTPUTS = ("weight", "decay", "z", "ds", "dz")


@dataclass(frozen=True)
class Case:
    """Sizes of a call; `lengths` of packed sequences; `state`: there is a past; `masked`: the first logits and some others are -inf."""

    batch: int
    tokens: int
    channels: tuple[int, ...]
    lengths: tuple[int, ...] = ()
    state: bool = False
    masked: bool = False

    def inputs(self) -> tuple[Tensor, Tensor]:
        s = 3.0 * random(self.batch, self.tokens, *self.channels, seed=0)
        if self.masked:
            s[:, :3] = -torch.inf
            s[:, 5, ..., :1] = -torch.inf
        count = len(self.lengths) or self.batch
        z = random(count, *self.channels, seed=1)
        return s, z if self.state else torch.full_like(z, -torch.inf)


CASES = [
    Case(2, 7, (5,), state=True),
    Case(2, 35, (2, 3)),
    Case(1, 40, (2, 3), (17, 0, 1, 22), state=True),
    Case(1, 20, (33,), (3, 17)),
    Case(2, 12, (3,), masked=True),
    Case(2, 12, (3,), state=True, masked=True),
    Case(2, 0, (4,), state=True),
    Case(1, 0, (4,), (0, 0), state=True),
]
SEGMENTED = [Case(1, 50, (4,), state=True), Case(1, 85, (3,), (40, 0, 1, 44))]  # by segments of at least eight tokens
LONG = [
    Case(1, 700, (4,), state=True),
    Case(1, 1100, (3,), (500, 0, 1, 599)),
    Case(4, 300, (16, 128), state=True),
    Case(1, 9000, (2, 128), (1, 0, 8700, 299), state=True),
    Case(1, 40_000, (100,)),
    Case(64, 70, (2, 300), masked=True),
]


def results(case: Case, x: tuple[Tensor, Tensor], dtype: torch.dtype, impl: str, device: str = "cpu") -> list[Tensor]:
    """Outputs and gradients for given ones of all outputs; a decay of -inf has none."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    s, z = x[0].to(device, dtype).requires_grad_(), x[1].to(device, wide).requires_grad_()
    if impl == "definition":
        outputs = definitions.running_softmax(s, z, list(case.lengths) or None)
    else:
        packing = Packing.from_lengths(case.lengths, device) if case.lengths else None
        outputs = RUNNING_SOFTMAX(RunningSoftmaxCall(s, z, packing), impl)
    flows = [
        random(*y.shape, seed=10 + i).to(device, y.dtype).masked_fill(y == -torch.inf, 0.0)
        for i, y in enumerate(outputs)
    ]
    found = [(y, flow) for y, flow in zip(outputs, flows, strict=True) if y.requires_grad]
    grads = torch.autograd.grad(
        [y.masked_fill(y == -torch.inf, 0.0) for y, _ in found],
        (s, z),
        [flow for _, flow in found],
        materialize_grads=True,
    )
    return [t.detach().cpu() for t in (*outputs, *grads)]


def assert_matches(case: Case, dtype: torch.dtype, impl: str, device: str = "cpu") -> None:
    x = case.inputs()
    x = x[0].to(dtype).float(), x[1]
    exact = torch.float64
    # of logits that nothing is before, the definition's logarithm has no gradient
    want = results(case, x, exact, "portable" if case.masked or not case.state else "definition")
    plain = results(case, x, dtype, "portable")
    for name, have, true, baseline in zip(OUTPUTS, results(case, x, dtype, impl, device), want, plain, strict=True):
        infinite = true == -torch.inf
        assert torch.equal(have == -torch.inf, infinite), f"{case}: {name}"
        parts = (t.masked_fill(infinite, 0.0) for t in (have, true, baseline))
        assert_within_budget(f"{case}: {name}", *parts, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scans_are_the_definition(case: Case) -> None:
    have, want = (results(case, case.inputs(), torch.float64, impl) for impl in ("portable", "definition"))
    for name, t, true in zip(OUTPUTS, have, want, strict=True):
        if name in ("ds", "dz") and (case.masked or not case.state):
            assert not t.isnan().any()
        else:
            torch.testing.assert_close(t, true, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("state", [False, True])
def test_gradients_by_scans_are_those_of_differences(state: bool) -> None:
    """Of a first token without a past too, whose weight is 1 and whose decay has no gradient."""
    s = random(1, 6, 2).double().requires_grad_()
    z = (random(1, 2, seed=1).double() if state else torch.full((1, 2), -torch.inf).double()).requires_grad_(state)

    def run(s: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        weight, decay, last = RUNNING_SOFTMAX(RunningSoftmaxCall(s, z, None), "portable")
        return weight, decay if state else decay[:, 1:], last

    assert torch.autograd.gradcheck(run, (s, z))


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_the_definition(case: Case) -> None:
    assert_matches(case, torch.float32, "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("case", sample(SEGMENTED, SEGMENTED[1:]), ids=str)
def test_the_kernels_with_segments(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = pytest.importorskip("flashmix.ops.scan.triton_gpu.plan")
    monkeypatch.setattr(plans, "SEGMENT", 8)
    assert plans.segments_of(bool(case.lengths), len(case.lengths) or case.batch, case.tokens, 1).each > 1
    assert_matches(case, torch.float32, "triton")


@pytest.mark.interpreted
def test_the_kernels_in_16_bits() -> None:
    assert_matches(CASES[2], torch.float16, "triton")


def weights(x: Tensor, impl: str = "triton") -> Tensor:
    """Weights and decays of `x [B, T, C]`, after a past of its own."""
    weight, decay, _ = RUNNING_SOFTMAX(
        RunningSoftmaxCall(x, x.new_zeros(len(x), x.shape[2], dtype=torch.float32), None), impl
    )
    return torch.cat([weight, decay.to(weight.dtype)], -1)


@pytest.mark.interpreted
def test_laws_of_the_kernels() -> None:
    """A token's bits do not depend on rows beside it and tokens after it, nor on what it is packed with."""
    assert_rows_do_not_meet(weights, random(3, 19, 4, dtype=torch.float16), (17,))
    assert_packed_is_alone([3, 0, 33, 1], "cpu")


def assert_packed_is_alone(lengths: list[int], device: str) -> None:
    s, z = (t.to(device) for t in Case(1, sum(lengths), (2, 3), tuple(lengths), state=True).inputs())
    weight, decay, last = RUNNING_SOFTMAX(RunningSoftmaxCall(s, z, Packing.from_lengths(lengths, device)), "triton")
    first = 0
    for n, length in enumerate(lengths):
        tokens = slice(first, first + length)
        alone = RUNNING_SOFTMAX(RunningSoftmaxCall(s[:, tokens], z[n : n + 1], None), "triton")
        packed = weight[:, tokens], decay[:, tokens], last[n : n + 1]
        for name, have, want in zip(OUTPUTS, alone, packed, strict=False):
            assert_same_bits(f"{name} of sequence {n}", have, want)
        first += length


@pytest.mark.interpreted
def test_the_operator_is_sound() -> None:
    s, z = (t.requires_grad_() for t in CASES[0].inputs())
    assert_sound_operator(RUNNING_SOFTMAX, RunningSoftmaxCall(s, z, None), "s", "z", impl="triton")


COMPILED = (
    *((4, False, target) for target in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))),
    *((width, True, (9, 0)) for width in (4, 4096)),
    (4096, False, (9, 0)),
)


@pytest.mark.parametrize("width, packed, capability", sample_of_rows(COMPILED, [(4, True, (9, 0))]))
def test_the_kernels_compile_without_spills(width: int, packed: bool, capability: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    from kernels import compile_launch, recording

    s = random(1, 3000, width).bfloat16().requires_grad_()
    packing = Packing.from_lengths([1000, 2000]) if packed else None
    with recording(capability) as launches:
        call = RunningSoftmaxCall(s, torch.zeros(2 if packed else 1, width).requires_grad_(), packing)
        outputs = RUNNING_SOFTMAX(call, "triton")
        torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    assert len(launches) == 4, [launch.name for launch in launches]
    for launch in launches:
        made = compile_launch(launch)
        assert made.stack == 0 and made.registers <= 128, (launch.name, made.registers, made.stack)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_on_the_device(case: Case, dtype: torch.dtype) -> None:
    assert_matches(case, dtype, "triton", "cuda")


@pytest.mark.gpu
def test_laws_on_the_device() -> None:
    """Bits of rows alone, packed and of every run; in a graph; compiled; corrupt boundaries; 100,000 sequences of one token."""
    assert_laws_on_the_device(weights, random(3, 150, 4).bfloat16())
    assert_packed_is_alone([3, 0, 33, 1, 300], "cuda")
    for wrong in ([0, 5, 3], [-7, 2, 9**9], [9, 9, 9]):  # nothing outside the tensors
        packing = Packing.unchecked(torch.tensor(wrong).cuda(), 9)
        RUNNING_SOFTMAX(RunningSoftmaxCall(random(1, 9, 4).cuda(), torch.zeros(2, 4).cuda(), packing), "triton")
    torch.cuda.synchronize()
    short, start = random(100_000, 1, 4).cuda(), torch.zeros(100_000, 4).cuda()
    rows = RUNNING_SOFTMAX(RunningSoftmaxCall(short, start, None), "triton")
    packing = Packing.from_lengths([1] * 100_000, "cuda")
    packed = RUNNING_SOFTMAX(RunningSoftmaxCall(short.transpose(0, 1), start, packing), "triton")
    for have, want in zip(packed[:2], rows[:2], strict=True):
        assert_same_bits("alone", have.transpose(0, 1), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["abc", "lightnet"])
def test_mechanisms_on_the_device(name: str) -> None:
    """With the kernels and without, against float64."""

    def run(dtype: torch.dtype, impl: str) -> list[Tensor]:
        x = [random(2, 90, 4, 64, seed=i).to("cuda", dtype).requires_grad_() for i in range(4 if name == "abc" else 3)]
        o, _ = getattr(flashmix, name)(*x, impl=impl)
        return [o, *torch.autograd.grad(o, x, torch.cos(torch.arange(o.numel(), device="cuda")).view_as(o).to(dtype))]

    for dtype in (torch.float32, torch.bfloat16):
        exact, plain, found = run(torch.float64, "portable"), run(dtype, "portable"), run(dtype, "auto")
        for i, (have, want, baseline) in enumerate(zip(found, exact, plain, strict=True)):
            assert_within_budget(f"{dtype} {i}", have.detach(), want.detach(), baseline.detach(), dtype, steps=3)
