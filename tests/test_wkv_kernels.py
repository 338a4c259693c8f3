"""The kernels of RWKV-4's averages: in Triton's interpreter, compiled without a GPU, and on a card."""

from __future__ import annotations

import math

import pytest
import torch
from samples import sample
from torch import Tensor

pytest.importorskip("triton")

from budget import assert_within_budget
from compilers.triton_carries import not_carried
from kernels import compile_launch, recording
from rowwise_cases import assert_captures_both_ways, assert_repeats, assert_rows_do_not_meet, assert_same_bits, random

from flashmix import Packing, rwkv4
from flashmix.ops.scan.native.binding import missing
from flashmix.ops.scan.triton_gpu import plan as plans

NAMES = ("o", "a", "b", "m", "dk", "dv", "dw", "du", "da", "db")
CASES: list[
    tuple[int, int, int, tuple[int, ...], float]
] = [  # batch, tokens, channels, packed sequences, size of the decay
    (1, 21, 5, (), 1.0),
    (2, 9, 33, (), 0.01),
    (1, 27, 4, (17, 0, 1, 9), 0.3),
    (1, 18, 3, (), 40.0),
    (2, 0, 3, (), 1.0),
]
SEGMENTED: list[tuple[int, int, int, tuple[int, ...], float]] = [  # by segments of at least eight tokens
    (1, 50, 4, (), 0.01),
    (1, 85, 3, (65, 0, 20), 0.3),
]
LONG: list[tuple[int, int, int, tuple[int, ...], float]] = [
    (3, 400, 70, (), 0.1),
    (1, 530, 4, (), 0.01),
    (1, 1700, 3, (1300, 0, 400), 0.3),
    (1, 3000, 64, (), 1e-3),
    (1, 1000, 40, (1, 0, 700, 299), 0.05),
    (1, 40_000, 100, (), 1e-3),
    (1, 9000, 64, (1, 0, 8700, 299), 0.01),
]


def inputs(batch: int, tokens: int, width: int, lengths: tuple[int, ...], decay: float) -> dict[str, Tensor]:
    count = len(lengths) or batch
    x = {name: random(batch, tokens, width, seed=i) for i, name in enumerate("kv")}
    x["w"], x["u"] = -decay * random(width, seed=2).abs(), random(width, seed=3)
    return x | {
        "a": random(count, width, seed=4),
        "b": 0.1 + random(count, width, seed=5).abs(),
        "m": random(count, width, seed=6),
    }


def results(
    x: dict[str, Tensor], dtype: torch.dtype, lengths: tuple[int, ...], impl: str, device: str = "cpu"
) -> dict[str, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = {n: t.to(device, dtype if n in "kv" else wide).requires_grad_(n != "m") for n, t in x.items()}
    packing = Packing.from_lengths(lengths, device) if lengths else None
    k, v, w, u, *state = leaves.values()
    o, last = rwkv4(k, v, w, u, initial_state=tuple(state), return_state=True, cu_seqlens=packing, impl=impl)  # type: ignore[arg-type]
    assert last is not None
    outputs = [o, last[0], last[1]]
    flows = [random(*t.shape, seed=7 + i).to(device, t.dtype) for i, t in enumerate(outputs)]
    wanted = [t for n, t in leaves.items() if n != "m"]
    grads = torch.autograd.grad(outputs, wanted, flows)
    return {n: t.detach().cpu() for n, t in zip(NAMES, (o, *last, *grads), strict=True)}


def assert_averages(
    case: tuple[int, int, int, tuple[int, ...], float], dtype: torch.dtype, device: str = "cpu", impl: str = "triton"
) -> None:
    x, lengths = inputs(*case), case[3]
    x |= {n: x[n].to(dtype).float() for n in "kv"}
    want = results(x, torch.float64, lengths, "portable")
    plain = results(x, dtype, lengths, "portable")
    for name, have in results(x, dtype, lengths, impl, device).items():
        assert_within_budget(f"{case}: {name}", have, want[name], plain[name], dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_plain_pytorch(case: tuple[int, int, int, tuple[int, ...], float]) -> None:
    assert_averages(case, torch.float32)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", sample(SEGMENTED, [case for case in SEGMENTED if case[3]]), ids=str)
def test_the_kernels_with_segments(
    case: tuple[int, int, int, tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SEGMENT", 8)
    assert plans.segments_of(bool(case[3]), len(case[3]) or case[0], case[1], 1, 16).each > 1
    assert_averages(case, torch.float32)


@pytest.mark.interpreted
@pytest.mark.whole
def test_the_kernels_at_a_long_memory() -> None:
    """`m + w` token after token is over this budget twice: equal decays round to one side."""
    assert_averages((1, 400, 16, (), 1e-3), torch.float32)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("case", sample(LONG, [case for case in LONG if case[1] < 40_000]), ids=str)
def test_a_long_memory_in_c(case: tuple[int, int, int, tuple[int, ...], float]) -> None:
    """The same in C, whose error was up to 5 times this budget."""
    assert_averages(case, torch.float32, impl="native")


@pytest.mark.interpreted
def test_the_kernels_in_16_bits() -> None:
    assert_averages(CASES[0], torch.bfloat16)


def assert_nothing_is_nothing(device: str) -> None:
    """Without a state, and of keys of -inf, which count nothing: the averages of the others, and no gradient is NaN."""
    k, v = random(1, 12, 4, seed=0), random(1, 12, 4, seed=1)
    w, u = -random(4, seed=2).abs(), random(4, seed=3)
    k[0, 3, 1], k[0, 5:8, 2] = -math.inf, -math.inf
    leaves = [t.to(device).clone().requires_grad_() for t in (k, v, w, u)]
    o, last = rwkv4(*leaves, return_state=True, impl="triton")
    want, end = rwkv4(*(t.double() for t in (k, v, w, u)), return_state=True, impl="portable")
    plain, rounded = rwkv4(k, v, w, u, return_state=True, impl="portable")
    assert last is not None and end is not None and rounded is not None
    for have, exact, baseline in zip((o, *last), (want, *end), (plain, *rounded), strict=True):
        assert_within_budget("averages", have.detach().cpu(), exact, baseline)
    assert all(d.isfinite().all() for d in torch.autograd.grad(o.sum(), leaves))


@pytest.mark.interpreted
def test_keys_of_nothing() -> None:
    assert_nothing_is_nothing("cpu")


@pytest.mark.parametrize("lengths", sample([(30, 10), (3000,)], [(30, 10)]), ids=["packed", "segments"])
def test_the_kernels_compile_without_spills(lengths: tuple[int, ...]) -> None:
    with recording((9, 0)) as launches:
        x = inputs(1, sum(lengths), 64, lengths, 1.0)
        leaves = {
            n: t.to(torch.bfloat16 if n in "kv" else torch.float32).requires_grad_(n != "m") for n, t in x.items()
        }
        k, v, w, u, a, b, m = leaves.values()
        packing = Packing.from_lengths(lengths)
        o, _ = rwkv4(k, v, w, u, initial_state=(a, b, m), cu_seqlens=packing, impl="triton")
        torch.autograd.grad(o, (k, v, w, u, a, b), torch.empty_like(o))
    passes = 1 if len(lengths) > 1 else 2
    assert [launch.name for launch in launches] == ["wkv_kernel"] * passes + ["wkv_backward_kernel"] * passes
    for launch in launches:
        assert compile_launch(launch).stack == 0, launch.name
        assert not not_carried(launch), launch.name


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_on_the_device(case: tuple[int, int, int, tuple[int, ...], float]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_averages(case, dtype, "cuda")


@pytest.mark.gpu
def test_keys_of_nothing_on_the_device() -> None:
    assert_nothing_is_nothing("cuda")


@pytest.mark.gpu
def test_laws_on_the_device() -> None:
    """Bits of rows alone and of every run; in a graph; 100,000 sequences of one token."""
    w, u = -random(40, seed=1).abs().cuda(), random(40, seed=2).cuda()

    def op(x: Tensor) -> Tensor:
        return rwkv4(x, x * x, w, u, impl="triton")[0]

    x = random(3, 150, 40).bfloat16()
    assert_rows_do_not_meet(op, x.cuda())
    assert_repeats(lambda x: op(x.cuda()).cpu(), x)
    assert_captures_both_ways(op, x.cuda().requires_grad_())
    short = random(1, 100_000, 40).cuda()
    packing = Packing.from_lengths([1] * 100_000, "cuda")
    y, _ = rwkv4(short, short, w, u, cu_seqlens=packing, impl="triton")
    assert_same_bits("alone", y, op_alone(short, w, u))


def op_alone(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Each token as a sequence of a batch."""
    rows = x.transpose(0, 1)
    return rwkv4(rows, rows, w, u, impl="triton")[0].transpose(0, 1)
