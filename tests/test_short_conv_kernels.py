"""The kernels of the short convolution: interpreted, compiled for every GPU, and on one against the definition."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import definitions
import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import (
    assert_captures,
    assert_compiles,
    assert_matches,
    assert_repeats,
    assert_rows_do_not_meet,
    assert_same_bits,
    random,
)
from samples import sample, sample_of_rows
from torch import Tensor

from flashmix import Packing
from flashmix.modules import ShortConvolution
from flashmix.ops.short_conv.call import ShortConvCall
from flashmix.ops.short_conv.joined import joined_convolutions
from flashmix.ops.short_conv.op import SHORT_CONV, short_conv, short_conv_qkv

pytest.importorskip("triton")

from kernels import TARGETS, compile_launch, recording

from flashmix.gpu.arch import SHARED_MEMORY_KIB
from flashmix.ops.short_conv import triton_gpu as short_conv_triton

LENGTHS = [3, 0, 1, 70, 2, 0, 66]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GPU = pytest.mark.gpu


def moved(op: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`op` of tensors that are carried to `device`, and its results carried back."""

    def call(*tensors: Tensor) -> Any:
        got = op(*(t.to(device) for t in tensors))
        return got.cpu() if isinstance(got, Tensor) else tuple(t if t is None else t.cpu() for t in got)

    return call


def kernel(device: str, **options: Any) -> Callable[..., Any]:
    """`short_conv(x, weight, bias, state)` by its kernels; the state comes back."""

    def call(x: Tensor, w: Tensor, b: Tensor | None = None, s: Tensor | None = None) -> Any:
        return short_conv(x, w, b, initial_state=s, return_state=True, impl="triton", **options)

    return moved(call, device)


def definition(lengths: list[int] | None, activation: str | None) -> Callable[..., Any]:
    def call(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        if lengths is None:
            return definitions.short_conv(x, w, b, s, activation)
        rows = zip(x.split(lengths, 1), s.split(1), strict=True)
        parts = [definitions.short_conv(part, w, b, state, activation) for part, state in rows]
        return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])

    return call


def check(
    width: int,
    tokens: int,
    channels: int,
    dtype: torch.dtype,
    device: str,
    activation: str | None = "silu",
    lengths: list[int] | None = None,
) -> None:
    """Outputs, the state and all gradients."""
    batch, count, tokens = (1, len(lengths), sum(lengths)) if lengths else (2, 2, tokens)
    packing = Packing.from_lengths(lengths, device=device) if lengths else None
    x, state = random(batch, tokens, channels, dtype=dtype, seed=1), random(count, width - 1, channels, dtype=dtype)
    weight, bias = random(channels, width, dtype=dtype, seed=3), random(channels, dtype=dtype, seed=4)
    op = kernel(device, activation=activation, cu_seqlens=packing)
    assert_matches(op, definition(lengths, activation), x, weight, bias, state)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("width", "mode"),
    sample_of_rows(product([1, 2, 4], ["long", "folded", "packed"]), [(4, "long"), (2, "folded"), (1, "packed")]),
)
def test_interpreted(width: int, mode: str) -> None:
    with mock.patch.object(short_conv_triton, "SHORT", 4 if mode == "long" else 64):
        for tokens, channels in ((1, 24), (3, 7), (21, 8)) if mode != "packed" else ((0, 24),):
            check(
                width, tokens, channels, torch.float32, "cpu", lengths=[3, 0, 1, 5, 2, 0] if mode == "packed" else None
            )


def check_skips(mode: str, device: str, dtype: torch.dtype) -> None:
    """The first W - 1 outputs of sequences that are skipped stay what they were, the others are what they are without."""
    lengths = [2, 0, 5, 9] if mode == "packed" else None
    packing = Packing.from_lengths(lengths, device=device) if lengths else None
    batch, tokens = (1, sum(lengths)) if lengths else (4, 9)
    x, weight = (random(*shape, dtype=dtype).to(device) for shape in ((batch, tokens, 24), (24, 4)))
    call = ShortConvCall(x, weight, None, x, None, packing, "silu", True)
    skips = torch.tensor([True, True, False, True], device=device)
    with mock.patch.object(short_conv_triton, "SHORT", 4 if mode == "long" else 64):
        (y, state), _ = SHORT_CONV.forward(call, False, "triton")
        results = torch.full_like(y, 7.0), torch.full_like(state, 7.0)
        with mock.patch.object(ShortConvCall, "results", lambda _: results):
            (found, end), _ = SHORT_CONV.forward(call.but(skips=skips), False, "triton")
    parts = zip(skips.tolist(), *((t.split(lengths, 1) if lengths else t.split(1)) for t in (y, found)), strict=True)
    for skipped, wanted, got in parts:
        first = 3 if skipped else 0
        assert torch.equal(got[:, first:], wanted[:, first:]) and (got[:, :first] == 7.0).all()
    assert torch.equal(end, state)


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["long", "folded", "packed"])
def test_skips_interpreted(mode: str) -> None:
    check_skips(mode, "cpu", torch.float32)


@GPU
@pytest.mark.parametrize("mode", ["long", "folded", "packed"])
def test_skips_on_the_device(mode: str) -> None:
    check_skips(mode, "cuda", torch.bfloat16)


@pytest.mark.interpreted
def test_a_batch_of_0_interpreted() -> None:
    """Of long rows, for which the tile is chosen by the number of sequences."""
    x, weight = torch.randn(0, 64, 100, requires_grad=True), torch.randn(100, 4, requires_grad=True)
    y, state = short_conv(x, weight, return_state=True, impl="triton")
    assert y.shape == x.shape and state.shape == (0, 3, 100)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert dx.shape == x.shape and torch.equal(dweight, torch.zeros_like(weight))


WIDTHS = (
    [(4, dtype) for dtype in DTYPES]
    + [(width, torch.float32) for width in (1, 3, 8)]
    + [(2, DTYPES[1]), (5, DTYPES[1])]
)


@GPU
@pytest.mark.parametrize("channels", [7, 24, 1000])
@pytest.mark.parametrize("width, dtype", WIDTHS)
def test_every_width(width: int, dtype: torch.dtype, channels: int) -> None:
    for tokens in (0, 1, 2, 9, 64, 130) if channels == 24 else (1, 9, 130):
        check(width, tokens, channels, dtype, "cuda")
    if channels != 1000:
        check(width, 0, channels, dtype, "cuda", lengths=LENGTHS)


@GPU
@pytest.mark.parametrize("activation", [None, "sigmoid", "gelu", "gelu_tanh", "relu", "relu2"])
def test_every_activation(activation: str | None) -> None:
    check(4, 70, 40, torch.float32, "cuda", activation)


@GPU
def test_packed_and_split_have_the_bits_of_one_by_one() -> None:
    x, weight, bias = random(1, sum(LENGTHS), 40).cuda(), random(40, 4, seed=1).cuda(), random(40, seed=2).cuda()
    state = random(len(LENGTHS), 3, 40, seed=3).cuda()
    packing = Packing.from_lengths(LENGTHS, device="cuda")
    y, last = short_conv(x, weight, bias, initial_state=state, return_state=True, cu_seqlens=packing)
    for n, part in enumerate(x.split(LENGTHS, 1)):
        one, end = short_conv(part, weight, bias, initial_state=state[n : n + 1], return_state=True)
        start = sum(LENGTHS[:n])
        assert_same_bits("packed", y[:, start : start + LENGTHS[n]], one)
        assert_same_bits("state", last[n : n + 1], end)
    whole, _ = short_conv(x, weight, bias)
    carried, parts = None, []
    for part in x.split([100, 0, 40, 1, 1], 1):
        got, carried = short_conv(part, weight, bias, initial_state=carried, return_state=True)
        parts.append(got)
    assert_same_bits("split", torch.cat(parts, 1), whole)


@GPU
@pytest.mark.parametrize("channels", [7, 24])
def test_sequences_are_their_own(channels: int) -> None:
    weight = random(channels, 4, seed=1).cuda()
    op = moved(lambda x: short_conv(x, weight, impl="triton")[0], "cuda")
    assert_rows_do_not_meet(op, random(3, 403, channels))


@GPU
def test_same_bits_again_and_strides() -> None:
    packing = Packing.from_lengths([100, 0, 3, 200], device="cuda")
    inputs = random(1, 303, 41), random(41, 4, seed=1), random(41, seed=2), random(4, 3, 41, seed=3)
    assert_repeats(kernel("cuda", cu_seqlens=packing), *inputs)
    x, weight = random(2, 100, 96).cuda(), random(32, 4, seed=1).cuda()
    for odd in (
        x[..., 32:64],
        x[:, ::3, 64:],
        x[:, :, ::3],
        x[:1, :, :32].expand(2, -1, -1),
        x[:, :1, :32].expand(2, 9, 32),
    ):
        for have, want in zip(kernel("cuda")(odd, weight), kernel("cuda")(odd.contiguous(), weight), strict=True):
            assert_same_bits("strided", have, want)


def test_no_nan_leaves_its_row() -> None:
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        x, weight = random(2, 9, 8).to(device), random(8, 4, seed=1).to(device)
        whole, _ = short_conv(x, weight)
        x[0, 4, 3] = torch.nan
        spoilt, _ = short_conv(x, weight)
        changed = (spoilt != whole).nonzero()
        assert {(b, c) for b, _, c in changed.tolist()} == {(0, 3)} and {t for _, t, _ in changed.tolist()} == {
            4,
            5,
            6,
            7,
        }


def residual_of(device: str, impl: str = "auto") -> Callable[..., Any]:
    return moved(lambda x, w, r: short_conv(x, w, residual=r, impl=impl)[0], device)


def residual_definition(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return definitions.short_conv(x, w, residual=r)[0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_residual(device: str) -> None:
    inputs = random(2, 9, 24), random(24, 4, seed=1), random(2, 9, 24, seed=2)
    for dtype in (torch.float64, *DTYPES) if device == "cpu" else DTYPES:
        assert_matches(residual_of(device), residual_definition, *(t.to(dtype) for t in inputs))
    x = random(2, 9, 24, seed=3, dtype=torch.bfloat16)
    assert_matches(
        lambda x, w: residual_of(device)(x, w, x), lambda x, w: residual_definition(x, w, x), x, inputs[1].bfloat16()
    )
    assert_compiles(residual_of(device), *inputs)
    if device == "cpu":
        leaves = [t[..., :3].double().requires_grad_() for t in (inputs[0], inputs[1][:3], inputs[2])]
        assert torch.autograd.gradgradcheck(residual_of("cpu"), leaves)
    with pytest.raises(ValueError, match=r"residual must have shape \[2, 9, 24\], got \[2, 8, 24\]"):
        short_conv(*inputs[:2], residual=inputs[2][:, :8])


@pytest.mark.interpreted
def test_residual_interpreted() -> None:
    for residual in (random(2, 5, 24, seed=2), random(5, 2, 24, seed=2).transpose(0, 1)):
        assert_matches(
            residual_of("cpu", "triton"), residual_definition, random(2, 5, 24), random(24, 4, seed=1), residual
        )


SIZES = (24, 40, 136)


def qkv(packing: Packing | None = None, impl: str = "auto") -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        *rest, state = tensors
        return short_conv_qkv(*rest, initial_state=state, return_state=True, cu_seqlens=packing, impl=impl)

    return call


def qkv_definition(*tensors: Tensor) -> tuple[Tensor, ...]:
    return definitions.short_conv_qkv(tensors[:3], tensors[3:6], tensors[6:9], tensors[9])


def qkv_inputs(batch: int, tokens: int, width: int, dtype: torch.dtype = torch.float32, count: int = 0) -> list[Tensor]:
    inputs = [random(batch, tokens, size, dtype=dtype, seed=i) for i, size in enumerate(SIZES)]
    weights = [random(size, width, dtype=dtype, seed=3 + i) for i, size in enumerate(SIZES)]
    biases = [random(size, dtype=dtype, seed=6 + i) for i, size in enumerate(SIZES)]
    return [*inputs, *weights, *biases, random(count or batch, width - 1, sum(SIZES), dtype=dtype, seed=9)]


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_qkv_is_its_definition(tokens: int, dtype: torch.dtype) -> None:
    assert_matches(qkv(), qkv_definition, *qkv_inputs(2, tokens, 4, dtype))


@pytest.mark.interpreted
def test_qkv_interpreted() -> None:
    assert_matches(qkv(impl="triton"), qkv_definition, *qkv_inputs(2, 5, 4))


@pytest.mark.interpreted
@pytest.mark.parametrize(("batch", "tokens", "bias"), sample_of_rows([(2, 5, False), (1, 12, True)], [(2, 5, False)]))
def test_one_gradient_of_a_projection_has_the_bits_of_three(
    batch: int, tokens: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first case has a program a sequence, the last is packed. A part without a gradient, and a frozen weight, are none for others."""
    monkeypatch.setattr(short_conv_triton, "SHORT", 4)
    packing, sizes = Packing.from_lengths([3, 0, 9]) if bias else None, (8, 16, 40)
    x = random(batch, tokens, sum(sizes), dtype=torch.bfloat16)
    w, b = random(sum(sizes), 4, dtype=torch.bfloat16, seed=1), random(sum(sizes), seed=2) if bias else None
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    biases = (None, None, None) if b is None else b.split(sizes)
    apart = short_conv_qkv(*x.split(sizes, -1), *w.split(sizes), *biases, cu_seqlens=packing, impl="triton")[:3]
    joined = joined_convolutions(x, w, b, sizes, "silu", packing)
    flows = [torch.randn_like(t) for t in apart]
    for one, other in zip(joined, apart, strict=True):
        assert_same_bits("output", one, other)
    for kept, inputs in ((slice(0, 3), leaves), (slice(1, 2), leaves[:1])):
        grads = (torch.autograd.grad(y[kept], inputs, flows[kept], retain_graph=True) for y in (joined, apart))
        for one, other in zip(*grads, strict=True):
            assert_same_bits("gradient", one, other)


UNIT_SIZES = (16, 32, 24)


def unit_qkv(
    device: str, packing: Packing | None, unit: int = 16, activation: str | None = "silu"
) -> Callable[..., Any]:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return joined_convolutions(x, weight, bias, UNIT_SIZES, activation, packing, unit)

    return moved(call, device)


def unit_definition(lengths: list[int] | None, unit: int = 16, activation: str | None = "silu") -> Callable[..., Any]:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        rows = [x] if lengths is None else x.split(lengths, 1)
        y = torch.cat([definitions.short_conv(row, weight, bias, None, activation)[0] for row in rows], 1)
        q, k, v = y.split(UNIT_SIZES, -1)
        q, k = (definitions.l2_norm(t.unflatten(-1, (-1, unit))).flatten(-2) for t in (q, k))
        return q, k, v

    return call


def check_unit(device: str, batch: int, tokens: int, lengths: list[int] | None, **options: Any) -> None:
    packing = None if lengths is None else Packing.from_lengths(lengths, device=device)
    dtype = options.pop("dtype", torch.float32)
    x, w = random(batch, tokens, sum(UNIT_SIZES), dtype=dtype), random(sum(UNIT_SIZES), 4, dtype=dtype, seed=1)
    bias = random(sum(UNIT_SIZES), dtype=dtype, seed=2)
    assert_matches(unit_qkv(device, packing, **options), unit_definition(lengths, **options), x, w, bias)


@pytest.mark.interpreted
@pytest.mark.parametrize("lengths", [None, [3, 0, 4]])
def test_unit_heads_interpreted(lengths: list[int] | None) -> None:
    """Queries and keys of length 1 per head, in the convolution's own pass; values as they are."""
    check_unit("cpu", 1 if lengths else 2, 7 if lengths else 4, lengths)


@pytest.mark.interpreted
def test_unit_heads_of_long_rows_and_without_activation_interpreted() -> None:
    with mock.patch.object(short_conv_triton, "SHORT", 4):
        check_unit("cpu", 1, 5, None, activation=None)


@GPU
def test_what_is_recorded_has_the_bits_of_what_is_not() -> None:
    module = ShortConvolution(3 * 512, 4, device="cuda", dtype=torch.bfloat16)
    qkv = random(1, 2048, 3 * 512, dtype=torch.bfloat16).cuda().requires_grad_()
    recorded = module.of_qkv(qkv, (512, 512, 512), unit=128)[:3]
    with torch.no_grad():
        found = module.of_qkv(qkv, (512, 512, 512), unit=128)[:3]
    for one, other in zip(recorded, found, strict=True):
        assert_same_bits("without a gradient", other, one)


@GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_unit_heads_kernels(lengths: list[int] | None, dtype: torch.dtype) -> None:
    for tokens in (1, 9, 403) if lengths is None else (sum(LENGTHS),):
        check_unit("cuda", 1 if lengths else 2, tokens, lengths, dtype=dtype)


def test_a_projection_whose_packing_was_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_conv_triton, "forward_joined", lambda call, unit: tuple(t.clone() for t in call.inputs))
    packing = Packing(torch.tensor([0, 2, 5]), 5)
    y, *_ = joined_convolutions(random(1, 5, 6).requires_grad_(), random(6, 4), None, (2, 2, 2), "silu", packing)
    packing.cu_seqlens[1] = 3
    with pytest.raises(RuntimeError, match="cu_seqlens was overwritten between the forward and the backward"):
        y.sum().backward()


@GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 9, 403])
def test_qkv_kernels(tokens: int, dtype: torch.dtype) -> None:
    assert_matches(moved(qkv(impl="triton"), "cuda"), qkv_definition, *qkv_inputs(2, tokens, 4, dtype))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_qkv_is_three_convolutions(device: str) -> None:
    """Packed, of parts of one projection; the same bits, gradients too."""
    inputs = [t.to(device) for t in qkv_inputs(1, sum(LENGTHS), 4, count=len(LENGTHS))]
    packing = Packing.from_lengths(LENGTHS, device=device)
    joined = torch.cat(inputs[:3], -1).requires_grad_()
    q, k, v, state = qkv(packing)(*joined.split(SIZES, -1), *inputs[3:])
    flow = random(1, sum(LENGTHS), sum(SIZES), seed=10).to(device)
    (together,) = torch.autograd.grad([q, k, v], joined, flow.split(SIZES, -1))
    for i, (x, states) in enumerate(zip(joined.split(SIZES, -1), inputs[9].split(SIZES, -1), strict=True)):
        options = {"initial_state": states, "return_state": True, "cu_seqlens": packing}
        y, end = short_conv(x, inputs[3 + i], inputs[6 + i], **options)
        (alone,) = torch.autograd.grad(y, joined, flow.split(SIZES, -1)[i])
        part = slice(sum(SIZES[:i]), sum(SIZES[: i + 1]))
        assert_same_bits("output", (q, k, v)[i], y)
        assert_same_bits("state", state[..., part], end)
        assert_same_bits("gradient", together[..., part], alone[..., part])


def test_qkv_gradients_to_second_order_and_compiled() -> None:
    inputs = [t.double().requires_grad_() for t in qkv_inputs(1, 3, 2)]
    inputs = [t[..., :3].detach().requires_grad_() if t.dim() == 3 and i < 3 else t for i, t in enumerate(inputs)]
    inputs[3:6] = [t[:3].detach().requires_grad_() for t in inputs[3:6]]
    inputs[6:9] = [t[:3].detach().requires_grad_() for t in inputs[6:9]]
    inputs[9] = inputs[9][..., :9].detach().requires_grad_()
    assert torch.autograd.gradcheck(qkv(), inputs)
    assert torch.autograd.gradgradcheck(qkv(), inputs)
    assert_compiles(qkv(), *qkv_inputs(2, 9, 4))


def test_qkv_refuses() -> None:
    q, k, v, *rest = qkv_inputs(2, 5, 4)
    call = qkv()
    with pytest.raises(ValueError, match=r"k must have shape \[2, 5, 40\], got \[2, 4, 40\]"):
        call(q, k[:, :4], v, *rest)
    with pytest.raises(TypeError, match="v must have dtype float32 like q, got float64"):
        call(q, k, v.double(), *rest)
    with pytest.raises(ValueError, match=r"k_weight must have shape \[40, 4\], got \[40, 3\]"):
        call(q, k, v, rest[0], rest[1][:, :3], *rest[2:])
    with pytest.raises(ValueError, match="must be given together or not at all"):
        call(q, k, v, *rest[:4], None, *rest[5:])
    with pytest.raises(ValueError, match=r"initial_state must have shape \[2, 3, 200\], got \[2, 3, 199\]"):
        call(q, k, v, *rest[:-1], rest[-1][..., :199])
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'triton', 'portable', got 'cuda'"):
        qkv(impl="cuda")(q, k, v, *rest)


@GPU
def test_operators_are_sound_and_compile() -> None:
    x, w, b, s = (t.cuda() for t in (random(1, 9, 8), random(8, 4, seed=1), random(8, seed=2), random(3, 3, 8, seed=3)))
    packing = Packing(torch.tensor([0, 4, 4, 9], device="cuda"), 9)
    call = ShortConvCall(x.requires_grad_(), w, b, None, s, packing, "silu", True)
    torch.library.opcheck(SHORT_CONV.operator, (*SHORT_CONV.flat(call), True, "triton"))
    op = kernel("cuda", cu_seqlens=packing)
    assert_compiles(op, x.detach().cpu(), w.cpu(), b.cpu(), s.cpu())
    assert_compiles(moved(qkv(), "cuda"), *qkv_inputs(2, 9, 4))

    def second(dtype: torch.dtype, device: str) -> Tensor:
        u, v = (t.detach().to(device, dtype).requires_grad_() for t in (x, w))
        (first,) = torch.autograd.grad(short_conv(u, v)[0].square().sum(), u, create_graph=True)
        return torch.autograd.grad(first.sum(), v)[0].cpu()

    found, exact, plain = (
        second(*how) for how in ((torch.float32, "cuda"), (torch.float64, "cpu"), (torch.float32, "cpu"))
    )
    assert_within_budget("second derivative", found, exact, plain, steps=3)  # the op and two derivatives


@GPU
def test_graphs_and_no_synchronisation() -> None:
    x, w = random(2, 100, 64).cuda().requires_grad_(), random(64, 4, seed=1).cuda().requires_grad_()
    flow = random(2, 100, 64, seed=2).cuda()

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(short_conv(x, w)[0], (x, w), flow)

    assert_captures(step)


@GPU
@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements_and_65535_rows() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False
    w = random(4096, 4, seed=1).cuda().bfloat16()
    for shape in ((3, 180_000, 4096), (200_000, 3, 4096)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y, state = short_conv(x, w, return_state=True)
        (dx,) = torch.autograd.grad(y, x, x.detach())
        part = x.detach()[-1:, -50:].clone().requires_grad_()
        few, end = short_conv(part, w, return_state=True)
        (d_few,) = torch.autograd.grad(few, part, part.detach())
        assert_same_bits("outputs", y[-1:, -47:], few[:, -47:] if shape[1] > 50 else few)
        assert_same_bits("gradient", dx[-1:, -47:], d_few[:, -47:] if shape[1] > 50 else d_few)
        assert_same_bits("state", state[-1:], end)
        del x, y, dx


def launches(call: Callable[[], Any], capability: tuple[int, int]) -> list[Any]:
    with recording(capability) as found:
        outputs = [t for t in call() if t is not None]
        torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    return found


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def conv_call(width: int, channels: int, dtype: torch.dtype, tokens: int, packed: bool, state: bool) -> Any:
    def call() -> Any:
        ends = Packing(torch.tensor([0, 2, tokens]), tokens) if packed else None
        batch, count = (1, 2) if packed else (2, 2)
        initial = leaf(count, width - 1, channels, dtype=dtype) if state else None
        x, w, b = (
            leaf(batch, tokens, channels, dtype=dtype),
            leaf(channels, width, dtype=dtype),
            leaf(channels, dtype=dtype),
        )
        return short_conv(x, w, b if state else None, initial_state=initial, return_state=state, cu_seqlens=ends)

    return call


def qkv_call() -> Any:
    return qkv()(*(leaf(*t.shape, dtype=torch.bfloat16) for t in qkv_inputs(2, 100, 4)))


def joined_call(sizes: tuple[int, int, int] = SIZES, unit: int = 0, packed: bool = False) -> Any:
    packing = Packing(torch.tensor([0, 2, 100]), 100) if packed else None
    x, w = leaf(1 if packed else 2, 100, sum(sizes), dtype=torch.bfloat16), leaf(sum(sizes), 4, dtype=torch.bfloat16)
    return joined_convolutions(x, w, None, sizes, "silu", packing, unit)


BF16 = torch.bfloat16
FAST = {
    "long": conv_call(4, 4096, BF16, 8192, False, False),
    "step": conv_call(4, 4096, BF16, 1, False, True),
    "packed": conv_call(4, 512, BF16, 100, True, False),
    "qkv": qkv_call,
    "joined": joined_call,
    "unit": partial(joined_call, (1024, 512, 512), 128),
    "unit, packed": partial(joined_call, (1024, 512, 512), 128, packed=True),
}
EVERYTHING = os.environ.get("FLASHMIX_ALL_KERNELS") == "1"
CALLS = FAST | {
    f"{width} {channels} {dtype} {tokens} {packed} {state}": conv_call(width, channels, dtype, tokens, packed, state)
    for width in (1, 2, 4, 5, 8)
    for channels, dtype in ((4096, torch.float16), (100, BF16), (7, torch.float32))
    for tokens, packed in ((100, False), (5, False), (100, True))
    for state in (False, True)
}


@pytest.mark.parametrize("name", CALLS if EVERYTHING else sample(FAST, ("long", "step", "joined", "unit, packed")))
def test_kernels_compile(name: str) -> None:
    for capability in TARGETS if EVERYTHING else ((9, 0),):
        found = launches(CALLS[name], capability)
        assert found
        for launch in found:
            made = compile_launch(launch)
            assert made.shared <= SHARED_MEMORY_KIB[capability] * 1024, (launch.name, made.shared)
            assert made.stack <= 32, (launch.name, capability, made.stack)
