"""The `gate` and `scores` phases: what the log decay does to keys and to pairs of tokens (docs/chunk_algorithm.md, sections 2 and 3).

Row keys `X` `[chunks, R, C, K]` read the state (the query, and the vector that reads what is to be corrected), column keys `Y`
`[chunks, S, C, K]` write to it. With `G` the in-chunk cumulative log decay, a decay offers

    rows(X)      ~x_i = x_i e^{G_i}, or x_i e^{G_{i-1}} for a row key that reads the state before its token's decay
    columns(Y)   ^y_j = y_j e^{G_C - G_j}
    total        e^{G_C}, a factor of the state, [chunks or 1, K or 1, 1]
    pairs(X, Y)  A_ij = sum_k x_ik y_jk e^{G_i - G_j} (or e^{G_{i-1} - G_j}) for j <= i or j < i, [chunks, R * C, S * C]

Exponents are sums of the decays between two tokens, never positive, and never a difference of rounded sums. Each
`*_backward` returns the gradient of its keys and collects that of the gate, which `finish` returns. Pairs without a decay
between them (a token with itself) are left out of the gate's gradient instead of cancelling there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """How a row key reads: after its own token's decay or before it (`exclusive`), and whether it sees its own token's write."""

    exclusive: bool
    diagonal: bool


def make_decay(g: Tensor | None, rows: tuple[Row, ...], like: Tensor) -> NoDecay | TokenDecay | ChannelDecay:
    """The decay of a slab from its log-decay tile: None, `[chunks, C]` or `[chunks, C, K]`."""
    if g is None:
        return NoDecay(rows, like)
    # e^floor is 0 in the dtype: a lower gate does the same, and sums of finite numbers stay finite
    g = g.clamp_min(-750.0 if g.dtype == torch.float64 else -110.0)
    return TokenDecay(g, rows) if g.dim() == 2 else ChannelDecay(g, rows)


class NoDecay:
    """No gate: every factor is 1, pairs are masked."""

    def __init__(self, rows: tuple[Row, ...], like: Tensor) -> None:
        C = like.shape[-2]
        self.total = like.new_ones(1, 1, 1)
        masks = [like.new_ones(C, C).tril_(0 if row.diagonal else -1) for row in rows]
        self._pair = torch.stack(masks)[None, :, :, None]  # [1, R, C, 1, C]

    def rows(self, X: Tensor) -> Tensor:
        return X

    def columns(self, Y: Tensor) -> Tensor:
        return Y

    def pairs(self, X: Tensor, Y: Tensor) -> Tensor:
        return _masked(X.flatten(1, 2) @ Y.flatten(1, 2).mT, self._pair)

    def rows_backward(self, rows: Tensor, drows: Tensor) -> Tensor:
        return drows

    def columns_backward(self, columns: Tensor, dcolumns: Tensor) -> Tensor:
        return dcolumns

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        dA = _masked(dA, self._pair)
        return (dA @ Y.flatten(1, 2)).view(X.shape), (dA.mT @ X.flatten(1, 2)).view(Y.shape)

    def total_backward(self, S: Tensor, dS: Tensor) -> None:
        pass

    def finish(self) -> Tensor | None:
        return None


class _Gated:
    """What both gated decays share: factors of rows and columns, and the gate's gradient.

    Gradients of exponents are collected where they arise: `_dG_i` from rows (they decay by all gates up to i) and, negative,
    from columns within the chunk; `_dcolumn_j` from `^y_j` (it decays by the gates after j); `_dtotal` from the state.
    """

    total: Tensor
    _kinds: tuple[Row, ...]
    _row: Tensor  # [chunks, R, C, K or 1]
    _column: Tensor  # [chunks, 1, C, K or 1]
    _dG: Tensor
    _dcolumn: Tensor
    _dtotal: Tensor

    def rows(self, X: Tensor) -> Tensor:
        return X * self._row

    def columns(self, Y: Tensor) -> Tensor:
        return Y * self._column

    def _per_gate(self, x: Tensor) -> Tensor:
        """A product `[..., K]` summed to the gate's own channels."""
        raise NotImplementedError

    def rows_backward(self, rows: Tensor, drows: Tensor) -> Tensor:
        self._collect_rows(self._per_gate(rows * drows))
        return drows * self._row

    def columns_backward(self, columns: Tensor, dcolumns: Tensor) -> Tensor:
        self._dcolumn += self._per_gate(columns * dcolumns).sum(1)
        return dcolumns * self._column

    def _collect_rows(self, rows: Tensor) -> None:
        """Adds `[chunks, R, C, ...]`; an exclusive row decays by the gates before its own, as the row above does."""
        for r, kind in enumerate(self._kinds):
            if kind.exclusive:
                self._dG[:, :-1] += rows[:, r, 1:]
            else:
                self._dG += rows[:, r]

    def finish(self) -> Tensor:
        """The gradient of the log decay, like its tile."""
        dg = self._dG.flip(1).cumsum(1).flip(1)
        dg[:, 1:] += self._dcolumn[:, :-1].cumsum(1)
        return dg.add_(self._dtotal)


class TokenDecay(_Gated):
    """One decay a token and head: pairs decay by a matrix `e^{G_i - G_j}`, made once."""

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        G = g.double().cumsum(-1)  # the difference of two sums of up to 64 gates keeps its digits in float64
        last = G[:, -1:]
        # e^{G_i - G_j} where it is not above the diagonal; there the exponent could be positive
        inclusive = (G.unsqueeze(-1) - G.unsqueeze(-2)).to(g.dtype).clamp_max_(0).exp_()
        factor, pair = [], []
        for kind in rows:
            below = inclusive
            if kind.exclusive:
                below = torch.zeros_like(inclusive)
                below[:, 1:] = inclusive[:, :-1]
            pair.append(below.tril(0 if kind.diagonal else -1))
            factor.append((G - g if kind.exclusive else G).to(g.dtype).exp())
        self._kinds = rows
        self._row = torch.stack(factor, 1).unsqueeze(-1)
        self._column = (last - G).to(g.dtype).exp()[:, None, :, None]
        self._pair = torch.stack(pair, 1).unsqueeze(3)  # [chunks, R, C, 1, C]
        self.total = last.to(g.dtype).exp().unsqueeze(-1)
        self._dG, self._dcolumn, self._dtotal = torch.zeros_like(g), torch.zeros_like(g), torch.zeros_like(g[:, :1])

    def _per_gate(self, x: Tensor) -> Tensor:
        return x.sum(-1)

    def pairs(self, X: Tensor, Y: Tensor) -> Tensor:
        return _masked(X.flatten(1, 2) @ Y.flatten(1, 2).mT, self._pair)

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        _, R, C, _ = X.shape
        P = (dA * A).view(-1, R, C, Y.shape[1], C)
        for r, kind in enumerate(self._kinds):
            P[:, r].diagonal(-1 if kind.exclusive else 0, dim1=1, dim2=3).zero_()  # no decay between these
        self._collect_rows(P.sum((3, 4)))
        self._dG -= P.sum((1, 2, 3))
        dA = _masked(dA, self._pair)
        return (dA @ Y.flatten(1, 2)).view(X.shape), (dA.mT @ X.flatten(1, 2)).view(Y.shape)

    def total_backward(self, S: Tensor, dS: Tensor) -> None:
        """`S` the state a chunk starts from, `dS` the gradient of the state it ends with."""
        inner = torch.bmm(S.flatten(1).unsqueeze(1), dS.flatten(1).unsqueeze(2))
        self._dtotal += (inner * self.total).squeeze(-1)


class ChannelDecay(_Gated):
    """One decay a token, head and channel: pairs are cut into levels of blocks, each anchored at its middle.

    On the level of size h a chunk is cut in blocks of 2h. The rows of a block's second half meet the columns of its first
    half at its middle m: `e^{G_i - G_j} = e^{G_i - G_m} e^{G_m - G_j}`, both factors at most 1. The levels h = 1, 2, ..., C/2
    cover each pair i > j once. `prefix` (sum from the start of the half up to the token) and `suffix` (sum after the token
    up to the end of the half) grow from level to level by adding the sum of the half beside, so nothing is subtracted.
    """

    def __init__(self, g: Tensor, rows: tuple[Row, ...]) -> None:
        chunks, C, K = g.shape
        self._kinds = rows
        prefix, suffix = g.clone(), torch.zeros_like(g)
        self._levels: list[tuple[int, list[Tensor], Tensor]] = []  # h, row factors a kind, column factor: [chunks, C / 2h, h, K]
        h = 1
        while h < C:
            (p0, p1), (s0, _) = prefix.view(chunks, -1, 2, h, K).unbind(2), suffix.view(chunks, -1, 2, h, K).unbind(2)
            self._levels.append((h, self._row_factors(p1), s0.exp()))
            s0 += p1[:, :, -1:]
            p1 += p0[:, :, -1:]
            h *= 2
        self._row = torch.stack(self._row_factors(prefix), 1)
        self._column = suffix.exp_().unsqueeze(1)
        self.total = prefix[:, -1].exp().unsqueeze(-1)
        self._dG, self._dcolumn, self._dtotal = torch.zeros_like(g), torch.zeros_like(g), torch.zeros_like(g[:, :1])

    def _row_factors(self, prefix: Tensor) -> list[Tensor]:
        """`e^{prefix}` of the tokens `[..., h, K]` for each row kind, shifted by one token for exclusive ones."""
        factor = prefix.exp()
        shifted = None
        if any(kind.exclusive for kind in self._kinds):
            shifted = torch.ones_like(factor)
            shifted[..., 1:, :] = factor[..., :-1, :]
        return [shifted if kind.exclusive else factor for kind in self._kinds]  # type: ignore[misc]

    def _per_gate(self, x: Tensor) -> Tensor:
        return x

    def pairs(self, X: Tensor, Y: Tensor) -> Tensor:
        chunks, R, C, K = X.shape
        S = Y.shape[1]
        A = X.new_zeros(chunks, R, C, S, C)
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                A[:, r].diagonal(dim1=1, dim2=3).copy_((X[:, r, None] * Y).sum(-1))
        for h, row, column in self._levels:
            lower = [_halves(Y[:, s], h, 0) * column for s in range(S)]
            for r in range(R):
                upper = _halves(X[:, r], h, 1) * row[r]
                for s in range(S):
                    _blocks(A[:, r, :, s], h).copy_(_product(upper, lower[s]).view(chunks, -1, h, h))
        return A.view(chunks, R * C, S * C)

    def pairs_backward(self, X: Tensor, Y: Tensor, A: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        chunks, R, C, K = X.shape
        S = Y.shape[1]
        dA = dA.view(chunks, R, C, S, C)
        dX, dY = torch.zeros_like(X), torch.zeros_like(Y)
        for h, row, column in self._levels:
            lower = [_halves(Y[:, s], h, 0) * column for s in range(S)]
            for r in range(R):
                upper = _halves(X[:, r], h, 1) * row[r]
                for s in range(S):
                    block = _blocks(dA[:, r, :, s], h).reshape(-1, h, h)
                    _halves(dX[:, r], h, 1).addcmul_(_apply(block, lower[s]).view(column.shape), row[r])
                    _halves(dY[:, s], h, 0).addcmul_(_apply(block.mT, upper).view(column.shape), column)
        self._collect_rows(X * dX)
        self._dG -= (Y * dY).sum(1)
        for r, kind in enumerate(self._kinds):
            if kind.diagonal:
                d = dA[:, r].diagonal(dim1=1, dim2=3).unsqueeze(-1)  # [chunks, S, C, 1]
                dX[:, r] += (d * Y).sum(1)
                dY.addcmul_(d, X[:, r, None])
        return dX, dY

    def total_backward(self, S: Tensor, dS: Tensor) -> None:
        """`S` the state a chunk starts from, `dS` the gradient of the state it ends with."""
        self._dtotal += ((S * dS).sum(-1) * self.total.squeeze(-1)).unsqueeze(1)


def _masked(A: Tensor, pair: Tensor) -> Tensor:
    """`A` `[chunks, R * C, S * C]` times the pair decay `[chunks or 1, R, C, 1, C]`, in place."""
    _, R, C, _, _ = pair.shape
    A.view(A.shape[0], R, C, -1, C).mul_(pair)
    return A


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
