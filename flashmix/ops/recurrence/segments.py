"""Segments of a sequence: each acts on the state as `S_out = M S_in + N`, so that a sequence can be cut and joined again.

Segments can be worked on apart (on other devices, on idle multiprocessors) and joined by a scan over their `(M, N)`
(docs/chunk_algorithm.md, section 7). `N` is the state pass from zero, `M` the same pass with the identity as initial state and
zero values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.op import RECURRENCE


def transition(call: RecurrenceCall, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """`M` `[N, HV, K, K]` and `N` `[N, HV, K, V]` of each sequence of `call` (its initial state, scale and reads are not used).

    S_out = M S_in + N

    Raises ValueError: the decay is on the value axis, where a segment acts on the state from the right as well.
    """
    if call.value_decay:
        raise ValueError(
            "transition cannot take value_log_decay: such a segment is no matrix M before the state "
            "(Packing.shard joins it, by the products of its decays)"
        )
    own = call.but(initial_state=None, scale=1.0, read_before=False)
    start = torch.eye(call.K, dtype=call.state_dtype, device=call.device)
    start = start.expand(call.sequences, call.value_heads, call.K, call.K)
    alone = own.but(v=call.v.new_zeros(*call.v.shape[:3], call.K), initial_state=start)
    _, M = RECURRENCE(alone, impl, "transition")
    _, N = RECURRENCE(own, impl, "transition")
    return M, N


def scan(M: Tensor, N: Tensor, initial_state: Tensor | None = None) -> Tensor:
    """The state before each segment and after the last, `[segments + 1, ..., K, V]`, from their `M, N` `[segments, ..., K, K or V]`.

    S_{i+1} = M_i S_i + N_i,  S_0 = initial_state (zeros by default)
    """
    states = [torch.zeros_like(N[0]) if initial_state is None else initial_state]
    for m, n in zip(M, N, strict=True):
        states.append(m @ states[-1] + n)
    return torch.stack(states)
