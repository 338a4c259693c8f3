"""A decay of the value axis, `S diag(e^g)`: a chunk's keys meet without it, what they read and write decays (docs/chunk_algorithm.md,
section 12).

Every factor of `gate` belongs to a channel of the values instead of the keys. Rows and columns of the chunk are scaled on their
value side (`row_scale`, `column_scale`, both `[chunks, C, V]`); within a chunk, level by level, with the halves `u` and `l` of a block,

    O[u] += upper o (A[u, l] (lower o V[l]))          A = X Y^T

The one rule that has it is the raw one: one row key, one column key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops._scratch import scratch
from flashmix.ops.recurrence.portable.gate import (
    Row,
    _add_rows,
    _apply,
    _blocks,
    _Gated,
    _halves,
    _product,
    _product_backward,
    _row_factors,
    _sweep,
)  # fmt: skip


class ValueDecay(_Gated):
    """One decay a token, head and channel of the values, `[chunks, C, V]`."""

    def __init__(self, decay: Tensor, rows: tuple[Row, ...]) -> None:
        super().__init__(decay, rows)
        (self._row,) = rows
        self._levels: list[tuple[int, Tensor, Tensor]] = []  # h, upper, lower; both [chunks, C / 2h, h, V]

        def keep(h: int, upper: Tensor, lower: Tensor) -> None:
            (factor,) = _row_factors(upper, rows)  # upper is overwritten by the next level
            factor = factor.clone() if factor is upper else factor
            self._levels.append((h, factor, lower.clone()))

        prefix, self.column_scale = _sweep(decay, keep)
        (self.row_scale,) = _row_factors(prefix, rows)
        self.total = prefix[:, -1:]

    def rows(self, X: Tensor) -> Tensor:
        return X

    def columns(self, Y: Tensor) -> Tensor:
        return Y

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        return drows, dcolumns

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        return torch.bmm(X[:, 0], Y[:, 0].mT, out=out).tril_(0 if self._row.diagonal else -1)

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        _product_backward(X, Y, dA, dX, dY)

    def within(self, A: Tensor, v: Tensor) -> Tensor:
        read = scratch.tile(v, *v.shape).zero_()
        if self._row.diagonal:
            torch.mul(v, A.diagonal(dim1=1, dim2=2).unsqueeze(-1), out=read)
        for h, upper, lower in self._levels:
            written = _halves(v, h, 0) * lower
            _halves(read, h, 1).addcmul_(_apply(_block(A, h), written).view(upper.shape), upper)
        return read

    def written_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        dW = scratch.tile(W, *W.shape).zero_()
        self._dA = scratch.tile(A, *A.shape).zero_()
        self._dlevels: dict[int, tuple[Tensor, Tensor]] = {}
        if self._row.diagonal:
            torch.mul(dO, A.diagonal(dim1=1, dim2=2).unsqueeze(-1), out=dW)
            self._dA.diagonal(dim1=1, dim2=2).copy_((dO * W).sum(-1))
        for h, upper, lower in self._levels:
            block = _block(A, h)
            written, read = _halves(W, h, 0) * lower, _halves(dO, h, 1) * upper
            dwritten = _apply(block.mT, read).view(lower.shape)
            _halves(dW, h, 0).addcmul_(dwritten, lower)
            _blocks(self._dA, h).copy_(_product(read, written).view(A.shape[0], -1, h, h))
            dupper = torch.zeros_like(upper)
            _add_rows(dupper, read * _apply(block, written).view(upper.shape), self._row)
            self._dlevels[h] = dupper, dwritten.mul_(written)
        return dW

    def scores_backward(self, dZ: Tensor, W: Tensor) -> Tensor:
        return self._dA

    def scales_backward(self, at: slice, rows: Tensor, S: Tensor, dZ: Tensor, W: Tensor, reached: Tensor) -> None:
        assert self.row_scale is not None
        _add_rows(self._dprefix[at], torch.bmm(rows, S).mul_(self.row_scale[at]).mul_(dZ), self._row)
        self._dsuffix[at].addcmul_(reached, W)

    def total_backward(self, at: slice, S: Tensor, dS: Tensor) -> None:
        """`S` the state chunks `at` start from, `dS` the gradient of the state they end with."""
        self._dprefix[at, -1] += (S * dS).sum(-2) * self.total[at].squeeze(-2)

    def _level_backward(self, h: int, dupper: Tensor, dlower: Tensor) -> None:
        level = self._dlevels[h]
        dupper += level[0]
        dlower += level[1]


def _block(A: Tensor, h: int) -> Tensor:
    """Where second halves meet first halves, `[blocks, h, h]`."""
    return _blocks(A, h).reshape(-1, h, h)
