"""The cross entropy of given logits in plain PyTorch, without a copy of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import CrossEntropyCall
from flashmix.ops.losses.portable.head import chunks, rows_at_once
from flashmix.ops.losses.portable.rows import rows_backward, rows_forward


def keeps(call: CrossEntropyCall) -> Outputs:
    """The log-sum-exp of each row."""
    return call.results()


def forward(call: CrossEntropyCall, save: bool) -> tuple[Outputs, Outputs]:
    (losses,), (lse,) = call.results(), keeps(call)
    rows, vocabulary = call.logits.shape
    for part in chunks(rows, rows_at_once(None, vocabulary)):
        z = call.logits[part].to(losses.dtype, copy=True)
        losses[part], lse[part] = rows_forward(z, call.target[part], call)
    return (losses,), (lse,)


def backward(
    call: CrossEntropyCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    logits, (lse,), (grad,) = call.logits, kept, grads
    assert grad is not None
    gradient = logits if call.overwrite_logits else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows, vocabulary = logits.shape
    for part in chunks(rows, rows_at_once(None, vocabulary)):
        z = logits[part].to(lse.dtype, copy=True)
        gradient[part] = rows_backward(z, call.target[part], lse[part], grad[part], call)
    return {"logits": gradient}
