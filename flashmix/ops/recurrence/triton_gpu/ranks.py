"""A call whose sequences go on at other ranks, in two halves each way: the exchange stands between them, and scores are made once.

Forward: `scores`, the maps of the pieces that a state leaves; then the state pass with what entered. Backward: `state` from the end for
the gradients of the states that entered; then the rest with those of the states that left. Where sequences are cut into segments, the
map of a piece is the product of those of its segments, which the launch has that joins them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashmix.gpu.blocks import cdiv
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.triton_gpu import (
    gradients_from,
    join_backward,
    join_forward,
    outputs,
    scores_of,
    segment_ends,
    segment_maps,
    state_maps,
)
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import (
    ChunkScores,
    StateGradientResults,
    StateGradients,
    StateInputs,
    StateResults,
)
from flashmix.parallel.halves import Halves, Pieces, Shape, each, uncut


def composed(maps: Tensor, V: int, diagonal: bool) -> Tensor:
    """The map of each sequence, `[N, HV, V + K, K]`, from those of its segments: neighbours joined in pairs, again and again."""
    while maps.shape[2] > 1:
        count = maps.shape[2] // 2 * 2
        first, second = maps[:, :, 0:count:2], maps[:, :, 1:count:2]
        M, N = second[..., V:, :], pad(second[..., :V, :], (0, 0, 0, first.shape[3] - V))
        both = torch.addcmul(N, first, M) if diagonal else first @ M + N
        maps = torch.cat([both, maps[:, :, count:]], 2)
    return maps[:, :, 0]


def from_maps(maps: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """`N` `[n, HV, K, V]` and `M` in the shape that ranks send, of transposed maps `[n, HV, V + K, K]`."""
    V = shape["N"][2]
    N, M = maps[..., :V, :].mT, maps[..., V:, :].mT
    return N, M[..., : shape["M"][1], :] if M.shape[-1] == 1 else M


def of_segments(
    call: RecurrenceCall, maps: Tensor, starts: Tensor | None, pieces: Pieces, shape: Shape
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The `N` and `M` that ranks send, from the maps of the segments of all pieces, and from their `starts` where pieces begin."""
    diagonal, V = not call.rule.corrected, call.V
    N: dict[int, Tensor] = {}
    M: dict[int, Tensor] = {}
    for first, stop in uncut(pieces.begun):
        assert starts is not None
        last, S = maps[first:stop, :, -1], starts[first:stop, :, -1]
        own, through = last[..., :V, :], last[..., V:, :]
        N |= each(applied(through.mT, S.mT, own.mT, diagonal), first)
    for first, stop in uncut(pieces.through):
        found = from_maps(composed(maps[first:stop], V, diagonal), shape)
        N, M = N | each(found[0], first), M | each(found[1], first)
    return N, M


def applied(M: Tensor, S: Tensor, N: Tensor, diagonal: bool) -> Tensor:
    """`M S + N` of `[n, HV, ., .]`, contiguous; M is a column where it is diagonal."""
    out = torch.empty(N.shape, dtype=N.dtype, device=N.device)
    if diagonal:
        return torch.addcmul(N, M, S, out=out)
    torch.baddbmm(*(x.flatten(0, 1) for x in (N, M, S)), out=out.view(-1, *N.shape[2:]))
    return out


def back_through(maps: Tensor, gradient: Tensor, own: Tensor, V: int, diagonal: bool) -> Tensor:
    """The gradient that enters a segment, `[..., K, V]`: `M^T` of the one that leaves it, and its own; both are transposed."""
    M = maps[..., V:, :]
    return applied(M.mT if diagonal else M, gradient.mT, own.mT, diagonal)


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
        _, self.scores = scores_of(self.run)
        self.segments = segment_maps(self.run, self.scores)

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of the pieces that a state leaves, with the initial state of those that begin, and `M` of those that one also enters."""
        if self.segments is not None:
            starts = join_forward(self.run, self.segments)[1] if pieces.begun else None
            return of_segments(self.run.call, self.segments, starts, pieces, shape)
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
        return outputs(run, self.scores, self.segments, save)


class ChunkBackward:
    """The backward of a call: `entering`, then `gradients` with those of the states that left."""

    def __init__(self, call: RecurrenceCall, kept: Outputs, do: Tensor | None) -> None:
        self.run = Run.of(call)
        self.do = torch.zeros_like(call.v) if do is None else do.to(call.dtype).contiguous()
        self.inputs, self.scores = scores_of(self.run, kept)
        self.joined = kept[-2:] if self.run.plan.tiles.segments > 1 else ()
        self.ends = segment_ends(self.run, self.scores, self.joined, StateGradients(self.do, None, None))
        self.diagonal = not call.rule.corrected

    def entering(self, dstate: Tensor, continued: Sequence[int]) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        found: dict[int, Tensor] = {}
        if self.ends is not None:
            if continued:
                maps, V = self.joined[0], self.run.call.V
                last = join_backward(self.run, maps, self.ends, dstate)[:, :, 0]
                D = back_through(maps[:, :, 0], last, self.ends[:, :, 0], V, self.diagonal)
                found = {i: D[i] for i in continued}
            return found
        for first, stop in uncut(continued):
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
        x = StateGradients(self.do, dstate, None)
        decay = "log_decay" in wanted
        return gradients_from(self.run, self.inputs, self.scores, self.joined, x, self.ends, decay)


HALVES = Halves(ChunkForward, ChunkBackward)
