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
    q, k, v = call.q, call.k, call.v
    if call.left is not None:  # one query, the newest: the keys in its window are the last ones
        k, v = (x[:, -call.left - 1 :] for x in (k, v))
    seen = _seen_keys(call) if call.ranged else None
    forward_mode = forward_ad._current_level >= 0
    if not forward_mode and not torch.compiler.is_compiling():
        q, k, v = once_differentiable("softmax_attention", q, k, v)
    q, k, v = (x.transpose(1, 2) if x.stride(-1) == 1 else x.transpose(1, 2).contiguous() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH) if forward_mode else nullcontext():
        o = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=seen,
            scale=float(call.scale),
            # where sizes are symbols, torch takes no comparison, and since 2.15 no negation of one
            **({"enable_gqa": True} if call.heads_q != call.heads else {}),
            # torch aligns causal masks to the first key; one query is the newest and sees everything
            **({"is_causal": True} if call.right == 0 and call.tokens_q > 1 else {}),
        )
    if seen is not None:  # torch has NaN or a mean where nothing is seen
        o = o.masked_fill(~seen.any(-1, keepdim=True), 0)
    return (o.transpose(1, 2),)


def _seen_keys(call: AttentionCall) -> Tensor:
    """Which keys the one query of each sequence sees, `[B, 1, 1, Tk]`."""
    start, end = call.key_ranges()
    keys = torch.arange(call.tokens_k, device=call.device)
    return ((keys >= start[:, None]) & (keys < end[:, None]))[:, None, None]
