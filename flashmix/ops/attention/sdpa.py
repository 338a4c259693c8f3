"""Plain attention through torch's `scaled_dot_product_attention`, where that computes the same in O(T) memory."""

from __future__ import annotations

import torch.nn.functional as F

from flashmix.op.call import Outputs
from flashmix.ops.attention.call import AttentionCall


def formula(call: AttentionCall) -> Outputs:
    """`o [B, Tq, HQ, V]`; autograd differentiates it as any operator of torch."""
    tensors = (call.q, call.k, call.v)
    q, k, v = (x.transpose(1, 2) if x.stride(-1) == 1 else x.transpose(1, 2).contiguous() for x in tensors)
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        # torch aligns causal masks to the first key; one query is the newest and sees everything
        is_causal=call.right == 0 and call.tokens_q > 1,
        scale=call.scale,
        enable_gqa=call.heads_q != call.heads,
    )
    return (o.transpose(1, 2),)
