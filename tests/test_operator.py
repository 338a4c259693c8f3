"""Kernels as operators (`flashmix.op.rowwise.Operator`): eager, under autograd, compiled, of tensors without data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from rowwise_cases import random
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flashmix.op.rowwise import Operator, Options, Tensors


class Scaled:
    """`y = scale x w`, keeping the sum of each row, which it does not need."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        x = inputs[0]
        assert x is not None
        return [torch.empty_like(x)], [x.new_empty(x.shape[0])] if save else []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        x, w = inputs
        assert x is not None
        results[0].copy_(x * (1 if w is None else w) * options[0])
        for total in kept:
            total.copy_(x.sum(-1))

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        (x, w), (grad,) = inputs, grads
        assert x is not None and grad is not None and torch.equal(kept[0], x.sum(-1))
        if gradients[0] is not None:
            gradients[0].copy_(grad * (1 if w is None else w) * options[0])
        if gradients[1] is not None:
            gradients[1].copy_((grad * x).sum(0) * options[0])


def formula(x: Tensor, w: Tensor | None, scale: float) -> Tensor:
    return x * (1 if w is None else w) * scale


SCALED = Operator("test_scaled", f"{__name__}.Scaled", "Tensor x, Tensor? w", "float scale", formula=formula)


def scaled(x: Tensor, w: Tensor | None = None) -> Tensor:
    return SCALED(x, w, options=(2.0,))[0]


def inputs() -> tuple[Tensor, Tensor]:
    return random(3, 4, dtype=torch.float64).requires_grad_(), random(4, dtype=torch.float64, seed=1).requires_grad_()


def test_gradients_to_second_order() -> None:
    x, w = inputs()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(scaled, (x, w))
        assert check(scaled, (x,))
        assert check(lambda w: scaled(x.detach(), w), (w,))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager(backend: str) -> None:
    torch._dynamo.reset()
    compiled, (x, w) = torch.compile(scaled, fullgraph=True, backend=backend), inputs()
    assert torch.equal(compiled(x.detach(), w.detach()), scaled(x, w))
    for args in ((x, w), (x, w.detach()), (x.detach(), w)):
        wanted = [t for t in args if t.requires_grad]
        found = [torch.autograd.grad(op(*args).square().sum(), wanted) for op in (compiled, scaled)]
        for have, want in zip(*found, strict=True):
            torch.testing.assert_close(have, want)


def test_opcheck() -> None:
    x, w = inputs()
    torch.library.opcheck(SCALED.operator, (x, w, True, 2.0))
    torch.library.opcheck(SCALED.operator, (x.detach(), None, False, 2.0))
    plain = [x.detach(), w.detach()]
    torch.library.opcheck(SCALED.operator_backward, (plain[:1], plain, [plain[0].sum(1)], [True, False], 2.0))


def test_tensors_without_data_launch_nothing() -> None:
    with FakeTensorMode():
        x = torch.randn(3, 4, requires_grad=True)
        y = scaled(x, torch.randn(4))
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == grad.shape == (3, 4)


def test_a_second_derivative_without_a_formula_is_an_error() -> None:
    once = Operator("test_scaled_once", f"{__name__}.Scaled", "Tensor x, Tensor? w", "float scale")
    x, _ = inputs()
    y = once(x, None, options=(2.0,))[0]
    with pytest.raises(NotImplementedError, match="test_scaled_once has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


FIRST_CALLS = """
import sys, torch, flashmix
x = torch.randn(2, 8)
state, past = torch.zeros(2, 4, 16, 8), torch.zeros(2, 3, 96)
flashmix.delta_net_step(torch.randn(2, 96), torch.randn(2, 4), state, past, torch.randn(96, 4), heads=2)
q = torch.randn(2, 1, 4, 16)
flashmix.delta_rule_step(q, q, torch.randn(2, 1, 4, 8), torch.rand(2, 1, 4), state=state)
flashmix.rms_norm(x), flashmix.swiglu(x, x), flashmix.short_conv(x[None], torch.randn(8, 4))
assert "torch._dynamo" not in sys.modules
"""


def test_first_calls_do_without_the_compiler() -> None:
    """Whose import takes seconds: torch asks for it at the first call of an operator that Python defines."""
    subprocess.run([sys.executable, "-c", FIRST_CALLS], check=True)
