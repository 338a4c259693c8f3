"""Gated products against their definition."""

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
    random,
    saved_bytes,
)

from flashmix import explain
from flashmix.ops.gated_product.op import ACTIVATIONS, gated, swiglu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 24), (1, 1, 7), (3, 0, 8), (16,)])
def test_swiglu_is_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = random(*shape, dtype=dtype, seed=1) * 3, random(*shape, dtype=dtype, seed=2)
    assert_matches(swiglu, definitions.swiglu, gate, up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_is_its_definition(activation: str, dtype: torch.dtype) -> None:
    gate, up = random(3, 5, 24, dtype=dtype, seed=1) * 3, random(3, 5, 24, dtype=dtype, seed=2)
    scalar = torch.sigmoid if activation == "sigmoid" else getattr(definitions, activation)
    assert_matches(lambda g, u: gated(g, u, activation), lambda g, u: scalar(g) * u, gate, up)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_keeps_the_laws(activation: str) -> None:
    inputs = [random(3, 5, dtype=torch.float64, seed=s).requires_grad_() for s in (1, 2)]
    assert torch.autograd.gradcheck(lambda g, u: gated(g, u, activation), inputs)
    assert torch.autograd.gradgradcheck(lambda g, u: gated(g, u, activation), inputs)
    assert_compiles(lambda g, u: gated(g, u, activation), *(value.detach() for value in inputs))
    assert_repeats(lambda g, u: gated(g, u, activation), random(300, 41), random(300, 41, seed=1))
    assert_rows_do_not_meet(lambda x: gated(x, x * 0.5, activation), random(3, 1003, 7))


def test_gated_refuses_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of 'silu', .*, got 'elu'"):
        gated(torch.ones(2), torch.ones(2), "elu")


def test_swiglu_of_large_gates_stays_finite() -> None:
    gate = torch.tensor([-1e4, -200.0, -89.0, 89.0, 200.0, 1e4], requires_grad=True)
    y = swiglu(gate, torch.ones(6))
    (slope,) = torch.autograd.grad(y.sum(), gate)
    assert y.tolist() == pytest.approx([0.0, 0.0, 0.0, 89.0, 200.0, 1e4])
    assert slope.tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])


def test_swiglu_gradients_to_second_order() -> None:
    inputs = [random(3, 5, dtype=torch.float64, seed=s).requires_grad_() for s in (1, 2)]
    assert torch.autograd.gradcheck(swiglu, inputs)
    assert torch.autograd.gradgradcheck(swiglu, inputs)


def test_swiglu_compiles() -> None:
    assert_compiles(swiglu, random(2, 5, 24, seed=1), random(2, 5, 24, seed=2))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("channels", [7, 24, 64])
def test_swiglu_of_a_row_is_its_own(channels: int, threads: int) -> None:
    torch.set_num_threads(threads)
    assert_rows_do_not_meet(lambda x: swiglu(x, x * 0.5), random(3, 1003, channels))


def test_swiglu_takes_strided_inputs() -> None:
    both = random(4, 6, 32)
    gate, up = both.chunk(2, dim=-1)
    torch.testing.assert_close(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()), rtol=0, atol=0)


def test_swiglu_keeps_its_inputs_only() -> None:
    gate, up = random(64, 64).requires_grad_(), random(64, 64).requires_grad_()
    assert saved_bytes(swiglu, gate, up) == 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    "gate, up, error, text",
    [
        (torch.ones(3), torch.ones(4), ValueError, r"up must have shape \[3\], got \[4\]"),
        (torch.ones(3), torch.ones(3).double(), TypeError, "up must have dtype float32 like gate, got float64"),
        (torch.ones(3, dtype=torch.int64), torch.ones(3), TypeError, "gate must have a floating dtype, got int64"),
        ([1.0], torch.ones(1), TypeError, "gate must be a torch.Tensor, got list"),
        (torch.ones(3), torch.ones(3, device="meta"), ValueError, "up must be on cpu like gate, got meta"),
    ],
)
def test_swiglu_refuses(gate: object, up: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        swiglu(gate, up)  # type: ignore[arg-type]


def test_swiglu_explains_its_choice() -> None:
    assert explain(swiglu, torch.ones(2), torch.ones(2)).choice == "portable"
    with pytest.raises(ValueError, match="impl='triton' cannot run this: it needs tensors on a CUDA device, got cpu"):
        swiglu(torch.ones(2), torch.ones(2), impl="triton")
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'triton', 'portable', got 'cuda'"):
        swiglu(torch.ones(2), torch.ones(2), impl="cuda")
