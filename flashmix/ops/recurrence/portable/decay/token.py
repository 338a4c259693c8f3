"""One decay per token and head: a matrix of the decays between two tokens, for all row and column keys (docs/chunk_algorithm.md,
sections 2 and 3)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.portable.decay.base import (
    LongLogarithms,
    Row,
    SlabDecay,
    add_rows,
    product_backward,
    row_factor,
    times,
)


def token_factors(g: Tensor, out: Tensor) -> None:
    """Fills `out` `[chunks, C + 1, C]` from the log decay's tile `[chunks, C, 1]`.

    Row i has `e^{G_i - G_j}` for j <= i and 0 for j > i; one more row has `e^{G_j}`.
    """
    chunks, C, _ = g.shape
    ones = _triangles(C, torch.float64, g.device)
    decay = g.double().exp_()  # products in float64, rounded once
    # down a column, from token j + 1 on, one decay after the other; 0 above the diagonal
    products = torch.addcmul(ones.upper, decay, ones.below, out=scratch.tile(decay, chunks, C, C))
    out[:, :C].copy_(torch.cumprod(products, 1, out=products)).tril_()
    out[:, C].copy_(torch.cumprod(decay, 1).squeeze(2))


class _Triangles:
    """Ones on and above the diagonal of a `[C, C]` matrix, above it, and below it; zeros elsewhere."""

    def __init__(self, ones: Tensor) -> None:
        self.upper, self.above, self.below = ones.triu(), ones.triu(1), ones.tril(-1)


@cache
def _triangles(C: int, dtype: torch.dtype, device: torch.device) -> _Triangles:
    with torch.inference_mode(False):  # they outlive the call
        return _Triangles(torch.ones(C, C, dtype=dtype, device=device))


class TokenDecay(SlabDecay):
    """One decay per token and head: pairs decay by a matrix `e^{G_i - G_j}`, made once and kept for the backward."""

    def __init__(self, factors: Tensor, rows: tuple[Row, ...]) -> None:
        """From `token_factors`, and the kinds of rows."""
        self._kinds = rows
        self._between, prefix = factors[:, :-1], factors[:, -1].unsqueeze(2)
        self._row = row_factor(prefix, rows)
        self._column = factors[:, -2, None, :, None]
        self.total = prefix[:, -1:]

    def rows(self, X: Tensor, out: Tensor | None = None) -> Tensor:
        return times(X, self._row, out)

    def columns(self, Y: Tensor, out: Tensor | None = None) -> Tensor:
        return times(Y, self._column, out)

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        torch.bmm(X.flatten(1, 2), Y.flatten(1, 2).mT, out=out)
        return self._decay(out)

    def _decay(self, A: Tensor) -> Tensor:
        """`A` `[chunks, R * C, S * C]` times the decay of each pair, 0 where a row does not see a column; in place."""
        C = self._between.shape[-1]
        A = A.unflatten(2, (-1, C))
        between = self._between.unsqueeze(2)
        for r, kind in enumerate(self._kinds):
            rows = A[:, r * C : (r + 1) * C]
            if kind.exclusive:  # the decay of the row above, which ends on its own diagonal
                rows[:, 1:] *= between[:, :-1]
                rows[:, 0] = 0
            else:
                rows *= between
                if not kind.diagonal:
                    rows.diagonal(dim1=1, dim2=3).zero_()
        return A.flatten(2)

    def total_backward(self, products: Tensor) -> None:
        self._dprefix = products.new_zeros(products.shape[0], self._between.shape[-1], 1)  # of log e^{G_i}
        self._dprefix[:, -1] = products.sum(1, keepdim=True)

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        from_rows = rows.mul_(drows).sum(3, keepdim=True)
        from_columns = columns.mul_(dcolumns).sum(3)
        if self.long is not None:
            from_rows[:, -1].masked_fill_(self.long.rows.unsqueeze(2), 0)
            from_columns[:, -1].masked_fill_(self.long.rows, 0)
        for r, kind in enumerate(self._kinds):
            add_rows(self._dprefix, from_rows[:, r], kind)
        self._dsuffix = from_columns.sum(1)  # of log e^{G_C - G_j}
        return drows.mul_(self._row), dcolumns.mul_(self._column)

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        C = X.shape[2]
        if self.long is not None:
            A = A.clone()
            A[:, -C:, -C:].masked_fill_(self.long.rows.unsqueeze(2), 0)
        self._dbetween = scratch.tile(A, A.shape[0], C, C).zero_()  # of log e^{G_i - G_j}
        for rows, drows, kind in zip(A.split(C, 1), dA.split(C, 1), self._kinds, strict=True):
            for pairs, dpairs in zip(rows.split(C, 2), drows.split(C, 2), strict=True):
                if kind.exclusive:
                    self._dbetween[:, :-1].addcmul_(pairs[:, 1:], dpairs[:, 1:])
                else:
                    self._dbetween.addcmul_(pairs, dpairs)
        product_backward(X, Y, self._decay(dA), dX, dY)

    def finish(self) -> Tensor:
        """The gradient of the log decay, like its tile: of token t the sum over the pairs with `j < t <= i`.

        A row's factor is a pair with the token before the chunk, a column's one with the last token.
        """
        P = self._dbetween
        P[:, -1] += self._dsuffix
        dg = _between_tokens(P, self._dprefix)
        if self.long is not None:
            dg += self._finish_long(self.long)
        return dg

    def _finish_long(self, long: LongLogarithms) -> Tensor:
        """The same sums of what is in float64."""
        P, of_rows = long.of_pairs, long.of_rows
        if self._kinds[-1].exclusive:  # an exclusive row has the factor of the row above
            P, of_rows = (torch.cat((t[:, 1:], torch.zeros_like(t[:, :1])), 1) for t in (P, of_rows))
        P[:, -1] += long.of_columns
        return _between_tokens(P, of_rows.unsqueeze(2))


def _between_tokens(P: Tensor, of_rows: Tensor) -> Tensor:
    """Of each token t the sum of `P` `[chunks, C, C]` over pairs with `j < t <= i` and of rows `i >= t`, `[chunks, C, 1]`."""
    later = _triangles(P.shape[-1], P.dtype, P.device).above  # [j, t]: 1 where j < t
    before = torch.mm(P.flatten(0, 1), later).view_as(P).add_(of_rows)
    return before.tril_().sum(1).unsqueeze(2)
