"""The meaning of the selective scan: token loops, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.nn.functional import softplus as rectified


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    softplus: bool = False,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`h = e^{dt A} h + dt B u`, `y = C h + D u`, times `silu(z)`; the outputs and the last `h` `[B, D, S]`."""
    batch, tokens, channels = u.shape
    step = dt if dt_bias is None else dt + dt_bias
    step = rectified(step, threshold=1000) if softplus else step
    B, C = (t.unsqueeze(2) if t.dim() == 3 else t for t in (B, C))
    B, C = (t.repeat_interleave(channels // t.shape[2], dim=2) for t in (B, C))  # [B, T, D, S]
    h = u.new_zeros(batch, *A.shape) if initial_state is None else initial_state
    outputs = []
    for t in range(tokens):
        h = torch.exp(step[:, t, :, None] * A) * h + (step[:, t] * u[:, t])[:, :, None] * B[:, t]
        outputs.append((h * C[:, t]).sum(-1))
    y = torch.stack(outputs, 1) if outputs else u + 0
    y = y if D is None else y + D * u
    return y if z is None else y * silu(z), h
