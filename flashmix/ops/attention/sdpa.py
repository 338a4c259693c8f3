"""Plain attention through torch's `scaled_dot_product_attention`, where that computes the same in O(T) memory."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmix.op.autograd import once_differentiable
from flashmix.op.call import Outputs
from flashmix.ops.attention.call import AttentionCall


def formula(call: AttentionCall) -> Outputs:
    """`o [B, Tq, HQ, V]`; autograd differentiates it as any operator of torch, in forward mode too (the plain product then), but once."""
    tensors: tuple[Tensor, ...] = (call.q, call.k, call.v)
    forward_mode = forward_ad._current_level >= 0
    if not forward_mode and not torch.compiler.is_compiling():
        tensors = once_differentiable("softmax_attention", *tensors)
    q, k, v = (x.transpose(1, 2) if x.stride(-1) == 1 else x.transpose(1, 2).contiguous() for x in tensors)
    with sdpa_kernel(SDPBackend.MATH) if forward_mode else nullcontext():
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
