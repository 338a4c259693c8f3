"""How `portable.py` cuts the score matrix, and the scores of one tile of it.

Rows are cut into blocks of `ROWS` queries; a block takes the keys it can see in pieces of at most `KEYS`. The sizes
never depend on the number of tokens or on the batch, and every block is padded to its full size, so that the bits of a
row depend on nothing but the row and its keys. The `R = HQ / H` query heads that share a key head are laid below each
other: a tile is `[heads, R * rows, keys]`. Scores are in units of log 2, because exp2 is what vectorises best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashmix.ops.attention.dropout import dropout_factor
from flashmix.ops.attention.problem import Score

ROWS = 128
FEW_ROWS = 16  # for a few new queries against many keys
KEYS = 512
ALIGN = 64  # pieces start and end at multiples of this
TILE_ROWS = 1024  # heads are taken together up to this many rows of a tile
MOST_TABLES = 64  # masks and distances kept for the next tile that needs the same
LOG2_E = math.log2(math.e)
# e^-1e6 is 0 in every dtype, and float64 sums of such gates are still exact to 1e-6
STRONGEST_DECAY = -1e6


def rows_per_block(tokens_q: int, tokens_k: int) -> int:
    return FEW_ROWS if tokens_q <= FEW_ROWS < tokens_k else ROWS


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def to_row_blocks(x: Tensor, heads: int, rows: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, HQ, D]` as new memory `[B * heads, blocks, R * rows, D]`, the last block padded with zeros."""
    batch, tokens, heads_q, dim = x.shape
    shape = (batch, heads, round_up(tokens, rows) // rows, heads_q // heads, rows, dim)
    blocks = torch.empty(shape, dtype=dtype, device=x.device)
    blocks[:, :, tokens // rows :].zero_()
    for of_blocks, of_tokens in _same_elements(blocks, x):
        of_blocks.copy_(of_tokens)
    return blocks.view(batch * heads, shape[2], -1, dim)


def from_row_blocks_(x: Tensor, blocks: Tensor, heads: int, rows: int) -> None:
    """Writes what `to_row_blocks` made back into `x` `[B, T, HQ, D]`."""
    batch, _, heads_q, dim = x.shape
    for of_blocks, of_tokens in _same_elements(blocks.view(batch, heads, -1, heads_q // heads, rows, dim), x):
        of_tokens.copy_(of_blocks)


def _same_elements(blocks: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The full blocks and the last one of `[B, H, blocks, R, rows, D]`, each with the same view of `[B, T, HQ, D]`."""
    heads, rows = blocks.shape[1], blocks.shape[4]
    full = x.shape[1] // rows
    by_head = x.unflatten(2, (heads, x.shape[2] // heads))
    if full:
        yield blocks[:, :, :full].permute(0, 2, 4, 1, 3, 5), by_head[:, : full * rows].unflatten(1, (full, rows))
    if rest := x.shape[1] - full * rows:
        yield blocks[:, :, full, :, :rest].permute(0, 3, 1, 2, 4), by_head[:, full * rows :]


def to_keys(x: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """`[B, T, H, D]` as `[B * H, T padded to ROWS, D]`; for a few queries of one sequence a view, unpadded."""
    batch, tokens, heads, dim = x.shape
    if batch == 1 and rows == FEW_ROWS and x.dtype == dtype and x.stride(3) == 1:
        return x[0].transpose(0, 1)
    padded = x.new_zeros(batch, heads, round_up(tokens, ROWS), dim, dtype=dtype)
    padded[:, :, :tokens] = x.transpose(1, 2)
    return padded.view(batch * heads, -1, dim)


@dataclass
class Tile:
    """One block of rows against one piece of keys, for some of the (batch, key head) pairs."""

    heads: slice
    block: int
    first_position: int
    keys: slice

    @property
    def width(self) -> int:
        return self.keys.stop - self.keys.start

    @property
    def shift(self) -> int:
        """The position of the first row minus that of the first key."""
        return self.first_position - self.keys.start


@dataclass
class Workspace:
    """What the tiles of one call share: masks and distances by place, and memory for products by name."""

    tables: dict[tuple[str, int, int, int, int], Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Tiles:
    """The tiles of sequences that all have `tokens_q` queries and `tokens_k` keys, and their scores.

    `q [B * H, blocks, R * rows, K]` is multiplied with `scale` and `units_of_products`, `k [B * H, padded keys, K]`.
    """

    q: Tensor
    k: Tensor
    tokens_q: int
    tokens_k: int
    rows: int
    group: int
    score: Score
    slopes: Tensor | None = None  # [B * H, R, 1, 1], in log 2
    decay: tuple[Tensor, Tensor] | None = None  # its running sum in log 2, float64: at rows and at keys, [B * H, R, .]
    dropout: tuple[Tensor, Tensor, Tensor] | None = (
        None  # seed, query head [B * H, R, 1, 1], first row [B * H, 1, 1, 1]
    )
    workspace: Workspace = field(default_factory=lambda: Workspace())

    def head_slices(self) -> Iterator[slice]:
        """The (batch, key head) pairs that are taken together."""
        together = max(1, TILE_ROWS // (self.group * self.rows))
        for start in range(0, self.q.shape[0], together):
            yield slice(start, min(start + together, self.q.shape[0]))

    def of_block(self, heads: slice, block: int) -> Iterator[Tile]:
        """The tiles with a key that some row of the block may see."""
        first = block * self.rows + self.tokens_k - self.tokens_q
        low, high = 0, self.k.shape[1]
        if self.score.left is not None:
            low = max(0, first - self.score.left) // ALIGN * ALIGN
        if self.score.right is not None:
            high = min(high, round_up(first + self.rows + self.score.right, ALIGN))
        for start in range(low, high, KEYS):
            yield Tile(heads, block, first, slice(start, min(start + KEYS, high)))

    def product(self, buffer: str, x: Tensor, y: Tensor) -> Tensor:
        """`x @ y`, batched, in a buffer of this name that the next tile uses again: fresh memory costs page faults."""
        shape = (x.shape[0], x.shape[1], y.shape[2])
        size, buffers = math.prod(shape), self.workspace.buffers
        if buffer not in buffers or buffers[buffer].numel() < size:
            buffers[buffer] = x.new_empty(size)
        return torch.bmm(x, y, out=buffers[buffer][:size].view(shape))

    def products(self, tile: Tile) -> Tensor:
        """`q k^T` of a tile, `[heads, R * rows, keys]`."""
        return self.product("scores", self.q[tile.heads, tile.block], self.k[tile.heads, tile.keys].transpose(1, 2))

    def by_head(self, x: Tensor) -> Tensor:
        """A tile as a view `[heads, R, rows, keys]`."""
        return x.view(x.shape[0], self.group, self.rows, x.shape[2])

    def softcap_(self, products: Tensor) -> Tensor:
        """`tanh(scores / softcap)` in place; `units_of_products` made the products `2 scores / softcap`.

        `tanh x = (e^{2x} - 1) / (e^{2x} + 1)`: expm1 keeps small scores exact and takes a third of the time of tanh.
        """
        grown = products.clamp_(max=40).expm1_()  # tanh 20 is 1 in float64
        return grown.div_(grown + 2)

    def add_biases_(self, scores: Tensor, tile: Tile) -> Tensor:
        """Adds ALiBi, the decay between key and query, and -inf where a row does not see a key, in place."""
        by_head = self.by_head(scores)
        if self.slopes is not None:
            by_head.addcmul_(self.slopes[tile.heads], self.distance(tile), value=-1)
        if self.decay is not None:
            self._add_decay_(by_head, tile)
        score = self.score
        everything = self._present(tile) == tile.width
        everything &= score.left is None or tile.shift + self.rows - 1 <= score.left
        everything &= score.right is None or tile.width - 1 - tile.shift <= score.right
        if not everything:
            by_head.add_(self._mask(tile))
        return scores

    def dropout_factor(self, tile: Tile) -> Tensor | None:
        """What dropout multiplies the probabilities with, `[heads, R, rows, keys]`."""
        if self.dropout is None:
            return None
        seed, query_head, first_row = self.dropout
        rows = torch.arange(tile.block * self.rows, (tile.block + 1) * self.rows, device=self.q.device)[:, None]
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=self.q.device)
        heads, rows = query_head[tile.heads], first_row[tile.heads] + rows
        return dropout_factor(seed, heads, rows, keys, self.score.dropout_p, self.q.dtype)

    def distance(self, tile: Tile) -> Tensor:
        """`|position - key|`, `[rows, keys]`."""
        key, tables = ("distance", self.rows, tile.shift, tile.width, 0), self.workspace.tables
        if key not in tables:
            tables[key] = self._offsets(tile).abs()
        return tables[key]

    def _mask(self, tile: Tile) -> Tensor:
        """0 where a row sees a key, else -inf, `[rows, keys]`."""
        present = self._present(tile)
        key, tables = ("mask", self.rows, tile.shift, tile.width, present), self.workspace.tables
        if key not in tables:
            if len(tables) >= MOST_TABLES:
                tables.clear()
            offsets = self._offsets(tile)
            hidden = (torch.arange(tile.width, device=offsets.device) >= present).expand_as(offsets)
            if self.score.left is not None:
                hidden = hidden | (offsets > self.score.left)
            if self.score.right is not None:
                hidden = hidden | (-offsets > self.score.right)
            tables[key] = torch.zeros_like(offsets).masked_fill_(hidden, -torch.inf)
        return tables[key]

    def _present(self, tile: Tile) -> int:
        """How many keys of a tile are no padding; under a causal mask no row sees the padding anyway."""
        return tile.width if self.score.right == 0 else min(tile.width, self.tokens_k - tile.keys.start)

    def _offsets(self, tile: Tile) -> Tensor:
        rows = torch.arange(self.rows, device=self.q.device, dtype=self.q.dtype)[:, None]
        return rows - torch.arange(tile.width, device=self.q.device, dtype=self.q.dtype) + tile.shift

    def _add_decay_(self, scores: Tensor, tile: Tile) -> None:
        """Adds `G_row - G_key`; for keys before the block as (G_row - G_first) + (G_first - G_key), a vector each."""
        assert self.decay is not None
        at_rows, at_keys = self.decay
        rows = at_rows[tile.heads, :, tile.block * self.rows : (tile.block + 1) * self.rows, None]
        keys = at_keys[tile.heads, :, None, tile.keys]
        near = min(max(tile.shift, 0), tile.width)
        if near > 0:
            first = rows[:, :, :1]
            scores[..., :near].add_((first - keys[..., :near]).to(scores.dtype)).add_((rows - first).to(scores.dtype))
        if near < tile.width:
            scores[..., near:].add_((rows - keys[..., near:]).to(scores.dtype))


def units_of_products(score: Score) -> float:
    """What q is multiplied with beside `scale`: to have scores in log 2, or `2 scores / softcap` for `Tiles.softcap_`."""
    return LOG2_E if score.softcap is None else 2 / score.softcap


def decay_sums(log_decay: Tensor, tokens_q: int, heads: int, rows: int) -> tuple[Tensor, Tensor]:
    """The running sum of `log_decay [B, Tk, HQ]` in log 2 at the padded rows and the padded keys, `[B * H, R, .]`."""
    batch, tokens_k, heads_q = log_decay.shape
    sums = log_decay.double().clamp(min=STRONGEST_DECAY).mul_(LOG2_E).cumsum(1)
    sums = sums.transpose(1, 2).reshape(batch * heads, heads_q // heads, tokens_k)
    positions = torch.arange(round_up(tokens_q, rows), device=sums.device) + tokens_k - tokens_q
    keys = torch.arange(round_up(tokens_k, ROWS), device=sums.device)
    return sums[:, :, positions.clamp(0, tokens_k - 1)], sums[:, :, keys.clamp(max=tokens_k - 1)]
