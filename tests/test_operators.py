"""torch's own checks of every registered operator, as the public ops call it: schema, tensors without data, autograd, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_errors import OPS, full_call
from torch import Tensor

import flashmix
from flashmix.capabilities import tiny_call
from flashmix.op.call import Op
from flashmix.op.choose import choose

WRITING = "test_schema", "test_faketensor"  # the checks of operators that autograd does not pass


def on(device: str, call: dict[str, Any]) -> dict[str, Any]:
    moved = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in call.items()}
    if "cache" in moved:
        moved["cache"] = flashmix.KVCache.contiguous(1, 16, 2, 8, device=device)
    return moved


def called(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], tuple[Op, Any]]:
    """A call of each registered operator by each implementation that runs it here, by their names; the last one, with most operands."""
    found: dict[tuple[str, str], tuple[Op, Any]] = {}
    run = Op.__call__

    def record(self: Op, call: Any, impl: str = "auto", asked: str | None = None) -> Any:
        implementation = choose(asked or self.name, self.implementations, call, impl)
        by_formula = implementation.formula is not None and implementation.formula(call) is not None
        if self.formula is not None or not by_formula:
            found[self.name, implementation.name] = self, call
        return run(self, call, impl, asked)

    monkeypatch.setattr(Op, "__call__", record)
    for op in OPS:
        for make in (tiny_call, full_call):
            with torch.no_grad():
                OPS[op](**on(device, make(op)))
            if device == "cpu" and make is full_call:
                with torch.no_grad():
                    OPS[op](**on(device, full_call(op)), impl="portable")
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_operator_passes_the_checks_of_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = called(device, monkeypatch)
    names = {name for name, _ in found}
    assert {"recurrence", "norm", "rotary", "short_conv", "softmax_attention", "cross_entropy"} <= names, names
    for (_, impl), (op, call) in found.items():
        call = call.but(**{n: t.detach().clone() for n in call.names if (t := getattr(call, n)) is not None})
        if op.writes:
            torch.library.opcheck(op.operator, (*op.flat(call), False, impl), test_utils=WRITING)
            continue
        wanted = [
            n
            for n in call.names
            if (t := getattr(call, n)) is not None and t.is_floating_point() and "teacher" not in n
        ]
        needs = {}
        if hasattr(call, "needs"):  # the public op refuses gradients of other tensors, and finds out which are wanted
            wanted = [n for n in ("hidden", "weight", "bias") if n in wanted]
            needs = {"needs": tuple(wanted)}
        leaves = {n: getattr(call, n).requires_grad_() for n in wanted} | needs
        torch.library.opcheck(op.operator, (*op.flat(call.but(**leaves)), True, impl))
