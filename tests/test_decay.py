"""The gates of recurrences against their definitions."""

from __future__ import annotations

import definitions
import pytest
import torch
from rowwise_cases import DTYPES, assert_compiles, assert_matches, assert_repeats, assert_rows_do_not_meet, random
from torch import Tensor

from flashmix.ops.decay.op import bounded_decay, softplus_decay, write_strength

SHAPES = [((2, 5, 24), (24,)), ((2, 5, 3, 7), (3, 7)), ((1, 1, 7), (7,)), ((2, 0, 4), (4,)), ((40, 40), (40,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, of_bias", SHAPES)
def test_gates_are_their_definitions(shape: tuple[int, ...], of_bias: tuple[int, ...], dtype: torch.dtype) -> None:
    x, A_log = random(*shape, dtype=dtype) * 3, random(of_bias[0], dtype=dtype, seed=1)
    dt_bias = random(*of_bias, dtype=dtype, seed=2) * 2 - 3
    assert_matches(softplus_decay, definitions.softplus_decay, x, A_log, dt_bias)
    assert_matches(bounded_decay, definitions.bounded_decay, x, A_log, dt_bias)
    for negative in (False, True):
        assert_matches(
            lambda x: write_strength(x, negative_eigenvalues=negative),  # noqa: B023
            lambda x: definitions.write_strength(x, negative),  # noqa: B023
            x,
        )


def test_gates_are_float32_and_stay_in_their_bounds() -> None:
    x = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4], dtype=torch.bfloat16)[:, None].requires_grad_()
    zero = torch.zeros(1)
    for gate, low in ((softplus_decay, -1e5), (bounded_decay, -5.0)):
        g = gate(x, zero, zero)  # type: ignore[operator]
        (slope,) = torch.autograd.grad(g.sum(), x)
        assert g.dtype == torch.float32 and low <= g.min() and g.max() <= 0 and torch.isfinite(slope).all()
    assert write_strength(x, negative_eigenvalues=True).flatten().tolist() == pytest.approx([0, 0, 1, 2, 2])


def test_float64_is_as_precise_as_float64() -> None:
    """Where torch's own softplus is cut off: z between 20 and 40."""
    x = torch.linspace(-40, 60, 2001, dtype=torch.float64)[:, None]
    leaves = [t.requires_grad_() for t in (x, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))]
    found, exact = softplus_decay(*leaves), definitions.softplus_decay(*leaves)
    step = torch.finfo(torch.float64).eps
    assert ((found - exact) / exact).abs().max() <= 4 * step
    for got, expected in zip(*(torch.autograd.grad(g.sum(), leaves) for g in (found, exact)), strict=True):
        assert ((got - expected) / expected).abs().max() <= 4 * step


def test_laws() -> None:
    x, A_log, dt_bias = (random(*s, dtype=torch.float64, seed=1).requires_grad_() for s in ((2, 3, 2, 4), (2,), (2, 4)))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(softplus_decay, (x, A_log, dt_bias)) and check(bounded_decay, (x, A_log, dt_bias))
        assert check(write_strength, (x,))
    inputs = random(2, 5, 4), random(4, seed=1), random(4, seed=2)
    for gate in (softplus_decay, bounded_decay):
        assert_compiles(gate, *inputs)
        assert_repeats(gate, *inputs)
        # eight heads: the end of a row is whole vectors
        assert_rows_do_not_meet(lambda x, g=gate: g(x, random(8, seed=1), random(8, seed=2)), random(3, 403, 8))
    assert_compiles(write_strength, inputs[0])


X, HEADS = torch.ones(2, 5, 4), torch.ones(4)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((X, HEADS[:3], HEADS), ValueError, r"dt_bias must have shape \[3\], got \[4\]"),
        ((X, HEADS[:3], HEADS[:3]), ValueError, r"x must have shape \[\.\.\., 3\], got \[2, 5, 4\]"),
        ((X, HEADS, torch.ones(4, 4)), ValueError, r"x must have shape \[\.\.\., 4, 4\], got \[2, 5, 4\]"),
        ((X, X, HEADS), ValueError, r"A_log must have shape \[H\], got \[2, 5, 4\]"),
        ((X.long(), HEADS, HEADS), TypeError, "x must have a floating dtype, got int64"),
        ((X, HEADS.to("meta"), HEADS), ValueError, "A_log must be on cpu like x, got meta"),
    ],
)
def test_gates_refuse(arguments: tuple[Tensor, Tensor, Tensor], error: type[Exception], text: str) -> None:
    for gate in (softplus_decay, bounded_decay):
        with pytest.raises(error, match=text):
            gate(*arguments)  # type: ignore[operator]


def test_a_bound_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lower must be between -5\.0 and -1e-06, got 1"):
        bounded_decay(X, HEADS, HEADS, lower=1)


def test_float64_decays_of_large_inputs() -> None:
    """Where e^-z is still a number beside z in float64, though not in float32."""
    z = torch.linspace(15, 45, 40, dtype=torch.float64).view(20, 2)
    assert_matches(
        softplus_decay, definitions.softplus_decay, z, random(2, dtype=z.dtype), random(2, dtype=z.dtype, seed=1)
    )
