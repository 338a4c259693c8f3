"""The rows of `T = (I - A_ab)^{-1}` that float32 has no room for, of correlated keys (docs/chunk_algorithm.md, section 4).

Where a row of `A_ab` is long, because many earlier keys of the chunk point its token's way and are written with a strength near 2, the
rounding of `A_ab` and of `T` to float32 costs more than a token loop's roundings do. So does, over many channels, a product whose terms
have one sign: a matrix product adds them one after the other, and all partial sums are rounded one way. Such rows of `T`, and what they
are multiplied with, are made again in float64, from the keys. Whether a row is long depends on this row of `A_ab` and on its keys alone,
on its token and earlier ones of its chunk, so that neither the batch nor later tokens change a bit of a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.portable.decay.base import LongLogarithms, NoDecay, SlabDecay
from flashmix.ops.recurrence.portable.decay.channel import ChannelDecay
from flashmix.ops.recurrence.portable.decay.token import TokenDecay, token_factors
from flashmix.ops.recurrence.portable.layout import Layout, Slab
from flashmix.ops.recurrence.portable.tiles import load_tiles, row_kinds
from flashmix.ops.recurrence.portable.transform import transform_forward

# The sum of squares of a row of A_ab; parallel keys have LONG after 3 tokens at a strength of 2, after 48 at one of 0.5.
LONG = 12.0
MANY = 16  # channels; with fewer, random keys are often nearly parallel
ALIGNED = 0.5  # of the sum of squares that a row would have if all earlier keys were parallel to its own; random keys have 1 / K


@dataclass(frozen=True)
class LongRows:
    """The long rows of `A_ab` and of `T` in float64, `[chunks, C, C]`; other rows are 0."""

    rows: Tensor  # which, [chunks, C]
    A: Tensor
    T: Tensor


def long_rows(A: Tensor, X: Tensor, Y: Tensor) -> Tensor | None:
    """Which rows of `A_ab` `[chunks, C, C]` are long, `[chunks, C]`, or of many channels and aligned keys `X, Y` `[chunks, C, K]`.

    None if none are, and of float64, which has room.
    """
    if A.dtype == torch.float64 or A.numel() == 0:
        return None
    norms = torch.linalg.vector_norm(A, dim=2)
    found = norms > LONG**0.5
    if X.shape[2] >= MANY and (some := _if_any(norms > _few(X.shape[2]) ** 0.5)) is not None:
        earlier = torch.linalg.vector_norm(Y[:, :-1], dim=2).square_().cumsum_(1)
        parallel = earlier.mul_(ALIGNED).sqrt_().mul_(torch.linalg.vector_norm(X[:, 1:], dim=2))
        found[:, 1:] |= some[:, 1:] & (norms[:, 1:] > parallel)
    return _if_any(found)


def _few(K: int) -> float:
    """The sum of squares from which aligned keys are looked for: roundings of aligned terms grow with how many channels there are, while
    random keys with strengths up to 2 have a larger sum in few chunks of 32 or 64 channels, in none with strengths up to 1."""
    return min(3.5, 128 / K)


def rows_left_out(T: Tensor) -> Tensor | None:
    """The same rows from a `T` that `long_rows_of_transform` has seen: its diagonal is 1, and 0 in these."""
    return _if_any(T.diagonal(dim1=1, dim2=2) == 0)


def _if_any(rows: Tensor) -> Tensor | None:
    return rows if bool(rows.any()) else None


def long_rows_of_transform(
    call: RecurrenceCall, layout: Layout, slab: Slab, T: Tensor, long: Tensor | None
) -> LongRows | None:
    """The long rows in float64; in `T` itself they become 0. None if none are long."""
    if long is None:
        return None
    chosen = long.any(1).nonzero().squeeze(1)
    pairs = _correction_pairs(call, layout, slab, chosen)
    A, exact = (scratch.tile(pairs, *T.shape).zero_() for _ in range(2))
    others = ~long[chosen].unsqueeze(2)
    exact[chosen] = transform_forward(pairs, torch.empty_like(pairs)).masked_fill_(others, 0)
    A[chosen] = pairs.masked_fill_(others, 0)
    T.masked_fill_(long.unsqueeze(2), 0)
    return LongRows(long, A, exact)


def long_logarithms(
    long: LongRows, rows: Tensor, states: Tensor, W: Tensor, dZ: Tensor, columns: Tensor
) -> LongLogarithms:
    """What the long rows give the logarithms of decays (2.5): each term a float64 product, since their sums cancel.

    `rows` are those of the correction, `~a` `[chunks, C, K]`; `W` is `nu` and `dZ` is `dR`, `[chunks, C, V]`;
    `columns` are `nu . (^b dS')`, `[chunks, C]`.
    """
    wide = dZ.double()
    pairs = torch.bmm(wide, W.double().mT).mul_(long.A)
    of_rows = wide.mul_(torch.bmm(rows.double(), states.double())).sum(2).masked_fill_(~long.rows, 0)
    return LongLogarithms(long.rows, pairs, of_rows, columns.masked_fill(~long.rows, 0))


def _correction_pairs(call: RecurrenceCall, layout: Layout, slab: Slab, chosen: Tensor) -> Tensor:
    """`A_ab` of the chosen chunks of a slab in float64, from the operands, `[chosen, C, C]`."""
    tiles = load_tiles(call, layout, slab, torch.empty(0, dtype=torch.float64, device=call.device))
    X, Y = tiles.X[chosen, 1:], tiles.Y[chosen, -1:]
    g = None if tiles.g is None else tiles.g[chosen]
    decay: SlabDecay = NoDecay(rows := row_kinds(call)[1:])
    if g is not None and call.decay is Decay.CHANNEL:
        decay = ChannelDecay(g, rows)
    elif g is not None:
        factors = g.new_empty(g.shape[0], layout.C + 1, layout.C)
        token_factors(g, factors)
        decay = TokenDecay(factors, rows)
    return decay.pairs(X, Y, X.new_empty(X.shape[0], layout.C, layout.C))
