"""One call of the selective scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing

CHUNK = 64  # tokens from one kept state to the next
LANES = 32  # channels of a program on a GPU, which is a warp
PROGRAMS, SEGMENT = 1024, 256  # segments for at most half as many programs, of at least so many tokens


@dataclass(frozen=True)
class SelectiveScanCall(Call):
    """`h_t = e^{dt_t A} h_{t-1} + dt_t u_t B_t`, `y_t = h_t C_t`, of `u`, `dt` `[B, T, D]`, `A` `[D, S]`, `B`, `C` `[B, T, G, S]`.

    With `D`, `z`, `dt_bias` and `softplus`, which only the kernels for GPUs take: step sizes `softplus(dt + dt_bias)`, `(y + D u) silu(z)`.
    The outputs are `y` `[B, T, D]` and the last states `[N, D, S]`; the backward needs the states at the starts of chunks.
    """

    u: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    initial_state: Tensor | None
    packing: Packing | None
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    softplus: bool = False

    @property
    def sequences(self) -> int:
        return self.u.shape[0] if self.packing is None else self.packing.count

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of the states and of everything computed inside."""
        return state_dtype(self.dtype)

    @property
    def groups(self) -> int:
        return self.B.shape[2]

    @property
    def segmented(self) -> bool:
        """Whether so few channels of so long sequences are there that a GPU works on segments of them."""
        programs = self.sequences * self.groups * -(-self.u.shape[2] // self.groups // LANES)
        tokens = self.u.shape[1] if self.packing is None else -(-self.u.shape[1] // max(self.sequences, 1))
        return min(PROGRAMS // max(programs, 1), tokens // SEGMENT) > 1

    @property
    def chunks(self) -> int:
        """Chunks of all sequences, and room for those that packed sequences may have."""
        batch, tokens = self.u.shape[:2]
        return batch * (-(-tokens // CHUNK)) if self.packing is None else tokens // CHUNK + self.packing.count

    def results(self) -> Outputs:
        u = self.u
        state = torch.empty((self.sequences, *self.A.shape), dtype=self.state_dtype, device=u.device)
        return torch.empty(size=u.shape, dtype=u.dtype, device=u.device), state

    def kept_states(self) -> Tensor:
        """Empty memory for the state at the start of each chunk, `[chunks, D, S]` in an implementation's own order."""
        return torch.empty((self.chunks, *self.A.shape), dtype=self.state_dtype, device=self.device)
