"""The `step` phase: one token of every sequence, without chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.problem import Operands, Rule


def step(x: Operands, scale: float, read_before: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Output `[B, 1, HV, V]` and the next state `[B, HV, K, V]` for inputs with T = 1; computed in `dtype`."""
    B, _, HV, V = x.v.shape

    def row(t: Tensor) -> Tensor:
        """`[B, 1, H, D]` as a matrix of one row a value head, `[B * HV, 1, D]`."""
        if t.shape[2] != HV:
            t = t.repeat_interleave(HV // t.shape[2], dim=2)
        return t.to(dtype).reshape(B * HV, 1, -1)

    q, v = row(x.q), row(x.v)
    K = q.shape[-1]
    S = q.new_zeros(B * HV, K, V) if x.initial_state is None else x.initial_state.reshape(B * HV, K, V)
    decayed = S
    if x.g is not None:
        g = x.g.to(dtype)
        factor = g.exp().expand(B, HV) if g.dim() == 1 else g.exp()
        decayed = S * factor.reshape(B * HV, -1, 1)
    if x.rule is Rule.LINEAR:
        new = torch.baddbmm(decayed, row(x.k).mT, v)
    elif x.rule is Rule.TIED:
        k = row(x.k)
        u = torch.baddbmm(v, k, decayed, alpha=-1).mul_(x.beta.to(dtype).reshape(-1, 1, 1))
        new = torch.baddbmm(decayed, k.mT, u)
    else:
        nu = row(x.a) @ S
        new = torch.baddbmm(decayed, row(x.b).mT, nu.add_(v) if x.rule is Rule.UNTIED else nu)
        if x.rule is Rule.DPLR:
            new.baddbmm_(row(x.k).mT, v)
    o = torch.bmm(q, S if read_before else new).mul_(scale)
    return o.reshape(B, 1, HV, V).to(x.v.dtype), new.reshape(B, HV, K, V)
