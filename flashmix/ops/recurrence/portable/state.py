"""The `state` phase: the one serial pass, chunk after chunk (docs/chunk_algorithm.md, section 5).

    forward      Z = ~X S;   nu = T (Z_a + R);   S <- e^{G_C} S + ^Y^T W
    backward     dnu += ^b dS;   dR = T^T dnu;   d~X = [do; dR] S^T;   d^Y = W dS^T;   dS <- e^{G_C} dS + ~X^T [do; dR]

`~X` stacks the row keys (query, and key of the correction), `^Y` the column keys, `W` the values they write (raw ones, and the
corrected `nu`), `Z` the values that the rows read. The chunks of one depth advance together, with their states still in cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.portable.correlated import LongRows
from flashmix.ops.recurrence.portable.decay.base import SlabDecay
from flashmix.ops.recurrence.portable.layout import Layout, Slab


def state_forward(
    layout: Layout, slab: Slab, S: Tensor, total: Tensor | None, rows: Tensor, columns: Tensor, T: Tensor | None,
    long: LongRows | None, R: Tensor | None, W: Tensor, states: Tensor | None,
) -> Tensor:  # fmt: skip
    """Advances `S` over a slab and returns `Z`; with a `T` it fills the last `C` rows of `W` with `nu`.

    `R` is the target of the correction, `long` has the rows that `T` leaves out.
    `states`, if given, is filled with the state that each chunk starts from.
    """
    C = layout.C
    Z = scratch.tile(W, *rows.shape[:2], W.shape[2])
    tiles = (total, rows, columns.mT, T, None if long is None else long.T, R, Z, Z[:, -C:], W, W[:, -C:], states)
    depths = zip(*(layout.depths(t, slab) for t in tiles), strict=True)
    for decay, row, column, T_now, long_now, R_now, Z_now, U, W_now, nu, start in depths:
        S_now = S[: Z_now.shape[0]]
        if start is not None:
            start.copy_(S_now)
        torch.bmm(row, S_now, out=Z_now)
        if T_now is not None:
            wide = None if long_now is None else _wide_product(row[:, -C:], S_now).add_(R_now)
            _product(T_now, U.add_(R_now), long_now, wide, nu)
        if decay is not None:
            S_now *= decay
        S_now.baddbmm_(column, W_now)
    return Z


def state_backward(
    layout: Layout, slab: Slab, dS: Tensor, decay: SlabDecay, rows: Tensor, columns: Tensor, T: Tensor | None,
    long: LongRows | None, states: Tensor, W: Tensor, dZ: Tensor, dW: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Takes `dS` back over a slab; returns `d~X` and `d^Y`, adds the state's part to `dW`, and gives `decay` the gradient of its total.

    With `long` it returns `nu . (^b dS')` too, in float64, `[chunks, C]`, or else None.
    `dZ` holds `do` in its first `C` rows; with a `T` the last are filled with `dR`.
    """
    C, axis = layout.C, decay.shared
    drows, dcolumns = scratch.tile(rows, *rows.shape), scratch.tile(columns, *columns.shape)
    kept, product = scratch.tile(states, slab.count, states.shape[3 - axis]), scratch.tile(dS, *dS.shape)
    long_columns = None if long is None else long.T.new_empty(long.rows.shape)
    tiles = (
        decay.total,
        rows.mT,
        columns,
        None if T is None else T.mT,
        None if long is None else long.T.mT,
        long_columns,
        states,
        W,
        dZ,
        dZ[:, -C:],
        dW,
        dW[:, -C:],
        drows,
        dcolumns,
        kept,
    )
    depths = zip(*(reversed(layout.depths(t, slab)) for t in tiles), strict=True)
    for (
        total,
        row,
        column,
        T_now,
        long_now,
        of_columns,
        S,
        W_now,
        dZ_now,
        dR,
        dW_now,
        dnu,
        drow,
        dcolumn,
        kept_now,
    ) in depths:
        dS_now = dS[: S.shape[0]]
        wide = None
        if long_now is not None:
            wide = _wide_product(column[:, -C:], dS_now)
            torch.sum(W_now[:, -C:] * wide, 2, out=of_columns)
            wide += dnu
        dW_now.baddbmm_(column, dS_now)
        if T_now is not None:
            _product(T_now, dnu, long_now, wide, dR)
        torch.bmm(W_now, dS_now.mT, out=dcolumn)
        torch.bmm(dZ_now, S.mT, out=drow)
        if total is not None:
            dS_now *= total
            torch.sum(torch.mul(S, dS_now, out=product[: S.shape[0]]), axis, out=kept_now)
        dS_now.baddbmm_(row, dZ_now)
    decay.total_backward(kept)
    return drows, dcolumns, long_columns


def _product(x: Tensor, y: Tensor, exact: Tensor | None, wide: Tensor | None, out: Tensor) -> None:
    """`x @ y` into `out`, plus `exact @ wide` in float64; written to a part of a stacked tile, torch would make the products one by one."""
    if exact is not None and wide is not None:
        torch.add(torch.bmm(x, y), torch.bmm(exact, wide), out=out)
    elif out.is_contiguous():
        torch.bmm(x, y, out=out)
    else:
        out.copy_(torch.bmm(x, y))


def _wide_product(keys: Tensor, S: Tensor) -> Tensor:
    """`keys @ S` in float64: sums over channels of aligned keys, whose partial sums float32 would all round one way."""
    return torch.bmm(keys.double(), S.double())
