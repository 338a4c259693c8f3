"""The scores of one tile: a block of rows against a piece of keys, with everything that is added to a score.

Scores are in units of log 2, because exp2 is what vectorises best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.portable.blocks import KEYS, ROWS, Part, round_up, to_keys, to_row_blocks
from flashmix.ops.attention.portable.dropout import dropout_factor

ALIGN = 64  # pieces of keys start and end at multiples of this
MOST_TABLES = 64
LOG2_E = math.log2(math.e)
# e^-1e6 is 0 in every dtype, and float64 sums of such gates are still exact to 1e-6
STRONGEST_DECAY = -1e6


@dataclass
class Workspace:
    """What the tiles of one call share: masks and distances by place, and memory for products by name."""

    tables: dict[tuple[str, int, int, int, int], Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class ScoreTile:
    """One block of rows against one piece of keys."""

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


class ScoreTiles:
    """The tiles of one part."""

    def __init__(self, call: AttentionCall, part: Part, dtype: torch.dtype, workspace: Workspace) -> None:
        q, slopes, log_decay = call.q, call.alibi_slopes, call.log_decay
        self.call, self.part, self.workspace = call, part, workspace
        # [pairs, blocks, R * rows, K] and [pairs, padded keys, K]
        self.q = to_row_blocks(q, part, dtype).mul_(call.scale * units_of_products(call))
        self.k = to_keys(call.k, part, dtype)
        self.slopes = None if slopes is None else part.repeated(slopes.to(dtype) * LOG2_E)
        self.decay = None if log_decay is None else _decay_sums(log_decay, part)
        self.dropout: tuple[Tensor, Tensor, Tensor] | None = None
        if call.seed is not None:
            heads = part.repeated(torch.arange(q.shape[2], device=q.device))
            sequences = torch.arange(part.sequences.start, part.sequences.stop, device=q.device)
            first_row = (sequences * q.shape[1] + part.of_q.start).repeat_interleave(part.count[1])
            self.dropout = (call.seed, heads, first_row.view(-1, 1, 1, 1))

    def of_block(self, block: int) -> Iterator[ScoreTile]:
        """The tiles with a key that some row of the block may see."""
        part, call = self.part, self.call
        first = block * part.rows + part.tokens_k - part.tokens_q
        low, high = 0, self.k.shape[1]
        if call.left is not None:
            low = max(0, first - call.left) // ALIGN * ALIGN
        if call.right is not None:
            high = min(high, round_up(first + part.rows + call.right, ALIGN))
        for start in range(low, high, KEYS):
            yield ScoreTile(block, first, slice(start, min(start + KEYS, high)))

    def product(self, buffer: str, x: Tensor, y: Tensor) -> Tensor:
        """`x @ y`, batched, in a buffer of this name that the next tile uses again: fresh memory costs page faults."""
        shape = (x.shape[0], x.shape[1], y.shape[2])
        size, buffers = math.prod(shape), self.workspace.buffers
        if buffer not in buffers or buffers[buffer].numel() < size:
            buffers[buffer] = x.new_empty(size)
        return torch.bmm(x, y, out=buffers[buffer][:size].view(shape))

    def products(self, tile: ScoreTile) -> Tensor:
        """`q k^T` of a tile, `[pairs, R * rows, keys]`, in the units of `units_of_products`."""
        return self.product("scores", self.q[:, tile.block], self.k[:, tile.keys].transpose(1, 2))

    def of_rows(self, per_head: Tensor) -> Tensor:
        """`[HQ]` at every row of a block, `[pairs, R * rows, 1]`."""
        rows = self.part.repeated(per_head).expand(-1, -1, self.part.rows, 1)
        return rows.reshape(self.q.shape[0], -1, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """A tile as a view `[pairs, R, rows, keys]`."""
        return x.view(x.shape[0], self.part.group, self.part.rows, x.shape[2])

    def add_biases_(self, scores: Tensor, tile: ScoreTile) -> Tensor:
        """Adds ALiBi, the decay between key and query, and -inf where a row does not see a key, in place."""
        by_head, call = self.by_head(scores), self.call
        if self.slopes is not None:
            by_head.addcmul_(self.slopes, self.distance(tile), value=-1)
        if self.decay is not None:
            self._add_decay_(by_head, *self.decay, tile)
        everything = self._present(tile) == tile.width
        everything &= call.left is None or tile.shift + self.part.rows - 1 <= call.left
        everything &= call.right is None or tile.width - 1 - tile.shift <= call.right
        if not everything:
            by_head.add_(self._mask(tile))
        return scores

    def dropout_factor(self, tile: ScoreTile) -> Tensor | None:
        """What dropout multiplies the probabilities with, `[pairs, R, rows, keys]`."""
        if self.dropout is None:
            return None
        seed, heads, first_row = self.dropout
        rows = self.part.rows
        row = first_row + torch.arange(tile.block * rows, (tile.block + 1) * rows, device=self.q.device)[:, None]
        key = torch.arange(tile.keys.start, tile.keys.stop, device=self.q.device)
        return dropout_factor(seed, heads, row, key, self.call.dropout_p, self.q.dtype)

    def distance(self, tile: ScoreTile) -> Tensor:
        """`|position - key|`, `[rows, keys]`."""
        return self._table("distance", tile, 0, lambda: self._offsets(tile).abs())

    def _mask(self, tile: ScoreTile) -> Tensor:
        """0 where a row sees a key, else -inf, `[rows, keys]`."""
        call, present = self.call, self._present(tile)

        def make() -> Tensor:
            offsets = self._offsets(tile)
            hidden = (torch.arange(tile.width, device=offsets.device) >= present).expand_as(offsets)
            if call.left is not None:
                hidden = hidden | (offsets > call.left)
            if call.right is not None:
                hidden = hidden | (-offsets > call.right)
            return torch.zeros_like(offsets).masked_fill_(hidden, -torch.inf)

        return self._table("mask", tile, present, make)

    def _table(self, name: str, tile: ScoreTile, present: int, make: Callable[[], Tensor]) -> Tensor:
        """A table that depends on a tile's place only, kept for the next tile of that place."""
        key, tables = (name, self.part.rows, tile.shift, tile.width, present), self.workspace.tables
        if key not in tables:
            if len(tables) >= MOST_TABLES:
                tables.clear()
            tables[key] = make()
        return tables[key]

    def _present(self, tile: ScoreTile) -> int:
        """How many keys of a tile are no padding; under a causal mask no row sees the padding anyway."""
        return tile.width if self.call.right == 0 else min(tile.width, self.part.tokens_k - tile.keys.start)

    def _offsets(self, tile: ScoreTile) -> Tensor:
        """Position minus key, `[rows, keys]`."""
        rows = torch.arange(self.part.rows, device=self.q.device, dtype=self.q.dtype)[:, None]
        return rows - torch.arange(tile.width, device=self.q.device, dtype=self.q.dtype) + tile.shift

    def _add_decay_(self, scores: Tensor, at_rows: Tensor, at_keys: Tensor, tile: ScoreTile) -> None:
        """Adds `G_row - G_key`; for keys before the block as (G_row - G_first) + (G_first - G_key), a vector each."""
        rows = at_rows[:, :, tile.block * self.part.rows : (tile.block + 1) * self.part.rows, None]
        keys = at_keys[:, :, None, tile.keys]
        near = min(max(tile.shift, 0), tile.width)
        if near > 0:
            first = rows[:, :, :1]
            scores[..., :near].add_((first - keys[..., :near]).to(scores.dtype)).add_((rows - first).to(scores.dtype))
        if near < tile.width:
            scores[..., near:].add_((rows - keys[..., near:]).to(scores.dtype))


def softcap_(products: Tensor) -> Tensor:
    """`tanh(scores / softcap)` in place, from products that are `2 scores / softcap`.

    `tanh x = (e^{2x} - 1) / (e^{2x} + 1)`: expm1 keeps small scores exact and takes a third of the time of tanh.
    """
    grown = products.clamp_(max=40).expm1_()  # tanh 20 is 1 in float64
    return grown.div_(grown + 2)


def units_of_products(call: AttentionCall) -> float:
    """What q is multiplied with beside `scale`: to have scores in log 2, or `2 scores / softcap` for `softcap_`."""
    return LOG2_E if call.softcap is None else 2 / call.softcap


def _decay_sums(log_decay: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """The running sum G in log 2, float64, at the padded rows and at the padded keys: `[pairs, R, .]` each."""
    sums = part.at_keys_by_query_head(log_decay).double().clamp(min=STRONGEST_DECAY).mul_(LOG2_E).cumsum(1)
    sums = sums.transpose(1, 2).reshape(-1, part.group, part.tokens_k)
    rows = torch.arange(round_up(part.tokens_q, part.rows), device=sums.device) + part.tokens_k - part.tokens_q
    keys = torch.arange(round_up(part.tokens_k, ROWS), device=sums.device)
    return sums[:, :, rows.clamp(0, part.tokens_k - 1)], sums[:, :, keys.clamp(max=part.tokens_k - 1)]
