"""The selective scan's kernels for Hopper: on a CPU in the emulator of Gluon, compiled without a GPU, and on a card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

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
from selective_cases import assert_scans, inputs
from torch import Tensor

from flashmix import Packing, explain, selective_scan
from flashmix.ops.selective_scan import gluon_hopper

STACK = 256  # bytes of spills in the backward: what its loads of the next tokens and addresses take, once every eight tokens
Sizes = tuple[int, ...]
CASES: list[tuple[Sizes, Sizes]] = [
    ((1, 5, 32, 16, 1), ()),
    ((2, 37, 40, 16, 0), ()),
    ((1, 75, 64, 16, 2), (70, 0, 5)),
    ((1, 0, 32, 16, 1), (0, 0)),
]
LONG: list[tuple[Sizes, Sizes]] = [
    ((2, 64, 96, 16, 3), ()),
    ((3, 65, 33, 16, 1), ()),
    ((1, 33, 16, 16, 0), (0, 32, 1, 0)),
    ((2, 300, 70, 16, 1), ()),
    ((1, 510, 256, 16, 1), (100, 3, 0, 407)),
]


@pytest.fixture(params=["HALVES", "PAIRS"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the kernels for the backward, as with and without `FLASHMIX_TRY_SELECTIVE_PAIRS=1`; its name."""
    monkeypatch.setattr(gluon_hopper, "BACKWARD", getattr(gluon_hopper, request.param))
    return gluon_hopper.BACKWARD.kernel.fn.__name__


@pytest.mark.parametrize("sizes, lengths", CASES, ids=str)
def test_the_kernels_are_the_definition(sizes: Sizes, lengths: Sizes, kernel: str) -> None:
    for extras in (True, False):
        with hopper_card() as launched:
            assert_scans(sizes, lengths, torch.bfloat16, "gluon", extras)
        assert {"selective_hopper_kernel", kernel} <= set(launched)
    with hopper_card():
        assert_scans(sizes, lengths, torch.float16, "gluon", True)


def test_what_is_left_out_is_not_counted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch has its step sizes, skip and gate computed beside it, also where a kernel for them is there and left out."""
    x = {
        name: t.bfloat16()
        for name, t in inputs((1, 20, 32, 16, 1), torch.float32, 1).items()
        if name != "initial_state"
    }
    want = selective_scan(**x, softplus=True, impl="portable")[0]
    monkeypatch.setattr("flashmix.op.choose.AVOIDED", frozenset(("triton", "gluon", "native")))
    with hopper_card() as launched:
        assert_same_bits("y", selective_scan(**x, softplus=True)[0], want)
    assert not launched


def test_what_it_refuses() -> None:
    x = {name: t.bfloat16() for name, t in inputs((1, 600, 32, 16, 0), torch.float32, 1).items()}
    x["initial_state"] = x["initial_state"].float()
    with hopper_card():
        with pytest.raises(ValueError, match="segments"):
            selective_scan(**x, softplus=True, impl="gluon")
        for name in ("A", "B", "C", "initial_state"):
            x[name] = x[name][..., :8]
        with pytest.raises(ValueError, match="16 states, got 8"):
            selective_scan(**x, softplus=True, impl="gluon")


def calls(dtype: torch.dtype, lengths: Sizes, tokens: int, width: int, extras: bool) -> None:
    x = inputs((1, tokens, width, 16, 1), dtype, len(lengths) or 1, extras)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    packing = Packing.from_lengths(lengths) if lengths else None
    outputs = selective_scan(**leaves, softplus=extras, return_state=True, cu_seqlens=packing, impl="gluon")
    torch.autograd.grad(outputs, list(leaves.values()), [torch.empty_like(y) for y in outputs])


@pytest.mark.parametrize("extras", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_the_kernels_compile(extras: bool, kernel: str) -> None:
    with recording((9, 0)) as launches:
        calls(torch.bfloat16, () if extras else (3, 37), 40, 64, extras)
    for launch in launches:
        compiled = compile_launch(launch)
        if launch.name == "selective_hopper_kernel":
            assert compiled.stack == 0 and compiled.registers <= 168, compiled
        elif launch.name == kernel:  # eight programs a multiprocessor
            assert compiled.stack <= STACK and compiled.shared <= 228 * 1024 // 8 - 1024, compiled


def test_pairs_without_a_gate_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, float16, with a last block of 8 channels."""
    monkeypatch.setattr(gluon_hopper, "BACKWARD", gluon_hopper.PAIRS)
    with recording((9, 0)) as launches:
        calls(torch.float16, (3, 37), 40, 40, False)
    (launch,) = [launch for launch in launches if "pairs" in launch.name]
    compiled = compile_launch(launch)
    assert compiled.stack <= STACK and compiled.shared <= 228 * 1024 // 8 - 1024, compiled


@pytest.mark.parametrize("width", [33, 36])
def test_pairs_take_rows_of_16_bytes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other widths have the other kernel, which copies nothing with `cp.async`."""
    monkeypatch.setattr(gluon_hopper, "BACKWARD", gluon_hopper.PAIRS)
    with recording((9, 0)) as launches:
        calls(torch.bfloat16, (), 40, width, True)
    assert not [launch for launch in launches if "pairs" in launch.name]


def test_pairs_of_tensors_that_are_not_aligned(kernel: str) -> None:
    """Results are those of aligned ones, bit for bit."""
    aligned = inputs((1, 40, 32, 16, 1), torch.float32, 1)
    aligned = {n: t if n in ("A", "D", "dt_bias", "initial_state") else t.bfloat16() for n, t in aligned.items()}
    shifted = {n: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for n, t in aligned.items()}
    assert all(t.data_ptr() % 16 for t in shifted.values())
    found = []
    for x in (aligned, shifted):
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        with hopper_card() as launched:
            y = selective_scan(**leaves, softplus=True, impl="gluon")[0]
            found.append(torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y)))
        assert kernel in launched
    for want, have in zip(*found, strict=True):
        assert_same_bits("shifted", have, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes, lengths", [*CASES, *LONG], ids=str)
def test_on_the_device(sizes: Sizes, lengths: Sizes) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for extras in (True, False):
            assert_scans(sizes, lengths, dtype, "gluon", extras, "cuda")


def everything_selected() -> Callable[[Tensor], Tensor]:
    """The selective scan with everything that it has, of one tensor `[B, T, 40]`; A and D are on the device before a graph is captured."""
    A, D = -random(40, 16, seed=1).abs().cuda(), random(40, seed=2).cuda()

    def selected(u: Tensor) -> Tensor:
        B, C = u[..., :16], u[..., 16:32]
        return selective_scan(u, u, A, B, C, D=D, z=u, dt_bias=D, softplus=True, impl="gluon")[0]

    return selected


def test_what_is_taken_first() -> None:
    """On Hopper 16 states of 16-bit numbers come to Gluon before Triton, other numbers of states to Triton."""
    for states, first in ((16, "gluon"), (8, "triton")):
        given = {name: t.bfloat16() for name, t in inputs((1, 20, 32, states, 0), torch.float32, 1, False).items()}
        del given["initial_state"]
        with hopper_card():
            assert explain(selective_scan, **given).choice == first


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
def test_laws_on_the_device() -> None:
    """Bits of rows alone, of every run and in whatever memory; in a graph; compiled."""
    x, selected = random(3, 150, 40).bfloat16(), everything_selected()
    assert_rows_do_not_meet(selected, x.cuda())
    assert_repeats(lambda x: selected(x.cuda()).cpu(), x)
    want = results(lambda x: selected(x.cuda()).cpu(), [x])
    spoilt = [torch.full((1 << 24,), torch.nan, device="cuda") for _ in range(4)]
    del spoilt
    for have, expected in zip(results(lambda x: selected(x.cuda()).cpu(), [x]), want, strict=True):
        for h, w in zip(have, expected, strict=True):
            assert_same_bits("in other memory", h, w)
    leaf = x.cuda().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        y = selected(leaf)
        return y.detach(), *torch.autograd.grad(y, leaf, torch.ones_like(y))

    assert_captures(step)
    assert_compiles(lambda x: selected(x.cuda()).cpu(), x)


@pytest.mark.gpu
def test_many_short_sequences() -> None:
    """200,000 sequences of one token: each is what it is alone."""
    x = random(1, 200_000, 40).bfloat16().cuda()
    A, B = -random(40, 16, seed=1).abs().cuda(), x[..., :16]
    packing = Packing.from_lengths([1] * 200_000, "cuda")
    y, _ = selective_scan(x, x.abs(), A, B, B, cu_seqlens=packing, impl="gluon")
    alone, _ = selective_scan(*(t.transpose(0, 1) for t in (x, x.abs())), A, *(B.transpose(0, 1),) * 2, impl="gluon")
    assert_same_bits("alone", y, alone.transpose(0, 1))
