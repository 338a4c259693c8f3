"""Softmax attention in plain PyTorch on any device: blockwise, with an online softmax and a hand-written backward.

Forward, for a block of queries and its pieces of keys, in units of log 2:

    m' = max(m, max_j s_j);  p_j = 2^(s_j - m');  l = l 2^(m - m') + sum_j p_j;  a = a 2^(m - m') + p v
    o = a / l;  lse = m + log l;  a sink is where m and l start: m = sink, l = 1

Backward recomputes `p = e^(s - lse)` tile by tile; with `delta_i = do_i . o_i - dlse_i`:

    dv = p^T do;  ds = p (do v^T - delta);  dq = scale ds k;  dk = scale ds^T q
    dsink = -sum_i e^(sink - lse_i) delta_i

Packed sequences are walked one after the other; their boundaries are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashmix.ops.attention.blocks import (
    LOG2_E,
    STRONGEST_DECAY,
    Tile,
    Tiles,
    Workspace,
    decay_sums,
    from_row_blocks,
    rows_per_block,
    scaled_q,
    to_keys,
    to_row_blocks,
)
from flashmix.ops.attention.problem import Score

Features = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # sink, alibi_slopes, log_decay, seed
Boundaries = tuple[Tensor | None, Tensor | None]
Part = tuple[slice, slice]  # its tokens of q and of k


def forward(
    q: Tensor, k: Tensor, v: Tensor, features: Features, boundaries: Boundaries, score: Score
) -> tuple[Tensor, Tensor]:
    """`o [B,Tq,HQ,V]` and `lse [B,HQ,Tq]`, packed `[HQ,Tq]`."""
    dtype = _compute_dtype(q)
    batch, tokens, heads_q, _ = q.shape
    o = q.new_zeros(batch, tokens, heads_q, v.shape[3])
    lse = torch.full((batch, tokens, heads_q), -torch.inf, dtype=dtype, device=q.device)
    if features[0] is not None:  # all that a query without keys sees
        lse.copy_(features[0])
    workspace = Workspace()
    for part in _parts(q, k, boundaries):
        of_q, of_k = part
        tiles = _tiles(q, k, features, part, score, workspace)
        o_blocks, lse_blocks = _forward_part(
            tiles, to_keys(v[:, of_k], tiles.rows, dtype), _sink_rows(features[0], batch, tiles)
        )
        o[:, of_q] = from_row_blocks(o_blocks, batch, tiles.tokens_q, tiles.rows)
        lse[:, of_q] = from_row_blocks(lse_blocks, batch, tiles.tokens_q, tiles.rows)[..., 0]
    lse = lse.transpose(1, 2).contiguous()
    return o, lse if boundaries[0] is None else lse[0].clone()


def backward(
    d_o: Tensor | None,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    features: Features,
    boundaries: Boundaries,
    score: Score,
) -> list[Tensor]:
    """Gradients of q, k, v and of each of sink, alibi_slopes, log_decay that is given."""
    dtype = _compute_dtype(q)
    sink, slopes, log_decay, _ = features
    lse = _by_row(lse)
    delta = torch.zeros_like(lse) if d_o is None else torch.einsum("bthd,bthd->bth", d_o.to(dtype), o.to(dtype))
    if d_lse is not None:
        delta = delta - _by_row(d_lse)
    gradients = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    if sink is not None:
        gradients.append(_sink_gradient(sink, lse, delta))
    d_slopes = None if slopes is None else torch.zeros(slopes.shape, dtype=torch.float64, device=q.device)
    d_decay = None if log_decay is None else torch.zeros(log_decay.shape, dtype=torch.float64, device=q.device)

    rows_lse = lse.masked_fill(lse == -torch.inf, torch.inf).mul(LOG2_E)  # p = 0 in a row that sees nothing
    workspace = Workspace()
    for part in _parts(q, k, boundaries):
        of_q, of_k = part
        tiles = _tiles(q, k, features, part, score, workspace)
        heads, rows = k.shape[2], tiles.rows
        d_o_part = q.new_zeros(o[:, of_q].shape) if d_o is None else d_o[:, of_q]
        d_o_blocks = to_row_blocks(d_o_part.to(dtype), heads, rows)
        lse_blocks = to_row_blocks(rows_lse[:, of_q, :, None], heads, rows, fill=torch.inf)
        delta_blocks = to_row_blocks(delta[:, of_q, :, None], heads, rows)
        walk = _Backward(tiles, to_keys(v[:, of_k], tiles.rows, dtype), d_o_blocks, lse_blocks, delta_blocks)
        walk.run(d_slopes is not None, d_decay is not None)
        for gradient, found in zip(gradients, walk.d_qkv(q.shape[0]), strict=False):
            gradient[:, of_q if gradient is gradients[0] else of_k] = found
        if d_slopes is not None:
            d_slopes += walk.d_slopes.view(q.shape[0], -1).sum(0)
        if d_decay is not None:
            d_decay[:, of_k] = walk.d_decay(q.shape[0])
    if slopes is not None and d_slopes is not None:
        gradients.append(d_slopes.to(slopes.dtype))
    if log_decay is not None and d_decay is not None:
        gradients.append(d_decay.masked_fill_(log_decay < STRONGEST_DECAY, 0).to(log_decay.dtype))
    return gradients


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _by_row(statistic: Tensor) -> Tensor:
    """`[B, HQ, T]` or packed `[HQ, T]` as `[B, T, HQ]`."""
    return (statistic if statistic.dim() == 3 else statistic[None]).transpose(1, 2)


def _parts(q: Tensor, k: Tensor, boundaries: Boundaries) -> Iterator[Part]:
    """The whole batch, or each packed sequence that has queries and keys."""
    if boundaries[0] is None or boundaries[1] is None:
        if q.shape[0] and q.shape[1] and k.shape[1]:
            yield slice(0, q.shape[1]), slice(0, k.shape[1])
        return
    ends_q, ends_k = boundaries[0].tolist(), boundaries[1].tolist()
    for n in range(len(ends_q) - 1):
        if ends_q[n] < ends_q[n + 1] and ends_k[n] < ends_k[n + 1]:
            yield slice(ends_q[n], ends_q[n + 1]), slice(ends_k[n], ends_k[n + 1])


def _tiles(q: Tensor, k: Tensor, features: Features, part: Part, score: Score, workspace: Workspace) -> Tiles:
    dtype = _compute_dtype(q)
    _, slopes, log_decay, seed = features
    of_q, of_k = part
    batch, heads, group = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    tokens_q, tokens_k = of_q.stop - of_q.start, of_k.stop - of_k.start
    rows = rows_per_block(tokens_q, tokens_k)
    tiles = Tiles(
        q=to_row_blocks(scaled_q(q[:, of_q], score, dtype), heads, rows),
        k=to_keys(k[:, of_k], rows, dtype),
        tokens_q=tokens_q,
        tokens_k=tokens_k,
        rows=rows,
        group=group,
        score=score,
        workspace=workspace,
    )
    if slopes is not None:
        tiles.slopes = (slopes.to(dtype) * LOG2_E).view(heads, group, 1, 1).repeat(batch, 1, 1, 1)
    if log_decay is not None:
        tiles.decay = decay_sums(log_decay[:, of_k], tokens_q, heads, rows)
    if seed is not None:
        query_head = torch.arange(heads * group, device=q.device).view(heads, group, 1, 1).repeat(batch, 1, 1, 1)
        first_row = torch.arange(batch, device=q.device).mul_(tokens_q).add_(of_q.start).repeat_interleave(heads)
        tiles.dropout = (seed, query_head, first_row.view(-1, 1, 1, 1))
    return tiles


def _sink_rows(sink: Tensor | None, batch: int, tiles: Tiles) -> Tensor | None:
    """The sink of every row of a block in log 2, `[B * H, R * rows, 1]`."""
    if sink is None:
        return None
    return (
        (sink.to(tiles.q.dtype) * LOG2_E)
        .repeat_interleave(tiles.rows)
        .view(-1, tiles.q.shape[2], 1)
        .repeat(batch, 1, 1)
    )


def _forward_part(tiles: Tiles, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """o `[B * H, blocks, R * rows, V]` and lse `[B * H, blocks, R * rows, 1]`."""
    o = v.new_empty(*tiles.q.shape[:3], v.shape[2])
    lse = v.new_empty(*tiles.q.shape[:3], 1)
    lowest = torch.finfo(v.dtype).min  # not -inf: the difference of two of them is 0
    for heads in tiles.head_slices():
        for block in range(tiles.q.shape[1]):
            shape = tiles.q[heads, block].shape
            top = v.new_full((*shape[:2], 1), lowest) if sink is None else sink[heads].clamp(min=lowest)
            total = torch.zeros_like(top) if sink is None else torch.exp2(sink[heads] - top)
            mixed = v.new_zeros(*shape[:2], v.shape[2])
            for tile in tiles.of_block(heads, block):
                scores = tiles.products(tile)
                if tiles.score.softcap is not None:
                    tiles.softcap_(scores).mul_(tiles.score.softcap * LOG2_E)
                tiles.add_biases_(scores, tile)
                new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
                shrink = torch.exp2(top - new_top)
                p = scores.sub_(new_top).exp2_()
                total = total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                if (factor := tiles.dropout_factor(tile)) is not None:
                    tiles.by_head(p).mul_(factor)
                mixed.mul_(shrink).baddbmm_(p, v[heads, tile.keys])
                top = new_top
            o[heads, block] = mixed.div_(total.masked_fill(total == 0, 1))
            # total is 0 (nothing to see) or at least 1; log1p is much faster here than log
            lse[heads, block] = top.div_(LOG2_E).add_(total.sub_(1).log1p_())
    return o, lse


def _sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    p = torch.exp(sink.to(lse.dtype) - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(p * delta).sum((0, 1)).to(sink.dtype)


class _Backward:
    """The walk over the tiles of one part that sums the gradients."""

    def __init__(self, tiles: Tiles, v: Tensor, d_o: Tensor, lse: Tensor, delta: Tensor) -> None:
        self.tiles, self.v, self.d_o, self.lse, self.delta = tiles, v, d_o, lse, delta
        self.d_q, self.d_k, self.d_v = torch.empty_like(tiles.q), torch.zeros_like(tiles.k), torch.zeros_like(v)
        groups, padded_keys = (tiles.q.shape[0], tiles.group), tiles.k.shape[1]
        self.d_slopes = v.new_zeros(groups, dtype=torch.float64)
        self.d_score_rows = v.new_zeros(*groups, tiles.q.shape[1] * tiles.rows, dtype=torch.float64)
        self.d_score_keys = v.new_zeros(*groups, padded_keys, dtype=torch.float64)

    def run(self, slopes: bool, decay: bool) -> None:
        tiles = self.tiles
        for heads in tiles.head_slices():
            for block in range(tiles.q.shape[1]):
                d_q = tiles.q.new_zeros(tiles.q[heads, block].shape)
                for tile in tiles.of_block(heads, block):
                    scores = tiles.products(tile)
                    squashed = None
                    if tiles.score.softcap is not None:
                        squashed = tiles.softcap_(scores)
                        scores = squashed * (tiles.score.softcap * LOG2_E)
                    tiles.add_biases_(scores, tile)
                    p = scores.sub_(self.lse[heads, block]).exp2_()
                    d_scores = self._d_scores(tile, p)
                    if slopes:
                        by_head = tiles.by_head(d_scores)
                        self.d_slopes[heads] -= (by_head * tiles.distance(tile)).sum((2, 3))
                    if decay:
                        self._sum_d_scores(tile, d_scores)
                    if squashed is not None:
                        d_scores.addcmul_(d_scores, squashed.square_(), value=-1)
                    self.d_k[heads, tile.keys] += tiles.product("d_k", d_scores.transpose(1, 2), tiles.q[heads, block])
                    d_q.baddbmm_(d_scores, tiles.k[heads, tile.keys])
                self.d_q[heads, block] = d_q

    def _d_scores(self, tile: Tile, p: Tensor) -> Tensor:
        """`p (do v^T - delta)` of a tile, after adding to `d_v`."""
        d_o = self.d_o[tile.heads, tile.block]
        d_p = self.tiles.product("d_p", d_o, self.v[tile.heads, tile.keys].transpose(1, 2))
        kept = p
        if (factor := self.tiles.dropout_factor(tile)) is not None:
            kept = p.clone()
            self.tiles.by_head(kept).mul_(factor)
            self.tiles.by_head(d_p).mul_(factor)
        self.d_v[tile.heads, tile.keys] += self.tiles.product("d_v", kept.transpose(1, 2), d_o)
        return d_p.sub_(self.delta[tile.heads, tile.block]).mul_(p)

    def _sum_d_scores(self, tile: Tile, d_scores: Tensor) -> None:
        """Sums over the keys and over the rows of a tile: the gradients of the decay's running sum at both."""
        by_head, rows = self.tiles.by_head(d_scores), self.tiles.rows
        self.d_score_rows[tile.heads, :, tile.block * rows : (tile.block + 1) * rows] += by_head.sum(3)
        self.d_score_keys[tile.heads, :, tile.keys] += by_head.sum(2)

    def d_qkv(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v as `[B, T, H, D]`."""
        tiles, score = self.tiles, self.tiles.score
        d_q = from_row_blocks(self.d_q, batch, tiles.tokens_q, tiles.rows) * score.scale
        # the products used q scaled by `scaled_q`, whose factor beside `scale` has to go
        d_k = self.d_k / (LOG2_E if score.softcap is None else 2 / score.softcap)
        d_k, d_v = (x.view(batch, -1, *x.shape[1:])[:, :, : tiles.tokens_k].transpose(1, 2) for x in (d_k, self.d_v))
        return d_q, d_k, d_v

    def d_decay(self, batch: int) -> Tensor:
        """The gradient of `log_decay` `[B, Tk, HQ]`: a gate counts in the running sum at its own and all later keys."""
        tiles = self.tiles
        sums = -self.d_score_keys[:, :, : tiles.tokens_k]
        rows = self.d_score_rows[:, :, : tiles.tokens_q]
        seen = min(tiles.tokens_q, tiles.tokens_k)  # queries before the first key see nothing
        if seen:
            sums[:, :, tiles.tokens_k - seen :] += rows[:, :, tiles.tokens_q - seen :]
        return sums.flip(2).cumsum(2).flip(2).view(batch, -1, tiles.tokens_k).transpose(1, 2)
