"""One call of a recurrence's gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.dtypes import compute_dtype


@dataclass(frozen=True)
class GateCall(Call):
    """A gate `g` of `x [..., H]` or `[..., H, K]`, with `z = x + dt_bias` and `a = e^{A_log}`.

    softplus_decay:  g = -a log(1 + e^z)
    bounded_decay:   g = factor sigmoid(a z)
    write_strength:  g = factor sigmoid(x), without A_log and dt_bias
    """

    x: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    kind: str
    factor: float

    @property
    def channels(self) -> int:
        """Channels of a head."""
        return 1 if self.dt_bias is None or self.dt_bias.dim() == 1 else self.dt_bias.shape[1]

    def results(self) -> Outputs:
        x = self.x
        return (torch.empty(size=x.shape, dtype=compute_dtype(*self.tensors()), device=x.device),)
