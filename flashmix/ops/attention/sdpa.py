"""Plain attention through torch's `scaled_dot_product_attention`, where that computes the same in O(T) memory."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flashmix.ops.attention.call import Problem


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """`o [B,Tq,HQ,V]`."""
    q, k, v = (x.transpose(1, 2) if x.stride(-1) == 1 else x.transpose(1, 2).contiguous() for x in (q, k, v))
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        # torch aligns causal masks to the first key; one query is the newest and sees everything
        is_causal=problem.score.right == 0 and problem.tokens_q > 1,
        scale=problem.score.scale,
        enable_gqa=problem.heads_q != problem.heads,
    )
    return o.transpose(1, 2)
