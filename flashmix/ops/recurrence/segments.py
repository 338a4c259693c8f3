"""A segment of tokens acts on the state as `S_out = M S_in + N`: what one needs to cut a sequence and join it again.

Segments can be worked on apart (on other devices, on idle multiprocessors) and joined by a scan over their `(M, N)`
(docs/chunk_algorithm.md, section 7). `N` is the state pass from zero, `M` the same pass with the identity as initial state and
zero values; one pass computes both, side by side.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashmix.ops.recurrence.call import Operands
from flashmix.ops.recurrence.engine import run, state_dtype


def transition(x: Operands, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """`M` `[N, HV, K, K]` and `N` `[N, HV, K, V]` of each sequence of `x` (its initial state is not used).

    S_out = M S_in + N

    Raises ValueError: the decay is on the value axis, where a segment acts on the state from the right as well.
    """
    if x.value_gate:
        raise ValueError("transition cannot take value_log_decay: such a segment is no matrix M before the state")
    B, T, HV, V = x.v.shape
    K = x.q.shape[-1]
    sequences = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    dtype = state_dtype(x.v.dtype)
    identity = torch.eye(K, dtype=dtype, device=x.v.device)
    start = torch.cat([identity.new_zeros(K, V), identity], 1).expand(sequences, HV, K, V + K)
    values = torch.cat([x.v, x.v.new_zeros(B, T, HV, K)], -1)
    _, state = run("transition", replace(x, v=values, initial_state=start), 1.0, False, impl)
    return state[..., V:], state[..., :V]


def scan(M: Tensor, N: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """The state before each segment and after the last, `[segments + 1, ..., K, V]`, from their `M, N` `[segments, ..., K, K or V]`.

    S_{i+1} = M_i S_i + N_i,  S_0 = initial_state (zeros by default)
    """
    states = [torch.zeros_like(N[0]) if initial_state is None else initial_state]
    for m, n in zip(M, N, strict=True):
        states.append(m @ states[-1] + n)
    return torch.stack(states)
