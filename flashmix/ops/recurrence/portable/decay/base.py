"""The interface of a slab's decay to the phases, and the case without decay (docs/chunk_algorithm.md, sections 2 and 3).

Row keys `X` `[chunks, R, C, K]` read the state (the query, and the key of the correction), column keys `Y` `[chunks, S, C, K]` write
to it. With `G` the in-chunk cumulative log decay, a decay offers

    rows(X)      ~x_i = x_i e^{G_i}, or x_i e^{G_{i-1}} for a row key that reads the state before its token's decay      (1.6)
    columns(Y)   ^y_j = y_j e^{G_C - G_j}; both are written into `out` if it is given (it may be the keys themselves)    (1.6)
    total        e^{G_C}, a factor of the state, [chunks, K or 1, 1]; None without a decay                              (1.11)
    pairs(X, Y)  A_ij = sum_k x_ik y_jk e^{G_i - G_j} (or e^{G_{i-1} - G_j}) for j <= i or j < i, [chunks, R * C, S * C] (1.7)

Every factor is a product of the decays of single tokens, so it is at most 1, keeps its relative precision, and is 0 where a log decay
is -inf. Nothing is divided and no sums are subtracted. Each `*_backward` returns the gradient of its keys and collects that of the
logarithms of the factors it used; `finish` takes these back to the log decays. The gradient of a log decay is thus a sum over the
pairs that it lies between, in which nothing cancels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.scratch import scratch


@dataclass(frozen=True)
class Row:
    """How a row key reads: after its own token's decay or before it (`exclusive`), and whether it sees its own token's write."""

    exclusive: bool
    diagonal: bool


@dataclass(frozen=True)
class LongLogarithms:
    """What the long rows of the correction give the logarithms of factors, in float64; 0 in other rows."""

    rows: Tensor  # which rows are long, [chunks, C]
    of_pairs: Tensor  # P_ij [chunks, C, C]
    of_rows: Tensor  # [chunks, C]
    of_columns: Tensor  # [chunks, C]


class SlabDecay:
    """The decay of a slab. The defaults are those of a decay that leaves the keys, or the values, as they are."""

    total: Tensor | None = None
    long: LongLogarithms | None = None  # with one decay per token, of chunks that have long rows
    shared = 2  # the axis of the state whose channels have one decay

    def rows(self, X: Tensor, out: Tensor | None = None) -> Tensor:
        """The rows as they read the state."""
        return X

    def columns(self, Y: Tensor, out: Tensor | None = None) -> Tensor:
        """The columns as they write to the state."""
        return Y

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        """The scores."""
        raise NotImplementedError

    def written(self, W: Tensor) -> Tensor:
        """The part of `W` `[chunks, S * C, V]` that reaches the end of the chunk."""
        return W

    def output(self, Z: Tensor, A: Tensor, W: Tensor, scale: float) -> Tensor:
        """`scale (Z + A W)`: reads of the state `Z` `[chunks, C, V]`, and of `W` by the scores `A` `[chunks, C, S * C]` (1.8)."""
        return torch.baddbmm(Z, A, W, beta=scale, alpha=scale, out=scratch.tile(Z, *Z.shape))

    def read_backward(self, dZ: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        """The gradient of `rows S` from that of what rows read."""
        return dZ

    def within_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        """The gradient of `W` from the output by the scores; the state pass adds its part to the returned tile (5.4)."""
        return matmul(A.mT, dO)

    def written_backward(self, W: Tensor, dW: Tensor) -> Tensor:
        """The gradient of `W` in all, from what `within_backward` returned with the state's part in it."""
        return dW

    def scores_backward(self, dZ: Tensor, W: Tensor) -> Tensor:
        """The gradient of the scores (6.1)."""
        return matmul(dZ, W.mT)

    def total_backward(self, products: Tensor) -> None:
        """Takes `e^{G_C} S dS'` summed over the shared axis, `[chunks, K or V]`."""

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the keys from those of `rows(X)` and `columns(Y)`; all four are overwritten (6.4)."""
        return drows, dcolumns

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        """Adds to `dX` and `dY` the part that comes from the scores (3.3)."""
        raise NotImplementedError

    def finish(self) -> Tensor | None:
        """The gradient of the log decay, like its tile (2.6)."""
        return None


class NoDecay(SlabDecay):
    """No decay: every factor is 1, pairs are masked."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._kinds = rows

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        torch.bmm(X.flatten(1, 2), Y.flatten(1, 2).mT, out=out)
        return self._mask(out, X.shape[2])

    def _mask(self, A: Tensor, C: int) -> Tensor:
        for r, kind in enumerate(self._kinds):
            A[:, r * C : (r + 1) * C].unflatten(2, (-1, C)).transpose(1, 2).tril_(0 if kind.diagonal else -1)
        return A

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        product_backward(X, Y, self._mask(dA, X.shape[2]), dX, dY)


def add_rows(total: Tensor, rows: Tensor, kind: Row) -> None:
    """Adds the gradients of row factors `[..., h, K]` to those of tokens; an exclusive row has the factor of the row above."""
    dim = 2 if total.dim() == 4 else 1
    if kind.exclusive:
        n = total.shape[dim] - 1
        total.narrow(dim, 0, n).add_(rows.narrow(dim, 1, n))
    else:
        total += rows


def row_factors(prefix: Tensor, kinds: tuple[Row, ...]) -> list[Tensor]:
    """The factors of rows from those of tokens `[chunks, (blocks,) h, ...]`: one for each kind, or one for all if they read alike."""
    before = None
    if any(kind.exclusive for kind in kinds):
        dim = 1 if prefix.dim() < 4 else 2
        before, n = torch.ones_like(prefix), prefix.shape[dim] - 1
        before.narrow(dim, 1, n).copy_(prefix.narrow(dim, 0, n))
    found = [prefix if before is None or not kind.exclusive else before for kind in kinds]
    return found[:1] if all(f is found[0] for f in found) else found


def row_factor(prefix: Tensor, kinds: tuple[Row, ...]) -> Tensor:
    """The factors of rows side by side, `[chunks, R (1 if all rows read alike), ...]`."""
    found = row_factors(prefix, kinds)
    return torch.stack(found, 1) if len(found) > 1 else found[0].unsqueeze(1)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` per chunk, in scratch memory."""
    return torch.bmm(x, y, out=scratch.tile(x, x.shape[0], x.shape[1], y.shape[2]))


def times(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """`x * factor` in the shape of `x`, in scratch memory unless `out` is given."""
    return torch.mul(x, factor, out=scratch.tile(x, *x.shape) if out is None else out)


def product_backward(X: Tensor, Y: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
    """Adds to `dX, dY` the gradients of the factors of `X Y^T`."""
    dX.flatten(1, 2).baddbmm_(dA, Y.flatten(1, 2))
    dY.flatten(1, 2).baddbmm_(dA.mT, X.flatten(1, 2))
