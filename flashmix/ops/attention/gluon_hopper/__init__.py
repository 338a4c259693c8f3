"""Softmax attention for Hopper GPUs, in Gluon; `triton_gpu` takes what `supports` refuses, and some backward passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention import triton_gpu
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.backward_host import attention_backward
from flashmix.ops.attention.gluon_hopper.forward_host import attention_forward, memory_of, row_statistics

MOST_CHANNELS_SLOPES = 128  # in backward, with slopes alone: up to these Triton's is faster
MOST_CHANNELS_SOFTCAP = 192  # in backward: shared memory has no room for its derivative above


def backward_supports(call: AttentionCall) -> str | None:
    """Why the backward goes to `triton_gpu`, which reads what the forward keeps; None if it does not."""
    channels = max(call.q.shape[3], call.v.shape[3])
    if call.alibi_slopes is not None and call.log_decay is None and channels <= MOST_CHANNELS_SLOPES:
        return f"Triton's is faster with slopes alone up to {MOST_CHANNELS_SLOPES} channels"
    if call.softcap is not None and channels > MOST_CHANNELS_SOFTCAP:
        return f"its backward takes a softcap at head dims up to {MOST_CHANNELS_SOFTCAP}"
    return None


def keeps(call: AttentionCall) -> Outputs:
    return (torch.empty(memory_of(call), dtype=torch.float32, device=call.device),)


def forward(call: AttentionCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o`, with `return_lse` lse, and for backward m and l."""
    outputs, kept = attention_forward(call)
    return outputs, kept if save else ()


def by_rows(call: AttentionCall, kept: Outputs) -> Outputs:
    """What a forward kept as m and l `[B, HQ, Tq]`, of which heads can be taken."""
    top, total, _ = row_statistics(call, kept[0])
    return top, total


def of_rows(call: AttentionCall, rows: Outputs) -> Outputs:
    """What a forward of `call` keeps, of m and l."""
    (memory,) = keeps(call)
    for part, x in zip(row_statistics(call, memory), rows, strict=False):
        part.copy_(x)
    return (memory,)


def backward(call: AttentionCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of q, k, v and of each of sink, slopes and decay that is given."""
    o, memory = kept
    if backward_supports(call) is not None:
        m, l, _ = row_statistics(call, memory)
        return triton_gpu.backward(call, (o, m, l), grads, wanted)
    d_o, d_lse = grads if call.return_lse else (*grads, None)
    return attention_backward(call, o, memory, d_o, d_lse)
