"""The read of a token's own write in plain PyTorch, which autograd differentiates."""

from __future__ import annotations

import torch

from flashmix.op.call import Outputs
from flashmix.op.heads import repeat_heads
from flashmix.ops.own_write.call import OwnWriteCall


def formula(call: OwnWriteCall) -> Outputs:
    y, B, C, D = call.y, call.B, call.C, call.D
    own = call.scale * call.own
    # contiguous: the order of a sum is that of memory
    scores = repeat_heads((C * B.to(own.dtype)).contiguous().sum(-1, keepdim=True), own.shape[2])
    weight = scores * own.unsqueeze(-1)
    weight = weight if D is None else weight + D[:, None]
    return (torch.addcmul(y, weight, call.x).to(y.dtype),)
