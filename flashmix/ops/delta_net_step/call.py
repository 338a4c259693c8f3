"""One call of the step of a delta net layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, Written


@dataclass(frozen=True)
class DeltaNetStepCall(Call):
    """One token of each sequence: tensors and options as `delta_net_step` documents them."""

    qkv: Tensor
    strength: Tensor
    state: Written
    conv_state: Written
    conv_weight: Tensor
    conv_bias: Tensor | None
    decay: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    norm_weight: Tensor | None
    gate: Tensor | None
    state_indices: Tensor | None
    heads: int
    lower: float | None
    negative_eigenvalues: bool
    gate_activation: str
    eps: float

    def results(self) -> Outputs:
        """Output `[B, HV, V]`."""
        _, HV, _, V = self.state.shape
        return (torch.empty(self.qkv.shape[0], HV, V, dtype=self.qkv.dtype, device=self.qkv.device),)
