"""A decay of the value axis, `S diag(e^g)`: scores are made without it, reads and writes of values decay (docs/chunk_algorithm.md,
section 12).

Every factor belongs to a channel of the values instead of the keys: the values that rows read and columns write are scaled
(`_row`, `_column`, both `[chunks, C, V]`). Within a chunk, level by level, with the halves `u` and `l` of a block,

    O[u] += upper o (A[u, l] (lower o V[l]))          A = X Y^T

Only the raw rule has it: one row key, one column key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.portable.decay.base import Row, add_rows, matmul, product_backward, row_factors, times
from flashmix.ops.recurrence.portable.decay.channel import Swept, halves, sweep


class ValueDecay(Swept):
    """One decay per token, head and channel of the values, `[chunks, C, V]`."""

    shared = 1

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        super().__init__(g, rows)
        (self._kind,) = rows
        self._levels: list[tuple[int, Tensor, Tensor]] = []  # h, upper, lower; both [chunks, C / 2h, h, V]

        def keep(h: int, upper: Tensor, lower: Tensor) -> None:
            (factor,) = row_factors(upper, rows)  # upper is overwritten by the next level
            factor = factor.clone() if factor is upper else factor
            self._levels.append((h, factor, lower.clone()))

        prefix, self._column = sweep(g.exp_(), keep)
        (self._row,) = row_factors(prefix, rows)
        self.total = self._end

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        return torch.bmm(X[:, 0], Y[:, 0].mT, out=out).tril_(0 if self._kind.diagonal else -1)

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        product_backward(X, Y, dA, dX, dY)

    def written(self, W: Tensor) -> Tensor:
        return times(W, self._column)

    def output(self, Z: Tensor, A: Tensor, W: Tensor, scale: float) -> Tensor:
        return times(Z, self._row).add_(self._within(A, W)).mul_(scale)

    def _within(self, A: Tensor, v: Tensor) -> Tensor:
        """The values that rows read in their own chunk (12.4)."""
        read = scratch.tile(v, *v.shape).zero_()
        if self._kind.diagonal:
            torch.mul(v, A.diagonal(dim1=1, dim2=2).unsqueeze(-1), out=read)
        for h, upper, lower in self._levels:
            written = halves(v, h, 0) * lower
            halves(read, h, 1).addcmul_(_apply(_block(A, h), written).view(upper.shape), upper)
        return read

    def read_backward(self, dZ: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        add_rows(self._dprefix, matmul(rows, states).mul_(self._row).mul_(dZ), self._kind)
        return times(dZ, self._row)

    def within_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        self._dwithin = self._within_backward(A, W, dO)
        return scratch.tile(W, *W.shape).zero_()  # the state's part decays first

    def written_backward(self, W: Tensor, dW: Tensor) -> Tensor:
        self._dsuffix.addcmul_(dW.mul_(self._column), W)
        return self._dwithin.add_(dW)

    def _within_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        """The gradient of `W` by the scores; keeps those of the scores and of the factors for later (12.5), (12.6)."""
        dW = scratch.tile(W, *W.shape).zero_()
        self._dA = scratch.tile(A, *A.shape).zero_()
        self._dlevels = {}
        if self._kind.diagonal:
            torch.mul(dO, A.diagonal(dim1=1, dim2=2).unsqueeze(-1), out=dW)
            self._dA.diagonal(dim1=1, dim2=2).copy_((dO * W).sum(-1))
        for h, upper, lower in self._levels:
            block = _block(A, h)
            written, read = halves(W, h, 0) * lower, halves(dO, h, 1) * upper
            dwritten = _apply(block.mT, read).view(lower.shape)
            halves(dW, h, 0).addcmul_(dwritten, lower)
            _blocks(self._dA, h).copy_(_product(read, written).view(A.shape[0], -1, h, h))
            dupper = torch.zeros_like(upper)
            add_rows(dupper, read * _apply(block, written).view(upper.shape), self._kind)
            self._dlevels[h] = dupper, dwritten.mul_(written)
        return dW

    def scores_backward(self, dZ: Tensor, W: Tensor) -> Tensor:
        return self._dA


def _block(A: Tensor, h: int) -> Tensor:
    """Where second halves meet first halves, `[blocks, h, h]`."""
    return _blocks(A, h).reshape(-1, h, h)


def _blocks(A: Tensor, h: int) -> Tensor:
    """Where second halves meet first halves in `A` `[chunks, C, C]`: a view `[chunks, C / 2h, h, h]`."""
    n = A.shape[-1] // (2 * h)
    return A.unflatten(-1, (n, 2, h)).unflatten(1, (n, 2, h))[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of halves `[chunks, C / 2h, h, K]`; single rows are dot products, which need no matrix product."""
    if x.shape[2] == 1:
        return (x * y).sum(-1)
    return x.flatten(0, 1) @ y.flatten(0, 1).mT


def _apply(block: Tensor, x: Tensor) -> Tensor:
    """`block` `[blocks, h, h]` times the half `x` `[chunks, C / 2h, h, K]`."""
    x = x.flatten(0, 1)
    return block * x if x.shape[1] == 1 else block @ x
