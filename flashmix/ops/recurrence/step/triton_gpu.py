"""The `step` phase: a few tokens of every sequence, one after the other, the state held in registers between them.

    D = diag(e^g) S;    S' = D + k v^T                      raw
                        S' = D + b nu^T                     corrected: nu = r + S^T a, or nu = beta (v - D^T k)
    o = scale S'^T q                                        or scale S^T q

A program has `BV` columns of the state of one head of one sequence; columns of a state do not meet. Its result depends on
nothing else in the batch, and the tile follows from K, V and the state's dtype alone, so it has the same bits in any batch.
Letters: `d` channels of the keys (BK), `c` channels of the values (BV).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.series import LaunchSeries
from flashmix.op.call import Outputs
from flashmix.op.remember import Again, Tensors, by_signature
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.step.call import StepCall


class StepVectors(NamedTuple):
    """Vectors of one head, read by many threads, where alignment gains nothing; absent ones None."""

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    beta: Any
    log_decay: Any
    slots: Any
    o: Any


class StepStates(NamedTuple):
    """The state before, None for zeros; the state after, which may be the same; the states after each of the last tokens, or None."""

    old: Any
    new: Any
    history: Any


class StepNumbers(NamedTuple):
    """Sizes, and strides of sequence, token and head, that the code is not specialised for."""

    tokens: Any
    pool: Any
    kept: Any  # states of each sequence in `history`
    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    beta: Any
    log_decay: Any
    slots: Any
    scale: Any


class StateStrides(NamedTuple):
    """Strides of slot and head; of `history` of sequence, token and head."""

    old: Any
    new: Any
    history: Any


class StepSpec(NamedTuple):
    HV: int
    GROUP: int  # value heads per head of q and k
    A_GROUP: int
    B_GROUP: int
    K: int
    V: int
    BK: int
    BV: int
    RAW: bool
    CORRECTED: bool
    MINUS_A: bool
    DECAY: int  # 0: one factor for the state, 1: one for each row, 2: one for each column
    READ_BEFORE: bool
    ONE: bool  # one token
    V_FIRST: bool  # the states lie [V, K], the numbers of a key side by side; histories do not


@triton.jit
def corrected_value(x, n, S, D, key, value, place, R: tl.constexpr):
    """nu [BV]: r + S^T a, or beta (v - D^T k) of the tied rule; `place` is (sequence, token, value head, d, d < K)."""
    row, t, h, d, in_k = place
    beta = 1.0
    if x.beta is not None:
        beta = tl.load(x.beta + row * n.beta[0] + t * n.beta[1] + h * n.beta[2]).to(tl.float32)
    if x.a is None:
        nu = beta * (value - tl.sum(D * key[:, None], 0))  # [BV]
    else:
        ptr = x.a + row * n.a[0] + t * n.a[1] + (h // R.A_GROUP) * n.a[2] + d
        a = tl.load(ptr, mask=in_k, other=0.0).to(tl.float32)  # [BK]
        nu = tl.sum(S * (-a if R.MINUS_A else a)[:, None], 0)  # [BV]
        if not R.RAW:
            nu += beta * value
    return nu


@triton.jit
def decayed(x, n, S, place, c, in_v, R: tl.constexpr):
    """D = diag(e^g) S, or S diag(e^g): [BK, BV]."""
    row, t, h, d, in_k = place
    ptr = x.log_decay + row * n.log_decay[0] + t * n.log_decay[1] + h * n.log_decay[2]
    if R.DECAY == 2:
        return S * tl.exp(tl.load(ptr + c, mask=in_v, other=0.0).to(tl.float32))[None, :]
    elif R.DECAY == 1:
        return S * tl.exp(tl.load(ptr + d, mask=in_k, other=0.0).to(tl.float32))[:, None]
    else:
        return S * tl.exp(tl.load(ptr).to(tl.float32))


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
def step_kernel(x, states, n, strides, R: tl.constexpr):
    """Tokens of one sequence and value head, BV columns of the state. A slot outside [0, pool) is idle: o = 0."""
    HV: tl.constexpr = R.HV
    K: tl.constexpr = R.K
    V: tl.constexpr = R.V
    BK: tl.constexpr = R.BK
    BV: tl.constexpr = R.BV
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0) // COLUMNS
    row, h = (program // HV).to(tl.int64), (program % HV).to(tl.int64)
    d = tl.arange(0, BK)  # [BK]
    c = (tl.program_id(0) % COLUMNS) * BV + tl.arange(0, BV)  # [BV]
    in_k, in_v = d < K, c < V
    tile = d[:, None] * V + c[None, :]  # [BK, BV]
    lying = d[:, None] + c[None, :] * K if R.V_FIRST else tile  # [BK, BV]
    mask = in_k[:, None] & in_v[None, :]
    slot = row
    if x.slots is not None:
        slot = tl.load(x.slots + row * n.slots).to(tl.int64)
        live = (slot >= 0) & (slot < n.pool)
        slot = tl.where(live, slot, 0)
        mask = mask & live
    if states.old is None:
        S = tl.zeros([BK, BV], tl.float32)
    else:
        old = states.old + slot * strides.old[0] + h * strides.old[1] + lying
        S = tl.load(old, mask=mask, other=0.0).to(tl.float32)  # [BK, BV]
    q = x.q + row * n.q[0] + (h // R.GROUP) * n.q[2] + d
    v = x.v + row * n.v[0] + h * n.v[2] + c
    o = x.o + (row * n.tokens * HV + h) * V + c
    for i in range(1 if R.ONE else n.tokens):
        t = tl.zeros([], tl.int64) + i
        place = row, t, h, d, in_k
        D = S
        if x.log_decay is not None:
            D = decayed(x, n, S, place, c, in_v, R)
        value = tl.load(v + t * n.v[1], mask=in_v, other=0.0).to(tl.float32)  # [BV]
        new = D
        key = x.k  # None, or the key itself
        if x.k is not None:
            k = x.k + row * n.k[0] + t * n.k[1] + (h // R.GROUP) * n.k[2] + d
            key = tl.load(k, mask=in_k, other=0.0).to(tl.float32)  # [BK]
        if R.RAW:
            new = new + key[:, None] * value[None, :]
        if R.CORRECTED:
            nu = corrected_value(x, n, S, D, key, value, place, R)  # [BV]
            write = key
            if x.b is not None:
                b = x.b + row * n.b[0] + t * n.b[1] + (h // R.B_GROUP) * n.b[2] + d
                write = tl.load(b, mask=in_k, other=0.0).to(tl.float32)  # [BK]
            new = new + write[:, None] * nu[None, :]
        query = tl.load(q + t * n.q[1], mask=in_k, other=0.0).to(tl.float32)  # [BK]
        y = tl.sum((S if R.READ_BEFORE else new) * query[:, None], 0) * n.scale  # [BV]
        if x.slots is not None:
            y = tl.where(live, y, 0.0)
        tl.store(o + t * HV * V, y.to(x.o.dtype.element_ty), mask=in_v)
        S = new
        if states.history is not None:
            j = t - (n.tokens - n.kept)
            at = strides.history
            kept = states.history + row * at[0] + j * at[1] + h * at[2] + tile
            tl.store(kept, S.to(states.history.dtype.element_ty), mask=mask & (j >= 0))
    after = states.new + slot * strides.new[0] + h * strides.new[1] + lying
    tl.store(after, S.to(states.new.dtype.element_ty), mask=mask)


def tile(K: int, V: int, bytes_each: int) -> tuple[int, int, int]:
    """BK, BV and warps for a state of these sizes: a table, measured on an H200 (`benchmarks/decode.py --tiles`).

    It must not know the batch: another tile sums in another order.
    """
    BK = max(16, power_of_two(K))
    BV, warps = (32, 4) if BK > 128 else (64, 4) if BK == 128 and bytes_each == 4 else (32, 2)
    return BK, min(BV, max(16, power_of_two(V))), warps


def step(call: RecurrenceCall) -> tuple[Tensor, Tensor]:
    """Output `[B, T, HV, V]` and the next state `[B, HV, K, V]` of a few tokens, from the initial state or zeros."""
    B, _, HV, V = call.v.shape
    new = torch.empty(B, HV, call.K, V, dtype=torch.float32, device=call.device)
    o = torch.empty(size=call.v.shape, dtype=call.dtype, device=call.device)
    old = call.initial_state
    old = old if old is None or _is_packed(old) else old.contiguous()
    same = ("q", "k", "v", "a", "b", "beta", "log_decay", "scale", "read_before")
    own = {"state": old, "history": None, "state_indices": None, "minus_a": False}
    made = StepCall.make({name: getattr(call, name) for name in same} | own)
    if o.numel():
        _launch(made, o, new, call.value_decay)
    return o, new


def forward(call: StepCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, HV, V]`; the states and the history are written."""
    again = prepare(call)
    if again is not None:
        return (again(vars(call)),), ()
    (o,) = call.results()
    if o.numel():
        copies = {name: getattr(call, name).contiguous() for name in _with_gaps(call)}
        changed = call.but(**copies)
        _launch(changed, o, changed.state)
        for name, copy in copies.items():
            getattr(call, name).copy_(copy)
    return (o,), ()


@by_signature
def prepare(call: StepCall) -> Again | None:
    """The short way of calls like this one; None if some tensors must be copied first, or nothing is to be launched."""
    if _with_gaps(call) or call.v.numel() == 0:
        return None
    if _with_unit_strides(call) is not call:
        return None
    series, shape, dtype, device = LaunchSeries(), call.v.shape, call.dtype, call.device
    names, options = call.names, {name: getattr(call, name) for name in call.options}

    def run(x: Tensors) -> Tensor:
        o = torch.empty(size=shape, dtype=dtype, device=device)
        tensors = (*[x[name] for name in names], o)
        series(device, tensors, lambda: _launch(StepCall.make({**x, **options}), o, x["state"]))
        return o

    return run


def _launch(call: StepCall, o: Tensor, new: Tensor, value_decay: bool = False) -> None:
    """Fills `o` and `new`, and the history."""
    call = _with_unit_strides(call)
    q, k, a, b, beta, g, old = call.q, call.k, call.a, call.b, call.beta, call.log_decay, call.state
    (B, T, HV, V), (H, K) = call.v.shape, q.shape[2:]
    BK, BV, warps = tile(K, V, new.element_size())
    numbers = StepNumbers(
        tokens=T,
        pool=new.shape[0],
        kept=call.kept,
        q=_strides(q),
        k=_strides(k),
        v=_strides(call.v),
        a=_strides(a),
        b=_strides(b),
        beta=_strides(beta),
        log_decay=(0, 0, g.stride(0)) if g is not None and g.dim() == 1 else _strides(g),
        slots=0 if call.state_indices is None else call.state_indices.stride(0),
        scale=call.factor,
    )
    strides = StateStrides(_strides(old)[:2], new.stride()[:2], _strides(call.history))
    spec = StepSpec(
        HV=HV,
        GROUP=HV // H,
        A_GROUP=1 if a is None else HV // a.shape[2],
        B_GROUP=1 if b is None else HV // b.shape[2],
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        RAW=k is not None and beta is None,
        CORRECTED=a is not None or beta is not None,
        MINUS_A=call.minus_a,
        DECAY=0 if g is None or g.dim() < 4 else 2 if value_decay else 1,
        READ_BEFORE=call.read_before,
        ONE=T == 1,
        V_FIRST=not _is_packed(new),
    )
    kernel = bound(step_kernel, spec, num_warps=warps, num_stages=1)
    vectors = StepVectors(q, k, call.v, a, b, beta, g, call.state_indices, o)
    kernel(B * HV * cdiv(V, BV), vectors, StepStates(old, new, call.history), numbers, strides)


def _strides(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if t is None else t.stride()[:3]


def _with_unit_strides(call: StepCall) -> StepCall:
    """The call itself, or one whose rows of K or V numbers each lie in one piece."""
    names = ("q", "k", "v", "a", "b", "log_decay")
    found = {n: t for n in names if (t := getattr(call, n)) is not None and (n != "log_decay" or t.dim() == 4)}
    copies = {n: t.contiguous() for n, t in found.items() if t.stride(-1) != 1 and t.shape[-1] != 1}
    return call.but(**copies) if copies else call


def _with_gaps(call: StepCall) -> list[str]:
    """The written tensors that the kernel does not take as they lie."""
    gaps = [] if _is_packed(call.state) or _is_packed(call.state.mT) else ["state"]
    return gaps if call.history is None or _is_packed(call.history) else [*gaps, "history"]


def _is_packed(t: Tensor) -> bool:
    """Whether each `[K, V]` matrix of a state lies in one piece."""
    K, V = t.shape[-2:]
    return (t.stride(-1) == 1 or V == 1) and (t.stride(-2) == V or K == 1)
