"""The `transform` phase: `T = (I - A_ab)^{-1}` turns targets into corrected values, `nu = T R` (docs/chunk_algorithm.md, section 4).

Its backward is two lines and lives where its operands are: `dR = T^T dnu` in `state`, `dA_ab = dR nu^T` in `output`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transform_forward(A: Tensor, out: Tensor) -> Tensor:
    """Fills `out` with the inverse of `I - A` for strictly lower triangular `A` `[chunks, C, C]`, by blocks of 4, 8, 16, ... rows.

    A 4 x 4 block is nilpotent of order 4, so its inverse is `(I + A)(I + A^2)`. Two neighbouring inverses `T_1, T_2` of size
    h and the block `A_21` between them give the inverse of size 2h: `[[T_1, 0], [T_2 A_21 T_1, T_2]]`.
    """
    chunks, C, _ = A.shape
    eye = torch.eye(4, dtype=A.dtype, device=A.device)
    h = 4
    block = _diagonal_blocks(A, h).reshape(-1, h, h)
    first = (eye + block) @ (eye + block @ block)
    _diagonal_blocks(out.zero_(), h).copy_(first.view(chunks, -1, h, h))
    while h < C:
        pairs = _diagonal_blocks(out, 2 * h)
        T1, T2 = pairs[:, :, :h, :h].reshape(-1, h, h), pairs[:, :, h:, h:].reshape(-1, h, h)
        between = _diagonal_blocks(A, 2 * h)[:, :, h:, :h].reshape(-1, h, h)
        pairs[:, :, h:, :h] = (T2 @ between @ T1).view(chunks, -1, h, h)
        h *= 2
    return out


def _diagonal_blocks(A: Tensor, h: int) -> Tensor:
    """The blocks of size h on the diagonal of `A` `[chunks, C, C]`: a view `[chunks, C / h, h, h]`."""
    n = A.shape[-1] // h
    return A.unflatten(-1, (n, h)).unflatten(1, (n, h)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
