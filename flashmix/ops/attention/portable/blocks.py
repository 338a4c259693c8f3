"""Parts of a call that plain PyTorch works on at a time: some heads of some sequences, their queries in blocks of rows.

The sizes of blocks and pieces never depend on the number of tokens or on the batch, and every block is padded to its
full size, so that the bits of a row depend on nothing but the row and its keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from flashmix.op.packing import Packing
from flashmix.op.scratch import scratch
from flashmix.ops.attention.call import AttentionCall

ROWS = 128  # queries of a block
WINDOW_ROWS = 64  # the same under a window of at most KEYS: less of a tile lies outside it
FEW_ROWS = 16  # the same for a few new queries against many keys
KEYS = 512  # keys taken at once
TILE_AREA = 1024 * KEYS  # scores at once: as many heads are taken together


@dataclass(frozen=True)
class Part:
    """Some sequences of one pair of lengths, and some of their key heads."""

    sequences: slice
    heads: slice
    of_q: slice
    of_k: slice
    group: int  # query heads of a key head
    rows: int  # queries of a block

    @property
    def count(self) -> tuple[int, int]:
        """How many sequences, and how many key heads; a pair of them is one entry of the tensors below."""
        return self.sequences.stop - self.sequences.start, self.heads.stop - self.heads.start

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    @property
    def tokens_q(self) -> int:
        return self.of_q.stop - self.of_q.start

    @property
    def tokens_k(self) -> int:
        return self.of_k.stop - self.of_k.start

    def at_queries(self, x: Tensor) -> Tensor:
        """The part of `[B, Tq, HQ, ...]`."""
        return x[self.sequences, self.of_q, self.query_heads]

    def at_keys(self, x: Tensor) -> Tensor:
        """The part of `[B, Tk, H, ...]`."""
        return x[self.sequences, self.of_k, self.heads]

    def at_keys_by_query_head(self, x: Tensor) -> Tensor:
        """The part of `[B, Tk, HQ]`."""
        return x[self.sequences, self.of_k, self.query_heads]

    def repeated(self, per_head: Tensor) -> Tensor:
        """`[HQ]` or `[B, HQ]` at every pair, `[pairs, R, 1, 1]`."""
        if per_head.dim() == 2:
            return per_head[self.sequences, self.query_heads].reshape(-1, self.group, 1, 1)
        return per_head[self.query_heads].view(-1, self.group, 1, 1).repeat(self.count[0], 1, 1, 1)


def parts(call: AttentionCall) -> Iterator[Part]:
    """All parts of the batch, or of each packed sequence."""
    for of_batch, of_q, of_k in ranges(call):
        yield from parts_of(call, of_batch, of_q, of_k)


def parts_of(call: AttentionCall, of_batch: slice, of_q: slice, of_k: slice) -> Iterator[Part]:
    """The parts of the sequences `of_batch`, which have these ranges of queries and of keys."""
    heads, group = call.heads, call.group
    tokens_q, tokens_k = of_q.stop - of_q.start, of_k.stop - of_k.start
    rows, keys = _rows(tokens_q, tokens_k, call), min(KEYS, round_up(tokens_k, ROWS))
    pairs = max(1, TILE_AREA // (group * rows * keys))
    sequences, heads_at_once = max(1, pairs // heads), min(pairs, heads)
    for n in range(of_batch.start, of_batch.stop, sequences):
        for h in range(0, heads, heads_at_once):
            of_n, of_h = slice(n, min(n + sequences, of_batch.stop)), slice(h, min(h + heads_at_once, heads))
            yield Part(of_n, of_h, of_q, of_k, group, rows)


def ranges(call: AttentionCall) -> Iterator[tuple[slice, slice, slice]]:
    """The sequences of one range of queries and of keys: which of the batch, and these ranges; none without queries or keys.

    Boundaries that leave the tensors, or decrease, are cut off.
    """
    for of_batch, of_q, of_k in _all_ranges(call):
        if of_q.stop > of_q.start and of_k.stop > of_k.start and of_batch.stop > 0:
            yield of_batch, of_q, of_k


def _all_ranges(call: AttentionCall) -> Iterator[tuple[slice, slice, slice]]:
    if call.ranged:
        begin = 0
        for (start, end), same in groupby(zip(*(x.tolist() for x in call.key_ranges()), strict=True)):
            count = len(list(same))
            yield slice(begin, begin + count), slice(0, call.tokens_q), slice(start, end)
            begin += count
        return
    ends_q, ends_k = _boundaries(call.packing, call.tokens_q), _boundaries(call.packing_k, call.tokens_k)
    for of_q, of_k in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        yield slice(0, call.batch), slice(*of_q), slice(*of_k)


def _boundaries(packing: Packing | None, tokens: int) -> list[int]:
    return [0, tokens] if packing is None else packing.cu_seqlens.clamp(0, tokens).tolist()


def _rows(tokens_q: int, tokens_k: int, call: AttentionCall) -> int:
    if tokens_q <= FEW_ROWS < tokens_k:
        return FEW_ROWS
    narrow = call.left is not None and call.right is not None and call.left + call.right <= KEYS
    return WINDOW_ROWS if narrow else ROWS


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def to_row_blocks(x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """The part of `[B, Tq, HQ, D]` in scratch memory `[pairs, blocks, R * rows, D]`, the last block padded with zeros.

    The R query heads that share a key head lie below each other.
    """
    x = part.at_queries(x)
    sequences, tokens, heads_q, dim = x.shape
    shape = (sequences, heads_q // part.group, round_up(tokens, part.rows) // part.rows, part.group, part.rows, dim)
    blocks = scratch.tile(x.new_empty(0, dtype=dtype), *shape)
    blocks[:, :, tokens // part.rows :].zero_()
    for of_blocks, of_tokens in _same_elements(blocks, x):
        of_blocks.copy_(of_tokens)
    return blocks.view(-1, shape[2], part.group * part.rows, dim)


def write_row_blocks(x: Tensor, blocks: Tensor, part: Part) -> None:
    """Writes what `to_row_blocks` made back into `x` `[B, Tq, HQ, D]`."""
    x = part.at_queries(x)
    shape = (x.shape[0], x.shape[2] // part.group, blocks.shape[1], part.group, part.rows, x.shape[3])
    for of_blocks, of_tokens in _same_elements(blocks.view(shape), x):
        of_tokens.copy_(of_blocks)


def _same_elements(blocks: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The full blocks and the last one of `[N, H, blocks, R, rows, D]`, each with the same view of `[N, T, HQ, D]`."""
    heads, group, rows = blocks.shape[1], blocks.shape[3], blocks.shape[4]
    full = x.shape[1] // rows
    by_head = x.unflatten(2, (heads, group))
    if full:
        yield blocks[:, :, :full].permute(0, 2, 4, 1, 3, 5), by_head[:, : full * rows].unflatten(1, (full, rows))
    if rest := x.shape[1] - full * rows:
        yield blocks[:, :, full, :, :rest].permute(0, 3, 1, 2, 4), by_head[:, full * rows :]


def to_keys(x: Tensor, part: Part, dtype: torch.dtype) -> Tensor:
    """The part of `[B, Tk, H, D]` in scratch memory `[pairs, Tk padded to ROWS, D]`; for a few queries of one sequence as it is."""
    x = part.at_keys(x)
    sequences, tokens, heads, dim = x.shape
    if sequences == 1 and part.rows == FEW_ROWS and x.dtype == dtype:
        return (x[0] if x.stride(3) == 1 else x[0].contiguous()).transpose(0, 1)
    padded = scratch.tile(x.new_empty(0, dtype=dtype), sequences, heads, round_up(tokens, ROWS), dim)
    padded[:, :, :tokens] = x.transpose(1, 2)
    padded[:, :, tokens:] = 0
    return padded.view(sequences * heads, -1, dim)
