"""The step of the scan in plain PyTorch."""

from __future__ import annotations

import torch

from flashmix.op.call import Outputs
from flashmix.ops.recurrence.step.portable.in_place import put_states, rows_of, slots_of
from flashmix.ops.scan.call import scan_dtype
from flashmix.ops.scan.portable import factors
from flashmix.ops.scan.step.call import ScanStepCall


def forward(call: ScanStepCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, ...]`; the states are written."""
    x, state = call.x, call.state
    if x.numel() == 0:
        return call.results(), ()
    wide = scan_dtype(x.dtype)
    slots = slots_of(call.state_indices, state)
    g = call.decay
    g = g.to(wide) if g.is_complex() or not x.is_complex() else g.to(wide.to_real())
    factor, weight = factors(g, call.coupling)
    written = x.to(wide) if weight is None else weight * x
    h, outputs = rows_of(state, slots).to(wide), []
    for t in range(call.tokens):
        before, h = h, factor[:, t] * h + written[:, t]
        outputs.append(before if call.read_before else h)
    out = torch.stack(outputs, 1)  # before the states are written, of which the first output may be a view
    put_states(state, h, slots)
    if slots is not None:
        out.masked_fill_(~slots.mask.view(-1, *(1,) * (out.dim() - 1)), 0)
    return (out.to(x.dtype),), ()
