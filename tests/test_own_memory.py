"""The memory of results: each is its own and not much larger than its numbers, and can be written in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_errors import OPS, SEVERAL, full_call
from torch import Tensor

from flashmix.capabilities import tiny_call
from flashmix.op.choose import explain

NO_GRADIENT = ("_step", "attention_with_cache", "scan_max")
ITSELF = {(op, "out[1]", "x") for op in ("rms_norm", "layer_norm", "group_norm")}  # the residual, where none is given
LARGER, SMALL = 4, 2048  # times its numbers, and bytes of padding, that a result may keep


def flat(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an argument or result, with their places."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for i, entry in enumerate(value):
            yield from flat(entry, f"{name}[{i}]")


def calls(op: str) -> Iterator[dict[str, Any]]:
    """Calls with all optional tensors and with none, from a state, and of no tokens."""
    parameters = inspect.signature(OPS[op]).parameters
    state = {name: True for name in ("return_state", "return_residual", "return_lse") if name in parameters}
    given = {"initial_state": tuple(torch.full(shape, 0.1) for shape in SEVERAL[op])} if op in SEVERAL else {}
    required = {n: t for n, t in tiny_call(op).items() if parameters[n].default is not None}
    yield full_call(op) | state | given
    if "cache" not in parameters:
        yield required | state
    if not op.endswith(NO_GRADIENT):
        yield tiny_call(op, tokens=0) | state | given
    if "cu_seqlens" in parameters and "cache" not in parameters:
        yield tiny_call(op) | state | {"cu_seqlens": torch.tensor([0, 0, 4, 6])}


def implementations(op: str, call: dict[str, Any]) -> list[str]:
    return [impl for impl, reason in explain(OPS[op], **call).reasons.items() if reason is None] or ["auto"]


@pytest.mark.parametrize("op", OPS)
def test_results_have_memory_of_their_own(op: str) -> None:
    for call in calls(op):
        for impl in implementations(op, call):
            arguments = [pair for name, value in call.items() for pair in flat(value, name)]
            results = list(flat(OPS[op](**call, impl=impl), "out"))
            for place, (name, t) in enumerate(results):
                memory = t.untyped_storage()
                for other, u in (*arguments, *results[:place]):
                    shared = memory.nbytes() and u.untyped_storage().data_ptr() == memory.data_ptr()
                    assert not shared or (op, name, other) in ITSELF, f"{impl}: {name} has the memory of {other}"
                most = LARGER * t.numel() * t.element_size() + SMALL
                assert memory.nbytes() <= most, f"{impl}: {name} {list(t.shape)} keeps {memory.nbytes()} bytes"


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith(NO_GRADIENT)])
def test_results_can_be_written_in_place(op: str) -> None:
    """With a gradient, which is that of what was written, or its backward says that something it needs was overwritten."""
    plain = next(calls(op))
    for impl in implementations(op, plain):
        found = []
        for way in (torch.mul, Tensor.mul_):
            call = {n: t.clone().requires_grad_() if wants(n, t) else t for n, t in plain.items()}
            leaves = [t for t in call.values() if isinstance(t, Tensor) and t.requires_grad]
            results = [t for _, t in flat(OPS[op](**call, impl=impl), "out") if t.requires_grad]
            sums = [way(t, 2.0).square().sum() for t in results]
            found.append((sums, leaves))
        try:
            after = torch.autograd.grad(*found[1], allow_unused=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            continue
        for before, now in zip(torch.autograd.grad(*found[0], allow_unused=True), after, strict=True):
            assert (before is None) == (now is None) and (now is None or torch.equal(before, now))


def wants(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not name.startswith("teacher")
