"""Cross entropy with the options that fla and flash_attn share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.compat.surface import refuse
from flashmix.op.dtypes import state_dtype
from flashmix.ops.losses.op import cross_entropy


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    ignore_index: int,
    inplace_backward: bool,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, with its z-loss, and the z-loss alone, without a gradient; float32."""
    if logit_scale != 1:
        logits = logits * logit_scale
    loss = cross_entropy(
        logits,
        target,
        label_smoothing=label_smoothing,
        z_loss=lse_square_scale,
        ignore_index=ignore_index,
        softcap=softcap or None,
        reduction="none",
        overwrite_logits=inplace_backward,
    )
    if not lse_square_scale:
        return loss, torch.zeros_like(loss)
    with torch.no_grad():
        wide = logits.to(state_dtype(logits.dtype))
        wide = wide if not softcap else softcap * torch.tanh(wide / softcap)
        z_loss = lse_square_scale * wide.logsumexp(-1).square()
    return loss, z_loss.masked_fill(target == ignore_index, 0.0)


class RowCrossEntropy(nn.Module):
    """`FusedCrossEntropyLoss` of fla and `CrossEntropyLoss` of flash_attn: a mean over counted targets, "sum" or "none".

    Args:
        ignore_index: targets that count for nothing.
        reduction: "mean", "sum" or "none".
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        logit_scale: multiplies the logits.
        lse_square_scale: weight of the z-loss.
        inplace_backward: the backward may overwrite the logits.
        process_group: only None.
        return_z_loss: also return the z-loss, reduced like the loss.
        logit_softcapping: bound of the logits, or None.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
        logit_softcapping: float | None = None,
    ) -> None:
        super().__init__()
        refuse(type(self).__name__, "process_group", process_group is None)
        refuse(type(self).__name__, f"reduction {reduction!r}", reduction in ("mean", "sum", "none"))
        self.ignore_index, self.reduction, self.return_z_loss = ignore_index, reduction, return_z_loss
        self.options: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "logit_scale": logit_scale,
            "lse_square_scale": lse_square_scale,
            "ignore_index": ignore_index,
            "inplace_backward": inplace_backward,
            "softcap": logit_softcapping,
        }

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        refuse(type(self).__name__, "precomputed_lse", precomputed_lse is None)
        loss, z_loss = (self._reduce(x, target) for x in cross_entropy_loss(input, target, **self.options))
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduce(self, loss: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return loss
        return loss.sum() / (target != self.ignore_index).sum() if self.reduction == "mean" else loss.sum()
