"""Softmax attention in Triton, for any GPU from compute capability 8.0: forward and backward, every feature with every other."""

from __future__ import annotations

from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.ops.attention.call import Score
from flashmix.ops.attention.triton_gpu.backward import attention_backward
from flashmix.ops.attention.triton_gpu.decay import running_sums, sums_of_gradients
from flashmix.ops.attention.triton_gpu.forward import attention_forward
from flashmix.ops.attention.triton_gpu.launch import Call

Features = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
Boundaries = tuple[Tensor | None, Tensor | None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, features: Features, boundaries: Boundaries, score: Score
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`o [B,Tq,HQ,V]`, `lse [B,HQ,Tq]` (packed `[HQ,Tq]`), and for backward m and l, each `[B,HQ,Tq]`."""
    call = Call.of(q, k, v, features, boundaries, score)
    with gpu.on(q.device):
        form = call.form("forward", True)[0]
        return attention_forward(call, running_sums(call, features[2], form))


def backward(
    d_o: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    kept: list[Tensor],
    features: Features,
    boundaries: Boundaries,
    score: Score,
) -> list[Tensor]:
    """Gradients of q, k, v and of each of sink, alibi_slopes, log_decay that is given."""
    call = Call.of(q, k, v, features, boundaries, score)
    log_decay = features[2]
    with gpu.on(q.device):
        gradients, at_rows, at_keys = attention_backward(call, d_o, d_lse, o, kept, running_sums(call, log_decay)[0])
        if log_decay is not None and at_rows is not None and at_keys is not None:
            gradients.append(sums_of_gradients(call, log_decay, at_rows, at_keys))
    return gradients
