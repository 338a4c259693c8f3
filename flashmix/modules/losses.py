"""The language-model loss as a module: head and cross-entropy in one, without logits in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flashmix.op.packing import check_whole
from flashmix.op.public import Public
from flashmix.ops.losses.op import linear_cross_entropy


class LinearCrossEntropy(Public, nn.Module):
    """Cross-entropy of `hidden @ weight^T` against targets; the logits `[tokens, vocabulary]` are never held.

    Args:
        ignore_index: targets with this value are not counted.
        label_smoothing: weight of the uniform distribution in the target.
        z_loss: weight of `logsumexp(logits)^2`.
        softcap: None, or logits are first bounded to `softcap * tanh(logits / softcap)`.
        reduction: "mean" over counted targets, "sum", or "none".

    Example:
        >>> import torch
        >>> loss = LinearCrossEntropy()
        >>> loss(torch.randn(2, 5, 16), torch.randn(32, 16), torch.randint(32, (2, 5))).shape
        torch.Size([])
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.reduction = reduction

    def forward(self, hidden: Tensor, weight: Tensor, target: Tensor, reduction: str | None = None) -> Tensor:
        """The loss of `hidden` `[..., D]` under `weight` `[vocabulary, D]`; `reduction` overrides the module's."""
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction if reduction is None else reduction,
        )

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, softcap={self.softcap}"


def next_token_targets(tokens: Tensor, cu_seqlens: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The token after each token, `ignore_index` for the last of each sequence.

    Args:
        tokens: `[B, T]` int64.
        cu_seqlens: `[N + 1]` boundaries of packed sequences (`B == 1`), or None: each row is a sequence.

    Example:
        >>> import torch
        >>> next_token_targets(torch.tensor([[5, 6, 7, 8]]), torch.tensor([0, 2, 4])).tolist()
        [[6, -100, 8, -100]]
    """
    check_whole(cu_seqlens, "next_token_targets")
    targets = torch.roll(tokens, -1, dims=1)
    targets[:, -1:] = ignore_index
    if cu_seqlens is not None:
        targets[0, cu_seqlens[1:].to(torch.int64) - 1] = ignore_index  # -1 (empty at the front) is the last token too
    return targets
