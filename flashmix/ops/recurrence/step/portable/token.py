"""The `step` phase: one token of every sequence, without chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.call import RecurrenceCall


def step(call: RecurrenceCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output `[B, 1, HV, V]` and the next state `[B, HV, K, V]` for inputs with T = 1; computed in `dtype`."""
    B, _, HV, V = call.v.shape

    def row(t: Tensor) -> Tensor:
        """`[B, 1, H, D]` as a matrix of one row per value head, `[B * HV, 1, D]`."""
        if t.shape[2] != HV:
            t = t.repeat_interleave(HV // t.shape[2], dim=2)
        return t.to(dtype).reshape(B * HV, 1, t.shape[-1])

    q, v = row(call.q), row(call.v)
    K = q.shape[-1]
    S = q.new_zeros(B * HV, K, V) if call.initial_state is None else call.initial_state.reshape(B * HV, K, V)
    decayed = S
    if call.log_decay is not None:
        g = call.log_decay.to(dtype)
        factor = g.exp().expand(B, HV) if g.dim() == 1 else g.exp()
        factor = factor.reshape(B * HV, g.shape[3] if g.dim() == 4 else 1)
        decayed = S * factor.unsqueeze(1 if call.value_decay else 2)
    if call.a is not None and call.b is not None:  # both read the state before its decay
        nu = row(call.a) @ S
        new = torch.baddbmm(decayed, row(call.b).mT, nu if call.k is not None else nu.add_(v))
        if call.k is not None:
            new.baddbmm_(row(call.k).mT, v)
    else:
        assert call.k is not None
        k = row(call.k)
        if call.beta is not None:
            v = torch.baddbmm(v, k, decayed, alpha=-1).mul_(call.beta.to(dtype).reshape(-1, 1, 1))
        new = torch.baddbmm(decayed, k.mT, v)
    o = torch.bmm(q, S if call.read_before else new).mul_(call.scale)
    return o.reshape(B, 1, HV, V).to(call.v.dtype), new.reshape(B, HV, K, V)
