"""The selective scan's kernels for Hopper: on a CPU in the emulator of Gluon, compiled without a GPU, and on a card."""

from __future__ import annotations

import itertools
import math
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
    ((3, 65, 24, 16, 1), ()),
    ((1, 33, 16, 16, 0), (0, 32, 1, 0)),
    ((2, 300, 72, 16, 1), ()),
    ((1, 510, 256, 16, 1), (100, 3, 0, 407)),
]


KERNELS = {"selective_hopper_kernel", "selective_backward_hopper_kernel"}


@pytest.mark.parametrize("sizes, lengths", CASES, ids=str)
def test_the_kernels_are_the_definition(sizes: Sizes, lengths: Sizes) -> None:
    for extras in (True, False):
        with hopper_card() as launched:
            assert_scans(sizes, lengths, torch.bfloat16, "gluon", extras)
        assert set(launched) >= KERNELS
    if lengths:
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
        odd = {name: x[name] for name in ("B", "C")}
        odd |= {name: torch.cat([x[name], x[name]], -1)[..., :36] for name in ("u", "dt", "z", "D", "dt_bias")}
        odd |= {name: torch.cat([x[name], x[name]], -2)[..., :36, :] for name in ("A", "initial_state")}
        with pytest.raises(ValueError, match="8 channels of a group at a time, got 36 in 1 groups"):
            selective_scan(**odd, softplus=True, impl="gluon")
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


def assert_compile(dtype: torch.dtype, lengths: Sizes, width: int, extras: bool) -> None:
    with recording((9, 0)) as launches:
        calls(dtype, lengths, 40, width, extras)
    found = {launch.name: compile_launch(launch) for launch in launches if launch.name in KERNELS}
    forward, backward = found["selective_hopper_kernel"], found["selective_backward_hopper_kernel"]
    assert forward.stack == 0 and forward.registers <= 168, forward
    assert backward.stack <= STACK and backward.shared <= 228 * 1024 // 8 - 1024, (
        backward
    )  # eight programs a multiprocessor


def test_the_kernels_compile() -> None:
    assert_compile(torch.bfloat16, (), 64, True)


@pytest.mark.whole
def test_the_kernels_without_a_gate_compile() -> None:
    """Packed, float16, with a last block of 8 channels."""
    assert_compile(torch.float16, (3, 37), 40, False)


def test_tensors_that_are_not_aligned() -> None:
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
        assert set(launched) >= KERNELS
    for want, have in zip(*found, strict=True):
        assert_same_bits("shifted", have, want)


CHANNEL, TOKEN = 5, 9  # of the number that is not finite
ROWS = ("u", "dt", "z")  # with a number of each channel and token


def gradients(x: dict[str, Tensor], d_y: Tensor) -> dict[str, Tensor]:
    leaves = {name: t.to(d_y.device).requires_grad_() for name, t in x.items()}
    y, h = selective_scan(**leaves, softplus=True, return_state=True, impl="gluon")
    grads = torch.autograd.grad([y, h], list(leaves.values()), [d_y, torch.ones_like(h)])
    return {name: d.cpu() for name, d in zip(leaves, grads, strict=True)}


def assert_channels_are_apart(device: str, names: tuple[str, ...], values: tuple[float, ...]) -> None:
    """A number that is not finite leaves the gradients of all other channels as they were, bit for bit. dB and dC are sums over channels:
    with tensor cores they become NaN at all four tokens of a product, as the definition's may be at one."""
    wide = inputs((1, 20, 32, 16, 0), torch.float32, 1)
    x = {name: t.bfloat16() if name in (*ROWS, "B", "C") else t for name, t in wide.items()}
    d_y = random(1, 20, 32, seed=9).bfloat16()
    want = gradients(x, d_y.to(device))
    others = torch.arange(32) != CHANNEL
    first = TOKEN - TOKEN % 4
    for name, value in itertools.product(names, values):
        given = {n: t.clone() for n, t in (x | {"d_y": d_y}).items()}
        given[name][0, TOKEN, CHANNEL] = value
        have = gradients({n: given[n] for n in x}, given["d_y"].to(device))
        if (name, value) != ("dt", -math.inf):  # softplus is 0 there: a step of no length, and all gradients are finite
            assert not all(d.isfinite().all() for d in have.values()), (name, value)
        assert have.pop("B")[:, first + 4 :].isfinite().all(), (name, value)
        assert have.pop("C")[:, :first].isfinite().all(), (name, value)
        for n, d in have.items():
            axis = -2 if n in ("A", "initial_state") else -1
            own, expected = (t.movedim(axis, 0)[others] for t in (d, want[n]))
            assert_same_bits(f"{n} with {value} in {name}", own, expected)


def test_channels_are_apart() -> None:
    with hopper_card():
        assert_channels_are_apart("cpu", ("u", "d_y"), (math.inf,))


@pytest.mark.gpu
def test_channels_are_apart_on_the_device() -> None:
    assert_channels_are_apart("cuda", (*ROWS, "d_y"), (math.inf, -math.inf, math.nan))


@pytest.mark.gpu
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
