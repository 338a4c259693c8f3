"""The `transform` phase: `T = (I - A_ab)^{-1}` turns targets into corrected values, `nu = T R` (docs/chunk_algorithm.md, section 4).

Its backward is two lines and lives where its operands are: `dR = T^T dnu` in `state`, `dA_ab = dR nu^T` in `output`.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 8  # rows of the blocks that are inverted token by token


def transform_forward(A: Tensor, out: Tensor) -> Tensor:
    """Fills `out` with the inverse of `I - A` for strictly lower triangular `A` `[chunks, C, C]`, by blocks of 8, 16, ... rows.

    Small blocks by forward substitution. Two neighbouring inverses `T_1, T_2` of size h and the block `A_21` between them give
    the inverse of size 2h: `[[T_1, 0], [T_2 A_21 T_1, T_2]]`.
    """
    C = A.shape[1]
    _small_blocks(A, out.zero_())
    h = SMALL
    while h < C:
        for first in range(0, C, 2 * h):  # block after block: operands are views, where all at once would be copies
            one, two = slice(first, first + h), slice(first + h, first + 2 * h)
            lower = out[:, two]
            lower[:, :, one] = torch.bmm(lower[:, :, two], torch.bmm(A[:, two, one], out[:, one, one]))
        h *= 2
    return out


def _small_blocks(A: Tensor, out: Tensor) -> None:
    """The inverses of the small blocks on the diagonal, all at once: row i of `T` is that of `I` plus `A_ij` times row j for j < i."""
    block = (
        _diagonal_blocks(A).permute(2, 3, 1, 0).contiguous()
    )  # [row, column, block, chunk]: rows of all blocks side by side
    T = block.clone()  # the identity's part of each row; its diagonal is set below
    for j in range(1, SMALL - 1):
        T[j + 1 :, :j].add_(block[j + 1 :, j, None] * T[j, :j])
    blocks = _diagonal_blocks(out)
    blocks.copy_(T.permute(3, 2, 0, 1))
    blocks.diagonal(dim1=2, dim2=3).fill_(1)


def _diagonal_blocks(A: Tensor) -> Tensor:
    """The small blocks on the diagonal of `A` `[chunks, C, C]`: a view `[chunks, C / 8, 8, 8]`."""
    n = A.shape[-1] // SMALL
    return A.unflatten(-1, (n, SMALL)).unflatten(1, (n, SMALL)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
