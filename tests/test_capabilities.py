"""Every cell of `capabilities()` that says yes is run, and every that says no is an error in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flashmix
from flashmix.capabilities import DTYPES, Capability, capabilities, public_ops, table, tiny_call

FOUND = capabilities()
TOKENS = 6
pytestmark = pytest.mark.usefixtures("one_thread")
GATES = ("softplus_decay", "bounded_decay", "write_strength")
LOSSES = ("cross_entropy", "linear_cross_entropy", "linear_kl_divergence", "linear_grpo")


def where(cell: str, yes: bool = True) -> Any:
    return pytest.mark.parametrize("op", [name for name, can in FOUND.items() if getattr(can, cell) is yes])


def run(op: str, call: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call gives, None left out."""
    found = list(flattened(getattr(flashmix, op)(**call)))
    return [torch.cat(found[:3], -1), *found[3:]] if op == "short_conv_qkv" else found  # one output, then the state


def flattened(got: Any) -> Iterator[Tensor]:
    """The tensors of a result; several states come as a tuple."""
    if isinstance(got, Tensor):
        yield got
    elif got is not None:
        for part in got:
            yield from flattened(part)


def per_token(op: str) -> set[str]:
    """The arguments that have one entry a token."""
    short = tiny_call(op, tokens=TOKENS - 1)
    return {
        name
        for name, value in tiny_call(op, tokens=TOKENS).items()
        if isinstance(value, Tensor) and value.shape != short[name].shape
    }


def taking(op: str, dtype: torch.dtype) -> list[str]:
    """The implementations that take this dtype; all of them take float32."""
    reasons = flashmix.explain(getattr(flashmix, op), **tiny_call(op, dtype)).reasons
    return [impl for impl in FOUND[op].implementations if reasons[impl] is None]


def test_every_public_op_is_there_and_runs() -> None:
    assert set(FOUND) == set(public_ops()) and len(FOUND) >= 29
    for can in FOUND.values():
        assert can.forward and can.implementations and can.dtypes, can
    assert not FOUND["attention_with_cache"].backward and FOUND["softmax_attention"].backward


@where("forward")
def test_forward_in_every_dtype_with_every_implementation(op: str) -> None:
    for dtype in FOUND[op].dtypes:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for impl in taking(op, dtype):
            first, *rest = run(op, tiny_call(op, dtype) | {"impl": impl})
            assert first.dtype == (wide if op in (*LOSSES, *GATES) else dtype)
            assert all(torch.isfinite(t).all() for t in (first, *rest))


@where("backward")
def test_backward_in_every_dtype_with_every_implementation(op: str) -> None:
    for dtype in FOUND[op].dtypes:
        for impl in taking(op, dtype):
            call = tiny_call(op, dtype) | {"impl": impl}
            leaves = {
                name: value.requires_grad_()
                for name, value in call.items()
                if isinstance(value, Tensor) and value.is_floating_point() and not name.startswith("teacher_")
            }
            flow = torch.Generator().manual_seed(1)
            outputs = run(op, call)
            flows = [torch.rand(t.shape, generator=flow).to(t.dtype) for t in outputs]
            for name, grad in zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), flows), strict=True):
                assert torch.isfinite(grad).all() and grad.count_nonzero(), f"{dtype}, {impl}: gradient of {name}"


@where("backward", False)
def test_no_backward_is_said_in_words(op: str) -> None:
    call = tiny_call(op)
    next(value for value in call.values() if isinstance(value, Tensor)).requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient"):
        run(op, call)
    with torch.no_grad():
        run(op, call)


@where("packed")
def test_packed_is_one_by_one(op: str) -> None:
    if op == "attention_with_cache":
        return cache_packed_is_one_by_one()
    call, tokens = tiny_call(op, torch.float64, tokens=TOKENS), per_token(op)
    ends = torch.tensor([0, 2, 2, 6])
    together = run(op, call | {"cu_seqlens": ends})[0]
    for first, last in ((0, 2), (2, 6)):
        alone = {name: value[:, first:last] if name in tokens else value for name, value in call.items()}
        torch.testing.assert_close(run(op, alone)[0], together[:, first:last])


def cache_packed_is_one_by_one() -> None:
    call = tiny_call("attention_with_cache", torch.float64, tokens=TOKENS)
    q, k, v = (call[name] for name in ("q", "k", "v"))
    cache = flashmix.KVCache.contiguous(3, 8, 2, 8, dtype=torch.float64)
    packing = flashmix.Packing.from_lengths([2, 0, 4])
    together, _ = flashmix.attention_with_cache(q, cache, k, v, cu_seqlens=packing)
    for first, last in ((0, 2), (2, 6)):
        part = [t[:, first:last] for t in (q, k, v)]
        one = flashmix.KVCache.contiguous(1, 8, 2, 8, dtype=torch.float64)
        torch.testing.assert_close(flashmix.attention_with_cache(part[0], one, *part[1:])[0], together[:, first:last])


@where("step")
def test_steps_with_the_carried_state_are_the_whole(op: str) -> None:
    assert FOUND[op].state
    call, tokens = tiny_call(op, torch.float64, tokens=TOKENS), per_token(op)
    if not tokens:  # it has no axis of tokens: one at a time is all it does
        return
    stepped = tiny_call(op, torch.float64, tokens=TOKENS)  # its own cache
    keeps = {} if {"cache", "state"} & set(call) else {"return_state": True}
    whole = run(op, call | keeps)
    outputs: list[Tensor] = []
    for t in range(TOKENS):
        part = {name: value[:, t : t + 1] if name in tokens else value for name, value in stepped.items()}
        o, *state = run(op, part | keeps)
        outputs.append(o)
        if keeps:
            stepped["initial_state"] = state[0] if len(state) == 1 else tuple(state)
    torch.testing.assert_close(torch.cat(outputs, 1), whole[0])
    if keeps:
        torch.testing.assert_close(state, whole[1:])
    elif "state" in call:
        torch.testing.assert_close(stepped["state"], call["state"])
    else:
        assert torch.equal(stepped["cache"].lengths, call["cache"].lengths)


@where("state", False)
def test_an_op_without_a_state_takes_none(op: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'initial_state'"):
        run(op, tiny_call(op) | {"initial_state": None})


def test_a_dtype_or_device_that_no_one_runs_is_a_no() -> None:
    """The cells follow the checks: integers are refused by all, and so is an unknown implementation."""
    for op in FOUND:
        call = {name: t.int() if isinstance(t, Tensor) else t for name, t in tiny_call(op).items()}
        with pytest.raises(TypeError):
            flashmix.explain(getattr(flashmix, op), **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_dtypes_of_hopper_kernels_in_words(dtype: torch.dtype) -> None:
    q, beta = torch.ones(1, 5, 1, 128, dtype=dtype), torch.ones(1, 5, 1)
    reason = flashmix.explain(flashmix.delta_rule, q, q, q, beta).reasons["gluon"]
    assert reason is not None
    if dtype == torch.float16:
        assert reason.startswith("it scales operands by decays, of which float16 has none")
    else:
        assert reason == f"its kernels take bfloat16, got {dtype}"


def test_the_table_has_a_row_for_each_op() -> None:
    lines = table(FOUND).splitlines()
    assert lines[0] == "| op | forward | backward | packed | state | step | dtypes | implementations |"
    assert len(lines) == 2 + len(FOUND)
    can = Capability("an_op", True, False, True, False, False, DTYPES[1:3], ("portable",))
    assert (
        table({"an_op": can}).splitlines()[2] == "| an_op | yes | no | yes | no | no | float32, bfloat16 | portable |"
    )
