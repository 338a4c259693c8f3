"""From tokens `[B, T, H, D]` to chunks `[chunks, C, D]` and back.

A sequence is cut into chunks of `C` tokens, the last one padded with zeros. The *depth* of a chunk is its place in its
sequence. Chunks are ordered by depth, then sequence, then head, with the longest sequences first: all chunks of one depth
lie side by side, so that the serial pass over depths works on plain slices, for dense and packed batches alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmix.op.packing import Packing, check_boundaries
from flashmix.ops.recurrence.call import RecurrenceCall

# A slab is as many depths as fit in this many numbers of one tile: smaller slabs cost more operators, larger ones leave the cache.
SLAB_NUMBERS = 1 << 18


def chunk_size(call: RecurrenceCall) -> int:
    """Tokens in a chunk, from the head dimensions alone: work in a chunk grows with C, work between chunks with K V / C."""
    return 32 if max(call.K, call.V) <= 64 else 64


def chunk_bound(call: RecurrenceCall) -> int:
    """How many chunks there can be at most, all heads counted, from the sizes alone."""
    C = chunk_size(call)
    if call.packed:
        return (call.tokens // C + call.sequences) * call.value_heads
    return call.batch * (-(-call.tokens // C)) * call.value_heads


@dataclass(frozen=True)
class Slab:
    """Consecutive depths `[first, last)` that are worked on at a time, and their chunks as a slice of the whole call's."""

    first: int
    last: int
    chunks: slice

    @property
    def count(self) -> int:
        return int(self.chunks.stop - self.chunks.start)


@dataclass(frozen=True)
class PackedChunks:
    """Where the tokens of a packed batch stand among its chunks of `C`."""

    active: list[int]  # how many sequences reach each depth
    order: Tensor  # the sequences, longest first
    index: Tensor  # the token of each place in each chunk, T where there is none

    @staticmethod
    def of(packing: Packing, C: int) -> PackedChunks:
        """Made once a batch; raises ValueError where the boundaries are none (compiled, nothing has looked at them before)."""
        return packing.table((PackedChunks, C), lambda: PackedChunks.make(packing, C))

    @staticmethod
    def make(packing: Packing, C: int) -> PackedChunks:
        boundaries, device = packing.cu_seqlens.tolist(), packing.cu_seqlens.device
        check_boundaries(boundaries, packing.total)
        cu = torch.tensor(boundaries, dtype=torch.int64, device="cpu")
        chunks = -(-cu.diff() // C)
        order = torch.argsort(chunks, descending=True, stable=True)
        depths = int(chunks.max()) if len(chunks) else 0
        reach = chunks[order][None, :] > torch.arange(depths, device="cpu")[:, None]  # [depths, sequences]
        depth, place = reach.nonzero(as_tuple=True)
        sequence = order[place]
        token = (cu[sequence] + depth * C)[:, None] + torch.arange(C, device="cpu")
        index = torch.where(token < cu[sequence + 1][:, None], token, packing.total)
        return PackedChunks(reach.sum(1).tolist(), order.to(device), index.to(device))


class Layout:
    """Where each token of a call stands among its chunks."""

    def __init__(self, call: RecurrenceCall) -> None:
        self.call = call
        self.C = chunk_size(call)
        self.order: Tensor | None = None  # the sequences, longest first; None: as they are
        self.index: Tensor | None = None  # the token of each place in each chunk, T where there is none; None: dense
        if call.packing is None:
            depths = -(-call.tokens // self.C) if call.batch else 0
            self.active = [call.batch] * depths  # how many sequences reach each depth
        else:
            packed = PackedChunks.of(call.packing, self.C)
            self.active, self.order, self.index = packed.active, packed.order, packed.index
        self.starts = [0]
        for count in self.active:
            self.starts.append(self.starts[-1] + count)

    @property
    def chunks(self) -> int:
        """The number of chunks, all heads counted."""
        return self.starts[-1] * self.call.value_heads

    def slabs(self) -> list[Slab]:
        call, HV = self.call, self.call.value_heads
        limit = max(1, SLAB_NUMBERS // (HV * self.C * max(call.K, call.V)))  # (sequence, depth) pairs
        found, first = [], 0
        for depth in range(1, len(self.active) + 1):
            if depth == len(self.active) or self.starts[depth + 1] - self.starts[first] > limit:
                found.append(Slab(first, depth, slice(self.starts[first] * HV, self.starts[depth] * HV)))
                first = depth
        return found

    def depths(self, tile: Tensor | None, slab: Slab) -> Sequence[Any]:
        """The chunks of each depth of a slab, views of its tile; as many None for None."""
        counts = [active * self.call.value_heads for active in self.active[slab.first : slab.last]]
        return [None] * len(counts) if tile is None else torch.split_with_sizes(tile, counts)

    def load(self, x: Tensor, slab: Slab, tile: Tensor, minus: bool = False) -> Tensor:
        """Fills `tile` `[chunks, C, D]` with the tokens of a slab, or with minus them; heads are repeated to the value heads, places
        without a token are 0."""
        HV, C, T = self.call.value_heads, self.C, self.call.tokens
        (B, _, H), D = x.shape[:3], tile.shape[-1]
        if self.index is not None:
            index = self.index[self.starts[slab.first] : self.starts[slab.last]]
            tokens = tile.view(-1, H, HV // H, C, D).permute(0, 3, 1, 2, 4)  # [pairs, C, H, group, D]
            _put(x[0].reshape(T, H, 1, D)[index.clamp(max=T - 1)], tokens, minus)
            tokens[index == T] = 0
            return tile
        n, first = slab.last - slab.first, slab.first * C
        tokens = tile.view(n, B, H, HV // H, C, D).permute(1, 0, 4, 2, 3, 5)  # [B, n, C, H, group, D]
        x = x[:, first : first + n * C]
        whole = x.shape[1] // C
        if whole < n:
            rest, last = x[:, whole * C :], tokens[:, whole]
            _put(rest.reshape(B, rest.shape[1], H, 1, D), last[:, : rest.shape[1]], minus)
            last[:, rest.shape[1] :] = 0
            x, tokens = x[:, : whole * C], tokens[:, :whole]
        _put(x.reshape(B, whole, C, H, 1, D), tokens, minus)
        return tile

    def store(self, tile: Tensor, slab: Slab, out: Tensor, minus: bool = False) -> None:
        """The chunks `[chunks, C, D]` of a slab, or minus them, back to their tokens in `out` `[B, T, H, D]`, summed over the value heads
        of a head."""
        HV, C, T = self.call.value_heads, self.C, self.call.tokens
        B, _, H = out.shape[:3]
        out = out.view(B, T, H, -1)
        if H != HV:
            tile = tile.unflatten(0, (-1, HV // H)).sum(1)
        if self.index is not None:
            index = self.index[self.starts[slab.first] : self.starts[slab.last]]
            mask = index < T
            tokens = tile.unflatten(0, (-1, H)).transpose(1, 2)[mask].to(out.dtype)
            out[0, index[mask]] = tokens.neg_() if minus else tokens
            return
        n, first = slab.last - slab.first, slab.first * C
        tokens = tile.view(n, B, H, C, out.shape[3]).permute(1, 0, 3, 2, 4)  # [B, n, C, H, D]
        out = out[:, first : first + n * C]
        whole = out.shape[1] // C
        if whole < n:
            rest = out[:, whole * C :]
            _put(tokens[:, whole, : rest.shape[1]], rest, minus)
            out, tokens = out[:, : whole * C], tokens[:, :whole]
        _put(tokens, out.unflatten(1, (whole, C)), minus)

    def first_state(self, state: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The state `[N, HV, K, V]` a pass starts from (None: zeros), in the order of the chunks, as a new `[N * HV, K, V]`."""
        call = self.call
        if state is None:
            return torch.zeros(call.sequences * call.value_heads, call.K, call.V, dtype=dtype, device=call.device)
        state = state if self.order is None else state[self.order]
        return state.to(dtype).reshape(-1, call.K, call.V).clone(memory_format=torch.contiguous_format)

    def last_state(self, state: Tensor) -> Tensor:
        """The inverse of `first_state`."""
        state = state.unflatten(0, (self.call.sequences, self.call.value_heads))
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)


def _put(x: Tensor, out: Tensor, minus: bool) -> None:
    """`x` or `-x` into `out`, in the dtype of that."""
    if minus:
        torch.mul(x.expand_as(out), -1, out=out)  # torch.neg takes no other dtype
    else:
        out.copy_(x)
