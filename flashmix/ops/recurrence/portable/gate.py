"""The `gate` and `scores` phases: what the log decay does to keys and to pairs of tokens (docs/chunk_algorithm.md, sections 2 and 3).

Row keys `X` `[chunks, R, C, K]` read the state (the query, and the vector that reads what is to be corrected), column keys `Y`
`[chunks, S, C, K]` write to it. With `G` the in-chunk cumulative log decay, a decay offers

    rows(X)      ~x_i = x_i e^{G_i}, or x_i e^{G_{i-1}} for a row key that reads the state before its token's decay
    columns(Y)   ^y_j = y_j e^{G_C - G_j}; both into `out` if it is given (it may be the keys themselves)
    total        e^{G_C}, a factor of the state, [chunks, K or 1, 1]; None without a gate
    pairs(X, Y)  A_ij = sum_k x_ik y_jk e^{G_i - G_j} (or e^{G_{i-1} - G_j}) for j <= i or j < i, [chunks, R * C, S * C]

Decays are multiplied up from single tokens: every factor is a product of the decays between two tokens, so it is at most 1,
keeps its relative precision, and is 0 where a gate is -inf. Nothing is divided and no sums are subtracted. Each `*_backward`
returns the gradient of its keys and collects that of the logarithms of the factors it used; `finish` takes these back to the
gates. A gate's gradient is thus a sum over the pairs that it lies between, where nothing cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.scratch import scratch


@dataclass(frozen=True)
class Row:
    """How a row key reads: after its own token's decay or before it (`exclusive`), and whether it sees its own token's write."""

    exclusive: bool
    diagonal: bool


class _Decay:
    """What reads, writes and comes back on the side of the values, where a decay of keys has no part (`ValueDecay` has)."""

    total: Tensor | None = None
    shared = 2  # the axis of the state whose channels have one decay

    def written(self, W: Tensor) -> Tensor:
        """What of `W` `[chunks, S * C, V]` is written to the state."""
        return W

    def output(self, Z: Tensor, A: Tensor, W: Tensor, scale: float) -> Tensor:
        """The output: what queries read of the state, `Z` `[chunks, C, V]`, and of `W` by scores `A` `[chunks, C, S * C]`."""
        return torch.baddbmm(Z, A, W, beta=scale, alpha=scale, out=scratch.tile(Z, *Z.shape))

    def read_backward(self, dZ: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        """What reaches `rows S` from the gradient of what rows read."""
        return dZ

    def within_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        """What reaches `W` from the output by scores; what the state passes on is then added to it."""
        return matmul(A.mT, dO)

    def written_backward(self, W: Tensor, dW: Tensor) -> Tensor:
        """What reaches `W` in all."""
        return dW

    def scores_backward(self, dZ: Tensor, W: Tensor) -> Tensor:
        """The gradient of the scores."""
        return matmul(dZ, W.mT)

    def total_backward(self, shares: Tensor) -> None:
        """From `e^{G_C} S dS'` summed over the shared axis, `[chunks, K or V]`."""


class NoDecay(_Decay):
    """No gate: every factor is 1, pairs are masked."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._kinds = rows

    def rows(self, X: Tensor, out: Tensor | None = None) -> Tensor:
        return X

    def columns(self, Y: Tensor, out: Tensor | None = None) -> Tensor:
        return Y

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        torch.bmm(X.flatten(1, 2), Y.flatten(1, 2).mT, out=out)
        return self._mask(out, X.shape[2])

    def _mask(self, A: Tensor, C: int) -> Tensor:
        for r, kind in enumerate(self._kinds):
            A[:, r * C : (r + 1) * C].unflatten(2, (-1, C)).transpose(1, 2).tril_(0 if kind.diagonal else -1)
        return A

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        return drows, dcolumns

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        _product_backward(X, Y, self._mask(dA, X.shape[2]), dX, dY)

    def finish(self) -> Tensor | None:
        return None


class _Swept(_Decay):
    """What decays by channel share: their factors are made level by level (`_sweep`), and so are the gradients of these."""

    total: Tensor  # [chunks, K or 1, V or 1]
    _dlevels: dict[int, tuple[Tensor, Tensor]]

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        """From the log decay's tile, `[chunks, C, K or V]`, which it overwrites, and what kinds of rows there are."""
        self._kinds = rows
        self._dprefix = torch.zeros_like(g)  # of log e^{G_i}
        self._dsuffix = torch.zeros_like(g)  # of log e^{G_C - G_j}

    def total_backward(self, shares: Tensor) -> None:
        self._dprefix[:, -1] += shares

    def finish(self) -> Tensor:
        """The gradient of the log decay, like its tile."""
        return _sweep_backward(self._dprefix, self._dsuffix, self._dlevels)


class ChannelDecay(_Swept):
    """One decay a token, head and channel of the keys: pairs are cut into levels of blocks, each anchored at its middle."""

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        super().__init__(g, rows)
        # h, row factors [chunks, R (1 if all rows read alike), C / 2h, h, K], column factor [chunks, 1, C / 2h, h, K]
        self._levels: list[tuple[int, Tensor, Tensor]] = []

        def keep(h: int, upper: Tensor, lower: Tensor) -> None:  # both are overwritten by the next level
            self._levels.append((h, torch.stack(_row_factors(upper, rows), 1), lower.unsqueeze(1).clone()))

        prefix, suffix = _sweep(g.exp_(), keep)
        self._row = _row_factor(prefix, rows)
        self._column = suffix.unsqueeze(1)
        self.total = prefix[:, -1].unsqueeze(-1)

    def rows(self, X: Tensor, out: Tensor | None = None) -> Tensor:
        return _times(X, self._row, out)

    def columns(self, Y: Tensor, out: Tensor | None = None) -> Tensor:
        return _times(Y, self._column, out)

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        from_rows, from_columns = rows.mul_(drows), columns.mul_(dcolumns)
        for r, kind in enumerate(self._kinds):
            _add_rows(self._dprefix, from_rows[:, r], kind)
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
            _pairs(A, h).copy_(product.view(chunks, -1, R, h, S, h))
        return out

    def _decayed_halves(self, X: Tensor, Y: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of each level h, rows `[blocks, R * h, K]` and columns `[blocks, S * h, K]` as far as the middle of their blocks."""
        tiles = [scratch.tile(x, x.numel() // 2) for x in (X, Y)]
        for h, *factors in self._levels:
            halves = []
            for x, factor, tile, which in zip((X, Y), factors, tiles, (1, 0), strict=True):
                chunks, kinds, C, K = x.shape
                decayed = tile.view(chunks, C // (2 * h), kinds, h, K)
                torch.mul(_halves(x, h, which), factor, out=decayed.transpose(1, 2))
                halves.append(decayed.view(-1, kinds * h, K))
            yield h, halves[0], halves[1]

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        chunks, R, C, K = X.shape
        S = Y.shape[1]
        dA = dA.view(chunks, R, C, S, C)
        self._dlevels = {}
        for (h, upper, lower), (_, row, column) in zip(self._decayed_halves(X, Y), self._levels, strict=True):
            block = _pairs(dA, h).reshape(-1, R * h, S * h)
            if h == 1:
                dx = (block.unsqueeze(3) * lower.unsqueeze(1)).sum(2)
                dy = (block.unsqueeze(3) * upper.unsqueeze(2)).sum(1)
            else:
                dx, dy = torch.bmm(block, lower), torch.bmm(block.mT, upper)
            _halves(dX, h, 1).addcmul_(dx.view(chunks, -1, R, h, K).transpose(1, 2), row)
            _halves(dY, h, 0).addcmul_(dy.view(chunks, -1, S, h, K).transpose(1, 2), column)
            dupper = torch.zeros_like(column[:, 0])
            from_rows = dx.mul_(upper).view(chunks, -1, R, h, K)
            for r, kind in enumerate(self._kinds):
                _add_rows(dupper, from_rows[:, :, r], kind)
            self._dlevels[h] = dupper, dy.mul_(lower).view(chunks, -1, S, h, K).sum(2)
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                d = dA[:, r].diagonal(dim1=1, dim2=3).unsqueeze(-1)  # [chunks, S, C, 1]
                dX[:, r] += (d * Y).sum(1)
                dY.addcmul_(d, X[:, r, None])


def _sweep(decay: Tensor, level: Callable[[int, Tensor, Tensor], None]) -> tuple[Tensor, Tensor]:
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


def _sweep_backward(dprefix: Tensor, dsuffix: Tensor, dlevels: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of the log decays from those of the logarithms of what `_sweep` returned, in place, and of each level's factors."""
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


def _add_rows(total: Tensor, rows: Tensor, kind: Row) -> None:
    """Adds what rows `[..., h, K]` pass back; an exclusive row has the factor of the row above."""
    dim = 2 if total.dim() == 4 else 1
    if kind.exclusive:
        n = total.shape[dim] - 1
        total.narrow(dim, 0, n).add_(rows.narrow(dim, 1, n))
    else:
        total += rows


def _row_factors(prefix: Tensor, kinds: tuple[Row, ...]) -> list[Tensor]:
    """The factors of rows from those of tokens `[chunks, (blocks,) h, ...]`: one for each kind, or one for all if they read alike."""
    before = None
    if any(kind.exclusive for kind in kinds):
        dim = 1 if prefix.dim() < 4 else 2
        before, n = torch.ones_like(prefix), prefix.shape[dim] - 1
        before.narrow(dim, 1, n).copy_(prefix.narrow(dim, 0, n))
    found = [prefix if before is None or not kind.exclusive else before for kind in kinds]
    return found[:1] if all(f is found[0] for f in found) else found


def _row_factor(prefix: Tensor, kinds: tuple[Row, ...]) -> Tensor:
    """The factors of rows side by side, `[chunks, R (1 if all rows read alike), ...]`."""
    found = _row_factors(prefix, kinds)
    return torch.stack(found, 1) if len(found) > 1 else found[0].unsqueeze(1)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` a chunk, in scratch memory."""
    return torch.bmm(x, y, out=scratch.tile(x, x.shape[0], x.shape[1], y.shape[2]))


def _times(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """`x * factor` in the shape of `x`, in scratch memory unless there is an `out`."""
    return torch.mul(x, factor, out=scratch.tile(x, *x.shape) if out is None else out)


def _product_backward(X: Tensor, Y: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
    """Adds to `dX, dY` what reaches the factors of `X Y^T`."""
    dX.flatten(1, 2).baddbmm_(dA, Y.flatten(1, 2))
    dY.flatten(1, 2).baddbmm_(dA.mT, X.flatten(1, 2))


def _halves(x: Tensor, h: int, which: int) -> Tensor:
    """The first or second halves of the blocks of 2h tokens of `x` `[..., C, K]`: a view `[..., C / 2h, h, K]`."""
    return x.unflatten(-2, (-1, 2, h))[..., which, :, :]


def _pairs(A: Tensor, h: int) -> Tensor:
    """Where second halves meet first halves in `A` `[chunks, R, C, S, C]`: a view `[chunks, C / 2h, R, h, S, h]`."""
    n = A.shape[-1] // (2 * h)
    A = A.unflatten(4, (n, 2, h)).unflatten(2, (n, 2, h))[:, :, :, 1, :, :, :, 0]
    return A.diagonal(dim1=2, dim2=5).movedim(-1, 1)


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
