"""Calls of the losses over a vocabulary. N rows are the tokens of all axes, D channels, V the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Call, Outputs, refused
from flashmix.op.dtypes import compute_dtype


@dataclass(frozen=True, kw_only=True)
class LossOptions(Call):
    """Which cross entropy of a row."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCall(LossOptions):
    """The losses of the rows of `logits [N, V]` for `target [N]`; the backward may write over `logits`."""

    logits: Tensor
    target: Tensor
    overwrite_logits: bool

    def results(self) -> Outputs:
        return (row_results(self.logits, compute_dtype(self.logits)),)


@dataclass(frozen=True, kw_only=True)
class HeadCall(Call):
    """A loss of `hidden [N, D]` under a head, `weight [V, D]` and `bias [V]`, by chunks of so many tokens (None: chosen).

    `needs`: the fields of the head that autograd will ask a gradient of.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    chunk: int | None
    needs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropyCall(HeadCall, LossOptions):
    """The losses of the rows for `target [N]`, or their sum."""

    target: Tensor
    summed: bool

    @property
    def wide(self) -> torch.dtype:
        """The dtype of losses and of all arithmetic in plain PyTorch."""
        return compute_dtype(self.hidden, self.weight, self.bias)

    def results(self) -> Outputs:
        return (row_results(self.hidden, self.wide, self.summed),)


@dataclass(frozen=True, kw_only=True)
class ParallelCrossEntropyCall(LinearCrossEntropyCall):
    """The losses of the rows, where each process of the group of this name holds `weight` and `bias` of its part of the vocabulary."""

    group: str


@dataclass(frozen=True, kw_only=True)
class KLDivergenceCall(HeadCall):
    """The divergence of each row from a teacher's, `teacher_hidden [N, E]` under a head of its own, or its sum or mean over `mask [N]`."""

    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    mask: Tensor | None
    temperature: float
    reverse: bool
    reduction: str

    @property
    def scale(self) -> float:
        return 1 / self.temperature

    @property
    def wide(self) -> torch.dtype:
        """The dtype of losses and of all arithmetic in plain PyTorch."""
        return compute_dtype(self.hidden, self.weight, self.bias, self.teacher_hidden)

    def results(self) -> Outputs:
        return (row_results(self.hidden, self.wide, self.reduction != "none"),)


@dataclass(frozen=True, kw_only=True)
class GRPOCall(HeadCall):
    """The policy loss of `target [B, T]`, N = B T, reduced over `mask [B, T]`; `advantages [B]` or `[B, T]`, log-probabilities `[B, T]`."""

    target: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    mask: Tensor | None
    clip: tuple[float, ...]
    kl_weight: float
    temperature: float
    reduction: str

    def results(self) -> Outputs:
        return (row_results(self.hidden, torch.float32, True),)


def row_results(like: Tensor, dtype: torch.dtype, reduced: bool = False) -> Tensor:
    """An empty tensor `[N]`, or `[]`, for the rows of `like [N, ...]`."""
    return torch.empty((() if reduced else like.shape[:1]), dtype=dtype, device=like.device)


def triton_refuses_head(call: HeadCall) -> str | None:
    """The reason why Triton kernels cannot run the head; log-probabilities and advantages may have any dtype."""
    return refused((call.hidden, call.weight, call.bias))
