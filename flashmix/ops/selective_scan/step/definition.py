"""The meaning of the step of the selective scan: its token loop over a pool of states. Only tests, the self-test and docs import this."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.ops.selective_scan.definition import selective_scan


def selective_scan_step(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    state_indices: Tensor | None = None,
    z: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The outputs `[B, T, D]` and the pool afterwards; a sequence whose index is no slot is idle."""
    pool, y = state.clone(), torch.zeros_like(u)
    for n in range(u.shape[0]):
        slot = n if state_indices is None else int(state_indices[n])
        if 0 <= slot < pool.shape[0]:
            own, gate = slice(n, n + 1), None if z is None else z[n : n + 1]
            start = pool[slot : slot + 1]
            out, last = selective_scan(u[own], dt[own], A, B[own], C[own], z=gate, initial_state=start, **options)
            y[n], pool[slot] = out[0], last[0]
    return y, pool
