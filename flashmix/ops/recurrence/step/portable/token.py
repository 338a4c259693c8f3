"""The `step` phase: one token of every sequence, without chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.call import Operands


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
        decayed = S * (factor.reshape(B * HV, 1, -1) if x.value_gate else factor.reshape(B * HV, -1, 1))
    if x.a is not None and x.b is not None:  # both read the state before its decay
        nu = row(x.a) @ S
        new = torch.baddbmm(decayed, row(x.b).mT, nu if x.k is not None else nu.add_(v))
        if x.k is not None:
            new.baddbmm_(row(x.k).mT, v)
    else:
        assert x.k is not None
        k = row(x.k)
        if x.beta is not None:
            v = torch.baddbmm(v, k, decayed, alpha=-1).mul_(x.beta.to(dtype).reshape(-1, 1, 1))
        new = torch.baddbmm(decayed, k.mT, v)
    o = torch.bmm(q, S if read_before else new).mul_(scale)
    return o.reshape(B, 1, HV, V).to(x.v.dtype), new.reshape(B, HV, K, V)
