"""The one door to the recurrence: chooses an implementation and makes it an operator that autograd and compilers know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.choose import Implementation, choose
from flashmix.op.operator import differentiable, once_differentiable, only_data, operator
from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import Gate, Operands, Problem, RecurrenceCall
from flashmix.ops.recurrence.native.binding import missing


def _triton_supports(problem: Problem) -> str | None:
    if problem.gate is Gate.VALUE:
        return "its kernels have no decay on the value axis"
    if max(problem.K, problem.V) > 256:
        return f"its kernels hold head dimensions up to 256, got K = {problem.K} and V = {problem.V}"
    return gpu.refuses(problem.device, problem.dtype)


def _native_supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"it needs tensors on a CPU, got {problem.device.type}"
    if problem.dtype == torch.float64:
        return "it computes in float32, got float64"
    if problem.gate is Gate.VALUE:
        return "it has no decay on the value axis"
    if problem.tokens == 1 and not problem.packed:
        return "one token is a step, which it has none for"
    if max(problem.K, problem.V) > 256:
        return f"its tiles hold head dimensions up to 256, got K = {problem.K} and V = {problem.V}"
    return missing()


def _portable_supports(problem: Problem) -> str | None:
    return None


IMPLEMENTATIONS: tuple[Implementation[Problem], ...] = (
    Implementation("triton", "flashmix.ops.recurrence.triton_gpu", _triton_supports),
    Implementation("native", "flashmix.ops.recurrence.native", _native_supports),
    Implementation("portable", "flashmix.ops.recurrence.portable", _portable_supports),
)
_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}


def run(op: str, x: Operands, scale: float | None, read_before: bool, impl: str) -> tuple[Tensor, Tensor]:
    """Output `[B, T, HV, V]` and final state `[N, HV, K, V]` of checked operands.

    Under autocast `q, k, v, a, b` take the autocast dtype; gates, `beta` and states keep theirs.
    """
    chosen = choose(op, IMPLEMENTATIONS, Problem.of(x, read_before), impl)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in _tensors(x))
    scale = x.q.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v, a, b = _autocast(x.q, x.k, x.v, x.a, x.b)
    tensors = (q, k, v, x.beta, a, b, x.g, x.initial_state, x.cu_seqlens)
    options = (scale, read_before, save, chosen.name, x.value_gate)
    if torch.compiler.is_compiling() or not only_data(tensors):
        return recurrence(*tensors, *options)[:2]
    return _Eager.apply(*tensors, *options) if save else _run_forward(*tensors, *options)[:2]


def _tensors(x: Operands) -> tuple[Tensor | None, ...]:
    return x.q, x.k, x.v, x.beta, x.a, x.b, x.g, x.initial_state


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """The tensors in the autocast dtype of their device, where autocast is on and they are not float64."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _run_forward(
    q: Tensor, k: Tensor | None, v: Tensor, beta: Tensor | None, a: Tensor | None, b: Tensor | None, g: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, read_before: bool, save: bool, impl: str, value_gate: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Output, final state, and what the implementation keeps for its backward (nothing unless `save`)."""
    x = Operands(q, k, v, beta, a, b, g, initial_state, cu_seqlens, value_gate)
    with _no_autocast(q.device.type), gpu.on(q.device):
        if impl == "triton":
            outputs, kept = _BY_NAME[impl].load().forward(_call(x, scale, read_before), save)
            return *outputs, list(kept)
        return _BY_NAME[impl].load().forward(x, scale, read_before, save)


RecurrenceCall.names = ("q", "k", "v", "a", "b", "beta", "log_decay", "initial_state")


def _call(x: Operands, scale: float, read_before: bool) -> RecurrenceCall:
    """The call that the Triton implementation takes."""
    packing = None if x.cu_seqlens is None else Packing.unchecked(x.cu_seqlens, x.q.shape[1])
    tensors = (x.q, x.k, x.v, x.a, x.b, x.beta, x.g, x.initial_state)
    return RecurrenceCall(*tensors, packing, scale, read_before, x.value_gate)


def _fake_forward(q, k, v, beta, a, b, g, initial_state, cu_seqlens, scale, read_before, save, impl, value_gate):  # type: ignore[no-untyped-def]
    x = Operands(q, k, v, beta, a, b, g, initial_state, cu_seqlens, value_gate)
    problem = Problem.of(x, read_before)
    state = v.new_empty(_state_shape(problem), dtype=state_dtype(v.dtype))
    if impl == "triton":
        kept = _BY_NAME[impl].load().keeps(_call(x, scale, read_before)) if save else ()
        return torch.empty(v.shape, dtype=v.dtype, device=v.device), state, list(kept)
    kept = _BY_NAME[impl].load().residual_shapes(problem) if save else []
    residuals = [state.new_empty(shape, dtype=dtype) for shape, dtype in kept]
    return torch.empty(v.shape, dtype=v.dtype, device=v.device), state, residuals


def _run_backward(
    do: Tensor | None, dstate: Tensor | None,
    q: Tensor, k: Tensor | None, v: Tensor, beta: Tensor | None, a: Tensor | None, b: Tensor | None, g: Tensor | None,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, residuals: list[Tensor],
    scale: float, read_before: bool, impl: str, value_gate: bool, gate_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of those of `q, k, v, beta, a, b, g, initial_state` that are there, in this order, of `g` if it is asked for."""
    x = Operands(q, k, v, beta, a, b, g, initial_state, cu_seqlens, value_gate)
    with _no_autocast(q.device.type):
        if impl == "triton":
            wanted = frozenset({"log_decay"} if gate_gradient else ())
            call = _call(x, scale, read_before)
            with gpu.on(q.device):
                found = _BY_NAME[impl].load().backward(call, tuple(residuals), (do, dstate), wanted)
            names = ("q", "k", "v", "beta", "a", "b", "log_decay", "initial_state")
            return [found[name] for name in names if name in found]
        return _BY_NAME[impl].load().backward(do, dstate, x, residuals, scale, read_before, gate_gradient)


def _fake_backward(  # type: ignore[no-untyped-def]
    do, dstate, q, k, v, beta, a, b, g, initial_state, cu_seqlens, residuals, scale, read_before, impl, value_gate,
    gate_gradient,
):  # fmt: skip
    present = [t for t in (q, k, v, beta, a, b, g if gate_gradient else None, initial_state) if t is not None]
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in present]


GATE, TENSORS = 6, 9  # of the operator's inputs: which is the decay, how many are tensors


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.scale, ctx.read_before, _, ctx.impl, ctx.value_gate = inputs[TENSORS:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output[2])


def _backward(ctx: Any, do: Tensor | None, dstate: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, do, dstate, _recurrence_backward)


def _gradients(
    ctx: Any, do: Tensor | None, dstate: Tensor | None, backward: Callable[..., list[Tensor]]
) -> tuple[Tensor | None, ...]:
    """Those of all inputs of the operator, from one that gives those that are there."""
    nothing = (None,) * 5  # scale, read_before, save, impl, value_gate
    if do is None and dstate is None:
        return (None,) * TENSORS + nothing
    saved = ctx.saved_tensors  # once: checkpoints make them again
    tensors, residuals = saved[:TENSORS], saved[TENSORS:]
    options = ctx.scale, ctx.read_before, ctx.impl, ctx.value_gate
    gate_gradient = ctx.needs_input_grad[GATE]
    found = iter(backward(do, dstate, *tensors, list(residuals), *options, gate_gradient))
    missing = [t is None or (i == GATE and not gate_gradient) for i, t in enumerate(tensors[:-1])]
    return (*(None if no else next(found) for no in missing), None, *nothing)


class _Eager(torch.autograd.Function):
    """The operator called at once, without the dispatcher between."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _run_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        seen = torch.is_grad_enabled() or torch.compiler.is_compiling() or not only_data((do, dstate))
        return _gradients(ctx, do, dstate, _recurrence_backward if seen else _run_backward)


recurrence = operator("recurrence", _run_forward, _fake_forward)
_recurrence_backward = operator("recurrence_backward", _run_backward, _fake_backward)
differentiable("recurrence", _backward, _setup_context)
once_differentiable("recurrence")


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """States and everything computed inside are float32, for float64 inputs float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _state_shape(problem: Problem) -> tuple[int, int, int, int]:
    return problem.sequences, problem.value_heads, problem.K, problem.V
