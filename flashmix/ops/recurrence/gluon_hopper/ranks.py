"""A call whose sequences go on at other ranks, in the halves of `triton_gpu.ranks`, by the Hopper kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.memory import allocate, views
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import finished
from flashmix.ops.recurrence.gluon_hopper.memory import Saved, aligned, results, sizes_of, walks
from flashmix.ops.recurrence.gluon_hopper.phases import (
    ChunkReads,
    HopperRun,
    channel_reads,
    gradients,
    reads_of,
    save_states,
    scores,
    state_output,
    write_ends,
    write_last_state,
    write_maps,
)
from flashmix.ops.recurrence.triton_gpu import empty_maps
from flashmix.ops.recurrence.triton_gpu.ranks import JoinedPieces, from_maps
from flashmix.parallel.halves import Halves, Pieces, Shape, each, uncut


class Scored(NamedTuple):
    """What the phase `scores` makes of a call, and what the state passes read of it."""

    run: HopperRun
    reads: ChunkReads
    kept: list[
        Tensor
    ]  # T, without corrections empty, and the vectors of chunks; empty with a decay per channel, which makes them again
    decayed: list[Tensor]  # with a decay per channel: keys, A_qb and T, decays of chunks
    triton: Any  # what `output_backward_of_channels` reads

    @staticmethod
    def of(run: HopperRun, kept: Sequence[Tensor] | None = None) -> Scored:
        """Made, or as far as they are in what the forward `kept`: with a decay per channel again, and for the backward more."""
        sizes, device = sizes_of(run.call), run.call.device
        decayed = views(allocate(sizes.decayed_bytes, device), sizes.decayed)
        own = [] if decayed or kept is None else list(kept[:2])
        if not decayed and kept is None:
            own = [torch.empty(size=part.shape, dtype=part.dtype, device=device) for part in sizes.kept[:2]]
        reads, _, triton = scores(run, own, decayed, kept is None)
        return Scored(run, reads, own, decayed[:3], triton)

    def part(self, first: int, stop: int) -> tuple[HopperRun, ChunkReads]:
        """The sequences `first` to `stop` as a run of their own, and what its state passes read."""
        whole = self.run
        if (first, stop) == (0, whole.call.sequences):
            return whole, self.reads
        run = HopperRun(whole.base.part(first, stop))
        if not self.decayed:
            return run, reads_of(run, *(whole.base.of_chunks(t, first, stop) for t in self.kept))
        run.n, run.segmented = (
            n._replace(batch=whole.n.batch) for n in (run.n, run.segmented)
        )  # where kinds of keys lie
        keys, *chunks = self.decayed
        A, total = (whole.base.of_chunks(t, first, stop) for t in chunks)
        its = keys.flatten(0, 1) if run.call.packed else keys.flatten(0, 1)[first:]
        return run, channel_reads(run, its, A, total)


def state_maps(run: HopperRun, reads: ChunkReads) -> Tensor:
    """The maps of the segments, or of whole sequences where they are not cut, from nothing."""
    maps = empty_maps(run.call, run.segmented.segments)[0]
    write_maps(run, reads, maps)
    return maps


class HopperForward:
    """The forward of a call: `maps`, then `outputs` with the states that entered."""

    def __init__(self, call: RecurrenceCall) -> None:
        self.run = run = HopperRun.of(call)
        self.scored = Scored.of(run)
        cut = run.segmented.segments > 1
        self.joined = JoinedPieces(run.base, state_maps(run, self.scored.reads)) if cut else None

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of the pieces that a state leaves, with the initial state of those that begin, and `M` of those that one also enters."""
        if self.joined is not None:
            return self.joined.forward(pieces, shape)
        N: dict[int, Tensor] = {}
        M: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.begun):
            run, reads = self.scored.part(first, stop)
            state = run.base.states()
            write_last_state(run, reads, run.call.initial_state, state)
            N |= each(state, first)
        for first, stop in uncut(pieces.through):
            found = from_maps(state_maps(*self.scored.part(first, stop))[:, :, 0], shape)
            N, M = N | each(found[0], first), M | each(found[1], first)
        return N, M

    def outputs(self, initial_state: Tensor, save: bool) -> tuple[Outputs, Outputs]:
        """Output, final state and what is kept, as the op's own forward has them."""
        self.run.call = self.run.call.but(initial_state=initial_state)
        run, call = self.run, self.run.call
        joined = (
            ()
            if self.joined is None
            else (self.joined.maps, self.joined.enter(run.base.plan.enter_forward, initial_state))
        )
        o, state = run.base.tokens_like(call.V), run.base.states()
        if call.packed:
            o.zero_()  # tokens past the last sequence
        state_output(run, self.scored.reads, joined, o, state, Saved())
        return (o, state), (*self.scored.kept, *joined) if save else ()


class HopperBackward:
    """The backward of a call: `entering`, then `gradients` with those of the states that left."""

    def __init__(self, call: RecurrenceCall, kept: Outputs, do: Tensor | None) -> None:
        self.run = run = HopperRun.of(call)
        call = run.call
        self.do = torch.zeros_like(call.v) if do is None else aligned(do.to(call.dtype))
        self.scored = Scored.of(run, kept)
        self.segments = kept[-2:] if run.segmented.segments > 1 else ()
        self.joined = JoinedPieces(run.base, self.segments[0]) if self.segments else None

    def entering(self, dstate: Tensor, pieces: Pieces) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        if self.joined is not None:
            ends = torch.empty_like(self.joined.starts)
            write_ends(self.run, self.scored.reads, self.do, ends)
            return self.joined.backward(pieces, ends, dstate)
        found: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.continued):
            run, reads = self.scored.part(first, stop)
            do, dS0 = self.run.base.of_tokens(self.do, first, stop), run.base.states()
            tiles = reads.with_queries(run.tokens(do, 64))
            memory = run.memory(dstate[first:stop], None, dS0, None)
            run.launch(run.plan.state_ends, run.n, *tiles, None, None, memory)
            found |= each(dS0, first)
        return found

    def gradients(self, dstate: Tensor, wanted: frozenset[str]) -> Gradients:
        """The gradients of the call's tensors, with those of the states at the end of every piece."""
        run, found = self.run, results(self.run.call)
        sizes = sizes_of(run.call)
        walked = walks(run.call, sizes)
        parts = (sizes.work[0], *(sizes.counters if walked else sizes.states))
        dstates, *others = [torch.empty(size=part.shape, dtype=part.dtype, device=self.do.device) for part in parts]
        saved = Saved() if walked else Saved(*others)
        counters = others[0] if walked and others else None
        dstate = dstate.contiguous()
        starts = None if self.joined is None else self.joined.enter(run.base.plan.enter_backward, dstate)
        scored = self.scored.reads, self.segments, self.scored.triton
        if not walked:
            save_states(run, scored, saved)
        gradients(run, scored, (self.do, dstate, starts), dstates, saved, found, counters)
        return finished(run.call, found, wanted)


HALVES = Halves(HopperForward, HopperBackward)
