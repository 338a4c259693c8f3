"""One call of RWKV-4's averages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs
from flashmix.op.packing import Packing


@dataclass(frozen=True)
class WkvCall(Call):
    """Keys and values `[B, T, ...]`, a log decay and a bonus `[...]`, and the sums `a e^{-m}, b e^{-m}` and `m` before the first token,
    each `[N, ...]`. All have one dtype, float32 or float64, but keys and values, which may have 16 bits beside float32.

    The outputs are averages `[B, T, ...]` and the last sums and `m`, which is a constant in gradients.
    """

    k: Tensor
    v: Tensor
    log_decay: Tensor
    bonus: Tensor
    a: Tensor
    b: Tensor
    m: Tensor
    packing: Packing | None

    @property
    def sequences(self) -> int:
        return self.a.shape[0]

    def results(self) -> Outputs:
        return torch.empty(size=self.k.shape, dtype=self.dtype, device=self.device), *(self._state() for _ in range(3))

    def _state(self) -> Tensor:
        return torch.empty(size=self.a.shape, dtype=self.a.dtype, device=self.device)

    def kept(self) -> Outputs:
        """An empty tensor like that which a backward needs: `a`, `b` and `m` before each token, `[3, B, T, ...]`."""
        return (torch.empty(size=(3, *self.k.shape), dtype=self.a.dtype, device=self.device),)
