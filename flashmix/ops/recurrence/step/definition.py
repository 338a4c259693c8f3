"""The meaning of the steps: the token loops of the recurrence over a pool of states, in float64.

Only tests, the self-test and docs import this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loop = Callable[[dict[str, Tensor], Tensor], tuple[Tensor, Tensor]]


def steps_in_pool(
    loop: Loop, x: dict[str, Tensor], pool: Tensor, state_indices: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, T, HV, V]`, the pool after it, and the state of each sequence after each token `[B, T, HV, K, V]`.

    `loop(x, S)` is the token loop of a rule on operands `x` (`[B, T, ...]`, or a gate `[HV]`) from states `S`. A sequence whose
    index is no slot is idle: its output is 0 and no state is touched.
    """
    B, T = x["q"].shape[:2]
    pool, o = pool.clone(), torch.zeros_like(x["v"])
    states = pool.new_zeros(B, T, *pool.shape[1:])
    for n in range(B):
        slot = n if state_indices is None else int(state_indices[n])
        if not 0 <= slot < pool.shape[0]:
            continue
        for t in range(T):
            part = {name: value if value.dim() == 1 else value[n : n + 1, t : t + 1] for name, value in x.items()}
            y, S = loop(part, pool[slot : slot + 1])
            o[n, t], pool[slot], states[n, t] = y[0, 0], S[0], S[0]
    return o, pool, states
