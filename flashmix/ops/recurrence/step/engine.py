"""The one door to the steps of the recurrence: checks, the choice of an implementation, and both remembered.

A step takes some microseconds of a GPU, and Python as long to look at ten tensors. What depends on sizes, dtypes and
strides alone is therefore done once for each set of them; the calls that follow compare these, and launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.checks import check_dtype, check_like, check_range, check_shape, contents_are_checked, dims
from flashmix.op.choose import Implementation, choose, explaining
from flashmix.op.dtypes import autocast
from flashmix.op.operator import bump_versions, only_data

Tensors = tuple[Tensor | None, ...]  # q, k, v, beta, a, b, g, state, state_indices, history
MOST_TOKENS = 16
_REMEMBERED = 1024  # sets of sizes


@dataclass(frozen=True)
class StepProblem:
    """The facts of a step that decide which implementation runs it."""

    dtype: torch.dtype
    device: torch.device


IMPLEMENTATIONS: tuple[Implementation[StepProblem], ...] = (
    Implementation("triton", "flashmix.ops.recurrence.step.triton_gpu", lambda p: gpu.refuses(p.device, p.dtype)),
    Implementation("portable", "flashmix.ops.recurrence.step.portable.in_place", lambda problem: None),
)
_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
_known: dict[Any, Callable[[Tensors], Tensor]] = {}
_prepared: dict[Any, Callable[[Tensors], Tensor] | None] = {}


def run_step(
    op: str, tensors: Tensors, scale: float | None, read_before: bool, minus_a: bool, impl: str,
    check: Callable[[Tensors], None],
) -> Tensor:  # fmt: skip
    """Output `[B, T, HV, V]`; states and history are written. `check` raises unless the tensors fit one another."""
    if torch.compiler.is_compiling() or not rememberable(tensors, tensors[8]):
        return _run(op, tensors, scale, read_before, minus_a, impl, check)[0]
    key = (op, scale, read_before, minus_a, impl, signature(tensors))
    known = _known.get(key) if aligned(tensors[7], tensors[9]) else None
    if known is None:
        o, again = _run(op, tensors, scale, read_before, minus_a, impl, check)
        if again is not None:
            remember(_known, key, again)
        return o
    o = known(tensors)
    bump_versions(tensors[7], tensors[9])
    return o


def rememberable(tensors: Tensors, state_indices: Tensor | None) -> bool:
    """Whether sizes, dtypes and strides tell all about a call: it is on a GPU, has no gradient and asks for no more checks."""
    q = tensors[0]
    return (
        type(q) is Tensor
        and q.is_cuda
        and not torch.is_autocast_enabled("cuda")
        and not explaining()
        and not (torch.is_grad_enabled() and any(type(t) is not Tensor or t.requires_grad for t in tensors if t is not None))
        and not (isinstance(state_indices, Tensor) and contents_are_checked(state_indices))
    )  # fmt: skip


def signature(tensors: Tensors) -> Any:
    """What checks and choices depend on: dtype, device, sizes and strides of each tensor."""
    try:
        return tuple([None if t is None else (t.dtype, t.get_device(), t.shape, t.stride()) for t in tensors])
    except AttributeError:  # not a tensor: the checks will say so
        return None


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps `value`; forgets all where sizes change without end."""
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = value


def aligned(*states: Tensor | None) -> bool:
    """Whether states begin on 16 bytes, as all that torch allocates do: what is remembered is compiled for that."""
    return not any(t is not None and t.data_ptr() % 16 for t in states)


def _run(
    op: str, tensors: Tensors, scale: float | None, read_before: bool, minus_a: bool, impl: str,
    check: Callable[[Tensors], None],
) -> tuple[Tensor, Callable[[Tensors], Tensor] | None]:  # fmt: skip
    """The output, and how to do the same again for tensors of the same signature, where there is a short way."""
    check(tensors)
    q, k, v, beta, a, b, *rest = tensors
    assert q is not None
    refuse_gradient(op, tensors)
    chosen = choose(op, IMPLEMENTATIONS, StepProblem(q.dtype, q.device), impl)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v, a, b = autocast(q, k, v, a, b)
    call = (q, k, v, beta, a, b, *rest, scale, read_before, minus_a, chosen.name)
    if torch.compiler.is_compiling() or not only_data(tensors):
        return _recurrent_step(*call), None
    o = _step(*call)  # as the operator, whose first call imports all of torch's compiler
    bump_versions(tensors[7], tensors[9])
    return o, prepared(chosen, tensors, (tensors[7], tensors[9]), scale, read_before, minus_a)


def prepared(
    implementation: Implementation[StepProblem], tensors: Tensors, states: Tensors, *options: Any
) -> Callable[[Tensors], Tensor] | None:
    """The implementation's short way for tensors of this signature: made once, None where there is none."""
    q = tensors[0]
    if q is None or not q.is_cuda or implementation.name != "triton" or q.numel() == 0 or not aligned(*states):
        return None
    key = (implementation.module, options, signature(tensors))
    if key not in _prepared:
        remember(_prepared, key, implementation.load().prepare(tensors, *options))
    return _prepared[key]


def refuse_gradient(op: str, tensors: Tensors) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(f"{op} has no gradient, it writes its state in place: call it under torch.no_grad()")


def _step(
    q: Tensor, k: Tensor | None, v: Tensor, beta: Tensor | None, a: Tensor | None, b: Tensor | None, g: Tensor | None,
    state: Tensor, state_indices: Tensor | None, history: Tensor | None,
    scale: float, read_before: bool, minus_a: bool, impl: str,
) -> Tensor:  # fmt: skip
    tensors = (q, k, v, beta, a, b, g, state, state_indices, history)
    if v.numel() == 0:
        return torch.empty(v.shape, dtype=v.dtype, device=v.device)
    again = prepared(_BY_NAME[impl], tensors, (state, history), scale, read_before, minus_a)
    if again is not None:
        return again(tensors)
    with torch.autocast(q.device.type, enabled=False):
        return _BY_NAME[impl].load().step_in_place(tensors, scale, read_before, minus_a)


_recurrent_step = torch.library.custom_op("flashmix::recurrent_step", _step, mutates_args=("state", "history"))


@_recurrent_step.register_fake
def _(q, k, v, beta, a, b, g, state, state_indices, history, scale, read_before, minus_a, impl):  # type: ignore[no-untyped-def]
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def check_state(
    state: Tensor, state_indices: Tensor | None, q: Tensor, batch: int, heads: int, K: int, V: int, like: str = "q"
) -> None:
    """A state `[B, HV, K, V]`, or with indices a pool `[P, HV, K, V]`, that may be written; `like` is what `q` is called."""
    slots = dims("state", state, "P HV K V")[0] if state_indices is not None else batch
    check_shape("state", state, slots, heads, K, V)
    check_dtype("state", state, *((torch.float64,) if q.dtype == torch.float64 else (torch.float32, torch.bfloat16)))
    check_written("state", state, like, q)
    if state_indices is not None and slots < 1:
        raise ValueError("state must have at least one slot, got 0")


def check_written(name: str, t: Tensor, like: str, q: Tensor) -> None:
    """On the device of `q`, and no number of it in two places."""
    check_like(name, t, like, q, dtype=False)
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        raise ValueError(f"{name} must have memory of its own for each number, got strides {list(t.stride())}")


def check_indices(state_indices: Tensor | None, q: Tensor, batch: int, slots: int, like: str = "q") -> None:
    """`[B]` whole numbers; where contents are checked, slots of the pool or -1, each slot once."""
    if state_indices is None:
        return
    check_shape("state_indices", state_indices, batch)
    check_dtype("state_indices", state_indices, torch.int32, torch.int64)
    check_like("state_indices", state_indices, like, q, dtype=False)
    if not contents_are_checked(state_indices):
        return
    seen: set[int] = set()
    for index in state_indices.tolist():
        check_range("state_indices", index, -1, slots - 1)
        if index >= 0 and index in seen:
            raise ValueError(f"state_indices must name each slot at most once, got {index} twice")
        seen.add(index)


def check_history(history: Tensor | None, state: Tensor, q: Tensor, tokens: int) -> None:
    """`[B, n, HV, K, V]` like the state, `1 <= n <= T`."""
    check_range("the number of tokens", tokens, 1, MOST_TOKENS)
    if history is None:
        return
    kept = dims("history", history, "B n HV K V")[1]
    check_shape("history", history, q.shape[0], kept, *state.shape[1:])
    if not 1 <= kept <= tokens:
        raise ValueError(f"history must hold between 1 and {tokens} tokens, those of the call, got {kept}")
    check_like("history", history, "state", state)
    check_written("history", history, "q", q)
