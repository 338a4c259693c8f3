"""One call of rows with a factor each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs


@dataclass(frozen=True)
class ScaledCall(Call):
    """`y = x factor` of rows `x [..., D]` and a factor `[...]` for each."""

    x: Tensor
    factor: Tensor

    def results(self) -> Outputs:
        x = self.x
        return (torch.empty(size=x.shape, dtype=x.dtype, device=x.device),)
