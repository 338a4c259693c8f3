"""One query of each sequence: its scores are one row, which needs no tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.dtypes import state_dtype
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.portable.tiles import LOG2_E, softcap_, units_of_products


def fits(call: AttentionCall, tokens: int) -> bool:
    """Whether `attend` computes this many queries of a sequence."""
    return tokens == 1 and call.log_decay is None and call.dropout_p == 0


def attend(call: AttentionCall, of_batch: slice, of_q: slice, of_k: slice) -> tuple[Tensor, Tensor, Tensor]:
    """o `[B, 1, HQ, V]`, and m and l `[B, 1, HQ, 1]`, of the sequences `of_batch`, with one query and one or more keys `of_k`.

    The query stands at the last key: of a window, what lies before it counts.
    """
    dtype = state_dtype(call.dtype)
    if call.left is not None:
        of_k = slice(max(of_k.start, of_k.stop - 1 - call.left), of_k.stop)
    q, k, v = call.q[of_batch, of_q], call.k[of_batch, of_k], call.v[of_batch, of_k]
    by_key_head = (q.shape[0], call.heads, call.group, -1)
    q = (q.to(dtype) * (call.scale * units_of_products(call))).view(by_key_head)  # [B, H, R, K]
    scores = torch.matmul(q, k.to(dtype).permute(0, 2, 3, 1))  # [B, H, R, keys]
    if call.softcap is not None:
        softcap_(scores).mul_(call.softcap * LOG2_E)
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes[of_batch] if call.slopes_by_sequence else call.alibi_slopes
        slopes = (slopes.to(dtype) * LOG2_E).view(-1, call.heads, call.group, 1)
        scores.addcmul_(slopes, torch.arange(k.shape[1] - 1, -1, -1, dtype=dtype, device=q.device), value=-1)
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
    if call.sink is not None:
        sink = (call.sink.to(dtype) * LOG2_E).view(call.heads, call.group, 1)
        top = torch.maximum(top, sink)
    p = scores.sub_(top).exp2_()
    total = p.sum(-1, keepdim=True)
    if call.sink is not None:
        total += torch.exp2(sink - top)
    o = torch.matmul(p, v.to(dtype).transpose(1, 2)).div_(total)  # a key of finite score is seen: l is at least 1
    shape = (q.shape[0], 1, call.heads_q, -1)
    return o.view(shape), top.view(shape), total.view(shape)
