"""The `gate` phase: what the log decay does to tiles, forward and backward (docs/chunk_algorithm.md, section 2).

A decay tile offers, for keys `x, y` of shape `[chunks, C, K]` and the in-chunk cumulative log decay `G`:

    rows(x)      ~x_i = x_i e^{G_i}          (exclusive: e^{G_i - g_i}, the state before the token's own decay)
    columns(y)   ^y_j = y_j e^{G_C - G_j}
    total        e^{G_C}, a factor of the state `[chunks, K or 1, 1]`
    pairs(x, y)  A_ij = sum_k x_ik y_jk e^{G_i - G_j} for i > j (and i = j when `diagonal`)

All exponents are sums of log decays between two tokens, never differences of large numbers, and never positive. Each
`*_backward` returns the gradients of its keys and collects that of the decay, which `finish` returns. A pair of a token with
itself has no decay, so it is left out of the gate's gradient rather than cancelled.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_decay(g: Tensor | None, tile: Tensor) -> NoDecay | TokenDecay | ChannelDecay:
    """The decay of a slab from its log-decay tile: None, `[chunks, C]` or `[chunks, C, K]`."""
    if g is None:
        return NoDecay(tile)
    # e^floor is 0 in the dtype: a lower gate does the same, and sums of finite numbers stay finite
    g = g.clamp_min(-750.0 if g.dtype == torch.float64 else -110.0)
    return TokenDecay(g) if g.dim() == 2 else ChannelDecay(g)


class NoDecay:
    """No gate: every factor is 1."""

    def __init__(self, tile: Tensor) -> None:
        self.total = tile.new_ones(1, 1, 1)

    def rows(self, x: Tensor, exclusive: bool = False) -> Tensor:
        return x

    def columns(self, y: Tensor) -> Tensor:
        return y

    def pairs(self, x: Tensor, y: Tensor, diagonal: bool, exclusive: bool = False) -> Tensor:
        return (x @ y.mT).tril_(0 if diagonal else -1)

    def rows_backward(self, rows: Tensor, drows: Tensor, exclusive: bool = False) -> Tensor:
        return drows

    def columns_backward(self, columns: Tensor, dcolumns: Tensor) -> Tensor:
        return dcolumns

    def pairs_backward(
        self, x: Tensor, y: Tensor, A: Tensor, dA: Tensor, diagonal: bool, exclusive: bool = False
    ) -> tuple[Tensor, Tensor]:
        dA = dA.tril(0 if diagonal else -1)
        return dA @ y, dA.mT @ x

    def total_backward(self, S: Tensor, dS: Tensor) -> None:
        pass

    def finish(self) -> Tensor | None:
        return None


class TokenDecay:
    """One decay a token and head: pairs decay by a matrix `e^{G_i - G_j}` made once."""

    def __init__(self, g: Tensor) -> None:
        G = g.double().cumsum(-1)  # a difference of two sums of 64 gates keeps its digits only in float64
        last = G[:, -1:]
        self.row = G.to(g.dtype).exp().unsqueeze(-1)  # [chunks, C, 1]
        self.row_exclusive = (G - g).to(g.dtype).exp().unsqueeze(-1)
        self.column = (last - G).to(g.dtype).exp().unsqueeze(-1)
        self.total = last.to(g.dtype).exp().unsqueeze(-1)  # [chunks, 1, 1]
        self._G, self._g = G, g
        self._pair: dict[bool, Tensor] = {}
        self._dG = torch.zeros_like(g)
        self._dcolumn = torch.zeros_like(g)
        self._dtotal = torch.zeros_like(g[:, :1])

    def _pair_decay(self, exclusive: bool) -> Tensor:
        """e^{G_i - G_j} below the diagonal and on it, 0 above; exclusive: e^{G_i - g_i - G_j} below the diagonal, 0 elsewhere."""
        if exclusive not in self._pair:
            G = self._G - self._g if exclusive else self._G
            exponent = (G.unsqueeze(-1) - self._G.unsqueeze(-2)).to(self._g.dtype)
            C = exponent.shape[-1]
            above = torch.ones(C, C, dtype=torch.bool, device=exponent.device).triu(0 if exclusive else 1)
            self._pair[exclusive] = exponent.masked_fill_(above, -torch.inf).exp_()
        return self._pair[exclusive]

    def rows(self, x: Tensor, exclusive: bool = False) -> Tensor:
        return x * (self.row_exclusive if exclusive else self.row)

    def columns(self, y: Tensor) -> Tensor:
        return y * self.column

    def pairs(self, x: Tensor, y: Tensor, diagonal: bool, exclusive: bool = False) -> Tensor:
        A = (x @ y.mT).mul_(self._pair_decay(exclusive))
        return A if diagonal or exclusive else A.tril_(-1)

    def rows_backward(self, rows: Tensor, drows: Tensor, exclusive: bool = False) -> Tensor:
        self._add(self._dG, (rows * drows).sum(-1), exclusive)
        return drows * (self.row_exclusive if exclusive else self.row)

    def columns_backward(self, columns: Tensor, dcolumns: Tensor) -> Tensor:
        self._dcolumn += (columns * dcolumns).sum(-1)
        return dcolumns * self.column

    def pairs_backward(
        self, x: Tensor, y: Tensor, A: Tensor, dA: Tensor, diagonal: bool, exclusive: bool = False
    ) -> tuple[Tensor, Tensor]:
        P = (dA * A).tril_(-1)
        self._add(self._dG, P.sum(-1), exclusive)
        self._dG -= P.sum(-2)
        dA = dA * self._pair_decay(exclusive)
        if not (diagonal or exclusive):
            dA.tril_(-1)
        return dA @ y, dA.mT @ x

    def total_backward(self, S: Tensor, dS: Tensor) -> None:
        """`S` the state a chunk starts from, `dS` the gradient of the state it ends with."""
        self._dtotal += (S * dS).sum((-2, -1)).unsqueeze(-1) * self.total.squeeze(-1)

    @staticmethod
    def _add(dG: Tensor, rows: Tensor, exclusive: bool) -> None:
        """Exclusive rows decay by the gates before their own: their gradient belongs to the row above."""
        if exclusive:
            dG[:, :-1] += rows[:, 1:]
        else:
            dG += rows

    def finish(self) -> Tensor:
        return _reverse_cumsum(self._dG) + _exclusive_cumsum(self._dcolumn) + self._dtotal


class ChannelDecay:
    """One decay a token, head and channel: pairs are cut into levels of blocks, each anchored where it starts.

    On the level of size h a chunk is cut in blocks of 2h. Rows of a block's second half and columns of its first half meet
    at its middle m: `e^{G_i - G_j} = e^{G_i - G_m} e^{G_m - G_j}`, both factors at most 1. The levels h = 1, 2, ..., C/2
    cover each pair i > j once. `prefix` (sum from the start of the half to the token) and `suffix` (sum after the token to
    the end of the half) grow from level to level by adding the half beside, so nothing is ever subtracted.
    """

    def __init__(self, g: Tensor) -> None:
        chunks, C, K = g.shape
        prefix, suffix = g.clone(), torch.zeros_like(g)
        self._levels: list[tuple[int, Tensor, Tensor, Tensor]] = []
        h = 1
        while h < C:
            p, s = prefix.view(-1, 2, h, K), suffix.view(-1, 2, h, K)
            before = torch.zeros_like(p[:, 1])
            before[:, 1:] = p[:, 1, :-1]
            self._levels.append((h, p[:, 1].exp(), before.exp_(), s[:, 0].exp()))  # each [chunks * C / 2h, h, K]
            first, second = p[:, 0, -1:].clone(), p[:, 1, -1:].clone()
            p[:, 1] += first
            s[:, 0] += second
            h *= 2
        self.row = prefix.exp()
        before = torch.zeros_like(prefix)
        before[:, 1:] = prefix[:, :-1]
        self.row_exclusive = before.exp_()
        self.column = suffix.exp_()
        self.total = self.row[:, -1].unsqueeze(-1)  # [chunks, K, 1]
        self._dG = torch.zeros_like(g)
        self._dcolumn = torch.zeros_like(g)
        self._dtotal = torch.zeros_like(g[:, :1])

    rows = TokenDecay.rows
    columns = TokenDecay.columns
    _add = staticmethod(TokenDecay._add)
    finish = TokenDecay.finish

    def pairs(self, x: Tensor, y: Tensor, diagonal: bool, exclusive: bool = False) -> Tensor:
        chunks, C, K = x.shape
        A = x.new_zeros(chunks, C, C)
        if diagonal:
            A.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1))
        for h, row, row_exclusive, column in self._levels:
            x_half = x.view(-1, 2, h, K)[:, 1] * (row_exclusive if exclusive else row)
            y_half = y.view(-1, 2, h, K)[:, 0] * column
            _lower_blocks(A, h).copy_(_product(x_half, y_half).view(chunks, -1, h, h))
        return A

    def rows_backward(self, rows: Tensor, drows: Tensor, exclusive: bool = False) -> Tensor:
        self._add(self._dG, rows * drows, exclusive)
        return drows * (self.row_exclusive if exclusive else self.row)

    def columns_backward(self, columns: Tensor, dcolumns: Tensor) -> Tensor:
        self._dcolumn.addcmul_(columns, dcolumns)
        return dcolumns * self.column

    def pairs_backward(
        self, x: Tensor, y: Tensor, A: Tensor, dA: Tensor, diagonal: bool, exclusive: bool = False
    ) -> tuple[Tensor, Tensor]:
        chunks, C, K = x.shape
        dx, dy = torch.zeros_like(x), torch.zeros_like(y)
        for h, row, row_exclusive, column in self._levels:
            factor = row_exclusive if exclusive else row
            block = _lower_blocks(dA, h).reshape(-1, h, h)
            dx_half = _apply(block, y.view(-1, 2, h, K)[:, 0] * column)
            dy_half = _apply(block.mT, x.view(-1, 2, h, K)[:, 1] * factor)
            dx.view(-1, 2, h, K)[:, 1].addcmul_(dx_half, factor)
            dy.view(-1, 2, h, K)[:, 0].addcmul_(dy_half, column)
        self._add(self._dG, x * dx, exclusive)
        self._dG.addcmul_(y, dy, value=-1)
        if diagonal:
            d = dA.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            dx.addcmul_(d, y)
            dy.addcmul_(d, x)
        return dx, dy

    def total_backward(self, S: Tensor, dS: Tensor) -> None:
        """`S` the state a chunk starts from, `dS` the gradient of the state it ends with."""
        self._dtotal += ((S * dS).sum(-1) * self.total.squeeze(-1)).unsqueeze(1)


def _lower_blocks(A: Tensor, h: int) -> Tensor:
    """The blocks of `A` `[chunks, C, C]` where second halves meet first halves: a view `[chunks, C / 2h, h, h]`."""
    n = A.shape[-1] // (2 * h)
    return A.unflatten(-1, (n, 2, h)).unflatten(1, (n, 2, h))[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y^T of `[blocks, h, K]`; single rows are dot products, which need no matrix product."""
    return (x * y).sum(-1, keepdim=True) if x.shape[1] == 1 else x @ y.mT


def _apply(block: Tensor, x: Tensor) -> Tensor:
    """`block` `[blocks, h, h]` times `x` `[blocks, h, K]`."""
    return block * x if x.shape[1] == 1 else block @ x


def _reverse_cumsum(x: Tensor) -> Tensor:
    """sum over i >= t, along the chunk."""
    return x.flip(1).cumsum(1).flip(1)


def _exclusive_cumsum(x: Tensor) -> Tensor:
    """sum over i < t, along the chunk."""
    out = torch.zeros_like(x)
    out[:, 1:] = x[:, :-1].cumsum(1)
    return out
