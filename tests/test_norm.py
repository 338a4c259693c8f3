"""RMS and l2 normalisation against their definitions."""

from __future__ import annotations

import definitions
import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import (
    DTYPES,
    assert_compiles,
    assert_matches,
    assert_repeats,
    assert_rows_do_not_meet,
    random,
    results,
    saved_bytes,
)

from flashmix.ops.norm.op import group_norm, l2_norm, layer_norm, rms_norm

SHAPES = [(2, 5, 24), (1, 1, 7), (2, 0, 8), (2, 3, 4, 64), (160,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2)
    weight = random(shape[-1], dtype=dtype, seed=3)
    assert_matches(rms_norm, definitions.rms_norm, x)
    assert_matches(rms_norm, definitions.rms_norm, x, weight)
    assert_matches(lambda x, w, g: rms_norm(x, w, gate=g), definitions.rms_norm, x, weight, gate)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_one_channel_less_its_mean_is_exactly_0(dtype: torch.dtype) -> None:
    x, weight = random(7, 1, dtype=dtype) * 3 + 100, torch.ones(1, dtype=dtype).requires_grad_()
    wide, weights = random(7, 3, dtype=dtype) * 3 + 100, torch.ones(3, dtype=dtype).requires_grad_()
    for y, w in ((layer_norm(x, weight), weight), (group_norm(wide, 3, weights), weights)):
        assert not y.any() and not torch.autograd.grad(y.sum(), w)[0].any()


def test_rms_norm_with_a_sigmoid_gate() -> None:
    x, gate = random(3, 8, seed=1), random(3, 8, seed=2)
    assert_matches(
        lambda x, g: rms_norm(x, gate=g, gate_activation="sigmoid"),
        lambda x, g: definitions.rms_norm(x) / (1 + torch.exp(-g)),
        x,
        gate,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_and_returns_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (random(2, 5, 24, dtype=dtype, seed=s) for s in range(3))
    weight = weight[0, 0]

    def definition(x, r, w):  # type: ignore[no-untyped-def]
        return definitions.rms_norm(x + r, w), x + r

    assert_matches(lambda x, r, w: rms_norm(x, w, residual=r, return_residual=True), definition, x, residual, weight)
    y = rms_norm(x, weight, residual=residual)
    assert torch.equal(y, rms_norm(x, weight, residual=residual, return_residual=True)[0])


def test_rms_norm_keeps_a_float32_residual_beside_bfloat16() -> None:
    x, residual = random(2, 8, dtype=torch.bfloat16), random(2, 8, seed=1)
    y, h = rms_norm(x, torch.ones(8), residual=residual, return_residual=True)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(h, x + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_l2_norm_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_matches(l2_norm, definitions.l2_norm, random(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = random(*shape, dtype=dtype, seed=1) + 1, random(*shape, dtype=dtype, seed=2)
    weight, bias = random(shape[-1], dtype=dtype, seed=3), random(shape[-1], dtype=dtype, seed=4)
    assert_matches(layer_norm, definitions.layer_norm, x)
    assert_matches(layer_norm, definitions.layer_norm, x, weight, bias)
    assert_matches(
        lambda x, w, b, g: layer_norm(x, w, b, gate=g),
        lambda x, w, b, g: definitions.layer_norm(x, w, b) * definitions.silu(g),
        x,
        weight,
        bias,
        gate,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_is_its_definition(groups: int, center: bool, dtype: torch.dtype) -> None:
    x, gate, residual = (random(2, 9, 24, dtype=dtype, seed=s) + 1 for s in range(3))
    weight, bias = random(24, dtype=dtype, seed=3), random(24, dtype=dtype, seed=4)

    def op(x, w, b, g, r):  # type: ignore[no-untyped-def]
        return group_norm(x, groups, w, b, center=center, gate=g, residual=r, return_residual=True)

    def definition(x, w, b, g, r):  # type: ignore[no-untyped-def]
        return definitions.group_norm(x + r, groups, w, b, center) * definitions.silu(g), x + r

    assert_matches(op, definition, x, weight, bias, gate, residual)


def test_layer_norm_with_a_float32_weight_beside_bfloat16() -> None:
    x, weight = random(4, 8, dtype=torch.bfloat16), random(8, seed=1)
    y, h = layer_norm(x, weight, residual=x.float(), return_residual=True)
    assert (y.dtype, h.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(
        y.float(), definitions.layer_norm(2 * x.float(), weight), rtol=torch.finfo(torch.bfloat16).eps, atol=0
    )


def test_rows_of_zeros_stay_zero() -> None:
    for op in (rms_norm, layer_norm, l2_norm):
        x = torch.zeros(2, 8, requires_grad=True)
        y = op(x)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert not y.any() and torch.isfinite(grad).all()


def test_gradients_to_second_order() -> None:
    x, gate = (random(3, 5, dtype=torch.float64, seed=s).requires_grad_() for s in (1, 2))
    weight = random(5, dtype=torch.float64, seed=3).requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(l2_norm, (x,))
        assert check(lambda x, w: rms_norm(x, w, residual=x.flip(0), return_residual=True), (x, weight))
        assert check(lambda x, w, g: rms_norm(x, w, gate=g), (x, weight, gate))
        assert check(lambda x, w, g: layer_norm(x, w, w.flip(0), gate=g), (x, weight, gate))
        assert check(lambda x, w: layer_norm(x, w, w.flip(0)), (x, weight))
    frozen = weight.detach()
    assert torch.autograd.gradcheck(lambda g: rms_norm(x.detach(), frozen, gate=g), (gate,))


def test_compiles() -> None:
    x, gate, weight = random(2, 5, 24, seed=1), random(2, 5, 24, seed=2), random(24, seed=3)
    assert_compiles(lambda x, w, g: rms_norm(x, w, gate=g, residual=x, return_residual=True), x, weight, gate)
    assert_compiles(l2_norm, x)
    assert_compiles(lambda x, w, g: group_norm(x, 3, w, w, gate=g), x, weight, gate)
    assert_compiles(layer_norm, x, weight, weight)


@pytest.mark.parametrize("channels", [7, 24, 64])
def test_rows_are_their_own(channels: int) -> None:
    x, weight = random(3, 403, channels), random(channels, seed=1)
    assert_rows_do_not_meet(l2_norm, x)
    assert_rows_do_not_meet(lambda x: rms_norm(x, weight, gate=x * 0.5), x)
    assert_rows_do_not_meet(lambda x: layer_norm(x, weight, weight), x)
    assert_rows_do_not_meet(lambda x: group_norm(x, 1, weight, weight, gate=x * 0.5), x)


def test_same_bits_again() -> None:
    x, gate, weight = random(300, 41), random(300, 41, seed=1), random(41, seed=2)
    assert_repeats(l2_norm, x)
    assert_repeats(lambda x, w, g: rms_norm(x, w, gate=g, residual=g, return_residual=True), x, weight, gate)
    assert_repeats(lambda x, w, g: layer_norm(x, w, w, gate=g), x, weight, gate)


def test_the_backward_keeps_inputs_and_a_number_a_row() -> None:
    x, gate, weight = random(64, 32), random(64, 32, seed=1), random(32, seed=2)
    inputs, row = 64 * 32 * 4, 64 * 4
    assert saved_bytes(l2_norm, x) == inputs + row
    assert saved_bytes(rms_norm, x, weight) == inputs + row + 32 * 4
    assert saved_bytes(lambda x, w, g: rms_norm(x, w, gate=g), x, weight, gate) == 2 * inputs + row + 32 * 4
    assert saved_bytes(lambda x, w, g: layer_norm(x, w, gate=g), x, weight, gate) == 2 * inputs + 2 * row + 32 * 4
    residual = saved_bytes(lambda x, w, r: rms_norm(x, w, residual=r, return_residual=True), x, weight, gate)
    assert residual == inputs + row + 32 * 4


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    x, gate, weight = random(4, 8, dtype=torch.bfloat16), random(4, 8, seed=1), random(8, dtype=torch.float64, seed=2)
    for op in (rms_norm, layer_norm):
        (y,), grads = results(lambda x, w, g: op(x, w, gate=g), (x, weight, gate))  # noqa: B023
        assert [t.dtype for t in (y, *grads)] == [torch.bfloat16, torch.bfloat16, torch.float64, torch.float32]


def test_strided_inputs() -> None:
    x = random(4, 8, 6)
    assert torch.equal(l2_norm(x.transpose(1, 2)), l2_norm(x.transpose(1, 2).contiguous()))
    wide = x[:, :1].expand(4, 8, 6)
    assert torch.equal(rms_norm(wide, gate=wide), rms_norm(wide.contiguous(), gate=wide.contiguous()))


def test_autocast_and_checkpointing() -> None:
    x, weight = random(2, 8, dtype=torch.bfloat16).requires_grad_(), torch.ones(8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.utils.checkpoint.checkpoint(lambda x, w: rms_norm(x, w, gate=x), x, weight, use_reentrant=False)
    assert y.dtype == torch.bfloat16
    for have, want in zip(
        torch.autograd.grad(y.sum(), (x, weight)),
        torch.autograd.grad(rms_norm(x, weight, gate=x).sum(), (x, weight)),
        strict=True,
    ):
        assert torch.equal(have, want)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ({"weight": torch.ones(7)}, ValueError, r"weight must have shape \[8\], got \[7\]"),
        ({"gate": torch.ones(8)}, ValueError, r"gate must have shape \[2, 8\], got \[8\]"),
        ({"residual": torch.ones(1, 8)}, ValueError, r"residual must have shape \[2, 8\], got \[1, 8\]"),
        ({"weight": torch.ones(8, dtype=torch.int64)}, TypeError, "weight must have a floating dtype, got int64"),
        ({"gate": torch.ones(2, 8, device="meta")}, ValueError, "gate must be on cpu like x, got meta"),
        ({"gate_activation": "tanhh"}, ValueError, "gate_activation must be one of 'silu', .*, got 'tanhh'"),
        ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'portable', got 'cuda'"),
    ],
)
def test_rms_norm_refuses(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rms_norm(torch.ones(2, 8), **arguments)


def test_layer_and_group_norm_refuse() -> None:
    for op in (layer_norm, lambda x, **rest: group_norm(x, 2, **rest)):
        with pytest.raises(ValueError, match=r"bias must have shape \[8\], got \[7\]"):
            op(torch.ones(2, 8), bias=torch.ones(7))
        with pytest.raises(ValueError, match=r"gate_activation must be one of 'silu', .*, got 'swish'"):
            op(torch.ones(2, 8), gate=torch.ones(2, 8), gate_activation="swish")
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"D must be a positive multiple of groups = {groups}, got 8"):
            group_norm(torch.ones(2, 8), groups)


def test_norms_refuse_what_is_no_row() -> None:
    for op in (rms_norm, layer_norm, l2_norm):
        with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., D\], got \[\]"):
            op(torch.tensor(1.0))
        with pytest.raises(TypeError, match="x must have a floating dtype, got int64"):
            op(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize("channels", [1, 2])
def test_layer_norm_of_one_and_of_two_channels(channels: int) -> None:
    """A channel alone is its own mean: nothing of it is left, and its weight gets no gradient."""
    x, weight, bias = 30 * random(40, channels), random(channels, seed=1), random(channels, seed=2)
    assert_matches(layer_norm, definitions.layer_norm, x, weight, bias)
    if channels == 1:
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        d_x, d_weight, _ = torch.autograd.grad(layer_norm(*leaves).square().sum(), leaves)
        assert not d_x.any() and not d_weight.any()


def test_gradients_of_16_bit_weights_are_summed_in_32() -> None:
    """torch's own layer norm adds them up in 16 bits on a CPU: 12 % off after 10,000 rows."""
    x, dy = random(4096, 8, dtype=torch.bfloat16, seed=1), random(4096, 8, dtype=torch.bfloat16, seed=2)
    weight, bias = (random(8, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in (3, 4))
    (got,) = torch.autograd.grad(layer_norm(x, weight, bias), bias, dy)
    exact = dy.double().sum(0)
    assert_within_budget("bias", got, exact, exact.bfloat16())
