"""Softmax attention in plain PyTorch on any device: blockwise, with an online softmax and a hand-written backward.

Forward, for a block of queries and its pieces of keys, in units of log 2:

    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v
    o = a / l;  lse = m + log l;  a sink is where m and l start: m = sink, l = 1

Backward recomputes `p = 2^(s - m)` tile by tile from the m and l that forward kept (lse alone would cost digits); with
`do' = do / l` and `delta_i = (do_i . o_i - dlse_i) / l_i`:

    dv = p^T do';  ds = p (do' v^T - delta);  dq = scale ds k;  dk = scale ds^T q
    dsink = -sum_i 2^(sink - m_i) delta_i

Packed sequences are walked one after the other; their boundaries are read on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.scratch import scratch
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.portable import one_query
from flashmix.ops.attention.portable.blocks import parts, parts_of, ranges, to_keys, to_row_blocks, write_row_blocks
from flashmix.ops.attention.portable.tiles import (
    LOG2_E,
    STRONGEST_DECAY,
    ScoreTile,
    ScoreTiles,
    Workspace,
    softcap_,
    units_of_products,
)


def keeps(call: AttentionCall) -> Outputs:
    return call.row_statistics()


def forward(call: AttentionCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o`, with `return_lse` lse, and for backward m and l."""
    if not (call.packed or call.ranged) and min(call.batch, call.tokens_k) > 0 and one_query.fits(call, call.tokens_q):
        o, top, total = one_query.attend(call, slice(0, call.batch), slice(0, 1), slice(0, call.tokens_k))
        o = o.to(call.dtype)
    else:
        o, top, total = _by_ranges(call)
    if not save and not call.return_lse:
        return (o,), ()
    top, total = (x[..., 0].transpose(1, 2).contiguous() for x in (top, total))
    kept = (top, total) if save else ()
    if not call.return_lse:
        return (o,), kept
    # total is 0 (nothing to see) or at least 1, where log1p is exact enough, and much faster than log
    lse = top / LOG2_E + (total - 1).log1p_()
    return (o, lse[0].clone() if call.packed else lse), kept


def _by_ranges(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """o `[B, Tq, HQ, V]`, and m and l `[B, Tq, HQ, 1]`, one range of queries and keys after the other."""
    q, k, v, dtype = call.q, call.k, call.v, state_dtype(call.dtype)
    batch, tokens, heads_q, _ = q.shape
    o = _new_like(q, call, (batch, tokens, heads_q, v.shape[3]), k.shape[1])
    # the lowest number, not -inf: the difference of two of them is 0
    lowest = torch.finfo(dtype).min
    top = torch.full((batch, tokens, heads_q, 1), lowest, dtype=dtype, device=q.device)
    total = torch.zeros_like(top)
    start: tuple[Tensor, Tensor] | None = None
    if call.sink is not None:
        sink = call.sink.to(dtype) * LOG2_E
        start = sink.clamp(min=lowest), torch.exp2(sink - sink.clamp(min=lowest))
        top, total = (x[:, None].expand_as(top).clone() for x in start)
    workspace = Workspace()
    for of_batch, of_q, of_k in ranges(call):
        if one_query.fits(call, of_q.stop - of_q.start):
            for x, row in zip((o, top, total), one_query.attend(call, of_batch, of_q, of_k), strict=True):
                x[of_batch, of_q] = row
            continue
        for part in parts_of(call, of_batch, of_q, of_k):
            scratch.restart()
            tiles = ScoreTiles(call, part, dtype, workspace)
            for x, blocks in zip((o, top, total), _attend(tiles, to_keys(v, part, dtype), start), strict=True):
                write_row_blocks(x, blocks, part)
    return o, top, total


def backward(call: AttentionCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of q, k, v, and of sink, slopes and decay where wanted."""
    q, k, dtype = call.q, call.k, state_dtype(call.dtype)
    o, top, total = kept
    top, total = (x.transpose(1, 2) for x in (top, total))
    d_o, d_lse = grads if call.return_lse else (*grads, None)
    d_o = torch.zeros_like(o) if d_o is None else d_o
    # o first, whose layout the product takes; a sum in pairs, since its error reaches all scores of a row
    delta = (o.to(dtype) * d_o.to(dtype)).sum(-1)
    if d_lse is not None:
        delta = delta - (d_lse if d_lse.dim() == 3 else d_lse[None]).transpose(1, 2)
    share = total.reciprocal().masked_fill_(total == 0, 0)
    delta = delta * share

    fewest = min(q.shape[1], k.shape[1])
    found = {name: _new_like(x, call, x.shape, fewest) for name, x in (("q", q), ("k", k), ("v", call.v))}
    d_slopes = _float64_zeros(call.alibi_slopes) if "alibi_slopes" in wanted else None
    d_decay = _float64_zeros(call.log_decay) if "log_decay" in wanted else None
    workspace = Workspace()
    for part in parts(call):
        scratch.restart()
        d_o_blocks, shares, tops, deltas = (
            to_row_blocks(x, part, dtype) for x in (d_o, *(y[..., None] for y in (share, top, delta)))
        )
        tiles = ScoreTiles(call, part, dtype, workspace)
        sums = _Gradients(tiles, to_keys(call.v, part, dtype), d_o_blocks.mul_(shares), tops, deltas)
        sums.add_all(d_slopes is not None, d_decay is not None)
        sums.write_qkv(found["q"], found["k"], found["v"])
        if d_slopes is not None:
            if call.slopes_by_sequence:
                d_slopes[part.sequences, part.query_heads].add_(sums.of_slopes())
            else:
                d_slopes[part.query_heads].add_(sums.of_slopes().sum(0))
        if d_decay is not None:
            part.at_keys_by_query_head(d_decay).copy_(sums.of_decay())

    sink, slopes, log_decay = call.sink, call.alibi_slopes, call.log_decay
    if sink is not None and "sink" in wanted:
        at_sink = torch.exp2(sink.double() * LOG2_E - top) * delta  # float64: one rounding would bias a whole head
        found["sink"] = at_sink.sum((0, 1)).neg_().to(sink.dtype)
    if slopes is not None and d_slopes is not None:
        found["alibi_slopes"] = d_slopes.to(slopes.dtype)
    if log_decay is not None and d_decay is not None:
        found["log_decay"] = d_decay.masked_fill_(log_decay < STRONGEST_DECAY, 0).to(log_decay.dtype)
    return found


def _float64_zeros(x: Tensor | None) -> Tensor | None:
    return None if x is None else torch.zeros(x.shape, dtype=torch.float64, device=x.device)


def _new_like(x: Tensor, call: AttentionCall, shape: Sequence[int], tokens: int) -> Tensor:
    """A tensor for results: zeros, unless the parts of a batch will fill it whole."""
    return x.new_zeros(shape) if call.packed or call.ranged or not tokens else x.new_empty(shape)


def _attend(tiles: ScoreTiles, v: Tensor, start: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """o `[pairs, blocks, R * rows, V]`, and m and l, `[pairs, blocks, R * rows, 1]`; `start`: what a sink begins them with."""
    o = scratch.tile(v, *tiles.q.shape[:3], v.shape[2])
    tops, totals = (scratch.tile(v, *tiles.q.shape[:3], 1) for _ in range(2))
    lowest = torch.finfo(v.dtype).min
    begin = (None, None) if start is None else tuple(tiles.of_rows(x) for x in start)
    for block in range(tiles.q.shape[1]):
        (top, total), mixed = begin, None
        for tile in tiles.of_block(block):
            scores = tiles.products(tile)
            if tiles.call.softcap is not None:
                softcap_(scores).mul_(tiles.call.softcap * LOG2_E)
            tiles.add_biases_(scores, tile)
            largest = scores.amax(-1, keepdim=True)
            new_top = largest.clamp_(min=lowest) if top is None else torch.maximum(top, largest)
            p = scores.sub_(new_top).exp2_()
            own = p.sum(-1, keepdim=True)
            if (factor := tiles.dropout_factor(tile)) is not None:
                tiles.by_head(p).mul_(factor)
            if top is not None and total is not None:
                shrink = torch.exp2(top - new_top)
                own = (total * shrink).add_(own)
                if mixed is not None:
                    mixed.mul_(shrink)
            if mixed is None:
                mixed = tiles.product("mixed", p, v[:, tile.keys])
            else:
                mixed.baddbmm_(p, v[:, tile.keys])
            top, total = new_top, own
        tops[:, block] = lowest if top is None else top
        totals[:, block] = 0 if total is None else total
        if mixed is None or total is None:
            o[:, block] = 0
        else:
            torch.div(mixed, total.masked_fill(total == 0, 1), out=o[:, block])
    return o, tops, totals


def _zeros_by_channel(x: Tensor) -> Tensor:
    """Zeros `[pairs, D, keys]` for gradients of keys `[pairs, keys, D]`.

    `do'^T p` is a faster product than `p^T do'`, and rows that do not lie a power of two apart turn around five times as
    fast in the end.
    """
    pairs, keys, dim = x.shape
    return x.new_zeros(pairs, dim, keys + 16)[..., :keys]


class _Gradients:
    """The sums over all tiles of one part that make up the gradients."""

    def __init__(self, tiles: ScoreTiles, v: Tensor, d_o: Tensor, top: Tensor, delta: Tensor) -> None:
        self.tiles, self.v, self.d_o, self.top, self.delta = tiles, v, d_o, top, delta
        self.d_q = torch.empty_like(tiles.q)
        self.d_k, self.d_v = _zeros_by_channel(tiles.k), _zeros_by_channel(v)
        by_head = (tiles.q.shape[0], tiles.part.group)
        self.d_slopes = v.new_zeros(by_head, dtype=torch.float64)
        self.d_scores_of_rows = v.new_zeros(*by_head, tiles.q.shape[1] * tiles.part.rows, dtype=torch.float64)
        self.d_scores_of_keys = v.new_zeros(*by_head, tiles.k.shape[1], dtype=torch.float64)

    def add_all(self, slopes: bool, decay: bool) -> None:
        """Walks over the tiles; sums what ALiBi's slopes and the decay need only where asked to."""
        tiles = self.tiles
        for block in range(tiles.q.shape[1]):
            q, d_q = tiles.q[:, block], None
            for tile in tiles.of_block(block):
                p, squashed = self._probabilities(tile)
                d_scores = self._d_scores(tile, p)
                if slopes:
                    self.d_slopes.sub_((tiles.by_head(d_scores) * tiles.distance(tile)).sum((2, 3)))
                if decay:
                    self._add_decay(tile, d_scores)
                if squashed is not None:  # the derivative of tanh
                    d_scores.addcmul_(d_scores, squashed.square_(), value=-1)
                self.d_k[:, :, tile.keys].add_(tiles.product("d_k", q.transpose(1, 2), d_scores))
                if d_q is None:
                    d_q = tiles.product("d_q", d_scores, tiles.k[:, tile.keys])
                else:
                    d_q.baddbmm_(d_scores, tiles.k[:, tile.keys])
            self.d_q[:, block] = 0 if d_q is None else d_q

    def _probabilities(self, tile: ScoreTile) -> tuple[Tensor, Tensor | None]:
        """`l p` of a tile, and `tanh(scores / softcap)` where there is a softcap."""
        tiles = self.tiles
        scores, squashed = tiles.products(tile), None
        if tiles.call.softcap is not None:
            squashed = softcap_(scores)
            scores = squashed * (tiles.call.softcap * LOG2_E)
        return tiles.add_biases_(scores, tile).sub_(self.top[:, tile.block]).exp2_(), squashed

    def _d_scores(self, tile: ScoreTile, p: Tensor) -> Tensor:
        """`p (do' v^T - delta)` of a tile, after adding to `d_v`."""
        tiles, d_o = self.tiles, self.d_o[:, tile.block]
        d_p = tiles.product("d_p", d_o, self.v[:, tile.keys].transpose(1, 2))
        kept = p
        if (factor := tiles.dropout_factor(tile)) is not None:
            kept = p.clone()
            tiles.by_head(kept).mul_(factor)
            tiles.by_head(d_p).mul_(factor)
        self.d_v[:, :, tile.keys].add_(tiles.product("d_v", d_o.transpose(1, 2), kept))
        return d_p.sub_(self.delta[:, tile.block]).mul_(p)

    def _add_decay(self, tile: ScoreTile, d_scores: Tensor) -> None:
        """The decay's running sum is added to a row of scores and subtracted from a column."""
        by_head, rows = self.tiles.by_head(d_scores), self.tiles.part.rows
        self.d_scores_of_rows[:, :, tile.block * rows : (tile.block + 1) * rows].add_(by_head.sum(3))
        self.d_scores_of_keys[:, :, tile.keys].add_(by_head.sum(2))

    def write_qkv(self, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> None:
        """Writes the gradients of q, k, v into the part of `[B, T, H, D]`."""
        part, call = self.tiles.part, self.tiles.call
        write_row_blocks(d_q, self.d_q.mul_(call.scale), part)
        self.d_k.div_(units_of_products(call))  # which are in `tiles.q`, beside `scale`
        for target, found in ((part.at_keys(d_k), self.d_k), (part.at_keys(d_v), self.d_v)):
            found = found.unflatten(0, part.count)
            target.copy_(found[..., : part.tokens_k].permute(0, 3, 1, 2))

    def of_slopes(self) -> Tensor:
        """The gradient of ALiBi's slopes at each sequence and query head of the part, `[sequences, HQ]`."""
        return self.d_slopes.view(self.tiles.part.count[0], -1)

    def of_decay(self) -> Tensor:
        """The gradient of `log_decay` `[B, Tk, HQ]`: a gate counts in the running sum at its own and all later keys."""
        part = self.tiles.part
        sums = -self.d_scores_of_keys[:, :, : part.tokens_k]
        seen = min(part.tokens_q, part.tokens_k)  # queries before the first key see nothing
        sums[:, :, part.tokens_k - seen :] += self.d_scores_of_rows[:, :, part.tokens_q - seen : part.tokens_q]
        sums = sums.flip(2).cumsum(2).flip(2)
        return sums.view(part.count[0], -1, part.tokens_k).transpose(1, 2)
