"""Wrong calls: one argument of a good call spoilt in a way that is surely wrong. The error names it, and nothing was written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from test_errors import ANY_AXES, FREE, full_call
from test_options import NOT_FINITE, OTHERS, SPOILT
from torch import Tensor

from .check import Finding, bits
from .draw import Draw
from .sample import OPS, Sample

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Spoilt:
    """A call with one wrong argument: how the text may begin (None: with any argument's name), and the errors."""

    call: Arguments
    begins: str | None
    errors: tuple[type[Exception], ...]
    what: str


Spoil = Callable[[Sample, Draw, Arguments], "Spoilt | None"]


def parameters(op: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(OPS[op]).parameters)


def tensors_of(call: Arguments) -> list[str]:
    return [name for name, value in call.items() if isinstance(value, Tensor)]


def an_option(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """A value of another type, or not finite, or one that the option's own check refuses."""
    name = draw.free.choice(list(parameters(sample.op)))
    kind = parameters(sample.op)[name].annotation
    if name == "axes":
        return None  # comes with positions of its own
    if name in OTHERS:
        value = draw.free.choice(list(OTHERS[name].values()))
        return Spoilt(call | {name: value}, name, (TypeError, ValueError), f"{name}={value!r}")
    if kind not in SPOILT:
        return None
    values, error = SPOILT[kind]
    choices: list[tuple[Any, type[Exception]]] = [(value, error) for value in values.values()]
    if kind.startswith("float"):
        choices += [(value, ValueError) for value in NOT_FINITE.values()]
    value, error = draw.free.choice(choices)
    return Spoilt(call | {name: value}, name, (error,), f"{name}={value!r}")


def no_tensor(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    name = draw.free.choice(tensors_of(call))
    value = draw.free.choice(([1.0], "x", object()))
    return Spoilt(call | {name: value}, name, (TypeError, ValueError), f"{name} is {type(value).__name__}")


COMPLEX = ("scan", "scan_step")


def another_dtype(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """Integers, complex numbers or booleans for floating ones, and the reverse."""
    name = draw.free.choice(tensors_of(call))
    floating = call[name].is_floating_point()
    dtype = draw.free.choice(
        (torch.int32, torch.complex64, torch.bool, torch.uint8) if floating else (torch.float32, torch.int8)
    )
    if dtype.is_complex and sample.op in COMPLEX:  # it may be what the others are not
        dtype = torch.int32
    return Spoilt(call | {name: call[name].to(dtype)}, name, (TypeError,), f"{name} in {dtype}")


def another_kind(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """Sparse, nested, float8."""
    names = [n for n in tensors_of(call) if call[n].is_floating_point() and call[n].dim() > 1 and call[n].numel()]
    if not names:
        return None
    name, kind = draw.free.choice(names), draw.free.choice(("sparse", "nested", "float8"))
    t = call[name]
    if kind == "nested" and t.device.type != "cpu":
        return None
    value = {
        "sparse": lambda: t.to_sparse(),
        "nested": lambda: torch.nested.nested_tensor(list(t.clone())),
        "float8": lambda: t.to(torch.float8_e4m3fn),
    }[kind]()
    return Spoilt(call | {name: value}, name, (TypeError, ValueError), f"{name} {kind}")


def another_device(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    names = tensors_of(call)
    if len(names) < 2:
        return None
    name = draw.free.choice(names)
    return Spoilt(call | {name: call[name].to("meta")}, None, (ValueError,), f"{name} on meta")


def a_shape(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """An axis too many or too long, of the tiny call that the tables of tests/test_errors.py are about."""
    call = full_call(sample.op)
    name = draw.free.choice(tensors_of(call))
    t = call[name]
    if draw.free.random() < 0.4 or not t.dim():
        if (sample.op, name) in ANY_AXES | {
            ("softmax_attention", "alibi_slopes")
        }:  # [1, HQ] are those of the only sequence
            return None
        return Spoilt(call | {name: t.unsqueeze(0)}, None, (ValueError,), f"{name} with an axis more")
    axis = draw.free.randrange(t.dim())
    if (sample.op, name, axis) in FREE:
        return None
    longer = torch.cat([t, t.narrow(axis, 0, 1)], axis)
    return Spoilt(call | {name: longer}, None, (ValueError,), f"{name} longer on axis {axis}")


def boundaries(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """Corrupt boundaries of packed sequences, for a batch of one or of more."""
    if "cu_seqlens" not in parameters(sample.op) or "positions" in sample.tensors:
        return None
    if sample.op == "attention_with_cache" and sample.lengths is None:
        return None
    shapes = [t.shape for n, t in sample.tensors.items() if n in sample.per_token or n in ("q", "x")]
    T = shapes[0][1]
    ends = {
        "unsorted": [0, T + 1, T],
        "short": [0, T - 1] if T else [0, -1],
        "long": [0, T + 1],
        "not from 0": [1, T + 1],
        "negative": [0, -1, T],
        "no entry": [],
    }
    kind = draw.free.choice((*ends, "float", "int16", "two axes", "lengths"))
    good = torch.tensor([0, T])
    device = next(t.device for t in call.values() if isinstance(t, Tensor))
    wrong: Any = {"float": good.double(), "int16": good.short(), "two axes": good[None], "lengths": [0, T]}.get(kind)
    if wrong is None:
        wrong = torch.tensor(ends[kind], dtype=torch.int64)
    if isinstance(wrong, Tensor):
        wrong = wrong.to(device)
        if wrong.is_cuda and kind in ends and kind != "no entry":
            return None  # contents are not read on a GPU
    return Spoilt(call | {"cu_seqlens": wrong}, "cu_seqlens", (TypeError, ValueError), f"boundaries {kind}")


def a_state(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """Another number of sequences, or another dtype."""
    state = call.get("initial_state")
    if not isinstance(state, Tensor):
        return None
    if draw.free.random() < 0.5:
        more = (
            torch.cat([state, torch.zeros_like(state[:1])]) if state.shape[0] else state.new_zeros(1, *state.shape[1:])
        )
        return Spoilt(call | {"initial_state": more}, "initial_state", (ValueError,), "a state more")
    dtype = torch.float16 if state.dtype != torch.float16 else torch.float64
    return Spoilt(call | {"initial_state": state.to(dtype)}, "initial_state", (TypeError,), f"states in {dtype}")


def a_mixture(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """Keys or values in another dtype than queries."""
    names = [
        n
        for n in ("k", "v")
        if isinstance(call.get(n), Tensor) and n in sample.tensors and next(iter(sample.tensors)) != n
    ]
    if not names:
        return None
    name = draw.free.choice(names)
    dtype = torch.float16 if sample.dtype != torch.float16 else torch.float32
    return Spoilt(call | {name: call[name].to(dtype)}, None, (TypeError,), f"{name} in {dtype}")


def an_entry(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    """A number in a tensor of indices that is no index; read on the CPU only."""
    names = [n for n in ("target", "positions", "state_indices") if isinstance(call.get(n), Tensor) and call[n].numel()]
    if not names or call[names[0]].is_cuda or ("mask" in call and names[0] == "target"):
        return None
    name = names[0]
    t = call[name].contiguous().clone()
    most = {"target": 2**31, "positions": 10**6, "state_indices": 10**6}[name]
    t.view(-1)[draw.free.randrange(t.numel())] = draw.free.choice((most, -7))
    return Spoilt(call | {name: t}, name, (ValueError,), f"{name} out of range")


def a_keyword(sample: Sample, draw: Draw, call: Arguments) -> Spoilt | None:
    if draw.free.random() < 0.5:
        return Spoilt(call | {"impl": "fast"}, "impl", (ValueError,), "impl")
    return Spoilt(call | {"implementation": "auto"}, sample.op, (TypeError,), "a keyword that is none")


SPOILS: tuple[Spoil, ...] = (
    an_option,
    an_option,
    no_tensor,
    another_dtype,
    another_kind,
    another_device,
    a_shape,
    a_shape,
    boundaries,
    a_state,
    a_mixture,
    an_entry,
    a_keyword,
)


def check(sample: Sample, draw: Draw, device: str) -> tuple[str, list[Finding]]:
    """The kind of what was spoilt, and the finding if the call was taken, or refused in the wrong words, or wrote something."""
    placed, bases = sample.place(device)
    call = sample.arguments(placed)
    spoilt = None
    while spoilt is None:
        spoil = draw.free.choice(SPOILS)
        spoilt = spoil(sample, draw, dict(call))
    before = {name: base.clone() for name, base in bases.items()}
    findings = list(refused(sample, spoilt))
    for name, base in bases.items():
        if not torch.equal(bits(base), bits(before[name])):
            findings.append(Finding("auto", f"{spoilt.what}: refused, but {name} was written"))
    return f"wrong: {spoil.__name__}", findings


def refused(sample: Sample, spoilt: Spoilt) -> Iterator[Finding]:
    try:
        OPS[sample.op](**spoilt.call)
    except spoilt.errors as error:
        text = str(error)
        names = [spoilt.begins] if spoilt.begins else [*parameters(sample.op)]
        begin = (
            r"^(the number of heads of |the head dim of |the width of |the number of )?("
            + "|".join(map(re.escape, names))
            + r")\b"
        )
        if not re.search(begin, text):
            yield Finding("auto", f"{spoilt.what}: the text names no argument: {text[:200]}")
    except Exception as error:
        yield Finding("auto", f"{spoilt.what}: {type(error).__name__} instead: {str(error)[:200]}")
    else:
        yield Finding("auto", f"{spoilt.what}: was taken")
