"""The laws of the house, for every public op that `capabilities()` names, on tiny calls.

The future does not reach the past, a row does not see its neighbours, a state carried over a cut leaves no trace, the same call gives
the same bits, and second derivatives are right or refused in words.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from paper_loops import MECHANISMS
from samples import sample
from test_capabilities import FOUND, LOSSES, TOKENS, per_token, run, taking, where
from torch import Tensor

from flashmix.capabilities import tiny_call

pytestmark = pytest.mark.usefixtures("one_thread")
every_op = pytest.mark.parametrize("op", FOUND)
STEPS = [op for op in FOUND if op.endswith("_step")]
with_time = pytest.mark.parametrize("op", [op for op in FOUND if op not in LOSSES and per_token(op)])
REFUSED = r"no second derivative|is not implemented"


def a_call(op: str, dtype: torch.dtype = torch.float32, batch: int = 1, impl: str = "auto") -> dict[str, Any]:
    """A tiny call in which tokens are in order, and a loss is one number a token."""
    call = tiny_call(op, dtype, tokens=TOKENS, batch=batch) | {"impl": impl}
    if op == "softmax_attention":
        call["causal"] = True
    elif op in LOSSES:
        call["reduction"] = "none"
    return call


def leaves_of(call: dict[str, Any]) -> dict[str, Tensor]:
    """The arguments that can have a gradient, made to want one."""
    return {
        name: value.requires_grad_()
        for name, value in call.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not name.startswith("teacher_")
    }


def evaluated(op: str, call: dict[str, Any], upto: int | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and the gradients of their weighted sum; with `upto` of the first output's first tokens only."""
    call = {name: value.clone() if isinstance(value, Tensor) else value for name, value in call.items()}
    leaves = leaves_of(call) if FOUND[op].backward else {}
    outputs = run(op, call)
    outputs = outputs if upto is None else [o[:, :upto] for o in outputs]
    if not leaves:
        return outputs, {}
    flows = [torch.linspace(1, 2, o[0].numel()).view(1, *o.shape[1:]).expand_as(o).to(o.dtype) for o in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), flows)
    return [o.detach() for o in outputs], dict(zip(leaves, grads, strict=True))


def same(got: Tensor, expected: Tensor, what: str) -> None:
    assert got.shape == expected.shape and torch.equal(got, expected), f"{what}: other bits"


@every_op
def test_the_same_call_gives_the_same_bits(op: str) -> None:
    for dtype in FOUND[op].dtypes:
        for impl in taking(op, dtype):
            first, second = (evaluated(op, a_call(op, dtype, batch=2, impl=impl)) for _ in range(2))
            for got, expected in zip(first[0], second[0], strict=True):
                same(got, expected, f"{dtype}, {impl}")
            for name, grad in first[1].items():
                same(grad, second[1][name], f"{dtype}, {impl}, gradient of {name}")


def rows_of(op: str) -> set[str]:
    """The arguments that have one entry a row of the batch."""
    one = tiny_call(op, batch=1)
    return {n for n, v in tiny_call(op, batch=3).items() if isinstance(v, Tensor) and v.shape != one[n].shape}


@every_op
def test_a_row_does_not_see_its_neighbours(op: str) -> None:
    rows = rows_of(op)
    together, grads = evaluated(op, a_call(op, batch=3))
    for row in range(3):
        call = a_call(op, batch=3)
        call |= {name: call[name][row : row + 1] for name in rows}
        call |= {"cache": a_call(op)["cache"]} if "cache" in call else {}
        alone, own = evaluated(op, call)
        for got, expected in zip(alone, together, strict=True):
            same(got, expected[row : row + 1], f"row {row}")
        for name in rows & own.keys():
            same(own[name], grads[name][row : row + 1], f"row {row}, gradient of {name}")


@with_time
def test_the_future_does_not_reach_the_past(op: str) -> None:
    past, tokens = 4, per_token(op)
    call, other = a_call(op), a_call(op)
    for name in tokens:
        other[name] = torch.cat([call[name][:, :past], call[name][:, past:].flip(1) * 0.5], dim=1)
    (outputs, grads), (changed, others) = evaluated(op, call, past), evaluated(op, other, past)
    for got, expected in zip(changed, outputs, strict=True):
        same(got, expected, "output")
    for name in tokens & grads.keys():
        same(others[name][:, :past], grads[name][:, :past], f"gradient of {name}")
        assert not grads[name][:, past:].any() and not others[name][:, past:].any(), f"{name} of later tokens"


@where("state")
def test_a_cut_leaves_no_trace(op: str) -> None:
    tokens = per_token(op)
    if not tokens:
        pytest.skip("one token a call: see the steps of tests/test_capabilities.py")
    carried = {"return_state": True} if "cache" not in a_call(op) and op not in STEPS else {}
    whole = run(op, a_call(op, torch.float64, batch=2) | carried)
    empty = 0 if op not in STEPS else 1  # a step has at least one token
    for sizes in ([empty, 6 - empty], [2, 4], [5, 1], [1, empty, 3, 2 - empty]):
        call, outputs, first = a_call(op, torch.float64, batch=2), [], 0
        state: list[Tensor] = []
        for size in sizes:
            part = {n: v[:, first : first + size] if n in tokens else v for n, v in call.items()}
            if state:
                part["initial_state"] = tuple(state) if len(state) > 1 else state[0]
            o, *rest = run(op, part | carried)
            state, first = (rest if carried else []), first + size
            outputs.append(o)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole[0])
        for got, expected in zip(state, whole[1:] if carried else [], strict=True):
            torch.testing.assert_close(got, expected)


# Those whose second derivative torch's differences take seconds for, and mechanisms that no published model runs, with `-m whole`.
DERIVED = [op for op, can in FOUND.items() if can.backward]
LONG = ("rotary", "rotary_qk", "short_conv_qkv")


@pytest.mark.parametrize(
    "op", sample(DERIVED, [op for op in DERIVED if op not in LONG and not (op in MECHANISMS and MECHANISMS[op].rare)])
)
def test_second_derivatives_are_right_or_refused_in_words(op: str) -> None:
    for impl in FOUND[op].implementations:
        call = a_call(op, torch.float64 if impl in taking(op, torch.float64) else torch.float32, impl=impl)
        leaves = leaves_of(call)

        def function(
            *values: Tensor, call: dict[str, Any] = call, names: tuple[str, ...] = tuple(leaves)
        ) -> tuple[Tensor, ...]:
            return tuple(run(op, call | dict(zip(names, values, strict=True))))

        outputs = function(*leaves.values())
        grads = torch.autograd.grad(sum(o.sin().sum() for o in outputs), list(leaves.values()), create_graph=True)
        try:
            torch.autograd.grad(sum(g.sin().sum() for g in grads), list(leaves.values()))
        except (RuntimeError, NotImplementedError) as error:
            assert re.search(REFUSED, str(error)), str(error)
        else:
            assert torch.autograd.gradgradcheck(function, tuple(leaves.values()))
