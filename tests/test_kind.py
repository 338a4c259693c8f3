"""Calls of a kind that ran before: the same results and errors, at less cost; on a CPU that passes for the current GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmix
from flashmix.gpu import device as gpu
from flashmix.op.kind import ByKind
from flashmix.ops.attention import op as attention
from flashmix.ops.recurrence import op as recurrence


@pytest.fixture
def fitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """An entry for each call that was checked."""
    seen: list[Any] = []
    monkeypatch.setattr(gpu, "is_current", lambda t: t.is_cpu)
    for module in (attention, recurrence):

        def fit(values: dict[str, Any], fit: Any = module.fit) -> None:
            seen.append(1)
            fit(values)

        monkeypatch.setattr(module, "CALLS", ByKind(module.CALLS.op, fit))
    yield seen


def operands(T: int = 5) -> list[Tensor]:
    q, k, v = torch.randn(3, 1, T, 2, 8)
    return [q, k, v, torch.rand(1, T, 2), -torch.rand(1, T, 2)]


def test_a_kind_is_checked_once_and_has_the_same_results(fitted: list[Any]) -> None:
    for _ in range(3):
        x = operands()
        o, state = flashmix.delta_rule(*x, return_state=True)
        wanted = flashmix.delta_rule(*(t.clone() for t in x), return_state=True, scale=8**-0.5)
        assert torch.equal(o, wanted[0]) and torch.equal(state, wanted[1])
    assert len(fitted) == 2


def test_gradients_are_recorded_as_each_call_wants(fitted: list[Any]) -> None:
    x = [t.requires_grad_() for t in operands()]
    found = []
    for _ in range(2):
        o, _ = flashmix.delta_rule(*x)
        found.append((o, *torch.autograd.grad(o.sum(), x)))
        with torch.no_grad():
            assert not flashmix.delta_rule(*x)[0].requires_grad
        assert not flashmix.delta_rule(*(t.detach() for t in x))[0].requires_grad
        assert flashmix.delta_rule(x[0], *(t.detach() for t in x[1:]))[0].requires_grad
    assert len(fitted) == 3  # without a graph it matters not who would want a gradient
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("impl", ["portable", "sdpa", "auto"])
def test_options_make_kinds(fitted: list[Any], impl: str) -> None:
    x = torch.randn(3, 1, 6, 2, 8).unbind()
    full, causal, *again = (
        flashmix.softmax_attention(*x, causal=causal, impl=impl)[0] for causal in (False, True, False, True)
    )
    assert torch.equal(full, again[0]) and torch.equal(causal, again[1]) and not torch.equal(full, causal)
    assert len(fitted) == (2 if impl == "portable" else 4)  # torch differentiates its own attention


def test_each_call_with_dropout_draws_anew(fitted: list[Any]) -> None:
    q, k, v = torch.randn(3, 1, 64, 2, 8)
    first, second = (flashmix.softmax_attention(q, k, v, dropout_p=0.5)[0] for _ in range(2))
    assert not torch.equal(first, second) and len(fitted) == 2


def wrong(x: list[Tensor]) -> dict[str, list[Any]]:
    q, k, v, beta, decay = x
    return {
        "dtype of k": [q, k.double(), v, beta, decay],
        "tokens of v": [q, k, v[:, 1:], beta, decay],
        "no tensor": [q, k, v.tolist(), beta, decay],
        "None": [q, k, None, beta, decay],
        "sparse": [q, k, v.to_sparse(), beta, decay],
        "device": [q, k, v, beta.to("meta"), decay],
        "integers": [q, k, v, beta.int(), decay],
        "axes": [q, k, v, beta[..., None], decay],
        "nested": [q, k, torch.nested.nested_tensor([v[0], v[0]]), beta, decay],
    }


@pytest.mark.parametrize("name", wrong(operands()))
def test_wrong_calls_raise_after_good_ones(fitted: list[Any], name: str) -> None:
    x = operands()
    with pytest.raises((TypeError, ValueError)) as wanted:
        flashmix.delta_rule(*wrong(x)[name])
    for _ in range(2):
        flashmix.delta_rule(*x)
    for _ in range(2):
        with pytest.raises(wanted.type) as found:
            flashmix.delta_rule(*wrong(x)[name])
        assert str(found.value) == str(wanted.value)
    with pytest.raises(ValueError, match="impl must be one of"):
        flashmix.delta_rule(*x, impl="none")


def test_strides_make_kinds(fitted: list[Any]) -> None:
    x = operands()
    for _ in range(2):
        o, _ = flashmix.delta_rule(*x)
        across, _ = flashmix.delta_rule(x[0].transpose(1, 2).contiguous().transpose(1, 2), *x[1:])
        assert torch.equal(o, across)
    assert len(fitted) == 2


def test_no_tensor_is_held(fitted: list[Any]) -> None:
    x = [t.requires_grad_() for t in operands()]
    for _ in range(2):
        o, state = flashmix.delta_rule(*x, return_state=True)
        a, _ = flashmix.softmax_attention(*x[:3])
    held = [weakref.ref(t) for t in (*x, o, state, a)]
    del x, o, state, a
    gc.collect()
    assert not any(ref() is not None for ref in held)


def test_what_is_around_a_call_is_heeded(fitted: list[Any]) -> None:
    """Transforms, `explain` and packed sequences take the long way."""
    x = operands()
    for _ in range(2):
        o, _ = flashmix.delta_rule(*x)
    assert flashmix.explain(flashmix.delta_rule, *x).choice is not None
    rows = torch.func.vmap(lambda *x: flashmix.delta_rule(*x)[0])(*(torch.stack([t, t]) for t in x))
    assert torch.equal(rows[1], o)
    packed, _ = flashmix.delta_rule(*x, cu_seqlens=torch.tensor([0, 2, 5]))
    assert not torch.equal(packed, o)
    with pytest.raises(ValueError, match="must end at the token count"):
        flashmix.delta_rule(*x, cu_seqlens=torch.tensor([0, 2, 4]))
    negated = torch.complex(torch.zeros(1, 5, 2, 8), -x[0]).conj().imag  # q, with the other sign in memory
    assert torch.equal(flashmix.delta_rule(negated, *x[1:])[0], o)
