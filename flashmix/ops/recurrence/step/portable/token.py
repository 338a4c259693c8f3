"""The `step` phase: one token of every sequence, without chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.call import RecurrenceCall


def step(call: RecurrenceCall, dtype: torch.dtype, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Output `[B, 1, HV, V]` and the next state `[B, HV, K, V]` for inputs with T = 1; computed in `dtype`.

    With `in_place` the initial state, contiguous and in `dtype`, becomes the next one; the bits are the same.
    """
    B, _, HV, V = call.v.shape

    def row(t: Tensor) -> Tensor:
        """`[B, 1, H, D]` as a matrix of one row per value head, `[B * HV, 1, D]`."""
        if t.shape[2] != HV:
            t = t.repeat_interleave(HV // t.shape[2], dim=2)
        return t.to(dtype).reshape(B * HV, 1, t.shape[-1])

    q, v = row(call.q), row(call.v)
    K = q.shape[-1]
    S = q.new_zeros(B * HV, K, V) if call.initial_state is None else call.initial_state.reshape(B * HV, K, V)
    before = torch.bmm(q, S).mul_(call.scale) if call.read_before else None
    nu = row(call.a) @ S if call.a is not None and call.b is not None else None  # reads the state before its decay
    decayed = S
    if call.log_decay is not None:
        g = call.log_decay.to(dtype)
        factor = g.exp().expand(B, HV) if g.dim() == 1 else g.exp()
        factor = factor.reshape(B * HV, g.shape[3] if g.dim() == 4 else 1)
        factor = factor.unsqueeze(1 if call.value_decay else 2)
        decayed = S.mul_(factor) if in_place else S * factor
    over = in_place or (decayed is not S and decayed.is_contiguous())  # another layout would sum in another order
    if nu is not None:
        assert call.b is not None
        nu = nu if call.k is not None else nu.add_(v)
        new = added(decayed, row(call.b).mT, nu, over)
        if call.k is not None:
            new.baddbmm_(row(call.k).mT, v)
    else:
        assert call.k is not None
        k = row(call.k)
        if call.beta is not None:
            v = torch.baddbmm(v, k, decayed, alpha=-1).mul_(call.beta.to(dtype).reshape(-1, 1, 1))
        new = added(decayed, k.mT, v, over)
    o = torch.bmm(q, new).mul_(call.scale) if before is None else before
    return o.reshape(B, 1, HV, V).to(call.v.dtype), new.reshape(B, HV, K, V)


def added(S: Tensor, keys: Tensor, values: Tensor, over: bool) -> Tensor:
    """`S + keys values`, in the memory of `S` if it may be written over."""
    return S.baddbmm_(keys, values) if over else torch.baddbmm(S, keys, values)
