"""The cross entropy of a head on a GPU. The gradient of a sum is that of every row up to a factor, and ready with the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import LinearCrossEntropyCall, row_results
from flashmix.ops.losses.triton_gpu.head import (
    HeadSums,
    empty_sums,
    head_of,
    in_their_dtypes,
    rows_of,
    scaled_sums,
    statistics_of,
)
from flashmix.ops.losses.triton_gpu.rows import RowGradient, RowStatistics, logit_rows, rows_backward, rows_forward


def keeps(call: LinearCrossEntropyCall) -> Outputs:
    """The gradients of the needed tensors for the sum; of rows, their level and whole."""
    if call.summed:
        return tuple(empty_sums(call, call.needs, rows_of(call)).values())
    return tuple(statistics_of(call.hidden, 2))


def forward(call: LinearCrossEntropyCall, save: bool) -> tuple[Outputs, Outputs]:
    target, losses, (level, whole) = (
        call.target.contiguous(),
        row_results(call.hidden, call.wide),
        statistics_of(call.hidden, 2),
    )
    head, ready = head_of(call), call.summed and save
    sums = empty_sums(call, call.needs, head.rows) if ready else {}
    gradients, grad = HeadSums(head, sums), (target != call.ignore_index).to(torch.float32)
    for part, z in head.chunks():
        logits = logit_rows(z, head.bias, softcap=call.softcap)
        found = RowStatistics(losses, level, whole, None).rows(part)
        rows_forward(logits, target[part], found, call)
        if sums:
            rows_backward(logits, target[part], found, RowGradient(grad[part], z, z.stride(0)), call)
            gradients.add(part, z)
    if call.summed:
        return (losses.sum(0),), tuple(sums.values())
    return (losses,), (level, whole)


def backward(
    call: LinearCrossEntropyCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    if call.summed:
        return scaled_sums(call, kept, grads, wanted)
    (grad,), (level, whole), target = grads, kept, call.target.contiguous()
    assert grad is not None
    grad = grad.to(torch.float32).masked_fill(target == call.ignore_index, 0.0)
    head = head_of(call)
    gradients = HeadSums(head, empty_sums(call, wanted, head.rows))
    for part, z in head.chunks():
        found = RowStatistics(None, level, whole, None).rows(part)
        out = RowGradient(grad[part], z, z.stride(0))
        rows_backward(logit_rows(z, head.bias, softcap=call.softcap), target[part], found, out, call)
        gradients.add(part, z)
    return in_their_dtypes(call, gradients.sums)
