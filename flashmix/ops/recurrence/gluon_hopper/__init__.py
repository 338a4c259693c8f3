"""The recurrence on Hopper, in Gluon: phases of docs/chunk_algorithm.md for the tied delta rule with at most one decay a token.

The phases, what they keep and the tables of a packed batch are those of `triton_gpu`; here are their kernels with warps of different
roles, copies by TMA and the state in the accumulators of `wgmma`. Forward: `scores`, `state` with the output. Backward: `state` for the
states that chunks start from, `state` from the end, then `output`, with the sums over value heads that share a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import descriptors
from flashmix.ops.recurrence.gluon_hopper.plan import HopperPlan, hopper_plan
from flashmix.ops.recurrence.gluon_hopper.structs import HopperNumbers, OutputMemory, ScoresMemory, StateMemory
from flashmix.ops.recurrence.step.triton_gpu import step
from flashmix.ops.recurrence.triton_gpu import empty_maps, is_step, per_token
from flashmix.ops.recurrence.triton_gpu.layout import count_chunks
from flashmix.ops.recurrence.triton_gpu.plan import plan
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.parallel.halves import Halves

__all__ = ["backward", "forward", "halves", "keeps"]

TILED = ("q", "k", "v")  # operands that TMA reads


class HopperRun:
    """One call with its plan, its place in memory and what its kernels are told of it."""

    def __init__(self, base: Run) -> None:
        self.base, self.call = base, base.call
        self.plan: HopperPlan = hopper_plan(self.call, self.base.plan)
        self.segments = self.plan.triton.tiles.segments
        n, items = self.base.n, self.base.chunks * self.call.heads
        self.n = HopperNumbers(n.scale, n.tokens, n.chunks, 1, items)
        self.segmented = self.n._replace(segments=self.segments)
        assert self.call.k is not None
        self.q, self.k = self.tokens(self.call.q, 128), self.tokens(self.call.k, 128)

    @staticmethod
    def of(call: RecurrenceCall) -> HopperRun:
        moved = {name: x for name in TILED if (x := aligned(getattr(call, name))) is not getattr(call, name)}
        return HopperRun(Run.of(call.but(**moved) if moved else call))

    @property
    def state_programs(self) -> int:
        """Programs of a state pass in which each segment has one state."""
        return self.base.rows * self.segments * (2 // self.plan.warpgroups)

    def tokens(self, x: Tensor, width: int) -> Tiles:
        return descriptors.tokens(x, width, self.call.packed)

    def memory(
        self, state: Tensor | None, starts: Tensor | None, result: Tensor | None, ends: Tensor | None
    ) -> StateMemory:
        where = self.base.where
        return StateMemory(where.cu_seqlens, where.offsets, state, starts, result, ends)


def aligned(x: Tensor) -> Tensor:
    """The tensor contiguous and at an address that TMA can read from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state; keeps the tiles of pairs, the vectors of chunks, and the segments' maps and starts."""
    if is_step(call):
        return step(call), ()
    run = HopperRun.of(call)
    A, vectors = scores_of(run)
    return outputs(run, A, vectors, segment_maps(run, A, vectors), save)


def outputs(run: HopperRun, A: Tensor, vectors: Tensor, maps: Tensor | None, save: bool) -> tuple[Outputs, Outputs]:
    """Output, final state and what is kept, from the scores and the maps of the segments."""
    call = run.call
    o, state = run.base.tokens_like(call.V), run.base.states()
    if call.packed:
        o.zero_()  # tokens past the last sequence
    joined = join_forward(run, maps)
    x = run.memory(call.initial_state, joined[1] if joined else None, state, None)
    n = run.segmented if joined else run.n
    tiles = (run.q, run.k, run.tokens(call.v, 64), *scores_tiles(A, vectors, 2))
    run.plan.state_output(run.state_programs, *tiles, run.tokens(o, 64), None, None, x, n)
    return (o, state), (A, vectors, *joined) if save else ()


def halves(call: RecurrenceCall) -> Halves | None:
    """Both halves of a call over ranks, where there are such."""
    from flashmix.ops.recurrence.gluon_hopper.ranks import HALVES

    return HALVES


def keeps(call: RecurrenceCall) -> Outputs:
    """Empty tensors like those that `forward` keeps."""
    if is_step(call):
        return ()
    segments = plan(call).tiles.segments
    chunks = count_chunks(call, 64), call.value_heads
    A = torch.empty(*chunks, 2, 64, 64, dtype=call.dtype, device=call.device)
    vectors = torch.empty(*chunks, 4, 64, dtype=torch.float32, device=call.device)
    return (A, vectors, *(empty_maps(call, segments) if segments > 1 else ()))


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all given operands; that of the decay only if it is wanted."""
    run = HopperRun.of(call)
    do, dstate = grads
    do = gradient_of(run.call, do)
    dstate = None if dstate is None else dstate.contiguous()
    kept = kept or scores_of(run)  # of one token a sequence nothing is kept
    return gradients_from(run, kept, do, dstate, segment_ends(run, kept, do), "log_decay" in wanted)


def gradient_of(call: RecurrenceCall, do: Tensor | None) -> Tensor:
    """The gradient of the output as TMA reads it."""
    return torch.zeros_like(call.v) if do is None else aligned(do.to(call.dtype))


def gradients_from(
    run: HopperRun, kept: Outputs, do: Tensor, dstate: Tensor | None, ends: Tensor | None, decay: bool
) -> Gradients:
    """The gradients from what was kept and what the segments send back."""
    call = run.call
    A, vectors, *joined = kept
    states, dstates = (run.base.per_chunk(call.V, call.K, dtype=call.dtype) for _ in range(2))
    nu, dr = run.base.tokens_like(call.V), run.base.gradient_like(call.V)
    n = run.segmented if joined else run.n
    x = run.memory(call.initial_state, joined[1] if joined else None, None, None)
    tiles = (None, run.k, run.tokens(call.v, 64), *scores_tiles(A, vectors, 1))
    results = (None, descriptors.states(states, 64, 128), run.tokens(nu, 64))
    run.plan.state_save(run.state_programs, *tiles, *results, x, n)
    dS0 = None if call.initial_state is None else run.base.states()
    starts = None if ends is None else join_backward(run, joined[0], ends, dstate)
    state_backward(run, (A, vectors), starts, (do, dstate), (dstates, dr, dS0))
    found = output_backward(run, (do, dr, nu, states, dstates), vectors, decay)
    found["v"] = dr
    if dS0 is not None:
        found["initial_state"] = dS0
    return found


def scores_of(run: HopperRun) -> tuple[Tensor, Tensor]:
    """The tiles of pairs A_qb and T, `[chunks, HV, 2, 64, 64]`, and the vectors of chunks, `[chunks, HV, 4, 64]`."""
    call, base = run.call, run.base
    A, vectors = base.per_chunk(2, 64, 64, dtype=call.dtype), base.per_chunk(4, 64)
    x = ScoresMemory(base.where.spans, call.beta, call.log_decay, vectors)
    run.plan.scores(run.n.items, run.q, run.k, descriptors.pairs(A, 1), x, run.n)
    return A, vectors


def scores_tiles(A: Tensor, vectors: Tensor, tiles: int) -> tuple[Tiles, Tiles]:
    """The tiles of pairs, both or T alone at a time, and the vectors."""
    return descriptors.pairs(A, tiles), descriptors.vectors(vectors)


def segment_maps(run: HopperRun, A: Tensor, vectors: Tensor) -> Tensor | None:
    """Where the state pass is cut into segments, the map of each; else None."""
    return state_maps(run, A, vectors) if run.segments > 1 else None


def state_maps(run: HopperRun, A: Tensor, vectors: Tensor) -> Tensor:
    """The maps of the segments, or of whole sequences where they are not cut, from nothing."""
    maps = empty_maps(run.call, run.segments)[0]
    memory = run.memory(None, None, None, maps)
    run.plan.state_maps(2 * run.state_programs, *map_tiles(run, A, vectors), memory, run.segmented)
    return maps


def map_tiles(run: HopperRun, A: Tensor, vectors: Tensor) -> tuple[Tiles | None, ...]:
    """What a state pass reads that writes neither outputs nor states of chunks."""
    return None, run.k, run.tokens(run.call.v, 64), *scores_tiles(A, vectors, 1), None, None, None


def join_forward(run: HopperRun, maps: Tensor | None) -> Outputs:
    """The maps of the segments and the state that each starts from; nothing where there are none."""
    if maps is None:
        return ()
    call = run.call
    starts = torch.empty(*maps.shape[:3], call.V, call.K, dtype=torch.float32, device=call.device)
    join(run, run.plan.triton.join_forward, maps, call.initial_state, starts)
    return maps, starts


def join(run: HopperRun, kernel: Any, *tensors: Tensor | None) -> None:
    """One of the passes over the maps of segments, by the Triton kernel."""
    own = run.plan.triton.tiles
    kernel(run.base.rows * -(-run.call.V // own.join.BV), *tensors, run.base.segmented)


def segment_ends(run: HopperRun, kept: Outputs, do: Tensor) -> Tensor | None:
    """Where the state pass is cut into segments, what each sends back from nothing; else None."""
    A, vectors, *joined = kept
    if not joined:
        return None
    ends = torch.empty_like(joined[1])
    x = gradient_tiles(run, A, vectors, do)
    run.plan.state_ends(run.state_programs, *x, None, None, run.memory(None, None, None, ends), run.segmented)
    return ends


def gradient_tiles(run: HopperRun, A: Tensor, vectors: Tensor, do: Tensor) -> tuple[Tiles, ...]:
    """What a state pass from the end reads."""
    return run.q, run.k, run.tokens(do, 64), *scores_tiles(A, vectors, 2)


def join_backward(run: HopperRun, maps: Tensor, ends: Tensor, dstate: Tensor | None) -> Tensor:
    """The gradient that reaches the end of each segment."""
    starts = torch.empty_like(ends)
    join(run, run.plan.triton.join_backward, maps, ends, dstate, starts)
    return starts


def state_backward(
    run: HopperRun,
    scores: tuple[Tensor, Tensor],
    starts: Tensor | None,
    grads: tuple[Tensor, Tensor | None],
    results: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """The state pass from the end, in segments where they have `starts`."""
    (do, dstate), (dstates, dr, dS0) = grads, results
    x = gradient_tiles(run, *scores, do)
    memory, n = run.memory(dstate, starts, dS0, None), run.n if starts is None else run.segmented
    run.plan.state_backward(run.state_programs, *x, descriptors.states(dstates, 64, 128), run.tokens(dr, 64), memory, n)


def output_backward(run: HopperRun, values: tuple[Tensor, ...], vectors: Tensor, decay: bool) -> Gradients:
    """Gradients of keys, beta and, if asked for, of the decay."""
    call, base = run.call, run.base
    do, dr, nu, states, dstates = values
    make = torch.zeros_like if call.packed else torch.empty_like
    assert call.k is not None and call.beta is not None
    dq, dk = make(call.q), make(call.k)
    dbeta = per_token(base, call.beta)
    dg = None if call.log_decay is None else per_token(base, call.log_decay)
    programs = min(run.n.items, gpu.target(call.device).multiprocessors)
    keys = run.q, run.k
    read = [run.tokens(x, 128) for x in (do, dr, nu)] + [descriptors.states(x, 128, 64) for x in (states, dstates)]
    tiles = (*keys, *read, descriptors.vectors(vectors), run.tokens(dq, 64), run.tokens(dk, 64))
    run.plan.output(programs, *tiles, OutputMemory(base.where.spans, dbeta, dg), run.n)
    found = {"q": dq, "k": dk, "beta": dbeta}
    if decay and dg is not None and call.log_decay is not None:
        if call.decay is Decay.HEAD:
            dg = dg.sum((0, 1), dtype=torch.float64).to(call.log_decay.dtype)
        found["log_decay"] = dg
    return found
