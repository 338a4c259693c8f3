"""`softplus(z) = log(1 + e^z)`, in float64 too to the last digit: from 20 on torch takes it to be `z`, which is 1e-10 too little there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def softplus(z: Tensor) -> Tensor:
    return F.softplus(z, threshold=_threshold(z))


def softplus_backward(grad: Tensor, z: Tensor) -> Tensor:
    """The gradient of `z` from that of `softplus(z)`."""
    return torch.ops.aten.softplus_backward(grad, z, 1.0, _threshold(z))


def _threshold(z: Tensor) -> float:
    """From where on the rounding of the dtype leaves nothing but `z`."""
    return 40.0 if z.dtype == torch.float64 else 20.0


def invariant_softplus(x: Tensor) -> Tensor:
    """`log(1 + e^x)`, of functions whose result in torch does not depend on a number's place in memory (its softplus and sigmoid do)."""
    return torch.maximum(x, torch.zeros_like(x)) + torch.log1p(torch.exp(-x.abs()))
