"""The `gate` and `scores` phases: what the log decay does to keys and to pairs of tokens (docs/chunk_algorithm.md, sections 2 and 3).

Row keys `X` `[chunks, R, C, K]` read the state (the query, and the vector that reads what is to be corrected), column keys `Y`
`[chunks, S, C, K]` write to it. With `G` the in-chunk cumulative log decay, a decay offers

    rows(X)      ~x_i = x_i e^{G_i}, or x_i e^{G_{i-1}} for a row key that reads the state before its token's decay
    columns(Y)   ^y_j = y_j e^{G_C - G_j}
    total        e^{G_C}, a factor of the state, [chunks, K or 1, 1]; None without a gate
    pairs(X, Y)  A_ij = sum_k x_ik y_jk e^{G_i - G_j} (or e^{G_{i-1} - G_j}) for j <= i or j < i, [chunks, R * C, S * C]

Decays are multiplied up from single tokens, level by level: every factor is a product of the decays between two tokens, so it
is at most 1, keeps its relative precision, and is 0 where a gate is -inf. Nothing is divided and no sums are subtracted. Each
`*_backward` returns the gradient of its keys and collects that of the logarithms of the factors it used; `finish` takes these back
down the levels to the gates. A gate's gradient is thus a sum over the pairs that it lies between, where nothing cancels.

A decay of whole tokens is one number a row. Instead of the keys it scales what is read with them (`row_scale`) and what is
written under them (`column_scale`, both `[chunks, R * C or S * C, 1]`); `rows` and `columns` then return the keys as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.ops._scratch import scratch


@dataclass(frozen=True)
class Row:
    """How a row key reads: after its own token's decay or before it (`exclusive`), and whether it sees its own token's write."""

    exclusive: bool
    diagonal: bool


def make_decay(g: Tensor | None, rows: tuple[Row, ...], columns: int) -> NoDecay | TokenDecay | ChannelDecay:
    """The decay of a slab: log-decay tile (None, `[chunks, C]` or `[chunks, C, K]`), row kinds, number of column keys."""
    if g is None:
        return NoDecay(rows)
    return TokenDecay(g.exp_(), rows, columns) if g.dim() == 2 else ChannelDecay(g.exp_(), rows)


class _Decay:
    """How rows read values and what comes back; a decay of values has ways of its own (`value_gate.ValueDecay`)."""

    def within(self, A: Tensor, v: Tensor) -> Tensor:
        """What rows read of the values `[chunks, C, V]` in their own chunk, `A` `[chunks, R * C, C]`."""
        return matmul(A, v)

    def written_backward(self, A: Tensor, W: Tensor, dO: Tensor) -> Tensor:
        """What reaches the written `W` from `dO` within the chunk, `A` `[chunks, C, S * C]`."""
        return matmul(A.mT, dO)

    def scores_backward(self, dZ: Tensor, W: Tensor) -> Tensor:
        """The gradient of the scores."""
        return matmul(dZ, W.mT)

    def scales_backward(self, at: slice, rows: Tensor, S: Tensor, dZ: Tensor, W: Tensor, reached: Tensor) -> None:
        """Takes note of what `row_scale` (of `rows S`) and `column_scale` (of `W`, which `reached` reaches) pass back."""


class NoDecay(_Decay):
    """No gate: every factor is 1, pairs are masked."""

    total = row_scale = column_scale = None

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._kinds = rows

    def rows(self, X: Tensor) -> Tensor:
        return X

    def columns(self, Y: Tensor) -> Tensor:
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

    def total_backward(self, at: slice, S: Tensor, dS: Tensor) -> None:
        pass

    def finish(self) -> Tensor | None:
        return None


class _Gated(_Decay):
    """What all gated decays share: factors of rows and columns of the whole chunk, and the way back to the gate."""

    total: Tensor
    row_scale: Tensor | None = None
    column_scale: Tensor | None = None

    def __init__(self, decay: Tensor, rows: tuple[Row, ...]) -> None:
        self._kinds = rows
        self._dprefix = torch.zeros_like(decay)  # of log e^{G_i}
        self._dsuffix = torch.zeros_like(decay)  # of log e^{G_C - G_j}

    def _level_backward(self, h: int, dupper: Tensor, dlower: Tensor) -> None:
        """Adds what the pairs of the level of size h pass back to the logarithms of its factors."""
        raise NotImplementedError

    def _collect(self, rows: Tensor, columns: Tensor) -> None:
        """What row keys `[chunks, R, C, ...]` and column keys `[chunks, S, C, ...]` pass back to the logarithms of their factors."""
        for r, kind in enumerate(self._kinds):
            _add_rows(self._dprefix, rows[:, r], kind)
        self._dsuffix += columns.sum(1)

    def finish(self) -> Tensor:
        """The gradient of the log decay, like its tile."""
        return _sweep_backward(self._dprefix, self._dsuffix, self._level_backward)


class TokenDecay(_Gated):
    """One decay a token and head: pairs decay by a matrix `e^{G_i - G_j}`, made once."""

    def __init__(self, decay: Tensor, rows: tuple[Row, ...], columns: int) -> None:
        super().__init__(decay, rows)
        chunks, C = decay.shape
        self._between = between = scratch.tile(decay, chunks, C, C).zero_()  # e^{G_i - G_j} on and below the diagonal
        between.diagonal(dim1=1, dim2=2).fill_(1)

        def fill(h: int, upper: Tensor, lower: Tensor) -> None:
            torch.mul(upper.unsqueeze(-1), lower.unsqueeze(-2), out=_blocks(between, h))

        prefix, suffix = _sweep(decay, fill)
        factors = _row_factors(prefix, rows)
        self.row_scale = torch.cat([factors[min(r, len(factors) - 1)] for r in range(len(rows))], 1).unsqueeze(-1)
        self.column_scale = suffix.repeat(1, columns).unsqueeze(-1)
        self.total = prefix[:, -1:, None]

    def rows(self, X: Tensor) -> Tensor:
        return X

    def columns(self, Y: Tensor) -> Tensor:
        return Y

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        self._collect(_times(rows, drows).sum(-1), _times(columns, dcolumns).sum(-1))
        return drows, dcolumns

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

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        C = X.shape[2]
        self._dbetween = scratch.tile(A, *self._between.shape).zero_()  # of log e^{G_i - G_j}
        P = _times(dA, A).unflatten(2, (-1, C))
        for r, kind in enumerate(self._kinds):
            for s in range(P.shape[2]):
                _add_rows(self._dbetween, P[:, r * C : (r + 1) * C, s], kind)
        _product_backward(X, Y, self._decay(dA), dX, dY)

    def _level_backward(self, h: int, dupper: Tensor, dlower: Tensor) -> None:
        block = _blocks(self._dbetween, h)
        dupper += block.sum(-1)
        dlower += block.sum(-2)

    def total_backward(self, at: slice, S: Tensor, dS: Tensor) -> None:
        """`S` the state chunks `at` start from, `dS` the gradient of the state they end with."""
        self._dprefix[at, -1] += (S * dS).sum((-2, -1)) * self.total[at].flatten()


class ChannelDecay(_Gated):
    """One decay a token, head and channel: pairs are cut into levels of blocks, each anchored at its middle (`_sweep`)."""

    def __init__(self, decay: Tensor, rows: tuple[Row, ...]) -> None:
        super().__init__(decay, rows)
        # h, row factors, column factor; each factor [chunks, C / 2h, h, K]
        self._levels: list[tuple[int, list[Tensor], Tensor]] = []

        def keep(h: int, upper: Tensor, lower: Tensor) -> None:
            factors = _row_factors(upper, rows)  # upper is overwritten by the next level
            self._levels.append((h, [f.clone() if f is upper else f for f in factors], lower.clone()))

        prefix, suffix = _sweep(decay, keep)
        self._row = torch.stack(_row_factors(prefix, rows), 1)  # [chunks, R (1 if all rows read alike), C, K]
        self._column = suffix.unsqueeze(1)
        self.total = prefix[:, -1].unsqueeze(-1)

    def rows(self, X: Tensor) -> Tensor:
        return _times(X, self._row)

    def columns(self, Y: Tensor) -> Tensor:
        return _times(Y, self._column)

    def keys_backward(self, rows: Tensor, drows: Tensor, columns: Tensor, dcolumns: Tensor) -> tuple[Tensor, Tensor]:
        self._collect(_times(rows, drows), _times(columns, dcolumns))
        return drows.mul_(self._row), dcolumns.mul_(self._column)

    def pairs(self, X: Tensor, Y: Tensor, out: Tensor) -> Tensor:
        chunks, R, C, _ = X.shape
        S = Y.shape[1]
        A = out.zero_().view(chunks, R, C, S, C)
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                A[:, r].diagonal(dim1=1, dim2=3).copy_((X[:, r, None] * Y).sum(-1))
        for h, row, column in self._levels:
            lower = [_halves(Y[:, s], h, 0) * column for s in range(S)]
            for r in range(R):
                upper = _halves(X[:, r], h, 1) * row[min(r, len(row) - 1)]
                for s in range(S):
                    _blocks(A[:, r, :, s], h).copy_(_product(upper, lower[s]).view(chunks, -1, h, h))
        return out

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
        chunks, R, C, _ = X.shape
        S = Y.shape[1]
        dA = dA.view(chunks, R, C, S, C)
        self._dlevels: dict[int, tuple[Tensor, Tensor]] = {}
        for h, row, column in self._levels:
            dupper, dlower = torch.zeros_like(column), torch.zeros_like(column)
            lower = [_halves(Y[:, s], h, 0) * column for s in range(S)]
            for r, kind in enumerate(self._kinds):
                factor = row[min(r, len(row) - 1)]
                upper = _halves(X[:, r], h, 1) * factor
                for s in range(S):
                    block = _blocks(dA[:, r, :, s], h).reshape(-1, h, h)
                    dx = _apply(block, lower[s]).view(column.shape)
                    dy = _apply(block.mT, upper).view(column.shape)
                    _halves(dX[:, r], h, 1).addcmul_(dx, factor)
                    _halves(dY[:, s], h, 0).addcmul_(dy, column)
                    _add_rows(dupper, upper * dx, kind)
                    dlower.addcmul_(lower[s], dy)
            self._dlevels[h] = dupper, dlower
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                d = dA[:, r].diagonal(dim1=1, dim2=3).unsqueeze(-1)  # [chunks, S, C, 1]
                dX[:, r] += (d * Y).sum(1)
                dY.addcmul_(d, X[:, r, None])

    def _level_backward(self, h: int, dupper: Tensor, dlower: Tensor) -> None:
        level = self._dlevels[h]
        dupper += level[0]
        dlower += level[1]

    def total_backward(self, at: slice, S: Tensor, dS: Tensor) -> None:
        """`S` the state chunks `at` start from, `dS` the gradient of the state they end with."""
        self._dprefix[at, -1] += (S * dS).sum(-1) * self.total[at].squeeze(-1)


def _sweep(decay: Tensor, level: Callable[[int, Tensor, Tensor], None]) -> tuple[Tensor, Tensor]:
    """Multiplies the decays `[chunks, C, ...]` of single tokens up to whole chunks; calls `level(h, upper, lower)` on the way.

    On the level of size h a chunk is cut in blocks of 2h. Rows of a block's second half meet columns of its first half at
    its middle m: `e^{G_i - G_j} = e^{G_i - G_m} e^{G_m - G_j}`. `upper` holds the first factor for the second halves, `lower` the
    second one for the first halves, both `[chunks, C / 2h, h, ...]`. The levels h = 1, 2, ..., C/2 cover each pair i > j once.
    Returns `e^{G_i}` and `e^{G_C - G_j}`.
    """
    prefix, suffix = (
        decay.clone(),
        torch.ones_like(decay),
    )  # from the start of the half up to i; after j up to the end of the half
    h = 1
    while h < decay.shape[1]:
        first, upper = prefix.unflatten(1, (-1, 2, h)).unbind(2)
        lower, _ = suffix.unflatten(1, (-1, 2, h)).unbind(2)
        level(h, upper, lower)
        lower *= upper[:, :, -1:]
        upper *= first[:, :, -1:]
        h *= 2
    return prefix, suffix


def _sweep_backward(dprefix: Tensor, dsuffix: Tensor, level: Callable[[int, Tensor, Tensor], None]) -> Tensor:
    """The gradient of the log decays from those of the logarithms of what `_sweep` returned, in place; `level` adds its own."""
    h = dprefix.shape[1] // 2
    while h:
        dfirst, dupper = dprefix.unflatten(1, (-1, 2, h)).unbind(2)
        dlower, _ = dsuffix.unflatten(1, (-1, 2, h)).unbind(2)
        dfirst[:, :, -1] += dupper.sum(2)
        dupper[:, :, -1] += dlower.sum(2)
        level(h, dupper, dlower)
        h //= 2
    return dprefix


def _add_rows(total: Tensor, rows: Tensor, kind: Row) -> None:
    """Adds what rows `[..., h, K]` (or `[chunks, C]`, `[chunks, C, C]`) pass back; an exclusive row has the factor of the row above."""
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


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """`x @ y` a chunk, in scratch memory."""
    return torch.bmm(x, y, out=scratch.tile(x, x.shape[0], x.shape[1], y.shape[2]))


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """`x * factor` in the shape of `x`, in scratch memory."""
    return torch.mul(x, factor, out=scratch.tile(x, *x.shape))


def _product_backward(X: Tensor, Y: Tensor, dA: Tensor, dX: Tensor, dY: Tensor) -> None:
    """Adds to `dX, dY` what reaches the factors of `X Y^T`."""
    dX.flatten(1, 2).baddbmm_(dA, Y.flatten(1, 2))
    dY.flatten(1, 2).baddbmm_(dA.mT, X.flatten(1, 2))


def _halves(x: Tensor, h: int, which: int) -> Tensor:
    """The first or second halves of the blocks of 2h tokens of `x` `[chunks, C, K]`: a view `[chunks, C / 2h, h, K]`."""
    return x.unflatten(1, (-1, 2, h))[:, :, which]


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
