"""One call of the step of the selective scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, Written


@dataclass(frozen=True)
class SelectiveStepCall(Call):
    """A few tokens of each sequence, as in `SelectiveScanCall`, on states `[B, D, S]` in place, or in a pool `[P, D, S]`."""

    u: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    state: Written
    state_indices: Tensor | None
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    softplus: bool = False

    def results(self) -> Outputs:
        u = self.u
        return (torch.empty(size=u.shape, dtype=u.dtype, device=u.device),)
