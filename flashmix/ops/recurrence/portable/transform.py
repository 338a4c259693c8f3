"""The `transform` phase: `T = (I - A_ab)^{-1}` turns targets into corrected values, `nu = T R` (docs/chunk_algorithm.md, section 4).

Its backward is two lines and lives where its operands are: `dR = T^T dnu` in `state`, `dA_ab = dR nu^T` in `output`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transform_forward(A: Tensor) -> Tensor:
    """The inverse of `I - A` for strictly lower triangular `A` `[chunks, C, C]`, by blocks of 4, 8, 16, ... rows.

    A 4 x 4 block is nilpotent of order 4, so its inverse is `(I + A)(I + A^2)`. Two neighbouring inverses `T_1, T_2` of size
    h and the block `A_21` between them give the inverse of size 2h: `[[T_1, 0], [T_2 A_21 T_1, T_2]]`.
    """
    C = A.shape[-1]
    eye = torch.eye(4, dtype=A.dtype, device=A.device)
    h = 4
    block = _diagonal_blocks(A, h).reshape(-1, h, h)
    T = (eye + block) @ (eye + block @ block)
    while h < C:
        T1, T2 = T.view(-1, 2, h, h).unbind(1)
        corner = _diagonal_blocks(A, 2 * h)[:, :, h:, :h].reshape(-1, h, h)
        T = torch.cat([torch.cat([T1, torch.zeros_like(T1)], -1), torch.cat([T2 @ corner @ T1, T2], -1)], -2)
        h *= 2
    return T


def _diagonal_blocks(A: Tensor, h: int) -> Tensor:
    """The blocks of size h on the diagonal of `A` `[chunks, C, C]`: a view `[chunks, C / h, h, h]`."""
    n = A.shape[-1] // h
    return A.unflatten(-1, (n, h)).unflatten(1, (n, h)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
