"""A few tokens of every sequence with the states updated in place, in plain PyTorch: the `step` phase over a pool."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.remember import Again
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.step.call import StepCall
from flashmix.ops.recurrence.step.portable.token import step


def forward(call: StepCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, HV, V]`; the states and the history are written."""
    if call.v.numel() == 0:
        return call.results(), ()
    state, history, wide = call.state, call.history, state_dtype(call.dtype)
    given = _as_recurrence(call, wide)
    if history is None and call.tokens == 1 and writes_through(state, call.state_indices, wide):
        o, _ = step(given.but(initial_state=state), wide, in_place=True)
        return (o.to(call.v.dtype),), ()
    slots = slots_of(call.state_indices, state)
    S = rows_of(state, slots).to(wide)
    outputs: list[Tensor] = []
    for t in range(call.tokens):
        o, S = step(_token(given, t).but(initial_state=S), wide)
        outputs.append(o if slots is None else o.masked_fill(~slots.mask[:, None, None, None], 0))
        if history is not None and t >= call.tokens - call.kept:
            into = history[:, t - call.tokens + call.kept]
            new = S.to(history.dtype)
            into.copy_(new if slots is None else torch.where(slots.mask[:, None, None, None], new, into))
    put_states(state, S, slots)
    return (torch.cat(outputs, 1).to(call.v.dtype),), ()


def prepare(call: StepCall) -> Again | None:
    """The short way of calls like this one; None where contents or addresses of their tensors are checked each time."""
    if call.state_indices is not None or call.history is not None:
        return None
    options = {name: getattr(call, name) for name in call.options}
    return lambda tensors: forward(StepCall.make({**tensors, **options}), False)[0][0]


def _as_recurrence(call: StepCall, wide: torch.dtype) -> RecurrenceCall:
    """The call as one of a rule that `step` knows: a delta rule with an erase or write vector is an untied one."""
    q, k, v, a, b, beta, g = call.q, call.k, call.v.to(wide), call.a, call.b, call.beta, call.log_decay
    if call.minus_a and a is not None:
        a = -a
    made = RecurrenceCall(q, k, v, a, b, beta, g, scale=call.factor, read_before=call.read_before)
    if beta is None or (a is None and b is None):
        return made
    factor = beta.to(wide).unsqueeze(-1)
    v = v * factor
    if a is None:
        if g is not None:
            factor = factor * (g.to(wide).exp() if g.dim() == 4 else g.to(wide).exp().unsqueeze(-1))
        a = -factor * k.to(wide).repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return made.but(k=None, v=v, a=a, b=k if b is None else b, beta=None)


def _token(call: RecurrenceCall, t: int) -> RecurrenceCall:
    """Token t of a call."""
    names = ("q", "k", "v", "a", "b", "beta", "log_decay")
    cut = {n: x[:, t : t + 1] for n in names if (x := getattr(call, n)) is not None and x.dim() > 1}
    return call.but(**cut)


class PoolSlots(NamedTuple):
    """Which sequences have a slot in the pool, `[B]`, and which one, 0 for those without."""

    mask: Tensor
    places: Tensor


def slots_of(state_indices: Tensor | None, pool: Tensor) -> PoolSlots | None:
    """The slots of the sequences; None where each has its own, in order."""
    if state_indices is None:
        return None
    mask = (state_indices >= 0) & (state_indices < pool.shape[0])
    return PoolSlots(mask, torch.where(mask, state_indices, 0).long())


def writes_through(state: Tensor, state_indices: Tensor | None, wide: torch.dtype) -> bool:
    """Whether the state can be computed where it lies: all of it, in its own dtype, without gaps."""
    return state_indices is None and state.dtype == wide and state.is_contiguous()


def rows_of(pool: Tensor, slots: PoolSlots | None) -> Tensor:
    """The states of the sequences; the pool itself where each has its own slot, in order."""
    return pool if slots is None else pool.index_select(0, slots.places)


def put_states(pool: Tensor, new: Tensor, slots: PoolSlots | None) -> None:
    """Writes the new states of the sequences that have a slot to the pool."""
    if slots is None:
        pool.copy_(new)
        return
    mask, places = slots
    if pool.device.type == "cpu":
        pool[places[mask]] = new[mask].to(pool.dtype)
    else:  # nothing waits for the device: every slot asks which sequence writes to it
        count = pool.shape[0]
        writer = torch.full((count + 1,), -1, dtype=torch.int64, device=pool.device)
        writer.scatter_(0, torch.where(mask, places, count), torch.arange(places.shape[0], device=pool.device))
        writer = writer[:count]
        axes = (slice(None),) + (None,) * (pool.dim() - 1)
        pool.copy_(torch.where((writer >= 0)[axes], new.to(pool.dtype)[writer.clamp(min=0)], pool))
