"""A per-channel decay of the keys (docs/chunk_algorithm.md, (2.2)-(2.4), (2.7), (2.8), (3.1)-(3.4))."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.portable.decay.base import Row, SlabDecay, add_rows, row_factor, row_factors, times


class Swept(SlabDecay):
    """The common part of per-channel decays: factors and their gradients are made level by level (`sweep`)."""

    total: Tensor  # [chunks, K or 1, V or 1]
    _dlevels: dict[int, tuple[Tensor, Tensor]]

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        """From the log decay's tile, `[chunks, C, K or V]`, which it overwrites, and the kinds of rows."""
        self._kinds = rows
        self._end = chunk_decay(g)
        self._dprefix = torch.zeros_like(g)  # of log e^{G_i}
        self._dsuffix = torch.zeros_like(g)  # of log e^{G_C - G_j}

    def total_backward(self, products: Tensor) -> None:
        self._dprefix[:, -1] += products

    def finish(self) -> Tensor:
        """The gradient of the log decay, like its tile."""
        return sweep_backward(self._dprefix, self._dsuffix, self._dlevels)


class ChannelDecay(Swept):
    """A per-channel decay of the keys: pairs are cut into levels of blocks, each anchored at its middle."""

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        super().__init__(g, rows)
        # h, row factors [chunks, R (1 if all rows read alike), C / 2h, h, K], column factor [chunks, 1, C / 2h, h, K]
        self._levels: list[tuple[int, Tensor, Tensor]] = []

        def keep(h: int, upper: Tensor, lower: Tensor) -> None:  # both are overwritten by the next level
            self._levels.append((h, torch.stack(row_factors(upper, rows), 1), lower.unsqueeze(1).clone()))

        prefix, suffix = sweep(g.exp_(), keep)
        self._row = row_factor(prefix, rows)
        self._column = suffix.unsqueeze(1)
        self.total = self._end.mT

    def rows(self, X: Tensor, out: Tensor | None = None) -> Tensor:
        return times(X, self._row, out)

    def columns(self, Y: Tensor, out: Tensor | None = None) -> Tensor:
        return times(Y, self._column, out)

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        from_rows, from_columns = rows.mul_(drows), columns.mul_(dcolumns)
        for r, kind in enumerate(self._kinds):
            add_rows(self._dprefix, from_rows[:, r], kind)
        self._dsuffix += from_columns.sum(1)
        return drows.mul_(self._row), dcolumns.mul_(self._column)

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        chunks, R, C, _ = X.shape
        S = Y.shape[1]
        A = out.zero_().view(chunks, R, C, S, C)
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                A[:, r].diagonal(dim1=1, dim2=3).copy_((X[:, r, None] * Y).sum(-1))
        for h, upper, lower in self._decayed_halves(X, Y):
            # single tokens are dot products, which need no matrix product
            product = (upper.unsqueeze(2) * lower.unsqueeze(1)).sum(-1) if h == 1 else torch.bmm(upper, lower.mT)
            pairs(A, h).copy_(product.view(chunks, -1, R, h, S, h))
        return out

    def _decayed_halves(self, X: Tensor, Y: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each level h, rows `[blocks, R * h, K]` and columns `[blocks, S * h, K]` as far as the middle of their blocks."""
        tiles = [scratch.tile(x, x.numel() // 2) for x in (X, Y)]
        for h, *factors in self._levels:
            parts = []
            for x, factor, tile, which in zip((X, Y), factors, tiles, (1, 0), strict=True):
                chunks, kinds, C, K = x.shape
                decayed = tile.view(chunks, C // (2 * h), kinds, h, K)
                torch.mul(halves(x, h, which), factor, out=decayed.transpose(1, 2))
                parts.append(decayed.view(-1, kinds * h, K))
            yield h, parts[0], parts[1]

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        chunks, R, C, K = X.shape
        S = Y.shape[1]
        dA = dA.view(chunks, R, C, S, C)
        self._dlevels = {}
        for (h, upper, lower), (_, row, column) in zip(self._decayed_halves(X, Y), self._levels, strict=True):
            block = pairs(dA, h).reshape(-1, R * h, S * h)
            if h == 1:
                dx = (block.unsqueeze(3) * lower.unsqueeze(1)).sum(2)
                dy = (block.unsqueeze(3) * upper.unsqueeze(2)).sum(1)
            else:
                dx, dy = torch.bmm(block, lower), torch.bmm(block.mT, upper)
            halves(dX, h, 1).addcmul_(dx.view(chunks, -1, R, h, K).transpose(1, 2), row)
            halves(dY, h, 0).addcmul_(dy.view(chunks, -1, S, h, K).transpose(1, 2), column)
            dupper = torch.zeros_like(column[:, 0])
            from_rows = dx.mul_(upper).view(chunks, -1, R, h, K)
            for r, kind in enumerate(self._kinds):
                add_rows(dupper, from_rows[:, :, r], kind)
            self._dlevels[h] = dupper, dy.mul_(lower).view(chunks, -1, S, h, K).sum(2)
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                d = dA[:, r].diagonal(dim1=1, dim2=3).unsqueeze(-1)  # [chunks, S, C, 1]
                dX[:, r] += (d * Y).sum(1)
                dY.addcmul_(d, X[:, r, None])


def chunk_decay(g: Tensor) -> Tensor:
    """`e^{G_C}` `[chunks, 1, ...]` of log decays: `e` to a sum by halves. The state is multiplied by it again and again, and a product of
    `e^g`, each rounded to one side where they are equal and near 1, would be off by what all tokens add up.
    """
    while g.shape[1] > 1:
        first, second = g.chunk(2, 1)
        g = first + second
    return g.exp()


def sweep(decay: Tensor, level: Callable[[int, Tensor, Tensor], None]) -> tuple[Tensor, Tensor]:
    """Multiplies the decays `[chunks, C, ...]` of single tokens up to whole chunks; calls `level(h, upper, lower)` on the way.

    On the level of size h a chunk is cut in blocks of 2h. Rows of a block's second half meet columns of its first half at
    its middle m: `e^{G_i - G_j} = e^{G_i - G_m} e^{G_m - G_j}`. `upper` holds the first factor for the second halves, `lower` the
    second one for the first halves, both `[chunks, C / 2h, h, ...]`. The levels h = 1, 2, ..., C/2 cover each pair i > j once.
    Returns `e^{G_i}` and `e^{G_C - G_j}`.
    """
    # from the start of the half up to i; after j up to the end of the half
    prefix, suffix = decay.clone(), torch.ones_like(decay)
    h = 1
    while h < decay.shape[1]:
        first, upper = prefix.unflatten(1, (-1, 2, h)).unbind(2)
        lower, _ = suffix.unflatten(1, (-1, 2, h)).unbind(2)
        level(h, upper, lower)
        lower *= upper[:, :, -1:]
        upper *= first[:, :, -1:]
        h *= 2
    return prefix, suffix


def sweep_backward(dprefix: Tensor, dsuffix: Tensor, dlevels: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of the log decays from those of the logarithms of the results of `sweep`, in place, and of each level's
    factors."""
    h = dprefix.shape[1] // 2
    while h:
        dfirst, dupper = dprefix.unflatten(1, (-1, 2, h)).unbind(2)
        dlower, _ = dsuffix.unflatten(1, (-1, 2, h)).unbind(2)
        dfirst[:, :, -1] += dupper.sum(2)
        dupper[:, :, -1] += dlower.sum(2)
        dupper += dlevels[h][0]
        dlower += dlevels[h][1]
        h //= 2
    return dprefix


def halves(x: Tensor, h: int, which: int) -> Tensor:
    """The first or second halves of the blocks of 2h tokens of `x` `[..., C, K]`: a view `[..., C / 2h, h, K]`."""
    return x.unflatten(-2, (-1, 2, h))[..., which, :, :]


def pairs(A: Tensor, h: int) -> Tensor:
    """Where second halves meet first halves in `A` `[chunks, R, C, S, C]`: a view `[chunks, C / 2h, R, h, S, h]`."""
    n = A.shape[-1] // (2 * h)
    A = A.unflatten(4, (n, 2, h)).unflatten(2, (n, 2, h))[:, :, :, 1, :, :, :, 0]
    return A.diagonal(dim1=2, dim2=5).movedim(-1, 1)
