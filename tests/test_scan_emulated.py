"""The scan's kernels for Hopper: on a CPU in the emulator of Gluon, compiled without a GPU, and on a card."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from budget import assert_within_budget
from compilers.gluon_emulator import hopper_card
from kernels import compile_launch, recording
from rowwise_cases import (
    assert_captures,
    assert_compiles,
    assert_repeats,
    assert_rows_do_not_meet,
    assert_same_bits,
    random,
    results,
)
from samples import sample_of_rows
from scan_cases import Case, assert_scans
from torch import Tensor

from flashmix import Packing, explain, scan
from flashmix.ops.scan import scan_max
from flashmix.ops.scan.gluon_hopper import plan as plans

COUPLINGS = ("complement", "root", "logit")
FEW = [
    Case((1, 5, 8)),
    Case((2, 37, 40), read_before=True),
    Case((1, 43, 3, 24), lengths=(38, 0, 5)),
    Case((1, 40, 16), strength=0.0, state=False),
    Case((1, 0, 8), lengths=(0, 0)),
    *(Case((1, 40, 16), lengths=(29, 11), read_before=how == "root", coupling=how) for how in COUPLINGS),
]
LONG = [
    Case((2, 300, 72)),
    Case((1, 700, 2, 64), lengths=(100, 3, 0, 597), read_before=True),
    Case((1, 9000, 64), strength=0.01),
    Case((1, 20_000, 8), strength=0.001, read_before=True),
    Case((1, 30_000, 40), lengths=(10_000, 0, 1, 19_000, 999), strength=0.01),
    Case((5, 600, 136), strength=30.0),
    Case((1, 2000, 64), strength=0.0),
    *(Case((2, 70, 40), strength=strength, coupling=how) for how in COUPLINGS for strength in (0.0, 1e-3, 30.0)),
    *(Case((1, 3000, 64), lengths=(1, 2100, 899), coupling=how, strength=0.1) for how in COUPLINGS),
]
STACK = 8  # bytes that ptxas takes with registers to spare (168 of 255)
KERNELS = {"scan_hopper_kernel", "scan_backward_hopper_kernel"}


def small(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    """Segments of 8 tokens where there are fewer than `few` programs, in windows of 3 and 2."""
    for name, value in {"GROUP": 4, "STAGES_OF_FEW": 2, "WINDOW": (3, 2), "JOINED": (2, 2), "FEW": few}.items():
        monkeypatch.setattr(plans, name, value)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_kernels_are_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "FEW", 0)
    with hopper_card() as launched:
        assert_scans(case, torch.bfloat16, "gluon")
    assert set(launched) == (KERNELS if case.sizes[1] else set())


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_kernels_with_segments(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 1 << 20)
    with hopper_card() as launched:
        assert_scans(case, torch.float16, "gluon")
    assert set(launched) == (KERNELS if case.sizes[1] else set())


def test_boundaries_that_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end, and touch nothing outside of their tensors: the emulator's memory refuses."""
    small(monkeypatch, 1 << 20)
    monkeypatch.setattr(Packing, "check", lambda self: None)
    x, g = random(1, 40, 16, seed=0).bfloat16(), -random(1, 40, 16, seed=1).abs()
    for bounds in ([0, 30, 10, 40], [35, 5, 40, 12], [0, 90, -20, 40]):
        packing = Packing.from_lengths([10, 20, 10])
        packing.cu_seqlens.copy_(torch.tensor(bounds))
        leaves = x.clone().requires_grad_(), g.clone().requires_grad_()
        with hopper_card() as launched:
            h, _ = scan(*leaves, cu_seqlens=packing, impl="gluon")
            torch.autograd.grad(h, leaves, torch.ones_like(h))
        assert set(launched) == KERNELS


def test_a_gradient_that_is_not_wanted() -> None:
    """Without the decay's the states are not read."""
    x, g = random(1, 20, 16, seed=0).bfloat16().requires_grad_(), -random(1, 20, 16, seed=1).abs()
    with hopper_card():
        have = torch.autograd.grad(scan(x, g, impl="gluon")[0].float().sum(), x)
        want = torch.autograd.grad(scan(x, g.clone().requires_grad_(), impl="gluon")[0].float().sum(), x)
    assert_same_bits("dx", have[0], want[0])


def test_what_it_refuses() -> None:
    x, g = random(1, 20, 2, 8, seed=0).bfloat16(), -random(1, 20, 2, 8, seed=1).abs()
    with hopper_card():
        for decay in (g[0, 0], g[..., 0]):
            with pytest.raises(ValueError, match="decays have the shape of x"):
                scan(x, decay, impl="gluon")
        with pytest.raises(ValueError, match="decays have the shape of x"):
            scan_max(x, g, impl="gluon")
        with pytest.raises(ValueError, match="8 channels at a time, got 6"):
            scan(x[..., :3], g[..., :3], impl="gluon")
        with pytest.raises(ValueError, match=r"16 or 32 bits, got torch\.float64"):
            scan(x, g.double(), impl="gluon")


def test_what_is_taken_first() -> None:
    x, g = random(1, 20, 16, seed=0).bfloat16(), -random(1, 20, 16, seed=1).abs()
    with hopper_card():
        assert explain(scan, x, g).choice == "gluon"
        assert explain(scan, x, g[0, 0]).choice == "triton"


def test_tensors_that_are_not_aligned() -> None:
    """Results are those of aligned ones, bit for bit."""
    given = random(1, 20, 16, seed=0).bfloat16(), -random(1, 20, 16, seed=1).abs().bfloat16()
    shifted = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in given]
    assert all(t.data_ptr() % 16 for t in shifted)
    with hopper_card():
        for have, want in zip(*(gradients(*x) for x in (shifted, given)), strict=True):
            assert_same_bits("shifted", have, want)


def gradients(x: Tensor, g: Tensor, device: str = "cpu") -> list[Tensor]:
    leaves = [t.to(device).requires_grad_() for t in (x, g)]
    h, state = scan(*leaves, return_state=True, impl="gluon")
    assert state is not None
    found = h, state, *torch.autograd.grad([h, state], leaves, [torch.ones_like(h), torch.ones_like(state)])
    return [t.detach().cpu() for t in found]


def assert_channels_are_apart(device: str, tokens: int) -> None:
    """A number that is not finite leaves all other channels as they were, bit for bit, and tokens before it."""
    x, g = random(1, tokens, 16, seed=0).bfloat16(), -0.1 * random(1, tokens, 16, seed=1).abs()
    want, token, others = gradients(x, g, device), tokens // 3, torch.arange(16) != 5
    for value in (math.nan, math.inf, -math.inf):
        spoilt = x.clone()
        spoilt[0, token, 5] = value
        have = gradients(spoilt, g, device)
        assert not have[0][0, token, 5].isfinite() and not have[1][0, 5].isfinite(), value
        assert_same_bits("before", have[0][:, :token], want[0][:, :token])
        for h, w in zip(have, want, strict=True):
            assert_same_bits(f"others than {value}", h[..., others], w[..., others])


def test_channels_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 1 << 20)
    with hopper_card():
        assert_channels_are_apart("cpu", 33)


def calls(tokens: int, width: int, decay: torch.dtype, coupling: str | None, packed: bool) -> None:
    given = torch.empty(1, tokens, width, dtype=torch.bfloat16), torch.zeros(1, tokens, width, dtype=decay)
    x, g, state = (t.requires_grad_() for t in (*given, torch.zeros(2 if packed else 1, width)))
    packing = Packing.from_lengths([tokens - 3, 3]) if packed else None
    outputs = scan(
        x,
        g,
        initial_state=state,
        return_state=True,
        cu_seqlens=packing,
        read_before=packed,
        coupling=coupling,
        impl="gluon",
    )
    torch.autograd.grad(outputs, (x, g, state), [torch.empty_like(y) for y in outputs])


@pytest.mark.parametrize(
    "tokens, coupling", sample_of_rows(itertools.product((100, 2000), (None, *COUPLINGS)), [(100, None)])
)
def test_the_kernels_compile_without_spills(tokens: int, coupling: str | None) -> None:
    with recording((9, 0)) as launches:
        calls(tokens, 512, torch.bfloat16, coupling, False)
        calls(tokens, 72, torch.float32, coupling, True)
    found = [launch for launch in launches if launch.name in KERNELS]
    assert len(found) == 4
    for launch in found:
        made = compile_launch(launch)
        assert made.stack <= STACK and made.registers <= 200 and made.shared <= 113 * 1024, (launch.name, made)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FEW, *LONG], ids=str)
def test_on_the_device(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert_scans(case, dtype, "gluon", "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [150, 5000])
def test_channels_are_apart_on_the_device(tokens: int) -> None:
    assert_channels_are_apart("cuda", tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("coupling", [None, "complement"])
@pytest.mark.parametrize("tokens", [100, 3000])
def test_laws_on_the_device(tokens: int, coupling: str | None) -> None:
    """Bits of rows alone, of every run and in whatever memory; in a graph; compiled."""
    op: Callable[[Tensor], Tensor] = lambda x: scan(x, -x.abs(), coupling=coupling, impl="gluon")[0]  # noqa: E731
    x = random(3, tokens, 40).bfloat16()
    assert_rows_do_not_meet(op, x.cuda())
    assert_repeats(lambda x: op(x.cuda()).cpu(), x)
    want = results(lambda x: op(x.cuda()).cpu(), [x])
    spoilt = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(4)]
    del spoilt
    for have, expected in zip(results(lambda x: op(x.cuda()).cpu(), [x]), want, strict=True):
        for h, w in zip(have, expected, strict=True):
            assert_same_bits("in other memory", h, w)
    leaf = x.cuda().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = op(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))

    assert_captures(step)
    assert_compiles(lambda x: op(x.cuda()).cpu(), x)


@pytest.mark.gpu
def test_many_short_sequences() -> None:
    """200,000 sequences of one token: each is what it is alone."""
    x = random(1, 200_000, 40).bfloat16().cuda()
    y, _ = scan(x, -x.abs(), cu_seqlens=Packing.from_lengths([1] * 200_000, "cuda"), impl="gluon")
    alone, _ = scan(x.transpose(0, 1), -x.abs().transpose(0, 1), impl="gluon")
    assert_same_bits("alone", y, alone.transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, channels", [(1_000_000, 8), (1 << 20, 2056)])
def test_long_rows(tokens: int, channels: int) -> None:
    """A million tokens, and more than 2^31 numbers: where a state is forgotten, the rest is as if it began there."""
    x = torch.randn(1, tokens, channels, device="cuda", dtype=torch.bfloat16)
    g = torch.full((1, tokens, channels), -0.01, device="cuda", dtype=torch.bfloat16)
    g[:, -1024] = -torch.inf
    h, _ = scan(x, g, impl="gluon")
    want, _ = scan(x[:, -1024:].double(), g[:, -1024:].double())
    plain, _ = scan(x[:, -1024:], g[:, -1024:], impl="portable")
    assert_within_budget("h", h[:, -1024:], want, plain, steps=3)


@pytest.mark.gpu
def test_many_runs_of_segments() -> None:
    """Whoever comes first, the bits are the same."""
    x = random(1, 40_000, 512, seed=0).bfloat16().cuda()
    g, d = (
        -0.01 * random(1, 40_000, 512, seed=1).abs().bfloat16().cuda(),
        random(1, 40_000, 512, seed=2).bfloat16().cuda(),
    )
    leaves = x.requires_grad_(), g.requires_grad_()
    h, _ = scan(*leaves, impl="gluon")
    want = torch.autograd.grad(h, leaves, d, retain_graph=True)
    for _ in range(100):
        again, _ = scan(*leaves, impl="gluon")
        assert torch.equal(again, h)
        assert all(map(torch.equal, torch.autograd.grad(h, leaves, d, retain_graph=True), want))
