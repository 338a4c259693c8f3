"""The recurrence in C, on a CPU: in float32, chunk after chunk with every tile in cache, one sequence and head per thread at a time.

The phases are those of docs/chunk_algorithm.md, in `chunk.h`, `pairs.h`, `correlated.h` and `gradients.h`, over the products of `tiles.h`;
`recurrence.c` compiles them for each set of vector instructions and takes the best that the machine has. They are built when the
package is installed, if there is a C compiler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.packing import Packing, check_boundaries
from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.native.binding import NativeCall, library

__all__ = ["backward", "forward", "keeps"]

CHUNK = 64  # as in recurrence.c


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, HV, V]` and final state `[N, HV, K, V]`; and with `save` what `keeps` says."""
    o = _empty(*call.v.shape)
    state = _empty(call.sequences, call.value_heads, call.K, call.V)
    kept = keeps(call) if save else ()
    if call.packed:  # a packed batch may have fewer chunks than its sizes allow
        for t in kept:
            t.zero_()
    _run("flashmix_forward", call, {"o": o, "state": state, **_named(kept)})
    return (o.to(call.dtype), state), kept


def keeps(call: RecurrenceCall) -> Outputs:
    """The state each chunk starts from; of corrected rules `nu`."""
    chunks = -(-call.tokens // CHUNK) * call.batch
    if call.packed:
        chunks = call.tokens // CHUNK + call.sequences
    states = _empty(chunks, call.value_heads, call.K, call.V)
    return (states, _empty(*call.v.shape)) if call.rule.corrected else (states,)


def _named(kept: Outputs) -> dict[str, Tensor]:
    return dict(zip(("states", "nu"), kept, strict=False))


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of the given tensors, of the log decay only if it is `wanted`, from those of the output and of the final state."""
    keys = call.batch, call.tokens, call.value_heads, call.K
    given = {f"d{name}": getattr(call, name) for name in ("q", "k", "v", "a", "b", "beta")}
    given |= {"dg": call.log_decay if "log_decay" in wanted else None, "d_initial_state": call.initial_state}
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("dq", "dk", "da", "db"), keys)
    shapes |= {"dg": keys if call.decay is Decay.CHANNEL else keys[:3]}
    found = {n: _empty(*shapes.get(n, t.shape)) for n, t in given.items() if t is not None}
    d_o, d_state = grads
    _run("flashmix_backward", call, {**_named(kept), **found}, d_o=d_o, d_state=d_state)
    if call.decay is Decay.HEAD and "dg" in found:
        found["dg"] = found["dg"].sum((0, 1), dtype=torch.float64)
    fields = {"dg": "log_decay", "d_initial_state": "initial_state"}
    return {fields.get(n, n[1:]): _like(gradient, given[n]) for n, gradient in found.items()}


def _empty(*shape: int) -> Tensor:
    return torch.empty(size=shape, dtype=torch.float32, device="cpu")


def _like(gradient: Tensor, operand: Tensor | None) -> Tensor:
    """In the operand's dtype; of an operand that several value heads share, the sum over these."""
    assert operand is not None
    if gradient.dim() == 4 and gradient.shape[2] != operand.shape[2]:
        gradient = gradient.unflatten(2, (operand.shape[2], -1)).sum(3)
    return gradient.to(operand.dtype)


def _run(name: str, call: RecurrenceCall, results: dict[str, Tensor], **grads: Tensor | None) -> None:
    """One call of the library; `results`, float32 and contiguous, and `grads` by the names of `NativeCall`."""
    g = call.log_decay
    if g is not None and call.decay is Decay.HEAD:
        g = g.expand(call.batch, call.tokens, call.value_heads)
    keys = {"q": call.q, "k": call.k, "a": call.a, "b": call.b}
    given = {**keys, "v": call.v, "beta": call.beta, "g": g, "initial_state": call.initial_state, **grads}
    tensors = {n: t.to(torch.float32).contiguous() for n, t in given.items() if t is not None} | results
    if call.packing is None:
        starts, chunks = _starts(torch.arange(call.batch + 1, device="cpu") * call.tokens)
    else:
        starts, chunks = call.packing.table((_run, CHUNK), lambda: _packed_starts(call.packing))
    threads = max(1, min(torch.get_num_threads(), call.sequences * call.value_heads))
    numbers = library().flashmix_scratch(call.K, call.V)
    scratch.restart()
    memory = scratch.tile(_empty(0), threads, numbers)
    tensors |= {"starts": starts, "chunk_starts": chunks, "scratch": memory}
    sizes: dict[str, Any] = {
        n: getattr(call, n) for n in ("sequences", "value_heads", "K", "V", "read_before", "scale")
    }
    decay = {Decay.NONE: 0, Decay.CHANNEL: 2}.get(call.decay, 1)
    sizes |= {"threads": threads, "scratch_numbers": numbers, "decay": decay}
    sizes |= {f"{n}_heads": 1 if t is None else t.shape[2] for n, t in keys.items()}
    native = NativeCall(**sizes, **{n: t.data_ptr() for n, t in tensors.items()})
    getattr(library(), name)(ctypes.byref(native))


def _starts(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of each sequence and its first chunk, `[N + 1]` each."""
    chunks = torch.zeros_like(tokens)
    torch.cumsum((tokens.diff() + CHUNK - 1) // CHUNK, 0, out=chunks[1:])
    return tokens, chunks


def _packed_starts(packing: Packing | None) -> tuple[Tensor, Tensor]:
    assert packing is not None
    tokens = packing.cu_seqlens.to(torch.int64).contiguous()
    check_boundaries(tokens.tolist(), packing.total)  # compiled, nothing has looked at them before
    return _starts(tokens.clone())  # the table must not change when the boundaries are overwritten
