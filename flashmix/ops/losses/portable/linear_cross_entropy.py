"""The cross entropy of a head in plain PyTorch; the backward computes the logits of each chunk again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import LinearCrossEntropyCall, row_results
from flashmix.ops.losses.portable.head import HeadGradients, PortableHead
from flashmix.ops.losses.portable.rows import rows_backward, rows_forward


def head_of(call: LinearCrossEntropyCall) -> PortableHead:
    return PortableHead(call.hidden, call.weight, call.bias, call.wide, call.chunk)


def keeps(call: LinearCrossEntropyCall) -> Outputs:
    """The log-sum-exp of each row."""
    return (row_results(call.hidden, call.wide),)


def forward(call: LinearCrossEntropyCall, save: bool) -> tuple[Outputs, Outputs]:
    losses, (lse,) = row_results(call.hidden, call.wide), keeps(call)
    for part, z in head_of(call).chunks():
        losses[part], lse[part] = rows_forward(z, call.target[part], call)
    return (losses.sum() if call.summed else losses,), (lse,)


def backward(
    call: LinearCrossEntropyCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    (lse,), (grad,) = kept, grads
    assert grad is not None
    grad = grad.expand(lse.shape)
    head = head_of(call)
    gradients = HeadGradients(head, wanted)
    for part, z in head.chunks():
        gradients.add(part, rows_backward(z, call.target[part], lse[part], grad[part], call))
    return gradients.results()
