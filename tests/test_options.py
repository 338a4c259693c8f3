"""Options that are no option: every scalar, flag and pair of every public op, refused by name before anything is computed."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from test_errors import OPS, error_of, full_call
from torch import Tensor

import flashmix

NOT_NUMBERS: dict[str, Any] = {
    "a string": "x",
    "a list": [1.0],
    "a dict": {},
    "a bool": True,
    "a tensor": torch.tensor(0.5),
}
NOT_FINITE = {"NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "beyond float32": 1e39}
NOT_INTEGERS: dict[str, Any] = {
    "a string": "1",
    "a list": [1],
    "a bool": True,
    "a fraction": 1.5,
    "a tensor": torch.tensor(1),
}
NOT_FLAGS: dict[str, Any] = {"None": None, "a string": "no", "0": 0, "1.0": 1.0, "a tensor": torch.tensor(True)}
NOT_PAIRS: dict[str, Any] = {
    "a string": "xyz",
    "one": (1,),
    "three": (1, 2, 3),
    "a number": 1,
    "strings": ("a", "b"),
    "NaN": (math.nan,) * 2,
}
NOT_STRINGS: dict[str, Any] = NOT_PAIRS | {
    "a list": [1],
    "a dict": {},
    "a set": {1},
    "a slice": slice(1),
    "a tensor": torch.ones(2),
}
SPOILT: dict[str, tuple[dict[str, Any], type[Exception]]] = {}
for kind, wrong in (("float", NOT_NUMBERS), ("int", NOT_INTEGERS), ("bool", NOT_FLAGS)):
    SPOILT[kind] = wrong, TypeError
    SPOILT[f"{kind} | None"] = {name: value for name, value in wrong.items() if value is not None}, TypeError
SPOILT["Tensor"] = {"None": None}, TypeError
OTHERS = {  # options that have a check of their own, with values that it refuses
    "window": NOT_PAIRS,
    "clip": NOT_PAIRS,
    "dt_limit": NOT_PAIRS,
    "rotary": NOT_PAIRS,
    "axes": NOT_PAIRS | {"an object": object()},
    "group": NOT_PAIRS,
    "positions": NOT_PAIRS | {"a number": 1.0},
    "scaling": NOT_PAIRS,
    "cache": NOT_PAIRS | {"None": None},
    "log_scale": {k: v for k, v in NOT_PAIRS.items() if k != "a number"}
    | NOT_FINITE
    | {"a string of a number": "1", "a bool": True, "2^2000": 2**2000},
    "activation": NOT_STRINGS,
    "coupling": NOT_STRINGS,
    "gate_activation": NOT_STRINGS | {"None": None},
    "reduction": NOT_STRINGS | {"None": None},
    "impl": NOT_STRINGS | {"None": None},
    "cu_seqlens": NOT_PAIRS,
    "cu_seqlens_k": NOT_PAIRS,
    "initial_state": {"a string": "x", "a number": 1.0, "a list": [1.0]},
    "state": {"a string": "x", "a list": [1.0], "None": None},
}


def parameters(op: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(OPS[op]).parameters)


def refused(op: str, name: str, value: Any, *errors: type[Exception]) -> None:
    """The op raises one of the errors, with a text that begins with the argument; of options with a table, having computed nothing."""
    call = full_call(op)
    if "axes" in parameters(op) and name == "axes":
        call["positions"] = torch.zeros(1, 6, 2, dtype=torch.int64)
    with pytest.raises(errors) as raised:
        OPS[op](**call | {name: value})
    text = str(raised.value)
    assert text.startswith(name), f"{op}({name}={value!r}): {text}"
    if name not in OTHERS and (
        not isinstance(value, Tensor)
        or (type(value) is Tensor and value.layout is torch.strided and not value.is_nested)
    ):
        error_of(op, call | {name: value}, type(raised.value))


@pytest.mark.parametrize("op", OPS)
def test_an_option_of_another_type(op: str) -> None:
    for name, parameter in parameters(op).items():
        values, error = SPOILT.get(parameter.annotation, ({}, TypeError))
        for value in values.values():
            refused(op, name, value, error)


@pytest.mark.parametrize("op", OPS)
def test_a_number_that_is_not_finite(op: str) -> None:
    for name, parameter in parameters(op).items():
        if parameter.annotation.startswith("float"):
            for value in NOT_FINITE.values():
                refused(op, name, value, ValueError)
        if name == "eps":
            refused(op, name, -1e-6, ValueError)
        if name in ("softcap", "temperature"):  # whose inverse is infinite in float32: NaN of 0
            refused(op, name, 1e-40, ValueError)


@pytest.mark.parametrize("op", OPS)
def test_an_option_with_a_check_of_its_own(op: str) -> None:
    for name in parameters(op):
        for value in OTHERS.get(name, {}).values():
            refused(op, name, value, TypeError, ValueError)


def test_every_option_is_in_a_table() -> None:
    known = {"dtype", "device", "base", "dim"}
    for op in OPS:
        for name, parameter in parameters(op).items():
            kind = parameter.annotation
            assert kind in SPOILT or name in OTHERS or kind == "Tensor | None" or name in known, (op, name, kind)


@pytest.mark.parametrize("op", ["softmax_attention", "delta_rule", "cross_entropy", "linear_grpo"])
def test_a_number_of_another_library_is_one(op: str) -> None:
    numpy = pytest.importorskip("numpy")
    option = {
        "softmax_attention": "scale",
        "delta_rule": "scale",
        "cross_entropy": "z_loss",
        "linear_grpo": "temperature",
    }[op]
    results = []
    for number in (0.5, numpy.float32(0.5), numpy.float64(0.5)):
        result = OPS[op](**full_call(op) | {option: number})
        results.append(result if isinstance(result, Tensor) else result[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


# ---- tensors that no op takes, and memory that is not one's own ----------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_tensors_of_another_kind(op: str) -> None:
    for name, value in full_call(op).items():
        if not isinstance(value, Tensor):
            continue
        for wrong in (
            torch.nn.UninitializedParameter(),
            torch.masked.masked_tensor(value, torch.ones_like(value, dtype=torch.bool)),
            torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        ):
            refused(op, name, wrong, TypeError, ValueError)
        if not value.is_floating_point() or value.dim() < 2:
            continue
        refused(op, name, value.to(torch.float8_e4m3fn), TypeError, ValueError)
        refused(op, name, value.to_sparse(), TypeError, ValueError)
        refused(op, name, torch.nested.nested_tensor(list(value.clone())), TypeError, ValueError)


def test_groups_of_a_selective_scan_may_not_be_nested() -> None:
    groups = torch.nested.nested_tensor([torch.randn(6, 2, 4)])
    refused("selective_scan", "B", groups, TypeError)
    refused("selective_scan_step", "B", groups, TypeError)


def test_lengths_are_integers() -> None:
    for lengths in ([1.5, 2.0], torch.tensor([1.0]), [True, False], [1 + 0j]):
        with pytest.raises(TypeError, match=r"^lengths must be integers, got"):
            flashmix.Packing.from_lengths(lengths)  # type: ignore[arg-type]
    assert flashmix.Packing.from_lengths([]).count == 0


def test_boundaries_that_are_overwritten_are_looked_at_again() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    cu_seqlens = torch.tensor([0, 2, 6])
    packing = flashmix.Packing(cu_seqlens, 6)
    before, _ = flashmix.linear_attention(q, k, v, cu_seqlens=packing)
    assert packing.positions.tolist() == [0, 1, 0, 1, 2, 3]
    cu_seqlens[1] = 4
    after, _ = flashmix.linear_attention(q, k, v, cu_seqlens=packing)
    want, _ = flashmix.linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 4, 6]))
    assert torch.equal(after, want) and not torch.equal(after, before)
    assert packing.positions.tolist() == [0, 1, 2, 3, 0, 1] and packing.sequence.tolist() == [0, 0, 0, 0, 1, 1]
    cu_seqlens[1] = 9
    with pytest.raises(ValueError, match=r"^cu_seqlens must not decrease, got 9 followed by 6$"):
        flashmix.linear_attention(q, k, v, cu_seqlens=packing)


@pytest.mark.parametrize("name", ["state", "history"])
def test_rows_that_share_memory_are_not_written(name: str) -> None:
    call = full_call("delta_rule_step")
    shape = call[name].shape
    window = torch.zeros(10 * math.prod(shape)).as_strided(shape, (*[1] * (len(shape) - 2), shape[-1], 1))
    refused("delta_rule_step", name, call[name][:1, ..., :1].expand(shape), ValueError)
    if shape[-3] > 1:
        refused("delta_rule_step", name, window, ValueError)


def test_a_history_in_the_memory_of_the_state() -> None:
    q, v, beta = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8), torch.rand(1, 1, 2)
    memory = torch.zeros(1, 2, 8, 8)
    with pytest.raises(ValueError, match=r"^history must not be in the memory of state"):
        flashmix.delta_rule_step(q, q, v, beta, memory, history=memory.unsqueeze(1))


def test_rotating_in_place_needs_memory_of_its_own() -> None:
    cos, sin = flashmix.rotary_table(8, 6)
    x = torch.randn(1, 6, 1, 8).expand(1, 6, 4, 8)
    with pytest.raises(ValueError, match=r"^x must have memory of its own for each number"):
        flashmix.rotary(x, cos, sin, inplace=True)


@pytest.mark.parametrize("op", [op for op in OPS if "log_decay" in parameters(op) or "beta" in parameters(op)])
@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_no_sequence_of_one_token(op: str, impl: str) -> None:
    call = {
        n: t[:0, :1] if isinstance(t, Tensor) and t.dim() > 2 and n != "state" else t for n, t in full_call(op).items()
    }
    for name in ("state", "initial_state", "history"):
        if isinstance(call.get(name), Tensor):
            call[name] = full_call(op)[name][:0, :1] if name == "history" else full_call(op)[name][:0]
    if op == "softmax_attention":
        return
    result = OPS[op](**call, impl=impl)
    o = result if isinstance(result, Tensor) else result[0]
    assert o.shape[0] == 0


def test_no_sequence_and_a_history_of_none() -> None:
    """Tensors without numbers share the address 0, and no memory."""
    q, v, beta, state = torch.randn(0, 2, 2, 8), torch.randn(0, 2, 2, 8), torch.rand(0, 2, 2), torch.zeros(0, 2, 8, 8)
    assert flashmix.delta_rule_step(q, q, v, beta, state, history=torch.zeros(0, 1, 2, 8, 8)).shape == (0, 2, 2, 8)
