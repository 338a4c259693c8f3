"""One call of the preconditioner of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class PreconditionerCall(Call):
    """Keys `[B, T, H, K]`, weights of their squares and log decays of the curvature `[B, T, H]`, `log_scale` `[H]`, and the curvature
    before the first token `[N, H, K]`. All have one dtype, float32 or float64.

    The outputs are the write keys `[B, T, H, K]` and the last curvature:

        A_t = e^{g_t} A_{t-1} + weight_t k_t^2;  r = log(A_t + eps) - log_scale;  write_t = k_t bound^{-r / (1 + |r|)}
    """

    k: Tensor
    weight: Tensor
    log_decay: Tensor
    log_scale: Tensor
    curvature: Tensor
    bound: float
    eps: float
    packing: Packing | None

    @property
    def sequences(self) -> int:
        return self.curvature.shape[0]

    def results(self) -> Outputs:
        return tuple(
            [torch.empty(size=t.shape, dtype=self.dtype, device=self.device) for t in (self.k, self.curvature)]
        )

    def kept(self) -> Outputs:
        """An empty tensor like that which a backward needs: the curvature after each token."""
        return (torch.empty(size=self.k.shape, dtype=self.dtype, device=self.device),)
