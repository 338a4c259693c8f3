"""One call of the step of the scan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, Written


@dataclass(frozen=True)
class ScanStepCall(Call):
    """A few tokens of each sequence, `x` `[B, T, ...]` as in `ScanCall`, on states `[B, ...]` in place, or in a pool `[P, ...]`."""

    x: Tensor
    log_decay: Tensor
    state: Written
    state_indices: Tensor | None
    read_before: bool
    coupling: str | None = None

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    @property
    def by_head(self) -> bool:
        """Whether all channels of a head decay alike."""
        return self.x.dim() == 4 and self.log_decay.dim() in (1, 3)

    @property
    def decay(self) -> Tensor:
        """The log decay (or logits) `[B, T, ...]` as it broadcasts to `x`."""
        g = self.log_decay.unsqueeze(-1) if self.by_head else self.log_decay
        return g.expand(*self.x.shape[:2], *g.shape[-(self.x.dim() - 2) :])

    def results(self) -> Outputs:
        x = self.x
        return (torch.empty(size=x.shape, dtype=x.dtype, device=x.device),)
