"""The op contract (flashmix.op.call): an op declared by its call, eager, compiled, under transforms, of tensors without data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from rowwise_cases import random
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flashmix import Packing
from flashmix.op.call import Call, Op, Outputs, Written, always
from flashmix.op.choose import Implementation


@dataclass(frozen=True)
class ScaledCall(Call):
    """`y = scale (x + shift) * w`, with `h = x + shift` as a second output where a shift is given."""

    x: Tensor
    shift: Tensor | None
    w: Tensor | None
    packing: Packing | None
    scale: float
    axes: tuple[int, ...]
    summed: bool

    def results(self) -> Outputs:
        return tuple(torch.empty_like(self.x) for _ in range(2 if self.summed else 1))

    def for_backward(self, outputs: Outputs) -> ScaledCall:
        return self if self.shift is None else self.but(x=outputs[1], shift=None)


def formula(call: ScaledCall) -> Outputs:
    h = call.x if call.shift is None else call.x + call.shift
    y = h * call.scale if call.w is None else h * call.w * call.scale
    return (y, h) if call.summed else (y,)


class Plain(ModuleType):
    """The implementation: keeps the sum of each row, which only its backward's assertion needs."""

    def forward(self, call: ScaledCall, save: bool) -> tuple[Outputs, Outputs]:
        assert not torch.is_autocast_enabled("cpu")
        outputs = tuple(t.clone() for t in formula(call))
        return outputs, (call.x.sum(-1),) if save else ()

    def keeps(self, call: ScaledCall) -> Outputs:
        return (call.x.new_empty(call.x.shape[:-1]),)

    def backward(
        self, call: ScaledCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
    ) -> dict[str, Tensor]:
        dy, dh = (*grads, None)[:2]
        assert call.shift is None and kept[0].shape == call.x.shape[:-1]
        dy = torch.zeros_like(call.x) if dy is None else dy
        found = {}
        if "x" in wanted:
            found["x"] = dy * call.scale if call.w is None else dy * call.w * call.scale
            found["x"] = found["x"] if dh is None else found["x"] + dh
        if "w" in wanted:
            found["w"] = (dy * call.x * call.scale).sum(0)
        return found


@dataclass(frozen=True)
class AddedCall(Call):
    """`total += x`, and the old total."""

    total: Written
    x: Tensor

    def results(self) -> Outputs:
        return (torch.empty_like(self.total),)


class Added(ModuleType):
    def forward(self, call: AddedCall, save: bool) -> tuple[Outputs, Outputs]:
        before = call.total.clone()
        call.total.add_(call.x)
        return (before,), ()


sys.modules["test_op_plain"], sys.modules["test_op_added"] = Plain("test_op_plain"), Added("test_op_added")
PLAIN = (Implementation("plain", "test_op_plain", always),)
SCALED = Op("test_scaled", ScaledCall, PLAIN, formula=formula, shares={"shift": "x"})
ONCE = Op("test_scaled_once", ScaledCall, PLAIN, shares={"shift": "x"})
ADDED = Op("test_added", AddedCall, (Implementation("plain", "test_op_added", always),), outputs=1)


def scaled(x: Tensor, w: Tensor | None = None, shift: Tensor | None = None, op: Op = SCALED, **options: Any) -> Any:
    outputs = op(ScaledCall(x, shift, w, options.get("packing"), 2.0, options.get("axes", ()), shift is not None))
    return outputs if shift is not None else outputs[0]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    made = (random(3, 4, dtype=torch.float64, seed=seed) for seed in range(2))
    return *(t.requires_grad_() for t in made), random(4, dtype=torch.float64, seed=2).requires_grad_()  # type: ignore[return-value]


def test_gradients_to_second_order() -> None:
    x, shift, w = inputs()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(scaled, (x, w))
        assert check(scaled, (x,))
        assert check(lambda w: scaled(x.detach(), w), (w,))
        assert check(lambda x, shift, w: scaled(x, w, shift), (x, shift, w))


def test_a_shared_gradient_has_the_dtype_of_each_field() -> None:
    x, shift, _ = inputs()
    narrow = x.detach().to(torch.float32).requires_grad_()
    y, h = scaled(narrow, None, shift)
    (y.sum() + h.sum()).backward()
    assert narrow.grad is not None and narrow.grad.dtype == torch.float32 and shift.grad is not None
    assert torch.equal(shift.grad, torch.full_like(shift, 3.0))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_eager(backend: str) -> None:
    torch._dynamo.reset()
    compiled, (x, shift, w) = torch.compile(scaled, fullgraph=True, backend=backend), inputs()
    assert torch.equal(compiled(x.detach(), w.detach()), scaled(x, w))
    for args in ((x, w), (x, w.detach()), (x.detach(), w)):
        wanted = [t for t in args if t.requires_grad]
        found = [torch.autograd.grad(op(*args).square().sum(), wanted) for op in (compiled, scaled)]
        for have, want in zip(*found, strict=True):
            torch.testing.assert_close(have, want)
    found = [
        torch.autograd.grad(sum(t.square().sum() for t in op(x, w, shift)), (x, shift, w)) for op in (compiled, scaled)
    ]
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want)


def test_opcheck() -> None:
    x, shift, w = inputs()
    packing = Packing.from_lengths([1, 2])
    for shifted, weight, packed in ((shift, w, None), (None, None, packing)):
        call = ScaledCall(x, shifted, weight, packed, 2.0, (1,), shifted is not None)
        torch.library.opcheck(SCALED.operator, (*SCALED.flat(call), True, "plain"))
    call = ScaledCall(x.detach(), None, w.detach(), packing, 2.0, (), False)
    torch.library.opcheck(
        SCALED.backward_operator, (*SCALED.flat(call), [x.detach()], [x.detach().sum(1)], ["x"], "plain")
    )
    torch.library.opcheck(ADDED.operator, (x.detach(), x.detach().clone(), False, "plain"))


def test_func_transforms() -> None:
    x, _, w = (t.detach() for t in inputs())
    want = torch.func.grad(lambda x: formula(ScaledCall(x, None, w, None, 2.0, (), False))[0].sum())(x)
    for op in (SCALED, ONCE):
        assert torch.equal(torch.func.grad(lambda x, op=op: scaled(x, w, op=op).sum())(x), want)
        assert torch.equal(torch.func.vmap(lambda x, op=op: scaled(x[None], w, op=op)[0])(x), scaled(x, w))
        rows = torch.func.vmap(torch.func.grad(lambda x, op=op: scaled(x[None], w, op=op).sum()))(x)
        assert torch.equal(rows, want)


def test_forward_mode_is_right_or_an_error() -> None:
    x, _, w = (t.detach() for t in inputs())
    _, tangent = torch.func.jvp(lambda x: scaled(x, w), (x,), (torch.ones_like(x),))
    assert torch.equal(tangent, 2 * w.expand_as(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(scaled(dual, w)).tangent, tangent)
        with pytest.raises(NotImplementedError, match="test_scaled_once has no forward-mode derivative"):
            scaled(dual, w, op=ONCE)


def test_written_fields_are_written_and_autograd_knows() -> None:
    total, x = torch.ones(3), torch.arange(3.0)
    compiled = torch.compile(lambda total, x: ADDED(AddedCall(total, x))[0], fullgraph=True, backend="aot_eager")
    for run in (lambda t, x: ADDED(AddedCall(t, x))[0], compiled, lambda t, x: ADDED.operator(t, x, False, "plain")):
        have, version = total.clone(), total._version
        version = have._version
        assert torch.equal(run(have, x), total) and torch.equal(have, total + x) and have._version > version
    with pytest.raises(NotImplementedError, match="writes into its arguments"):
        torch.func.grad(lambda t: ADDED(AddedCall(t, x))[0].sum())(total)


def test_autocast_stays_outside() -> None:
    x, _, w = inputs()
    with torch.autocast("cpu"):
        assert scaled(x, w).dtype == torch.float64


def test_tensors_without_data_run_nothing() -> None:
    with FakeTensorMode():
        x = torch.randn(3, 4, requires_grad=True)
        y = scaled(x, torch.randn(4))
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == grad.shape == (3, 4)


def test_a_second_derivative_without_a_formula_is_an_error() -> None:
    x, _, _ = inputs()
    (grad,) = torch.autograd.grad(scaled(x, op=ONCE).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="test_scaled_once has no second derivative"):
        grad.sum().backward()


def test_tables_of_a_packing_are_made_once_a_batch() -> None:
    packing, made = Packing.from_lengths([2, 3]), []
    for _ in range(2):
        packing.table("starts", lambda: made.append(0) or packing.cu_seqlens.tolist())
    assert packing.table("starts", list) == [0, 2, 5] and len(made) == 1
    packing.cu_seqlens[1] = 1
    assert packing.table("starts", packing.cu_seqlens.tolist) == [0, 1, 5]


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
