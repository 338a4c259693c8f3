"""The cross entropy of rows of logits in plain PyTorch, which overwrites the logits.

    lse      = ln sum_v e^z_v                                   z the logits, softcapped: c tanh(logits / c)
    expected = (1 - e) z_target + e mean(z)                     e = label_smoothing
    loss     = lse - expected + z_loss lse^2
    dz       = grad (p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / V),    p = e^(z - lse)

and through the softcap d logits = dz (1 - (z / c)^2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.losses.call import LossOptions


def rows_statistics(z: Tensor, target: Tensor, options: LossOptions, total: int | None = None) -> tuple[Tensor, Tensor]:
    """`lse` and `expected` of rows of logits.

    With a `total` vocabulary of which z is a part, a target outside of the part adds nothing.
    """
    if options.softcap is not None:
        z.div_(options.softcap).tanh_().mul_(options.softcap)
    column = target.clamp(0, z.shape[1] - 1)
    expected = z.gather(1, column.unsqueeze(1)).squeeze(1).mul_(1 - options.label_smoothing)
    if total is not None:
        expected.masked_fill_(column != target, 0.0)
    if options.label_smoothing:
        expected += options.label_smoothing * (z.mean(1) if total is None else z.sum(1) / total)
    largest = z.amax(1, keepdim=True)
    lse = z.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
    return lse, expected


def rows_forward(z: Tensor, target: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exps of rows of logits."""
    lse, expected = rows_statistics(z, target, options)
    losses = lse - expected + options.z_loss * lse.square()
    return losses.masked_fill_(target == options.ignore_index, 0.0), lse


def rows_backward(
    z: Tensor, target: Tensor, lse: Tensor, grad: Tensor, options: LossOptions, total: int | None = None
) -> Tensor:
    """Gradient of rows of logits for the gradient `grad` of their losses.

    With a `total` vocabulary of which z is a part, a target outside of the part is no column of z; `grad` is 0 for ignored rows then.
    """
    if total is None:
        grad = grad.masked_fill(target == options.ignore_index, 0.0)
    grad, lse = grad.unsqueeze(1), lse.unsqueeze(1)
    cap, smoothing = options.softcap, options.label_smoothing
    if cap is not None:
        z.div_(cap).tanh_().mul_(cap)
    dz = torch.sub(z, lse, out=z if cap is None else None).exp_().mul_(grad * (1 + 2 * options.z_loss * lse))
    if smoothing:
        dz.sub_(grad * (smoothing / (total or z.shape[1])))
    column = target.clamp(0, z.shape[1] - 1).unsqueeze(1)
    share = grad * (smoothing - 1)
    if total is not None:
        share = share.masked_fill(column != target.unsqueeze(1), 0.0)
    dz.scatter_add_(1, column, share)
    return dz if cap is None else dz.mul_(z.div_(cap).square_().neg_().add_(1))
