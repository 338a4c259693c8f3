"""The meaning of the step of the scan: the token loop over a pool of states. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.scan.definition import scan


def scan_step(
    x: Tensor,
    log_decay: Tensor,
    state: Tensor,
    state_indices: Tensor | None = None,
    read_before: bool = False,
    coupling: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs `[B, T, ...]` and the pool afterwards; a sequence whose index is no slot is idle."""
    pool, h = state.clone(), torch.zeros_like(x)
    for n in range(x.shape[0]):
        slot = n if state_indices is None else int(state_indices[n])
        if 0 <= slot < pool.shape[0]:
            g = log_decay[n : n + 1] if log_decay.dim() > 2 else log_decay
            y, last = scan(x[n : n + 1], g, pool[slot : slot + 1], read_before, coupling)
            h[n], pool[slot] = y[0], last[0]
    return h, pool
