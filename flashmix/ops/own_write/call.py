"""One call of the read of a token's own write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs


@dataclass(frozen=True)
class OwnWriteCall(Call):
    """`z = y + (scale own (B . C) + D) x` of outputs and values `y, x [B, T, H, P]`, keys and queries `B, C [B, T, G, K]`, which may be as
    they were before one rotation of both, weights `own [B, T, H]`, and `D [H]` or None.
    """

    y: Tensor
    x: Tensor
    B: Tensor
    C: Tensor
    own: Tensor
    D: Tensor | None
    scale: float

    def results(self) -> Outputs:
        y = self.y
        return (torch.empty(size=y.shape, dtype=y.dtype, device=y.device),)

    def for_backward(self, outputs: Outputs) -> OwnWriteCall:
        """Without `y`, whose gradient is that of the result."""
        return self.but(y=None)
