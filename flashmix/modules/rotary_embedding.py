"""Rotary position embedding with a table that grows on demand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from flashmix.op.checks import check_multiple, check_range
from flashmix.op.packing import Packing
from flashmix.op.public import Public
from flashmix.op.recompute import recomputed
from flashmix.ops.rotary.joined import joins, split_and_rotated
from flashmix.ops.rotary.op import rotary, rotary_table
from flashmix.ops.rotary.scaling import RotaryScaling

exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since torch 2.7


class RotaryEmbedding(Public, nn.Module):
    """Rotates pairs of channels by an angle proportional to the token's position.

    The table of cosines and sines is float32 whatever the model's dtype, is not part of the state dict, and doubles
    when a position past its end is asked for.

    Args:
        head_dim: channels of one head (not of the model).
        base: the longest wavelength is about `2 pi base` tokens.
        rotated: number of leading channels that are rotated, even; default all of them.
        interleaved: pairs are neighbours `(0, 1), (2, 3), ...` instead of halves `(i, i + rotated/2)`.
        scaling: of the frequencies, for texts longer than those of the training, one of `flashmix.ops.rotary.scaling`.
        axes: `rotated/2` numbers, the axis (time, height, width, ...) whose position turns each pair; positions are
            then `[B, T, axes]`.

    Raises:
        ValueError: `rotated` is odd or larger than `head_dim`.

    Source: Su et al., arXiv:2104.09864, equation 15; several axes: arXiv:2409.12191, section 2.1.

    Example:
        >>> import torch
        >>> RotaryEmbedding(16)(torch.randn(2, 5, 4, 16)).shape
        torch.Size([2, 5, 4, 16])
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        rotated: int | None = None,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
        axes: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.rotated = head_dim if rotated is None else rotated
        self.interleaved = interleaved
        self.scaling = scaling
        self.axes = axes
        check_range("rotated", self.rotated, 2, head_dim)
        check_multiple("rotated", self.rotated, "the size of a pair", 2)
        self._table: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        *,
        positions: int | Tensor | None = None,
        limit: int | None = None,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> Tensor:
        """Rotates `x`.

        Args:
            x: `[B, T, H, head_dim]`.
            positions: of the first token (int), or of each token (`[B, T]`, with axes `[B, T, axes]`); default 0, 1,
                ... in each sequence.
            limit: all `positions` lie below it; needed with a tensor, so that the host need not read that.
            cu_seqlens: boundaries of packed sequences; each starts at position 0.

        Returns:
            `x` rotated, same shape and dtype.
        """
        if isinstance(positions, Tensor):
            if limit is None:
                raise ValueError("limit must be given with a tensor of positions, got None")
        else:
            tokens = cu_seqlens.reach if isinstance(cu_seqlens, Packing) else x.shape[1]
            limit = tokens + (positions or 0)
        cos, sin = self._table_for(limit, x.device)
        return rotary(
            x, cos, sin, positions=positions, cu_seqlens=cu_seqlens, interleaved=self.interleaved, axes=self.axes
        )

    def of_parts(
        self, qkv: Tensor, sizes: tuple[int, int, int], *, cu_seqlens: Tensor | Packing | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of so many heads, which are parts of `qkv` `[B, T, sum(sizes), head_dim]`, the first two rotated."""
        if self.axes is None and (cu_seqlens is None or isinstance(cu_seqlens, Packing)):
            tokens = cu_seqlens.reach if isinstance(cu_seqlens, Packing) else qkv.shape[1]
            angles = (*self._table_for(tokens, qkv.device), cu_seqlens, self.interleaved)
            if joins(qkv, angles):
                return split_and_rotated(qkv, sizes, angles)
        qk, v = qkv.split([sizes[0] + sizes[1], sizes[2]], dim=2)
        q, k = recomputed("rotary", partial(self, cu_seqlens=cu_seqlens), qk).split(sizes[:2], dim=2)
        return q, k, v

    def _table_for(self, limit: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A table on `device` with at least `limit` positions; in an exported program one of `limit`, which may be any number there."""
        if exporting():
            return rotary_table(limit, self.rotated, self.base, scaling=self.scaling, device=device)
        table = self._table
        if table is None or table[0].shape[0] < limit or table[0].device != device:
            size = max(256, 1 << (limit - 1).bit_length())
            with torch.inference_mode(False), torch.no_grad():  # a table made while generating must serve training too
                table = rotary_table(size, self.rotated, self.base, scaling=self.scaling, device=device)
            self._table = table
        return table

    def extra_repr(self) -> str:
        text = f"{self.head_dim}, base={self.base}, rotated={self.rotated}, interleaved={self.interleaved}"
        return text if self.scaling is None else f"{text}, scaling={self.scaling}"
