"""Removal of padding: the real tokens of a padded batch, laid end to end and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.checks import check_dtype, check_shape
from flashmix.op.packing import Packing


class Padding:
    """The places of the real tokens in a padded `[B, T]` batch. Made once per model call; waits for the device once.

    Args:
        attention_mask: `[B, T]` bool or integer, non-zero where there is a token. Left, right or any other padding.

    Example:
        >>> import torch
        >>> padding = Padding(torch.tensor([[0, 1, 1], [1, 1, 1]]))
        >>> padding.packing.cu_seqlens.tolist()
        [0, 2, 5]
        >>> padding.restore(padding.remove(torch.tensor([[0, 7, 8], [4, 5, 6]]))).tolist()
        [[0, 7, 8], [4, 5, 6]]
    """

    def __init__(self, attention_mask: Tensor) -> None:
        real = attention_mask != 0
        self.shape = tuple(real.shape)
        self.index = real.flatten().nonzero().squeeze(1)
        cu_seqlens = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
        self.packing = Packing(cu_seqlens, self.index.shape[0])

    @property
    def is_needed(self) -> bool:
        """Whether there is any padding at all."""
        return self.packing.total != self.shape[0] * self.shape[1]

    def remove(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` to `[1, tokens, ...]`."""
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def restore(self, x: Tensor) -> Tensor:
        """`[1, tokens, ...]` to `[B, T, ...]`, zero at the padding."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return padded.index_copy(0, self.index, x[0]).unflatten(0, self.shape)


def padding_of(
    attention_mask: Tensor | None, cu_seqlens: Tensor | Packing | None, batch: int, tokens: int
) -> Padding | None:
    """The padding that a layer or model must remove, or None where there is none.

    Raises ValueError: the mask's shape is not `[B, T]`, or the batch is packed as well.
    """
    if attention_mask is None:
        return None
    if cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens must not both be given: a packed batch has no padding")
    check_shape("attention_mask", attention_mask, batch, tokens)
    check_dtype("attention_mask", attention_mask, torch.bool, torch.int64, torch.int32, torch.uint8)
    padding = Padding(attention_mask)
    return padding if padding.is_needed else None
