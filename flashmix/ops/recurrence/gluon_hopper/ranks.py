"""A call whose sequences go on at other ranks, in the halves of `triton_gpu.ranks`, by the Hopper kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import (
    HopperRun,
    finished,
    gradients,
    reads_of,
    results,
    scores,
    state_output,
    write_ends,
    write_maps,
)
from flashmix.ops.recurrence.gluon_hopper.memory import aligned, symbolic_sizes_of
from flashmix.ops.recurrence.triton_gpu import empty_maps
from flashmix.ops.recurrence.triton_gpu.ranks import JoinedPieces, from_maps
from flashmix.parallel.halves import Halves, Pieces, Shape, each, uncut


def state_maps(run: HopperRun, A: Tensor, vectors: Tensor) -> Tensor:
    """The maps of the segments, or of whole sequences where they are not cut, from nothing."""
    maps = empty_maps(run.call, run.segmented.segments)[0]
    write_maps(run, reads_of(run, A, vectors), maps)
    return maps


def part(run: HopperRun, first: int, stop: int, *made: Tensor) -> tuple[HopperRun, list[Tensor]]:
    """The sequences `first` to `stop` as a run of their own, with their tiles and vectors."""
    if (first, stop) == (0, run.call.sequences):
        return run, list(made)
    return HopperRun(run.base.part(first, stop)), [run.base.of_chunks(t, first, stop) for t in made]


class HopperForward:
    """The forward of a call: `maps`, then `outputs` with the states that entered."""

    def __init__(self, call: RecurrenceCall) -> None:
        self.run = run = HopperRun.of(call)
        pairs, vectors = symbolic_sizes_of(run.call).kept[:2]
        self.scores = [torch.empty(size=x.shape, dtype=x.dtype, device=call.device) for x in (pairs, vectors)]
        scores(run, self.scores, [], True)
        cut = run.segmented.segments > 1
        self.joined = JoinedPieces(run.base, state_maps(run, *self.scores)) if cut else None

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of the pieces that a state leaves, with the initial state of those that begin, and `M` of those that one also enters."""
        if self.joined is not None:
            return self.joined.forward(pieces, shape)
        N: dict[int, Tensor] = {}
        M: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.begun):
            run, (A, vectors) = part(self.run, first, stop, *self.scores)
            state = run.base.states()
            memory = run.memory(run.call.initial_state, None, state, None)
            tiles = reads_of(run, A, vectors).without(run.tokens(run.call.v, 64))
            run.plan.state_maps(run.state_programs, *tiles, None, None, None, memory, run.n)
            N |= each(state, first)
        for first, stop in uncut(pieces.through):
            run, (A, vectors) = part(self.run, first, stop, *self.scores)
            found = from_maps(state_maps(run, A, vectors)[:, :, 0], shape)
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
        state_output(run, reads_of(run, *self.scores), joined, o, state)
        return (o, state), (*self.scores, *joined) if save else ()


class HopperBackward:
    """The backward of a call: `entering`, then `gradients` with those of the states that left."""

    def __init__(self, call: RecurrenceCall, kept: Outputs, do: Tensor | None) -> None:
        self.run, self.kept = HopperRun.of(call), kept
        call = self.run.call
        self.do = torch.zeros_like(call.v) if do is None else aligned(do.to(call.dtype))
        self.joined = JoinedPieces(self.run.base, kept[2]) if len(kept) > 2 else None

    def entering(self, dstate: Tensor, pieces: Pieces) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        A, vectors, *_ = self.kept
        if self.joined is not None:
            ends = torch.empty_like(self.joined.starts)
            write_ends(self.run, reads_of(self.run, A, vectors), self.do, ends)
            return self.joined.backward(pieces, ends, dstate)
        found: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.continued):
            run, (A, vectors) = part(self.run, first, stop, self.kept[0], self.kept[1])
            do, dS0 = self.run.base.of_tokens(self.do, first, stop), run.base.states()
            tiles = reads_of(run, A, vectors).with_queries(run.tokens(do, 64))
            memory = run.memory(dstate[first:stop], None, dS0, None)
            run.plan.state_ends(run.state_programs, *tiles, None, None, memory, run.n)
            found |= each(dS0, first)
        return found

    def gradients(self, dstate: Tensor, wanted: frozenset[str]) -> Gradients:
        """The gradients of the call's tensors, with those of the states at the end of every piece."""
        run, found = self.run, results(self.run.call)
        A, vectors, *joined = self.kept
        parts = symbolic_sizes_of(run.call).work[: 3 if run.call.rule.corrected else 2]
        work = [torch.empty(size=part.shape, dtype=part.dtype, device=self.do.device) for part in parts]
        dstate = dstate.contiguous()
        starts = None if self.joined is None else self.joined.enter(run.base.plan.enter_backward, dstate)
        gradients(run, (reads_of(run, A, vectors), joined, None), (self.do, dstate, starts), work, found)
        return finished(run.call, found, wanted)


HALVES = Halves(HopperForward, HopperBackward)
