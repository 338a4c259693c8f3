"""What lies around a call: the default device, views with the other sign, boundaries that are overwritten, rows that vmap maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_errors import OPS, full_call
from torch import Tensor
from torch.func import grad, vmap

import flashmix
from flashmix import Packing
from flashmix.capabilities import tiny_call
from flashmix.op.choose import explain

FREE = [op for op in OPS if not op.endswith("_step") and op != "attention_with_cache"]

# torch has no rule for no rows of its own attention, nor of a quotient of one number.
NO_RULE = ("softmax_attention", "cross_entropy", "linear_cross_entropy", "linear_grpo")


def tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [t for entry in results if entry is not None for t in tensors(entry)]


def implementations(op: str, call: dict[str, Any]) -> list[str]:
    return [impl for impl, reason in explain(OPS[op], **call).reasons.items() if reason is None]


@pytest.mark.parametrize("op", OPS)
def test_the_default_device_is_not_where_a_call_computes(op: str) -> None:
    for impl in implementations(op, full_call(op)):
        want = tensors(OPS[op](**full_call(op), impl=impl))
        call = full_call(op)
        with torch.device("meta"):
            found = tensors(OPS[op](**call, impl=impl))
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))


@pytest.mark.parametrize("op", ["linear_attention", "delta_rule", "dplr", "scan", "selective_scan", "rwkv4", "slstm"])
def test_views_with_the_other_sign_are_read_as_they_are(op: str) -> None:
    call = full_call(op)
    want = tensors(OPS[op](**call, impl="native"))
    for name, t in call.items():
        if isinstance(t, Tensor) and t.is_floating_point():
            found = tensors(OPS[op](**call | {name: torch._neg_view(-t)}, impl="native"))
            for have, wanted in zip(found, want, strict=True):
                assert torch.equal(have.nan_to_num(), wanted.nan_to_num()), name


def test_a_state_with_the_other_sign_is_refused() -> None:
    call = full_call("delta_rule_step")
    with pytest.raises(ValueError, match=r"^state must not be a negated view"):
        flashmix.delta_rule_step(**call | {"state": torch._neg_view(call["state"])})


@pytest.mark.parametrize("op", ["linear_attention", "scan", "rotary", "softmax_attention", "short_conv", "hgrn"])
def test_boundaries_overwritten_before_the_backward(op: str) -> None:
    for impl in implementations(op, tiny_call(op) | {"cu_seqlens": torch.tensor([0, 2, 6])}):
        cu_seqlens = torch.tensor([0, 2, 6])
        call = tiny_call(op)
        first = next(name for name, t in call.items() if isinstance(t, Tensor))
        call[first].requires_grad_()
        result = tensors(OPS[op](**call, cu_seqlens=Packing(cu_seqlens, 6), impl=impl))[0]
        cu_seqlens[1] = 4
        with pytest.raises(RuntimeError, match=r"overwritten between the forward and the backward"):
            result.sum().backward()


@pytest.mark.parametrize("op", [op for op in FREE if op not in NO_RULE])
def test_vmap_over_no_rows(op: str) -> None:
    call = tiny_call(op)
    first = next(name for name, t in call.items() if isinstance(t, Tensor))
    none = call[first].new_zeros(0, *call[first].shape)
    mapped = vmap(lambda t: tuple(tensors(OPS[op](**call | {first: t}))))(none)
    shapes = [t.shape for t in tensors(OPS[op](**call))]
    assert [t.shape for t in mapped] == [(0, *shape) for shape in shapes]


def test_what_vmap_cannot_map_is_named() -> None:
    q, (k, v), gates = torch.randn(6, 2, 4), torch.randn(2, 6, 2, 2, 4), torch.rand(6, 2, 2)
    scores = torch.randn(2, 1, 6, 4)
    with pytest.raises(NotImplementedError, match=r"^mom: vmap must not map scores"):
        vmap(lambda s: flashmix.mom(q[None], k[None], v[None], gates[None], -gates[None], s)[0])(scores)
    with pytest.raises(ValueError, match=r"^cu_seqlens must be the same for all rows that vmap maps"):
        vmap(lambda c: flashmix.token_shift(q[None, :, 0], cu_seqlens=c)[0])(torch.tensor([[0, 2, 6], [0, 3, 6]]))


def test_the_second_derivative_of_torchs_attention_under_torch_func() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8)

    def loss(x: Tensor) -> Tensor:
        return flashmix.softmax_attention(x, k, v, impl="sdpa")[0].square().sum()

    with pytest.raises(NotImplementedError, match=r"^softmax_attention has no second derivative"):
        grad(lambda x: grad(loss)(x).sum())(q)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_attention_compiles_where_every_size_is_a_symbol(causal: bool) -> None:
    q, k, v = torch.randn(3, 3, 6, 2, 8)

    def attend(*x: Tensor) -> Tensor:
        return flashmix.softmax_attention(*x, causal=causal, impl="sdpa")[0]

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(q, k, v), attend(q, k, v))
