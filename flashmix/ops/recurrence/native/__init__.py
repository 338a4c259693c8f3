"""The recurrence in C, on a CPU: in float32, chunk after chunk with every tile in cache, a sequence and head a thread at a time.

The phases are those of docs/chunk_algorithm.md, in `chunk.h`, over the products of `tiles.h`; `recurrence.c` compiles them for each
set of vector instructions and takes the best that the machine has. They are built when the package is installed, where there is
a C compiler.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from flashmix.op.packing import check_boundaries
from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Gate, Operands, Problem
from flashmix.ops.recurrence.native.binding import Call, library

__all__ = ["backward", "forward", "residual_shapes"]

CHUNK = 64  # as in recurrence.c


def residual_shapes(problem: Problem) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The state each chunk starts from; of corrected rules `nu`."""
    chunks = -(-problem.tokens // CHUNK) * problem.batch
    if problem.packed:
        chunks = problem.tokens // CHUNK + problem.sequences
    HV, K, V = problem.value_heads, problem.K, problem.V
    shapes: list[tuple[int, ...]] = [(chunks, HV, K, V)]
    if problem.rule.corrected:
        shapes += [(problem.batch, problem.tokens, HV, V)]
    return [(shape, torch.float32) for shape in shapes]


def forward(x: Operands, scale: float, read_before: bool, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output `[B, T, HV, V]`, final state `[N, HV, K, V]`, and with `save` the residuals of `residual_shapes`."""
    p = Problem.of(x, read_before)
    o = _empty(*x.v.shape)
    state = _empty(p.sequences, p.value_heads, p.K, p.V)
    make = torch.zeros if p.packed else torch.empty  # a pack may have fewer chunks than its sizes allow
    kept = [make(shape, dtype=dtype) for shape, dtype in residual_shapes(p)] if save else []
    states, nu = (*kept, None, None)[:2]
    _run("flashmix_forward", p, x, scale, None, None, o=o, state=state, states=states, nu=nu)
    return o.to(x.v.dtype), state, kept


def backward(
    do: Tensor | None, dstate: Tensor | None, x: Operands, residuals: list[Tensor], scale: float, read_before: bool,
    gate_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the operands that are there, in their order; the decay's only with `gate_gradient`."""
    p = Problem.of(x, read_before)
    keys = p.batch, p.tokens, p.value_heads, p.K
    dq, dk, da, db = (None if t is None else _empty(*keys) for t in (x.q, x.k, x.a, x.b))
    dv = _empty(*x.v.shape)
    dbeta = None if x.beta is None else _empty(*keys[:3])
    dg = None
    if gate_gradient and x.g is not None:
        dg = _empty(*(keys if p.gate is Gate.CHANNEL else keys[:3]))
    dS0 = None if x.initial_state is None else _empty(*x.initial_state.shape)
    states, nu = (*residuals, None)[:2]
    _run(
        "flashmix_backward", p, x, scale, do, dstate, states=states, nu=nu, dq=dq, dk=dk, dv=dv, dbeta=dbeta, da=da, db=db,
        dg=dg, d_initial_state=dS0,
    )  # fmt: skip
    if p.gate is Gate.HEAD and dg is not None:
        dg = dg.sum((0, 1), dtype=torch.float64)
    found = ((dq, x.q), (dk, x.k), (dv, x.v), (dbeta, x.beta), (da, x.a), (db, x.b), (dg, x.g), (dS0, x.initial_state))
    return [_like_operand(gradient, x) for gradient, x in found if gradient is not None and x is not None]


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _like_operand(gradient: Tensor, operand: Tensor) -> Tensor:
    """In the operand's dtype; of one that several value heads share, their sum."""
    if gradient.dim() == 4 and gradient.shape[2] != operand.shape[2]:
        gradient = gradient.unflatten(2, (operand.shape[2], -1)).sum(3)
    return gradient.to(operand.dtype)


def _run(
    name: str, p: Problem, x: Operands, scale: float, do: Tensor | None, dstate: Tensor | None, **results: Tensor | None
) -> None:
    """One call of the library; `results`, float32 and contiguous, by the names that `Call` has for them."""
    g = x.g
    if g is not None and p.gate is Gate.HEAD:
        g = g.expand(p.batch, p.tokens, p.value_heads)
    given = {
        "q": x.q, "k": x.k, "v": x.v, "beta": x.beta, "a": x.a, "b": x.b, "g": g, "initial_state": x.initial_state,
        "d_o": do, "d_state": dstate,
    }  # fmt: skip
    tensors = {n: t.to(torch.float32).contiguous() for n, t in given.items() if t is not None}
    tensors |= {n: t for n, t in results.items() if t is not None}
    if x.cu_seqlens is None:
        starts = torch.arange(p.batch + 1) * p.tokens
    else:
        starts = x.cu_seqlens.to(torch.int64).contiguous()
        check_boundaries(starts.tolist(), p.tokens)  # again: compiled, it was not looked at
    chunks = torch.zeros_like(starts)
    torch.cumsum((starts.diff() + CHUNK - 1) // CHUNK, 0, out=chunks[1:])
    threads = max(1, min(torch.get_num_threads(), p.sequences * p.value_heads))
    numbers = library().flashmix_scratch(p.K, p.V)
    scratch.restart()
    memory = scratch.tile(torch.empty(0, dtype=torch.float32), threads, numbers)
    sizes: dict[str, Any] = {
        "sequences": p.sequences, "value_heads": p.value_heads, "K": p.K, "V": p.V, "threads": threads,
        "scratch_numbers": numbers, "gate": {Gate.NONE: 0, Gate.CHANNEL: 2}.get(p.gate, 1), "read_before": p.read_before,
        "scale": scale, "starts": starts.data_ptr(), "chunk_starts": chunks.data_ptr(), "scratch": memory.data_ptr(),
    }  # fmt: skip
    for name_, t in (("q", x.q), ("k", x.k), ("a", x.a), ("b", x.b)):
        sizes[f"{name_}_heads"] = 1 if t is None else t.shape[2]
    call = Call(**sizes, **{n: t.data_ptr() for n, t in tensors.items()})
    getattr(library(), name)(ctypes.byref(call))
