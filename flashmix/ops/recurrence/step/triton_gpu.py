"""The `step` phase: a few tokens of every sequence, one after the other, the state held in registers between them.

    D = diag(e^g) S;    S' = D + k v^T                      raw
                        S' = D + b nu^T                     corrected: nu = r + S^T a, or nu = beta (v - D^T k)
    o = scale S'^T q                                        or scale S^T q

A program has `BV` columns of the state of one head of one sequence; columns of a state do not meet. Its result depends on
nothing else in the batch, and the tile follows from K, V and the state's dtype alone, so it has the same bits in any batch.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.prepared import Launch
from flashmix.gpu.sizes import cdiv, padded
from flashmix.ops.recurrence.call import RecurrenceCall

# Pointers besides those of the state: vectors of one head, read by many threads, where alignment gains nothing.
_VECTORS = ["q", "k", "v", "beta", "a", "b", "g", "slots", "o"]
_STRIDES = [f"{t}_{axis}" for t in ("q", "k", "v", "beta", "a", "b", "g") for axis in "nth"]
_VARYING = ["tokens", "pool", "kept", "slots_n", *_STRIDES]

Tensors = tuple[Tensor | None, ...]  # q, k, v, beta, a, b, g, state, slots, history, as the public ops take them


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_VECTORS)
def step_kernel(
    q, k, v, beta, a, b, g, state, new_state, slots, history, o,
    tokens, pool, kept,
    q_n, q_t, q_h, k_n, k_t, k_h, v_n, v_t, v_h, beta_n, beta_t, beta_h,
    a_n, a_t, a_h, b_n, b_t, b_h, g_n, g_t, g_h,
    state_n, state_h, new_n, new_h, slots_n, history_n, history_t, history_h, scale,
    HV: tl.constexpr, GROUP: tl.constexpr, A_GROUP: tl.constexpr, B_GROUP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RAW: tl.constexpr, CORRECTED: tl.constexpr, MINUS_A: tl.constexpr, GATE: tl.constexpr,
    READ_BEFORE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Tokens of one sequence and value head, BV columns of the state. A slot outside [0, pool) is idle: o = 0.

    GATE: 0 a decay for all of the state, 1 for each row, 2 for each column.
    """
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    row = tl.program_id(0) // COLUMNS
    n, h = (row // HV).to(tl.int64), (row % HV).to(tl.int64)
    d = tl.arange(0, BK)  # [BK]
    c = (tl.program_id(0) % COLUMNS) * BV + tl.arange(0, BV)  # [BV]
    in_k, in_v = d < K, c < V
    tile = d[:, None] * V + c[None, :]  # [BK, BV]
    inside = in_k[:, None] & in_v[None, :]
    slot = n
    if slots is not None:
        slot = tl.load(slots + n * slots_n).to(tl.int64)
        live = (slot >= 0) & (slot < pool)
        slot = tl.where(live, slot, 0)
        inside = inside & live
    if state is None:
        S = tl.zeros([BK, BV], tl.float32)
    else:
        S = tl.load(state + slot * state_n + h * state_h + tile, mask=inside, other=0.0).to(tl.float32)  # [BK, BV]
    q += n * q_n + (h // GROUP) * q_h + d
    v += n * v_n + h * v_h + c
    o += (n * tokens * HV + h) * V + c
    for i in range(1 if ONE else tokens):
        t = tl.zeros([], tl.int64) + i
        D = S
        if g is not None:
            at = g + n * g_n + t * g_t + h * g_h
            if GATE == 2:
                D = S * tl.exp(tl.load(at + c, mask=in_v, other=0.0).to(tl.float32))[None, :]
            elif GATE == 1:
                D = S * tl.exp(tl.load(at + d, mask=in_k, other=0.0).to(tl.float32))[:, None]
            else:
                D = S * tl.exp(tl.load(at).to(tl.float32))
        x = tl.load(v + t * v_t, mask=in_v, other=0.0).to(tl.float32)  # [BV]
        new = D
        if k is not None:
            key = tl.load(k + n * k_n + t * k_t + (h // GROUP) * k_h + d, mask=in_k, other=0.0).to(tl.float32)  # [BK]
        if RAW:
            new = new + key[:, None] * x[None, :]
        if CORRECTED:
            strength = 1.0
            if beta is not None:
                strength = tl.load(beta + n * beta_n + t * beta_t + h * beta_h).to(tl.float32)
            if a is None:
                nu = strength * (x - tl.sum(D * key[:, None], 0))  # [BV]
            else:
                reader = tl.load(a + n * a_n + t * a_t + (h // A_GROUP) * a_h + d, mask=in_k, other=0.0).to(tl.float32)
                nu = tl.sum(S * (-reader if MINUS_A else reader)[:, None], 0)
                if not RAW:
                    nu += strength * x
            if b is None:
                writer = key
            if b is not None:
                writer = tl.load(b + n * b_n + t * b_t + (h // B_GROUP) * b_h + d, mask=in_k, other=0.0).to(tl.float32)
            new = new + writer[:, None] * nu[None, :]
        query = tl.load(q + t * q_t, mask=in_k, other=0.0).to(tl.float32)  # [BK]
        y = tl.sum((S if READ_BEFORE else new) * query[:, None], 0) * scale  # [BV]
        if slots is not None:
            y = tl.where(live, y, 0.0)
        tl.store(o + t * HV * V, y.to(o.dtype.element_ty), mask=in_v)
        S = new
        if history is not None:
            j = t - (tokens - kept)
            at = history + n * history_n + j * history_t + h * history_h + tile
            tl.store(at, S.to(history.dtype.element_ty), mask=inside & (j >= 0))
    tl.store(new_state + slot * new_n + h * new_h + tile, S.to(new_state.dtype.element_ty), mask=inside)


def tile(K: int, V: int, bytes_each: int) -> tuple[int, int, int]:
    """BK, BV and warps for a state of these sizes: a table, measured on an H200 (`benchmarks/decode.py --tiles`).

    It must not know the batch: another tile sums in another order.
    """
    BK = padded(K)
    BV, warps = (32, 4) if BK > 128 else (64, 4) if BK == 128 and bytes_each == 4 else (32, 2)
    return BK, min(BV, padded(V)), warps


def step(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    """Output `[B, T, HV, V]` and the next state `[B, HV, K, V]` of a few tokens, from the initial state or zeros."""
    B, _, HV, V = call.v.shape
    new = torch.empty(B, HV, call.K, V, dtype=torch.float32, device=call.device)
    tensors = (call.q, call.k, call.v, call.beta, call.a, call.b, call.log_decay, call.initial_state, None, None)
    return _run(tensors, new, call.scale, call.read_before, False, call.value_decay), new


def step_in_place(tensors: Tensors, scale: float, read_before: bool, minus_a: bool) -> Tensor:
    """Output `[B, T, HV, V]`; the states and the history are written."""
    state, history = tensors[7], tensors[9]
    assert state is not None
    held = [t for t in (state, history) if t is not None and not _is_packed(t)]
    if not held:
        return _run(tensors, state, scale, read_before, minus_a)
    copies = {t: t.contiguous() for t in held}
    changed = tuple(copies.get(t, t) if t is not None else None for t in tensors)
    o = _run(changed, changed[7], scale, read_before, minus_a)
    for t, copy in copies.items():
        t.copy_(copy)
    return o


def prepare(tensors: Tensors, scale: float, read_before: bool, minus_a: bool) -> Any:
    """A function of tensors like these that does as `step_in_place`, its checks and choices made; None if it cannot."""
    if not all(t is None or _is_packed(t) for t in (tensors[7], tensors[9])):
        return None
    v = tensors[2]
    if not all(t is None or _has_unit_stride(t) for t in _vectors(tensors)) or v is None or v.numel() == 0:
        return None
    launch = _launch(tensors, tensors[7], scale, read_before, minus_a)
    shape, dtype, device = v.shape, v.dtype, v.device

    def run(tensors: Tensors) -> Tensor:
        o = torch.empty(shape, dtype=dtype, device=device)
        q, k, v, beta, a, b, g, state, slots, history = tensors
        launch(device, (q, k, v, beta, a, b, g, state, state, slots, history, o))
        return o

    return run


def _run(
    tensors: Tensors, new: Tensor | None, scale: float, read_before: bool, minus_a: bool, value_gate: bool = False
) -> Tensor:
    q, k, v, beta, a, b, g, state, slots, history = tensors
    assert v is not None
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if o.numel() == 0:
        return o
    q, k, v, a, b = (t if t is None or _has_unit_stride(t) else t.contiguous() for t in (q, k, v, a, b))
    if g is not None and g.dim() == 4 and not _has_unit_stride(g):
        g = g.contiguous()
    state = state if state is None or _is_packed(state) else state.contiguous()
    tensors = (q, k, v, beta, a, b, g, state, slots, history)
    launch = _launch(tensors, new, scale, read_before, minus_a, value_gate)
    launch(o.device, (*tensors[:8], new, slots, history, o))
    return o


def _launch(
    tensors: Tensors, new: Tensor | None, scale: float, read_before: bool, minus_a: bool, value_gate: bool = False
) -> Launch:
    """The launch for tensors of these sizes."""
    q, k, v, beta, a, b, g, state, slots, history = tensors
    assert q is not None and v is not None and new is not None
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    BK, BV, warps = tile(K, V, new.element_size())
    gate = (0, 0, 0) if g is None else (0, 0, g.stride(0)) if g.dim() == 1 else g.stride()[:3]
    strides = [s for t in (q, k, v, beta, a, b) for s in (t.stride()[:3] if t is not None else (0, 0, 0))]
    past = (0, 0) if state is None else state.stride()[:2]
    kept = (0, 0, 0) if history is None else history.stride()[:3]
    numbers = (
        T, new.shape[0], 0 if history is None else history.shape[1], *strides, *gate,
        *past, *new.stride()[:2], 0 if slots is None else slots.stride(0), *kept, float(scale),
    )  # fmt: skip
    constants = {
        "HV": HV, "GROUP": HV // H, "A_GROUP": 1 if a is None else HV // a.shape[2],
        "B_GROUP": 1 if b is None else HV // b.shape[2], "K": K, "V": V, "BK": BK, "BV": BV,
        "RAW": k is not None and beta is None, "CORRECTED": a is not None or beta is not None, "MINUS_A": minus_a,
        "GATE": 0 if g is None or g.dim() < 4 else 2 if value_gate else 1, "READ_BEFORE": read_before, "ONE": T == 1,
    }  # fmt: skip
    return Launch(step_kernel, B * HV * cdiv(V, BV), numbers, constants, warps)


def _vectors(tensors: Tensors) -> Tensors:
    """Those that have a row of K or V numbers a head."""
    q, k, v, _, a, b, g, *_ = tensors
    return q, k, v, a, b, None if g is None or g.dim() < 4 else g


def _has_unit_stride(t: Tensor) -> bool:
    return t.stride(-1) == 1 or t.shape[-1] == 1


def _is_packed(t: Tensor) -> bool:
    """Whether each `[K, V]` matrix of a state lies in one piece."""
    K, V = t.shape[-2:]
    return (t.stride(-1) == 1 or V == 1) and (t.stride(-2) == V or K == 1)
