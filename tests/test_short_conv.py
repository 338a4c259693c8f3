"""The short convolution against its definition: whole, split, packed, one token at a time."""

from __future__ import annotations

import definitions
import pytest
import torch
from rowwise_cases import (
    DTYPES,
    assert_compiles,
    assert_matches,
    assert_repeats,
    assert_rows_do_not_meet,
    assert_same_bits,
    random,
    results,
    saved_bytes,
)

from flashmix import Packing
from flashmix.ops.short_conv.op import short_conv

LENGTHS = [3, 0, 1, 7, 2, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_short_conv_is_its_definition(width: int, tokens: int, dtype: torch.dtype) -> None:
    x, state = random(2, tokens, 24, dtype=dtype, seed=1), random(2, width - 1, 24, dtype=dtype, seed=2)
    weight, bias = random(24, width, dtype=dtype, seed=3), random(24, dtype=dtype, seed=4)
    assert_matches(lambda x, w: short_conv(x, w)[0], lambda x, w: definitions.short_conv(x, w)[0], x, weight)
    for activation in ("silu", None):
        assert_matches(
            lambda *a: short_conv(*a[:3], activation=activation, initial_state=a[3], return_state=True),  # noqa: B023
            lambda *a: definitions.short_conv(*a, activation),  # noqa: B023
            x,
            weight,
            bias,
            state,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_packed_is_one_by_one(width: int, dtype: torch.dtype) -> None:
    """Sequences shorter than the width and empty ones included; gradients too."""
    weight, bias = random(8, width, seed=1, dtype=dtype), random(8, seed=2, dtype=dtype)
    x = random(1, sum(LENGTHS), 8, dtype=dtype).requires_grad_()
    state = random(len(LENGTHS), width - 1, 8, seed=3, dtype=dtype).requires_grad_()
    options = {"bias": bias, "return_state": True}
    packing = Packing.from_lengths(LENGTHS)
    for first in (state, None):
        rows = [None] * len(LENGTHS) if first is None else first.split(1)
        parts = [
            short_conv(part, weight, initial_state=s, **options)
            for part, s in zip(x.split(LENGTHS, dim=1), rows, strict=True)
        ]
        alone = torch.cat([y for y, _ in parts], dim=1), torch.cat([s for _, s in parts])
        leaves = (x,) if first is None else (x, state)
        grads = [random(*y.shape, seed=5, dtype=dtype) for y in alone]
        wanted = torch.autograd.grad(alone, leaves, grads)
        for cu_seqlens in (packing, packing.cu_seqlens.int()):
            packed = short_conv(x, weight, initial_state=first, cu_seqlens=cu_seqlens, **options)
            found = torch.autograd.grad(packed, leaves, grads)
            for have, want in zip((*packed, *found), (*alone, *wanted), strict=True):
                assert_same_bits("packed", have, want)


@pytest.mark.parametrize("cuts", [[4, 5], [1, 8], [1] * 9, [0, 9], [2, 0, 2, 5]])
def test_split_and_carried_is_whole(cuts: list[int]) -> None:
    """The last cut list is a prompt and then steps: step = full."""
    x, weight = random(2, 9, 8), random(8, 4, seed=1)
    whole, last = short_conv(x, weight, return_state=True)
    state, parts = None, []
    for part in x.split(cuts, dim=1):
        y, state = short_conv(part, weight, initial_state=state, return_state=True)
        parts.append(y)
    assert_same_bits("outputs", torch.cat(parts, 1), whole)
    assert_same_bits("state", state, last)


def test_state_is_optional() -> None:
    assert short_conv(random(1, 3, 4), random(4, 4))[1] is None


def test_state_owns_its_memory() -> None:
    x = random(1, 64, 4)
    _, state = short_conv(x, random(4, 4), return_state=True)
    assert state.untyped_storage().nbytes() == 3 * 4 * 4


@pytest.mark.parametrize("lengths", [None, [1, 0, 2]])
@pytest.mark.parametrize("activation", ["silu", None])
def test_gradients_to_second_order(activation: str | None, lengths: list[int] | None) -> None:
    count = 1 if lengths is None else len(lengths)
    packing = None if lengths is None else Packing.from_lengths(lengths)
    shapes = ((1, 3, 2), (2, 3), (2,), (count, 2, 2))
    inputs = [random(*shape, dtype=torch.float64, seed=s).requires_grad_() for s, shape in enumerate(shapes)]

    def op(x, w, b, s):  # type: ignore[no-untyped-def]
        return short_conv(x, w, b, activation=activation, initial_state=s, return_state=True, cu_seqlens=packing)

    assert torch.autograd.gradcheck(op, inputs)
    assert torch.autograd.gradgradcheck(op, inputs)


def test_gradient_through_the_state_alone() -> None:
    x = random(1, 5, 4).requires_grad_()
    _, state = short_conv(x, random(4, 4), return_state=True)
    (grad,) = torch.autograd.grad(state.sum(), x)
    assert grad.sum((0, 2)).tolist() == [0, 0, 4, 4, 4]


def test_compiles() -> None:
    x, weight, bias, state = random(1, 9, 8), random(8, 4, seed=1), random(8, seed=2), random(3, 3, 8, seed=3)
    cu_seqlens = torch.tensor([0, 4, 4, 9])
    assert_compiles(lambda x, w: short_conv(x, w)[0], x, weight)
    assert_compiles(
        lambda x, w, b, s: short_conv(x, w, b, initial_state=s, return_state=True, cu_seqlens=cu_seqlens),
        x,
        weight,
        bias,
        state,
    )


@pytest.mark.parametrize("channels", [7, 24])
def test_sequences_are_their_own(channels: int) -> None:
    weight = random(channels, 4, seed=1)
    assert_rows_do_not_meet(lambda x: short_conv(x, weight)[0], random(3, 403, channels))


def test_same_bits_again() -> None:
    packing = Packing.from_lengths([100, 0, 3, 200])
    inputs = random(1, 303, 41), random(41, 4, seed=1), random(41, seed=2), random(4, 3, 41, seed=3)
    assert_repeats(
        lambda x, w, b, s: short_conv(x, w, b, initial_state=s, return_state=True, cu_seqlens=packing), *inputs
    )


def test_the_backward_keeps_inputs_only() -> None:
    assert saved_bytes(lambda x, w: short_conv(x, w)[0], random(1, 64, 32), random(32, 4)) == (64 + 4) * 32 * 4


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    x, state, weight = random(1, 6, 4, dtype=torch.bfloat16), random(1, 3, 4, dtype=torch.bfloat16), random(4, 4)
    outputs, grads = results(lambda x, w, s: short_conv(x, w, initial_state=s, return_state=True), (x, weight, state))
    assert [t.dtype for t in (*outputs, *grads)] == [torch.bfloat16] * 3 + [torch.float32, torch.bfloat16]


def test_strided_inputs() -> None:
    x, weight = random(2, 8, 9).transpose(1, 2), random(4, 8, seed=1).T
    assert_same_bits("transposed", short_conv(x, weight)[0], short_conv(x.contiguous(), weight.contiguous())[0])


X, W = torch.ones(2, 5, 8), torch.ones(8, 4)
REFUSED = [
    ({"weight": W.T}, ValueError, r"weight must have shape \[8, 8\], got \[4, 8\]"),
    ({"weight": W[:, :0]}, ValueError, r"weight must have shape \[8, W\] with W >= 1, got \[8, 0\]"),
    ({"x": X[0]}, ValueError, r"x must have shape \[B, T, D\], got \[5, 8\]"),
    ({"x": X.long()}, TypeError, "x must have a floating dtype, got int64"),
    ({"bias": torch.ones(7)}, ValueError, r"bias must have shape \[8\], got \[7\]"),
    ({"bias": torch.ones(8).long()}, TypeError, "bias must have a floating dtype, got int64"),
    ({"initial_state": torch.ones(2, 4, 8)}, ValueError, r"initial_state must have shape \[2, 3, 8\], got \[2, 4, 8\]"),
    (
        {"initial_state": torch.ones(2, 3, 8).double()},
        TypeError,
        "initial_state must have dtype float32 like x, got float64",
    ),
    ({"weight": W.to("meta")}, ValueError, "weight must be on cpu like x, got meta"),
    ({"activation": "swish"}, ValueError, "activation must be one of None, 'silu', .*, got 'swish'"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens must come with inputs of batch size 1"),
    ({"x": X[:1], "cu_seqlens": torch.tensor([0, 3, 2, 5])}, ValueError, "must not decrease, got 3 followed by 2"),
    (
        {"x": X[:1], "cu_seqlens": torch.tensor([0, 3, 5]), "initial_state": torch.ones(1, 3, 8)},
        ValueError,
        r"initial_state must have shape \[2, 3, 8\], got \[1, 3, 8\]",
    ),
    ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'portable', got 'cuda'"),
]


@pytest.mark.parametrize("arguments, error, text", REFUSED)
def test_short_conv_refuses(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        short_conv(**{"x": X, "weight": W, **arguments})
