"""From tokens `[B, T, H, D]` to chunks `[chunks, C, D]` and back.

A sequence is cut into chunks of `CHUNK` tokens, the last one padded with zeros. The *depth* of a chunk is its place in its
sequence. Chunks are ordered by depth, then sequence, then head, with the longest sequences first: all chunks of one depth
lie side by side, so that the serial pass over depths works on plain slices, for dense and packed batches alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.ops.packing import check_boundaries
from flashmix.ops.recurrence.problem import Problem

CHUNK = 64
# A slab is as many depths as fit in this many numbers of one tile: what the phases work on at a time stays in cache.
SLAB_NUMBERS = 1 << 17


@dataclass(frozen=True)
class Slab:
    """Consecutive depths `[first, last)` that are worked on at a time."""

    first: int
    last: int


class Layout:
    """Where each token of a call stands among its chunks."""

    def __init__(self, problem: Problem, cu_seqlens: Tensor | None) -> None:
        self.problem = problem
        self.order: Tensor | None = None
        self.index: Tensor | None = None
        if cu_seqlens is None:
            depths = -(-problem.tokens // CHUNK)
            self.active = [problem.batch] * (depths if problem.batch else 0)
        else:
            self._pack(cu_seqlens)
        self.starts = [0]
        for count in self.active:
            self.starts.append(self.starts[-1] + count)

    def _pack(self, cu_seqlens: Tensor) -> None:
        boundaries = cu_seqlens.tolist()
        check_boundaries(boundaries, self.problem.tokens)
        device = cu_seqlens.device
        cu = torch.tensor(boundaries, dtype=torch.int64)
        chunks = -(-cu.diff() // CHUNK)
        order = torch.argsort(chunks, descending=True, stable=True)
        depths = int(chunks.max()) if len(chunks) else 0
        self.active = [int(count) for count in (chunks[None, :] > torch.arange(depths)[:, None]).sum(1)]
        depth = torch.repeat_interleave(torch.arange(depths), torch.tensor(self.active, dtype=torch.int64))
        sequence = torch.cat([order[:count] for count in self.active]) if depths else order[:0]
        token = (cu[sequence] + depth * CHUNK)[:, None] + torch.arange(CHUNK)
        index = torch.where(token < cu[sequence + 1][:, None], token, self.problem.tokens)
        self.index, self.order = index.to(device), order.to(device)  # token T stands for "no token"

    @staticmethod
    def chunk_bound(problem: Problem) -> int:
        """How many (sequence, depth) pairs there can be at most, from the sizes alone."""
        if problem.packed:
            return problem.tokens // CHUNK + problem.sequences
        return problem.batch * (-(-problem.tokens // CHUNK))

    def chunks(self, slab: Slab) -> slice:
        """The chunks of a slab, all heads, as a slice of any tile of the whole call."""
        HV = self.problem.value_heads
        return slice(self.starts[slab.first] * HV, self.starts[slab.last] * HV)

    def at(self, depth: int, slab: Slab) -> slice:
        """The chunks of one depth, as a slice of the tiles of its slab."""
        HV, base = self.problem.value_heads, self.starts[slab.first]
        return slice((self.starts[depth] - base) * HV, (self.starts[depth + 1] - base) * HV)

    def slabs(self) -> list[Slab]:
        p = self.problem
        limit = max(1, SLAB_NUMBERS // (p.value_heads * CHUNK * max(p.K, p.V)))  # (sequence, depth) pairs
        found, first = [], 0
        for depth in range(1, len(self.active) + 1):
            if depth == len(self.active) or self.starts[depth + 1] - self.starts[first] > limit:
                found.append(Slab(first, depth))
                first = depth
        return found

    def load(self, x: Tensor, slab: Slab, dtype: torch.dtype) -> Tensor:
        """The tokens of a slab as chunks `[chunks, CHUNK, ...]`, heads repeated to the value heads, zeros where no token is."""
        p = self.problem
        rest = x.shape[3:]
        if self.index is None:
            n = slab.last - slab.first
            x = x[:, slab.first * CHUNK : slab.last * CHUNK]
            missing = n * CHUNK - x.shape[1]
            if missing:
                x = torch.cat([x, x.new_zeros(p.batch, missing, *x.shape[2:])], 1)
            x = x.unflatten(1, (n, CHUNK)).transpose(0, 1)  # [n, B, C, H, ...]
        else:
            index = self.index[self.starts[slab.first] : self.starts[slab.last]]
            there = (index < p.tokens).reshape(*index.shape, *[1] * (x.dim() - 2))
            x = torch.where(there, x[0][index.clamp(max=max(p.tokens - 1, 0))], x.new_zeros(()))[None]  # [1, n, C, H, ...]
        x = x.transpose(2, 3)
        if x.shape[2] != p.value_heads:
            group = p.value_heads // x.shape[2]
            x = x.unsqueeze(3).expand(*x.shape[:3], group, *x.shape[3:])
        return x.to(dtype).reshape(-1, CHUNK, *rest).contiguous()

    def store(self, tile: Tensor, slab: Slab, out: Tensor) -> None:
        """The chunks of a slab back to their tokens in `out` `[B, T, H, ...]`, summed over the value heads of a head."""
        p = self.problem
        H = out.shape[2]
        rest = tile.shape[2:]
        if p.value_heads != H:
            tile = tile.reshape(-1, H, p.value_heads // H, CHUNK, *rest).sum(2)
        if self.index is None:
            n = slab.last - slab.first
            tile = tile.reshape(n, p.batch, H, CHUNK, *rest).transpose(2, 3).transpose(0, 1)  # [B, n, C, H, ...]
            first, last = slab.first * CHUNK, min(slab.last * CHUNK, p.tokens)
            whole = (last - first) // CHUNK
            out[:, first : first + whole * CHUNK].unflatten(1, (whole, CHUNK)).copy_(tile[:, :whole])
            if whole < n:
                out[:, first + whole * CHUNK : last] = tile[:, whole, : last - first - whole * CHUNK]
        else:
            index = self.index[self.starts[slab.first] : self.starts[slab.last]]
            tile = tile.reshape(-1, H, CHUNK, *rest).transpose(1, 2)  # [n, C, H, ...]
            there = index < p.tokens
            out[0, index[there]] = tile[there].to(out.dtype)

    def sort_state(self, state: Tensor) -> Tensor:
        """States `[N, HV, K, V]` in the order of the chunks, as a new `[N * HV, K, V]`."""
        state = state if self.order is None else state[self.order]
        return state.reshape(-1, *state.shape[2:]).clone()

    def unsort_state(self, state: Tensor) -> Tensor:
        """The inverse of `sort_state`."""
        state = state.unflatten(0, (self.problem.sequences, self.problem.value_heads))
        return state if self.order is None else torch.empty_like(state).index_copy_(0, self.order, state)
