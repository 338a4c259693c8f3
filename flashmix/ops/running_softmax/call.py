"""One call of the running softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class RunningSoftmaxCall(Call):
    """Logits `s [B, T, ...]` and the normalisers before the first token, `z [N, ...]`, float32 (float64 beside float64).

    The outputs are weights like `s`, log decays in the dtype of `z`, and the last `z`.
    """

    s: Tensor
    z: Tensor
    packing: Packing | None

    @property
    def sequences(self) -> int:
        return self.z.shape[0]

    @property
    def tokens(self) -> int:
        return self.s.shape[1]

    def results(self) -> Outputs:
        s, z = self.s, self.z
        weight, decay = (torch.empty(size=s.shape, dtype=dtype, device=s.device) for dtype in (s.dtype, z.dtype))
        return weight, decay, torch.empty(size=z.shape, dtype=z.dtype, device=s.device)

    def for_backward(self, outputs: Outputs) -> RunningSoftmaxCall:
        """The weights, which the recurrence saves too, tell the dtype of the logits, which are not read."""
        return self.but(s=outputs[0])
