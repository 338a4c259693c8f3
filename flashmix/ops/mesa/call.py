"""One call of MesaNet's solution and output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import RecurrenceCall


@dataclass(frozen=True)
class MesaCall(Call):
    """Queries and keys `[B, T, H, K]`, values `[B, T, HV, V]`, strengths and log decays `[B, T, HV]`, the ridge `[HV, K]`, and the states
    `R` `[N, HV, K, K]` and `S` `[N, HV, K, V]` before the first token.

    The outputs are `scale S_t^T x_t` `[B, T, HV, V]`, where `steps` conjugate gradients solve `(R_t + diag(ridge)) x_t = q_t`, and the
    last states.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor
    ridge: Tensor
    R: Tensor | None
    S: Tensor | None
    packing: Packing | None
    steps: int
    scale: float

    @property
    def K(self) -> int:
        return self.q.shape[3]

    @property
    def V(self) -> int:
        return self.v.shape[3]

    @property
    def value_heads(self) -> int:
        return self.v.shape[2]

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.packing is None else self.packing.count

    @property
    def read(self) -> RecurrenceCall:
        """The read of the values with `q` in place of `x`: what kind of a call of the recurrence it is."""
        return RecurrenceCall(
            self.q, self.k, self.v, log_decay=self.log_decay, initial_state=self.S, packing=self.packing
        )

    @property
    def product(self) -> RecurrenceCall:
        """`R_t x_t` in the same way."""
        return self.read.but(v=self.k, initial_state=self.R)

    def results(self) -> Outputs:
        v, wide = self.v, state_dtype(self.dtype)
        sizes = [(self.sequences, self.value_heads, self.K, width) for width in (self.K, self.V)]
        states = (torch.empty(size=size, dtype=wide, device=v.device) for size in sizes)
        return torch.empty(size=v.shape, dtype=v.dtype, device=v.device), *states
