"""A call whose sequences go on at other ranks, in the halves of `triton_gpu.ranks`, by the Hopper kernels."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import (
    HopperRun,
    gradient_of,
    gradient_tiles,
    gradients_from,
    join_backward,
    join_forward,
    map_tiles,
    outputs,
    scores_of,
    segment_ends,
    segment_maps,
    state_maps,
)
from flashmix.ops.recurrence.triton_gpu.ranks import back_through, from_maps, of_segments
from flashmix.parallel.halves import Halves, Pieces, Shape, each, uncut


def part(run: HopperRun, first: int, stop: int, *made: Tensor) -> tuple[HopperRun, list[Tensor]]:
    """The sequences `first` to `stop` as a run of their own, with their tiles and vectors."""
    if (first, stop) == (0, run.call.sequences):
        return run, list(made)
    return HopperRun(run.base.part(first, stop)), [run.base.of_chunks(t, first, stop) for t in made]


class HopperForward:
    """The forward of a call: `maps`, then `outputs` with the states that entered."""

    def __init__(self, call: RecurrenceCall) -> None:
        self.run = HopperRun.of(call)
        self.scores = scores_of(self.run)
        self.segments = segment_maps(self.run, *self.scores)

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of the pieces that a state leaves, with the initial state of those that begin, and `M` of those that one also enters."""
        if self.segments is not None:
            starts = join_forward(self.run, self.segments)[1] if pieces.begun else None
            return of_segments(self.run.call, self.segments, starts, pieces, shape)
        N: dict[int, Tensor] = {}
        M: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.begun):
            run, (A, vectors) = part(self.run, first, stop, *self.scores)
            state = run.base.states()
            memory = run.memory(run.call.initial_state, None, state, None)
            run.plan.state_maps(run.state_programs, *map_tiles(run, A, vectors), memory, run.n)
            N |= each(state, first)
        for first, stop in uncut(pieces.through):
            run, (A, vectors) = part(self.run, first, stop, *self.scores)
            found = from_maps(state_maps(run, A, vectors)[:, :, 0], shape)
            N, M = N | each(found[0], first), M | each(found[1], first)
        return N, M

    def outputs(self, initial_state: Tensor, save: bool) -> tuple[Outputs, Outputs]:
        """Output, final state and what is kept, as the op's own forward has them."""
        self.run.call = self.run.call.but(initial_state=initial_state)
        return outputs(self.run, *self.scores, self.segments, save)


class HopperBackward:
    """The backward of a call: `entering`, then `gradients` with those of the states that left."""

    def __init__(self, call: RecurrenceCall, kept: Outputs, do: Tensor | None) -> None:
        self.run, self.kept = HopperRun.of(call), kept
        self.do = gradient_of(self.run.call, do)
        self.ends = segment_ends(self.run, kept, self.do)

    def entering(self, dstate: Tensor, continued: Sequence[int]) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        found: dict[int, Tensor] = {}
        if self.ends is not None:
            if continued:
                maps, V = self.kept[2], self.run.call.V
                last = join_backward(self.run, maps, self.ends, dstate)[:, :, 0]
                D = back_through(maps[:, :, 0], last, self.ends[:, :, 0], V, diagonal=False).mT
                found = {i: D[i] for i in continued}
            return found
        for first, stop in uncut(continued):
            run, (A, vectors) = part(self.run, first, stop, self.kept[0], self.kept[1])
            do, dS0 = self.run.base.of_tokens(self.do, first, stop), run.base.states()
            x, memory = gradient_tiles(run, A, vectors, do), run.memory(dstate[first:stop], None, dS0, None)
            run.plan.state_ends(run.state_programs, *x, None, None, memory, run.n)
            found |= each(dS0, first)
        return found

    def gradients(self, dstate: Tensor, wanted: frozenset[str]) -> Gradients:
        """The gradients of the call's tensors, with those of the states at the end of every piece."""
        return gradients_from(self.run, self.kept, self.do, dstate, self.ends, "log_decay" in wanted)


HALVES = Halves(HopperForward, HopperBackward)
