"""One call of the rotation by angles that add up over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class CumulativeRotaryCall(Call):
    """Keys and queries `B, C [B, T, G, K]` or, with R ranks, `[B, T, R, G, K]`, in one dtype; `angles [B, T, H, M]`, `dt`, `log_decay` and
    `trapezoid_gate [B, T, H]` of any; before the first token `theta [N, H, M]` and `last_k [N, H, K]` or `[N, R, H, K]`, or None for zeros.

        theta_t = theta_{t-1} + dt_t angles_t,    q_t = R(theta_t) C_t,    k_t = R(theta_t) B_t
        late_k_t = w_t k_{t-1},    w_t = e^{g_t} (own_{t-1} + (1 - lambda_t) dt_t),    own_t = lambda_t dt_t

    The outputs are `q` and `late_k` of all heads, and the last `theta`, `k` and `own` of each sequence, in the dtype of states. `own`
    before a first token is 0.
    """

    B: Tensor
    C: Tensor
    angles: Tensor
    dt: Tensor
    log_decay: Tensor
    trapezoid_gate: Tensor
    theta: Tensor | None
    last_k: Tensor | None
    packing: Packing | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The axis of ranks, () without one."""
        return tuple(self.B.shape[2:-2])

    @property
    def heads(self) -> int:
        return self.dt.shape[2]

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.B.shape[0] if self.packing is None else self.packing.count

    @property
    def state_dtype(self) -> torch.dtype:
        return state_dtype(self.dtype)

    def results(self) -> Outputs:
        (batch, tokens), K, N, H = self.B.shape[:2], self.B.shape[-1], self.count, self.heads
        q, late_k = (
            torch.empty(size=(batch, tokens, *self.ranks, H, K), dtype=self.dtype, device=self.device) for _ in range(2)
        )
        states = (N, H, self.angles.shape[3]), (N, *self.ranks, H, K), (N, H)
        return q, late_k, *(torch.empty(size=size, dtype=self.state_dtype, device=self.device) for size in states)
