"""The rows of `T = (I - A_ab)^{-1}` that float32 has no room for, of correlated keys (docs/chunk_algorithm.md, section 4).

Where a row of `A_ab` is long, because many earlier keys of the chunk point its token's way and are written with a strength near 2, the
rounding of `A_ab` and of `T` to float32 costs more than a token loop's roundings do. Such rows of `T` are made again in float64, from
the keys, and multiplied in float64. Whether a row is long depends on this row of `A_ab` alone, on its token and earlier ones of its
chunk, so that neither the batch nor later tokens change a bit of a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.portable.decay.base import NoDecay, SlabDecay
from flashmix.ops.recurrence.portable.decay.channel import ChannelDecay
from flashmix.ops.recurrence.portable.decay.token import TokenDecay, token_factors
from flashmix.ops.recurrence.portable.layout import Layout, Slab
from flashmix.ops.recurrence.portable.tiles import load_tiles, row_kinds
from flashmix.ops.recurrence.portable.transform import transform_forward

LONG = 12.0  # the sum of squares of a row of A_ab; parallel keys have it after 3 tokens at a strength of 2, after 48 at one of 0.5


def long_rows(A: Tensor) -> Tensor | None:
    """Which rows of `A_ab` `[chunks, C, C]` are long, `[chunks, C]`; None if none are, and of float64, which has room."""
    if A.dtype == torch.float64 or A.numel() == 0:
        return None
    return _if_any(torch.linalg.vector_norm(A, dim=2) > LONG**0.5)


def rows_left_out(T: Tensor) -> Tensor | None:
    """The same rows from a `T` that `long_rows_of_transform` has seen: its diagonal is 1, and 0 in these."""
    return _if_any(T.diagonal(dim1=1, dim2=2) == 0)


def _if_any(rows: Tensor) -> Tensor | None:
    return rows if bool(rows.any()) else None


def long_rows_of_transform(
    call: RecurrenceCall, layout: Layout, slab: Slab, T: Tensor, long: Tensor | None
) -> Tensor | None:
    """The long rows of `T` `[chunks, C, C]` in float64, other rows 0; in `T` itself they become 0. None if none are long."""
    if long is None:
        return None
    chosen = long.any(1).nonzero().squeeze(1)
    exact = _correction_pairs(call, layout, slab, chosen)
    exact = transform_forward(exact, torch.empty_like(exact))
    found = scratch.tile(exact, *T.shape).zero_()
    found[chosen] = exact.masked_fill_(~long[chosen].unsqueeze(2), 0)
    T.masked_fill_(long.unsqueeze(2), 0)
    return found


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
