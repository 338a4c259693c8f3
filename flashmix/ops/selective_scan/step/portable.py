"""The step of the selective scan in plain PyTorch."""

from __future__ import annotations

import torch

from flashmix.op.call import Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.ops.recurrence.step.portable.in_place import put_states, rows_of, slots_of
from flashmix.ops.selective_scan.step.call import SelectiveStepCall


def forward(call: SelectiveStepCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, D]`; the states are written."""
    u, state, wide = call.u, call.state, state_dtype(call.dtype)
    if u.numel() == 0:
        return call.results(), ()
    slots = slots_of(call.state_indices, state)
    dt, A = call.dt.to(wide), call.A.to(wide).contiguous()
    repeats = A.shape[0] // call.B.shape[2]
    B, C = (t.to(wide).contiguous().repeat_interleave(repeats, dim=2) for t in (call.B, call.C))  # [B, T, D, S]
    h, outputs = rows_of(state, slots).to(wide), []
    for t in range(u.shape[1]):
        h = torch.exp(dt[:, t].unsqueeze(-1) * A) * h + (dt[:, t] * u[:, t].to(wide)).unsqueeze(-1) * B[:, t]
        outputs.append((h * C[:, t]).sum(-1))
    put_states(state, h, slots)
    y = torch.stack(outputs, 1)
    if slots is not None:
        y.masked_fill_(~slots.mask[:, None, None], 0)
    return (y.to(u.dtype),), ()
