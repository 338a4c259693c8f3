"""A call whose sequences go on at other ranks, in two halves each way: the exchange stands between them, and scores are made once.

Forward: `scores`, the maps of the pieces that a state leaves; then the state pass with what entered. Backward: `state` from the end for
the gradients of the states that entered; then the rest with those of the states that left. Where sequences are cut into segments, the
join of these is in two parts as well (`JoinedPieces`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import Kernel
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.triton_gpu import (
    Phases,
    gradients_from,
    outputs,
    scores_of,
    segment_ends,
    segment_maps,
    state_maps,
)
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import (
    ChunkInputs,
    ChunkScores,
    StateGradientResults,
    StateGradients,
    StateInputs,
    StateResults,
)
from flashmix.parallel.halves import Halves, Pieces, Shape, each, uncut


class JoinedPieces:
    """The segments of a call's pieces: joined before the exchange from what a piece has itself, and entered after it, all at once.

    The second takes products of the maps, which are made beside the first.
    """

    def __init__(self, run: Run, maps: Tensor) -> None:
        call = run.call
        self.run, self.maps = run, maps
        self.starts = torch.empty(*maps.shape[:3], call.V, call.K, dtype=maps.dtype, device=maps.device)
        self.entered: list[tuple[int, int]] = []  # the pieces that something is to enter
        self.products: Tensor | None = None

    def forward(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` and `M` of the pieces that a state leaves; `starts` are those without states that enter from other pieces."""
        run, state = self.run, self.run.call.initial_state
        if state is not None and pieces.continued:
            state = state.clone()
            for first, stop in uncut(pieces.continued):
                state[first:stop].zero_()
        left = pieces.begun + pieces.through
        last, (programs, products) = run.states() if left else None, self.multiplied(pieces.continued)
        run.plan.join_forward(programs, self.maps, state, self.starts, last, products, run.segmented)
        N = {} if last is None else {i: last[i] for i in left}
        M = {} if products is None else {i: products[i, :, -1].mT[:, : shape["M"][1]] for i in pieces.through}
        return N, M

    def backward(self, pieces: Pieces, ends: Tensor, dstate: Tensor) -> dict[int, Tensor]:
        """The gradients of the states that enter pieces; `starts` are those without gradients that come back from other pieces."""
        run, first = self.run, self.run.states() if pieces.continued else None
        programs, products = self.multiplied(tuple(sorted(pieces.begun + pieces.through)))
        run.plan.join_backward(programs, self.maps, ends, dstate, self.starts, first, products, run.segmented)
        return {} if first is None else {i: first[i] for i in pieces.continued}

    def multiplied(self, entered: tuple[int, ...]) -> tuple[int, Tensor | None]:
        """The programs of a join, and memory for products of the maps where something is to enter pieces."""
        N, HV, segments, rows, K = self.maps.shape
        self.entered = uncut(entered)
        if not entered:
            return self.run.join_programs(), None
        rows -= self.run.call.V
        self.products = torch.empty(N, HV, segments, rows, K, dtype=self.maps.dtype, device=self.maps.device)
        return self.run.join_programs(rows), self.products

    def enter(self, kernel: Kernel, states: Tensor) -> Tensor:
        """The starts of the segments with the states, or gradients, that entered pieces."""
        run, plan = self.run, self.run.plan.tiles
        blocks = cdiv(run.call.V, plan.enter.BV) * cdiv(run.call.K, plan.enter.BK)
        each = run.call.value_heads * plan.segments * blocks
        for first, stop in self.entered:
            assert self.products is not None
            parts = (x[first:stop] for x in (self.products, states, self.starts))
            kernel((stop - first) * each, *parts, run.segmented)
        return self.starts


def from_maps(maps: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """`N` `[n, HV, K, V]` and `M` in the shape that ranks send, of transposed maps `[n, HV, V + K, K]`."""
    V = shape["N"][2]
    N, M = maps[..., :V, :].mT, maps[..., V:, :].mT
    return N, M[..., : shape["M"][1], :]


def part(run: Run, scores: ChunkScores, first: int, stop: int) -> tuple[Run, ChunkScores]:
    """The sequences `first` to `stop` as a run of their own, with their scores."""
    if (first, stop) == (0, run.call.sequences):
        return run, scores
    rows, columns = (tuple([run.of_tokens(x, first, stop) for x in keys]) for keys in (scores.rows, scores.columns))
    per_chunk = scores.A, scores.factors, scores.total, scores.low, scores.long
    made = [None if t is None else run.of_chunks(t, first, stop) for t in per_chunk]
    return run.part(first, stop), ChunkScores(rows, columns, *made)


class ChunkForward:
    """The forward of a call: `maps`, then `outputs` with the states that entered."""

    def __init__(self, call: RecurrenceCall) -> None:
        self.run = Run.of(call)
        self.scores = self.make_scores()
        maps = segment_maps(self.run, self.scores)
        self.joined = None if maps is None else JoinedPieces(self.run, maps)

    def make_scores(self) -> ChunkScores:
        return scores_of(self.run)[1]

    def make_outputs(self, run: Run, joined: Outputs, save: bool) -> tuple[Outputs, Outputs]:
        return outputs(run, self.scores, joined, save)

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of the pieces that a state leaves, with the initial state of those that begin, and `M` of those that one also enters."""
        if self.joined is not None:
            return self.joined.forward(pieces, shape)
        N: dict[int, Tensor] = {}
        M: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.begun):
            N |= each(self._states(first, stop), first)
        for first, stop in uncut(pieces.through):
            run, scores = part(self.run, self.scores, first, stop)
            found = from_maps(state_maps(run, scores, 1)[:, :, 0], shape)
            N, M = N | each(found[0], first), M | each(found[1], first)
        return N, M

    def _states(self, first: int, stop: int) -> Tensor:
        """The final states of some pieces, which begin."""
        run, scores = part(self.run, self.scores, first, stop)
        call, state = run.call, run.states()
        x, out = StateInputs(call.v, call.initial_state, None), StateResults(None, state, None, None, None)
        run.plan.state_maps(run.rows * cdiv(call.V, run.plan.tiles.maps.BV), scores, x, out, run.where, run.n)
        return state

    def outputs(self, initial_state: Tensor, save: bool) -> tuple[Outputs, Outputs]:
        """Output, final state and what is kept, as the op's own forward has them."""
        run = replace(self.run, call=self.run.call.but(initial_state=initial_state))
        joined = (
            () if self.joined is None else (self.joined.maps, self.joined.enter(run.plan.enter_forward, initial_state))
        )
        return self.make_outputs(run, joined, save)


class ChunkBackward:
    """The backward of a call: `entering`, then `gradients` with those of the states that left."""

    def __init__(self, call: RecurrenceCall, kept: Outputs, do: Tensor | None) -> None:
        self.run = Run.of(call)
        self.do = torch.zeros_like(call.v) if do is None else do.to(call.dtype).contiguous()
        self.inputs, self.scores = self.make_scores(kept)
        self.kept = kept[-2:] if self.run.plan.tiles.segments > 1 else ()
        self.ends = segment_ends(self.run, self.scores, self.kept, self.do)
        self.joined = JoinedPieces(self.run, self.kept[0]) if self.kept else None

    def make_scores(self, kept: Outputs) -> tuple[ChunkInputs, ChunkScores]:
        return scores_of(self.run, kept)

    def phases(self, decay: bool) -> Phases | None:
        """What stands in for the phases of `gradients_from`."""
        return None

    def entering(self, dstate: Tensor, pieces: Pieces) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        if self.joined is not None and self.ends is not None:
            return self.joined.backward(pieces, self.ends, dstate)
        found: dict[int, Tensor] = {}
        for first, stop in uncut(pieces.continued):
            run, scores = part(self.run, self.scores, first, stop)
            do, dS0 = self.run.of_tokens(self.do, first, stop), run.states()
            x = StateGradients(do, dstate[first:stop], None)
            grid = run.rows * cdiv(run.call.V, run.plan.tiles.state_backward.BV)
            out = StateGradientResults(None, None, None, dS0, None)
            run.plan.state_ends(grid, scores, x, out, run.where, run.n)
            found |= each(dS0, first)
        return found

    def gradients(self, dstate: Tensor, wanted: frozenset[str]) -> Gradients:
        """The gradients of the call's tensors, with those of the states at the end of every piece."""
        starts = None if self.joined is None else self.joined.enter(self.run.plan.enter_backward, dstate)
        x = StateGradients(self.do, dstate, starts)
        decay = "log_decay" in wanted
        return gradients_from(self.run, self.inputs, self.scores, self.kept, x, decay, self.phases(decay))


HALVES = Halves(ChunkForward, ChunkBackward)
