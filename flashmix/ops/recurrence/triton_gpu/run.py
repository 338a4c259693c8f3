"""One call of the recurrence as its phases see it: the plan, where its chunks lie, and the memory of results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.triton_gpu.layout import chunk_tables, count_chunks
from flashmix.ops.recurrence.triton_gpu.plan import Plan, plan
from flashmix.ops.recurrence.triton_gpu.structs import ChunkNumbers, ChunkTables

PER_TOKEN = ("q", "k", "v", "a", "b", "beta", "log_decay")
FIELDS = (*PER_TOKEN, "initial_state")


@dataclass(frozen=True)
class Run:
    """One call with contiguous tensors: its plan, its chunks and the memory of its results."""

    call: RecurrenceCall
    plan: Plan
    chunks: int
    where: ChunkTables
    n: ChunkNumbers
    transposed: bool = False

    @staticmethod
    def of(call: RecurrenceCall, transposed: bool = False) -> Run:
        own = plan(call, transposed)
        call = call.but(**{name: t.contiguous() for name in FIELDS if (t := getattr(call, name)) is not None})
        C = own.tiles.C
        numbers = ChunkNumbers(call.scale, call.tokens, cdiv(call.tokens, C), 1)
        return Run(call, own, count_chunks(call, C), chunk_tables(call, C), numbers, transposed)

    @property
    def chunk_programs(self) -> int:
        return self.chunks * self.call.value_heads

    @property
    def rows(self) -> int:
        """Sequences times value heads: each has a state."""
        return self.call.sequences * self.call.value_heads

    def join_programs(self, multiplied: int = 0) -> int:
        """Programs of the passes that join segments, with those for so many rows of products of maps."""
        BV = self.plan.tiles.join.BV
        return self.rows * (cdiv(self.call.V, BV) + cdiv(multiplied, BV))

    @property
    def segmented(self) -> ChunkNumbers:
        return self.n._replace(segments=self.plan.tiles.segments)

    def part(self, first: int, stop: int) -> Run:
        """The sequences `first` to `stop` as a run of their own, of what `of_tokens` and `of_chunks` give."""
        c = self.call
        state = None if c.initial_state is None else c.initial_state[first:stop]
        if c.packing is not None:  # everything stays in its place: the tables say which sequences these are
            cu, offsets = self.where.cu_seqlens[first : stop + 1], self.where.offsets[first : stop + 1]
            call = c.but(packing=Packing.unchecked(cu, c.tokens), initial_state=state)
            return replace(self, call=call, where=self.where._replace(cu_seqlens=cu, offsets=offsets))
        names = [name for name in PER_TOKEN if (t := getattr(c, name)) is not None and t.dim() > 1]
        call = c.but(**{name: getattr(c, name)[first:stop] for name in names}, initial_state=state)
        return replace(self, call=call, chunks=(stop - first) * self.n.chunks)

    def stretch(self, first: int, stop: int, initial_state: Tensor | None) -> Run:
        """The chunks `first` to `stop` of the only sequence of a dense call as a run of their own, of what `of_stretch` gives."""
        c = self.call
        names = [name for name in PER_TOKEN if (t := getattr(c, name)) is not None and t.dim() > 1]
        its = {name: self.of_stretch(getattr(c, name), first, stop) for name in names}
        call = c.but(**its, initial_state=initial_state)
        n = self.n._replace(tokens=call.tokens, chunks=stop - first)
        return replace(self, call=call, chunks=stop - first, n=n)

    def of_stretch(self, t: Tensor, first: int, stop: int) -> Tensor:
        """Of a tensor `[1, T, ...]` the tokens of the chunks `first` to `stop`."""
        C = self.plan.tiles.C
        return t[:, first * C : stop * C]

    def of_tokens(self, t: Tensor, first: int, stop: int) -> Tensor:
        """Of a tensor `[B, T, ...]` the part for the run of the sequences `first` to `stop`."""
        return t if self.call.packed else t[first:stop]

    def of_chunks(self, t: Tensor, first: int, stop: int) -> Tensor:
        """The same of `[chunks, ...]`."""
        return t if self.call.packed else t[first * self.n.chunks : stop * self.n.chunks]

    def tokens_like(self, width: int) -> Tensor:
        """`[B, T, HV, width]` in the dtype of the call."""
        c = self.call
        return torch.empty(c.batch, c.tokens, c.value_heads, width, dtype=c.dtype, device=c.device)

    def gradient_like(self, width: int) -> Tensor:
        """The same for gradients: tokens past the last sequence of a packed batch are in no chunk and stay 0."""
        found = self.tokens_like(width)
        return found.zero_() if self.call.packed else found

    def per_chunk(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.chunks, self.call.value_heads, *shape, dtype=dtype, device=self.call.device)

    def states(self) -> Tensor:
        """States as the caller has them."""
        c = self.call
        shape = (c.V, c.K) if self.transposed else (c.K, c.V)
        return torch.empty(c.sequences, c.value_heads, *shape, dtype=torch.float32, device=c.device)
