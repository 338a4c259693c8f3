"""The cross entropy of given logits on a GPU: they are read once in the forward and once in the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.gpu.rows import inner_contiguous
from flashmix.op.autograd import bump_versions
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import CrossEntropyCall
from flashmix.ops.losses.triton_gpu.head import statistics_of
from flashmix.ops.losses.triton_gpu.rows import (
    LogitRows,
    RowGradient,
    RowStatistics,
    logit_rows,
    rows_backward,
    rows_forward,
)


def rows_of(call: CrossEntropyCall) -> LogitRows:
    return logit_rows(inner_contiguous(call.logits), None, softcap=call.softcap)


def keeps(call: CrossEntropyCall) -> Outputs:
    """Level and whole of each row."""
    return tuple(statistics_of(call.logits, 2))


def forward(call: CrossEntropyCall, save: bool) -> tuple[Outputs, Outputs]:
    (losses,), (level, whole) = call.results(), keeps(call)
    rows_forward(rows_of(call), call.target.contiguous(), RowStatistics(losses, level, whole, None), call)
    return (losses,), (level, whole)


def backward(
    call: CrossEntropyCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    logits, (level, whole), (grad,) = call.logits, kept, grads
    assert grad is not None
    gradient = logits if call.overwrite_logits else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grad = grad.to(torch.float32).masked_fill(call.target == call.ignore_index, 0.0)
    out = RowGradient(grad, gradient, gradient.stride(0))
    rows_backward(rows_of(call), call.target.contiguous(), RowStatistics(None, level, whole, None), out, call)
    if call.overwrite_logits:
        bump_versions(logits)
    return {"logits": gradient}
