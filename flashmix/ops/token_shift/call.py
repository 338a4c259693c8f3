"""One call of the token shift."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class ShiftCall(Call):
    """`y_t = x_{t-1}` of `x [B, T, D]`, the state `[N, 1, D]` before the first; `reverse`: `y_t = x_{t+1}`, the state after the last.

    The outputs are `y`, and with `return_state` the token that each sequence loses: its last one, or first in reverse.
    """

    x: Tensor
    initial_state: Tensor | None
    packing: Packing | None
    tokens: int
    reverse: bool
    return_state: bool

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.x.shape[0] if self.packing is None else self.packing.count

    def results(self) -> Outputs:
        x = self.x
        y = torch.empty(size=x.shape, dtype=x.dtype, device=x.device)
        if not self.return_state:
            return (y,)
        return y, torch.empty((self.count, 1, x.shape[2]), dtype=x.dtype, device=x.device)

    def for_backward(self, outputs: Outputs) -> ShiftCall:
        """Without x and the state: the gradients are those of the outputs, shifted back."""
        return self.but(x=None, initial_state=None)
