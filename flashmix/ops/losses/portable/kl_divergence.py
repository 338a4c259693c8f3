"""The divergence of two heads' distributions in plain PyTorch; the backward computes the logits of each chunk again.

p = softmax(z_p / T), q = softmax(z_q / T):    loss = T^2 sum p (ln p - ln q),    reversed T^2 sum q (ln q - ln p)
d z_q = T grad (q - p),    reversed T grad q (ln q - ln p - sum_v q_v (ln q_v - ln p_v))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import KLDivergenceCall, row_results
from flashmix.ops.losses.head import mean_over
from flashmix.ops.losses.portable.head import HeadGradients, PortableHead


class Distributions(NamedTuple):
    """Student q and teacher p of some rows, and their logarithms, `[rows, V]` each."""

    log_q: Tensor
    q: Tensor
    log_p: Tensor
    p: Tensor


def forward(call: KLDivergenceCall, save: bool) -> tuple[Outputs, Outputs]:
    losses = row_results(call.hidden, call.wide)
    for part, (log_q, q, log_p, p) in distributions(call, *heads(call)):
        terms = weighted(q, log_q.sub_(log_p), out=q) if call.reverse else weighted(p, log_p.sub_(log_q), out=p)
        losses[part] = terms.sum(1).div_(call.scale * call.scale)
    return (losses if call.reduction == "none" else mean_over(losses, call.mask, call.reduction),), ()


def backward(
    call: KLDivergenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    assert grads[0] is not None
    grad = row_gradient(call, grads[0])
    student, teacher = heads(call)
    gradients = HeadGradients(student, wanted)
    for part, (log_q, q, log_p, p) in distributions(call, student, teacher):
        if call.reverse:
            difference = log_q.sub_(log_p)
            mean = weighted(q, difference, out=p).sum(1, keepdim=True)
            dz = weighted(q, difference.sub_(mean), out=difference)
        else:
            dz = q.sub_(p)
        gradients.add(part, dz.mul_((grad[part] / call.scale).unsqueeze(1)))
    return gradients.results()


def heads(call: KLDivergenceCall) -> tuple[PortableHead, PortableHead]:
    """The student's and the teacher's."""
    student = PortableHead(call.hidden, call.weight, call.bias, call.wide, call.chunk, 2)
    return student, PortableHead(call.teacher_hidden, call.teacher_weight, call.teacher_bias, call.wide, call.chunk, 2)


def distributions(
    call: KLDivergenceCall, student: PortableHead, teacher: PortableHead
) -> Iterator[tuple[slice, Distributions]]:
    for (part, z_q), (_, z_p) in zip(student.chunks(), teacher.chunks(), strict=True):
        yield part, Distributions(*log_softmax(z_q, call.scale), *log_softmax(z_p, call.scale))


def log_softmax(z: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities under scaled logits, written over the logits, and the probabilities."""
    z.mul_(scale)
    z.sub_(z.amax(1, keepdim=True))
    p = torch.exp(z)
    total = p.sum(1, keepdim=True)
    return z.sub_(total.log()), p.div_(total)


def weighted(weights: Tensor, difference: Tensor, out: Tensor) -> Tensor:
    """`weights * difference`, 0 where the weight is (a token ruled out by an infinite logit); `out` may be either."""
    ruled_out = weights == 0
    return torch.mul(weights, difference, out=out).masked_fill_(ruled_out, 0.0)


def row_gradient(call: KLDivergenceCall, grad: Tensor) -> Tensor:
    """The gradient `[N]` of the rows' losses for that of the result."""
    rows = call.hidden.shape[0]
    if call.reduction == "mean":
        count = torch.full((), rows, device=grad.device) if call.mask is None else call.mask.sum()
        grad = grad / count.clamp(min=1)
    grad = grad.expand(rows)
    return grad if call.mask is None else grad.masked_fill(~call.mask, 0.0)
