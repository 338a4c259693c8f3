"""The losses of fla.modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flashmix.compat.fla.common import FLA
from flashmix.compat.losses import RowCrossEntropy, cross_entropy_loss
from flashmix.compat.surface import refuse
from flashmix.ops.losses.op import linear_cross_entropy, linear_kl_divergence


class SoftcappedCrossEntropy(RowCrossEntropy):
    """fla's `FusedCrossEntropyLoss`: `RowCrossEntropy` with the bound of the logits before `inplace_backward`."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        logit_softcapping: float | None = None,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        common = (ignore_index, reduction, label_smoothing, logit_scale, lse_square_scale)
        super().__init__(*common, inplace_backward, process_group, return_z_loss, logit_softcapping)


@FLA.function(
    "cross_entropy_loss",
    "logits target label_smoothing=0.0 logit_scale=1.0 lse_square_scale=0.0 logit_softcapping=None ignore_index=-100 "
    "inplace_backward=False !process_group=None",
)
def row_cross_entropy(logit_softcapping: float | None, **options: Any) -> tuple[Tensor, Tensor]:
    """`(losses, z_losses)` of rows, float32; the z-loss is in the loss too."""
    return cross_entropy_loss(softcap=logit_softcapping, **options)


_LINEAR_LOSS = (
    "ignore_index=-100 label_smoothing=0.0 logit_scale=1.0 logit_softcapping=None ~num_chunks=8 reduction='mean' "
    "!use_l2warp=False ~l2_penalty_factor=0.0001 ~accumulate_grad_in_fp32=True !process_group=None"
)


@FLA.function("fused_linear_cross_entropy_loss", f"x target weight bias=None {_LINEAR_LOSS}")
def linear_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    logit_scale: float,
    logit_softcapping: float | None,
    **options: Any,
) -> Tensor:
    """`flashmix.linear_cross_entropy(x, weight, target)`; the scale of the logits multiplies `x` and the bias."""
    if logit_scale != 1:
        x, bias = x * logit_scale, None if bias is None else bias * logit_scale
    return linear_cross_entropy(x, weight, target, bias=bias, softcap=logit_softcapping or None, **options)


class HeadLoss(nn.Module):
    """fla's `FusedLinearCrossEntropyLoss`: the head and the loss in one, `forward(x, target, weight, bias=None)`.

    Args: those of `fused_linear_cross_entropy_loss`, without the tensors, by keyword.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        known = FLA.options["fused_linear_cross_entropy_loss"]
        known.bind("fla.FusedLinearCrossEntropyLoss", (), {"x": None, "target": None, "weight": None, **options})
        self.options = options

    def forward(self, x: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return FLA.names["fused_linear_cross_entropy_loss"](x, target, weight, bias, **self.options)


@FLA.function(
    "fused_kl_div_loss", "x target_x weight target_weight reduction='batchmean' ~accumulate_grad_in_fp32=True"
)
def kl_loss(x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor, reduction: str) -> Tensor:
    """`flashmix.linear_kl_divergence`: from the student's next-token distribution to the teacher's, the mean over tokens."""
    refuse("fla.fused_kl_div_loss", f"reduction {reduction!r}", reduction == "batchmean")
    return linear_kl_divergence(x, weight, target_x, target_weight)


class HeadKLDivergence(nn.Module):
    """fla's `FusedKLDivLoss`: `forward(x, target_x, weight, target_weight)`.

    Args:
        reduction: only "batchmean".
        accumulate_grad_in_fp32: ignored.
    """

    def __init__(self, reduction: str = "batchmean", accumulate_grad_in_fp32: bool = True) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor, target_x: Tensor, weight: Tensor, target_weight: Tensor) -> Tensor:
        return kl_loss(x, target_x, weight, target_weight, self.reduction)


FLA.add("FusedCrossEntropyLoss", SoftcappedCrossEntropy, "`process_group`")
FLA.add("FusedLinearCrossEntropyLoss", HeadLoss, "`use_l2warp`, `process_group`")
FLA.add("FusedKLDivLoss", HeadKLDivergence)
