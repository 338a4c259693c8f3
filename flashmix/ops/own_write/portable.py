"""The read of a token's own write in plain PyTorch, which autograd differentiates."""

from __future__ import annotations

import torch

from flashmix.op.call import Outputs
from flashmix.ops.own_write.call import OwnWriteCall


def formula(call: OwnWriteCall) -> Outputs:
    y, B, C, D = call.y, call.B, call.C, call.D
    own = call.scale * call.own
    scores = (
        (C * B.to(own.dtype)).contiguous().sum(-1, keepdim=True)
    )  # contiguous: the order of a sum is that of memory
    if B.shape[2] != own.shape[2]:
        scores = scores.repeat_interleave(own.shape[2] // B.shape[2], 2)
    weight = scores * own.unsqueeze(-1)
    weight = weight if D is None else weight + D[:, None]
    return (torch.addcmul(y, weight, call.x).to(y.dtype),)
