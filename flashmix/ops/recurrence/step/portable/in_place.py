"""A few tokens of every sequence with the states updated in place, in plain PyTorch: the `step` phase over a pool."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.step.portable.token import step

Tensors = tuple[Tensor | None, ...]  # q, k, v, beta, a, b, g, state, slots, history, as the public ops take them


def step_in_place(tensors: Tensors, scale: float, read_before: bool, minus_a: bool) -> Tensor:
    """Output `[B, T, HV, V]`; the states and the history are written."""
    q, k, v, beta, a, b, g, state, slots, history = tensors
    assert q is not None and v is not None and state is not None
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    live, rows = live_slots(slots, v.shape[0], state.shape[0], state.device)
    S = state.index_select(0, rows).to(wide)
    a, b, k, v, beta = _writes(a, b, k, v, beta, g, minus_a, wide)
    outputs: list[Tensor] = []
    tokens, kept = v.shape[1], 0 if history is None else history.shape[1]
    for t in range(tokens):
        part = {"q": q, "k": k, "v": v, "a": a, "b": b, "beta": beta, "log_decay": g}
        part = {n: x if x is None or x.dim() == 1 else x[:, t : t + 1] for n, x in part.items()}
        call = RecurrenceCall(**part, initial_state=S, scale=scale, read_before=read_before)  # type: ignore[arg-type]
        o, S = step(call, wide)
        outputs.append(o.masked_fill(~live[:, None, None, None], 0))
        if history is not None and t >= tokens - kept:
            into = history[:, t - tokens + kept]
            into.copy_(torch.where(live[:, None, None, None], S.to(history.dtype), into))
    put_states(state, S, slots, live, rows)
    return torch.cat(outputs, 1).to(tensors[2].dtype)  # type: ignore[union-attr]


def _writes(
    a: Tensor | None, b: Tensor | None, k: Tensor | None, v: Tensor, beta: Tensor | None, g: Tensor | None,
    minus_a: bool, wide: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """`a, b, k, v, beta` of the rule that `step` knows: a delta rule with an erase or write vector is an untied one."""
    if beta is None or (a is None and b is None):
        return -a if minus_a and a is not None else a, b, k, v.to(wide), beta
    assert k is not None
    strength = beta.to(wide).unsqueeze(-1)
    if a is not None:
        a = -a if minus_a else a
    else:
        factor = strength
        if g is not None:
            factor = strength * (g.to(wide).exp() if g.dim() == 4 else g.to(wide).exp().unsqueeze(-1))
        a = -factor * k.to(wide).repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    return a, k if b is None else b, None, v.to(wide) * strength, None


def live_slots(slots: Tensor | None, batch: int, pool: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which sequences have a slot in the pool, and the slots, 0 for the others."""
    if slots is None:
        return torch.ones(batch, dtype=torch.bool, device=device), torch.arange(batch, device=device)
    live = (slots >= 0) & (slots < pool)
    return live, torch.where(live, slots, 0).long()


def put_states(pool: Tensor, new: Tensor, slots: Tensor | None, live: Tensor, rows: Tensor) -> None:
    """Writes the new states of the live sequences to their slots."""
    if slots is None:
        pool.copy_(new)
    elif pool.device.type == "cpu":
        pool[rows[live]] = new[live].to(pool.dtype)
    else:  # nothing waits for the device: every slot asks which sequence writes to it
        count = pool.shape[0]
        writer = torch.full((count + 1,), -1, dtype=torch.int64, device=pool.device)
        writer.scatter_(0, torch.where(live, rows, count), torch.arange(rows.shape[0], device=pool.device))
        writer = writer[:count]
        axes = (slice(None),) + (None,) * (pool.dim() - 1)
        pool.copy_(torch.where((writer >= 0)[axes], new.to(pool.dtype)[writer.clamp(min=0)], pool))
