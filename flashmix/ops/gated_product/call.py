"""One call of the gated product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs


@dataclass(frozen=True)
class GatedCall(Call):
    """`y = act(gate) up` of tensors of one shape and dtype."""

    gate: Tensor
    up: Tensor
    activation: str

    def results(self) -> Outputs:
        gate = self.gate
        return (torch.empty(size=gate.shape, dtype=gate.dtype, device=gate.device),)
