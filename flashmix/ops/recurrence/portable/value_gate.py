"""A decay of the value axis, `S diag(e^g)`: a chunk's keys meet without it, what they read and write decays (docs/chunk_algorithm.md,
section 12).

Every factor of `gate` belongs to a channel of the values instead of the keys: what rows read and what columns write is scaled
(`_row`, `_column`, both `[chunks, C, V]`). Within a chunk, level by level, with the halves `u` and `l` of a block,

    O[u] += upper o (A[u, l] (lower o V[l]))          A = X Y^T

The one rule that has it is the raw one: one row key, one column key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.portable.gate import (
    Row,
    _add_rows,
    _apply,
    _blocks,
    _halves,
    _product,
    _product_backward,
    _row_factors,
    _sweep,
    _Swept,
    _times,
    matmul,
)  # fmt: skip


class ValueDecay(_Swept):
    """One decay a token, head and channel of the values, `[chunks, C, V]`."""

    shared = 1

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        super().__init__(g, rows)
        (self._kind,) = rows
        self._levels: list[tuple[int, Tensor, Tensor]] = []  # h, upper, lower; both [chunks, C / 2h, h, V]

        def keep(h: int, upper: Tensor, lower: Tensor) -> None:
            (factor,) = _row_factors(upper, rows)  # upper is overwritten by the next level
            factor = factor.clone() if factor is upper else factor
            self._levels.append((h, factor, lower.clone()))

        prefix, self._column = _sweep(g.exp_(), keep)
        (self._row,) = _row_factors(prefix, rows)
        self.total = prefix[:, -1:]

    def rows(self, X: Tensor, out: Tensor | None = None) -> Tensor:
        return X

    def columns(self, Y: Tensor, out: Tensor | None = None) -> Tensor:
        return Y

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        return drows, dcolumns

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        return torch.bmm(X[:, 0], Y[:, 0].mT, out=out).tril_(0 if self._kind.diagonal else -1)

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        _product_backward(X, Y, dA, dX, dY)

    def written(self, W: Tensor) -> Tensor:
        return _times(W, self._column)

    def output(self, Z: Tensor, A: Tensor, W: Tensor, scale: float) -> Tensor:
        return _times(Z, self._row).add_(self._within(A, W)).mul_(scale)

    def _within(self, A: Tensor, v: Tensor) -> Tensor:
        """What rows read of the values in their own chunk."""
        read = scratch.tile(v, *v.shape).zero_()
        if self._kind.diagonal:
            torch.mul(v, A.diagonal(dim1=1, dim2=2).unsqueeze(-1), out=read)
        for h, upper, lower in self._levels:
            written = _halves(v, h, 0) * lower
            _halves(read, h, 1).addcmul_(_apply(_block(A, h), written).view(upper.shape), upper)
        return read

    def read_backward(self, dZ: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        _add_rows(self._dprefix, matmul(rows, states).mul_(self._row).mul_(dZ), self._kind)
        return _times(dZ, self._row)

    def within_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        self._dwithin = self._within_backward(A, W, dO)
        return scratch.tile(W, *W.shape).zero_()  # what the state passes on decays first

    def written_backward(self, W: Tensor, dW: Tensor) -> Tensor:
        self._dsuffix.addcmul_(dW.mul_(self._column), W)
        return self._dwithin.add_(dW)

    def _within_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        """What reaches `W` by the scores; takes note of what reaches these and the gate."""
        dW = scratch.tile(W, *W.shape).zero_()
        self._dA = scratch.tile(A, *A.shape).zero_()
        self._dlevels = {}
        if self._kind.diagonal:
            torch.mul(dO, A.diagonal(dim1=1, dim2=2).unsqueeze(-1), out=dW)
            self._dA.diagonal(dim1=1, dim2=2).copy_((dO * W).sum(-1))
        for h, upper, lower in self._levels:
            block = _block(A, h)
            written, read = _halves(W, h, 0) * lower, _halves(dO, h, 1) * upper
            dwritten = _apply(block.mT, read).view(lower.shape)
            _halves(dW, h, 0).addcmul_(dwritten, lower)
            _blocks(self._dA, h).copy_(_product(read, written).view(A.shape[0], -1, h, h))
            dupper = torch.zeros_like(upper)
            _add_rows(dupper, read * _apply(block, written).view(upper.shape), self._kind)
            self._dlevels[h] = dupper, dwritten.mul_(written)
        return dW

    def scores_backward(self, dZ: Tensor, W: Tensor) -> Tensor:
        return self._dA


def _block(A: Tensor, h: int) -> Tensor:
    """Where second halves meet first halves, `[blocks, h, h]`."""
    return _blocks(A, h).reshape(-1, h, h)
