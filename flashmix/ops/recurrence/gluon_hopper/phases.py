"""The phases of a call on Hopper: what each kernel is launched with, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import Kernel
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import descriptors
from flashmix.ops.recurrence.gluon_hopper.channel import decayed_keys, output_backward_of_channels
from flashmix.ops.recurrence.gluon_hopper.memory import Saved, has_join, in_turn, ready
from flashmix.ops.recurrence.gluon_hopper.plan import HopperPlan, hopper_plan
from flashmix.ops.recurrence.gluon_hopper.structs import HopperNumbers, OutputMemory, ScoresMemory, StateMemory
from flashmix.ops.recurrence.gluon_hopper.walk_launch import walk_backward
from flashmix.ops.recurrence.triton_gpu.run import Run


class HopperRun:
    """One call with its plan, its place in memory and what its kernels are told of it."""

    def __init__(self, base: Run) -> None:
        self.base, self.call = base, base.call
        call = base.call
        self.plan: HopperPlan = hopper_plan(call, base.plan)
        n, items = self.base.n, self.base.chunks * call.heads
        self.n = HopperNumbers(n.scale, n.tokens, n.chunks, 1, items, call.batch)
        self.segmented = self.n._replace(segments=self.plan.triton.tiles.segments)

    @staticmethod
    def of(call: RecurrenceCall) -> HopperRun:
        return HopperRun(Run.of(ready(call)[0]))

    def launch(self, kernel: Kernel, n: HopperNumbers, *given: Any, channels: int | None = None) -> None:
        """Launches a state pass in which each segment has one state, or a tile of so many `channels` in the place of its values."""
        each = (self.plan.BV if channels is None else channels) // 64 // kernel.spec.WARPGROUPS
        programs = self.base.rows * n.segments * each
        if kernel.spec.STAYS:
            n = n._replace(programs=programs)
            programs = min(programs, gpu.target(self.call.device).multiprocessors)
        kernel(programs, *given, n)

    def tokens(self, x: Tensor, width: int) -> Tiles:
        return descriptors.tokens(x, width, self.call.packed)

    def memory(self, *given: Any) -> StateMemory:
        """Of the state to begin with, those of segments, the results for sequences and segments, counters, and parts of maps."""
        return StateMemory(self.base.where.cu_seqlens, self.base.where.offsets, *given)


class ChunkReads(NamedTuple):
    """What the state passes read of the phases before."""

    q: Tiles | None  # None where decayed queries lie with the keys
    k: Tiles
    pairs: Tiles | None  # T; with a decay per channel A_qb before it
    T: Tiles | None  # with corrections
    vectors: Tiles

    def with_queries(self, values: Tiles) -> tuple[Any, ...]:
        return self.q, self.k, values, self.pairs, self.vectors

    def without(self, values: Tiles) -> tuple[Any, ...]:
        return None, self.k, values, self.T, self.vectors


def reads_of(run: HopperRun, inverses: Tensor, vectors: Tensor) -> ChunkReads:
    """The same with at most one decay per token, of T, `[chunks, HV, 1, 64, 64]` (without corrections empty), and the vectors."""
    assert run.call.k is not None
    q, k = (run.tokens(x, run.plan.BK) for x in (run.call.q, run.call.k))
    T = descriptors.pairs(inverses, 1) if run.call.rule.corrected else None
    return ChunkReads(q, k, T, T, descriptors.vectors(vectors))


def channel_reads(run: HopperRun, keys: Tensor, A: Tensor, total: Tensor) -> ChunkReads:
    """The same with a decay per channel, of the decayed keys, A_qb and T, `[chunks, HV, 2, 64, 64]`, and the decay of chunks."""
    T = descriptors.pairs(A, 1) if run.call.rule.corrected else None
    return ChunkReads(None, run.tokens(keys, 128), descriptors.pairs(A, A.shape[2]), T, descriptors.totals(total))


def scores(
    run: HopperRun, kept: list[Tensor], decayed: list[Tensor], first: bool
) -> tuple[ChunkReads, list[Tensor], Any]:
    """T, with a decay per channel A_qb too, and what the state passes read with them, made if they were not yet: at the `first` time.

    Returns those, the maps and starts of segments, and what Triton's kernels are given with a decay per channel.
    """
    call = run.call
    if call.decay is Decay.CHANNEL:
        keys, A, total, *_ = decayed
        triton = decayed_keys(run.base, run.plan, run.n, decayed, not first)
        return channel_reads(run, keys.flatten(0, 1), A, total), kept, triton
    inverses, vectors, *joined = kept
    assert call.k is not None
    reads = reads_of(run, inverses, vectors)
    if first:
        x = ScoresMemory(run.base.where.spans, call.beta, call.log_decay, vectors)
        k = run.tokens(call.k, 64) if call.rule.corrected else None
        run.plan.scores(run.n.items, k, reads.T, x, run.n)
    return reads, joined, None


def write_maps(run: HopperRun, reads: ChunkReads, maps: Tensor, parts: tuple[Tensor, Tensor] | None = None) -> None:
    """Writes the map of each segment, or of a whole sequence that is not cut, from nothing; for `join.py` in `parts`, N^T and M."""
    tiles = reads.without(run.tokens(run.call.v, 64))
    x = run.memory(None, None, None, maps, None, parts)
    kernel = run.plan.state_maps
    channels = run.plan.BV + (run.plan.BK if run.call.rule.corrected else 0)
    run.launch(kernel, run.segmented, *tiles, None, None, None, x, channels=channels)


def maps_joined(run: HopperRun, reads: ChunkReads, maps: Tensor, states: Tensor, turned: Sequence[Tensor]) -> Tensor:
    """Writes maps, and returns the state that each segment starts from, in the memory `states`; M is `turned` with `join.py`."""
    base, state = run.base, run.call.initial_state
    if not turned:
        write_maps(run, reads, maps)
        base.plan.join_forward(base.join_programs(), maps, state, states, None, None, base.segmented)
        return states
    starts, own = in_turn(states, maps)
    write_maps(run, reads, maps, (own, turned[0]))
    join(run, run.plan.join_forward, (turned[0], own, starts), state)
    return starts


def ends_joined(
    run: HopperRun, reads: ChunkReads, given: tuple[Tensor, Tensor | None], maps: Tensor, room: Sequence[Tensor]
) -> Tensor:
    """Returns the gradient that reaches the end of each segment, of those of the output and of final states, in the memory `room`."""
    base, (do, dstate) = run.base, given
    if has_join(run.call):
        ends, starts = in_turn(room[0], maps)
        write_ends(run, reads, do, ends)
        join(run, run.plan.join_backward, (maps, ends, starts), dstate)
    else:
        ends, starts = room
        write_ends(run, reads, do, ends)
        base.plan.join_backward(base.join_programs(), maps, ends, dstate, starts, None, None, base.segmented)
    return starts


def join(run: HopperRun, kernel: Kernel, given: tuple[Tensor, Tensor, Tensor], state: Tensor | None) -> None:
    """Launches `join.py` with maps, what segments leave, and the memory of starts."""
    maps, own, starts = given
    V, BV = run.call.V, kernel.spec.BV
    tiles = descriptors.segments(maps, 128), descriptors.segments(own, BV), descriptors.segments(starts, BV)
    kernel(run.base.rows * cdiv(V, BV), *tiles, state, run.segmented)


def write_last_state(run: HopperRun, reads: ChunkReads, initial_state: Tensor | None, state: Tensor) -> None:
    """Writes the final states of sequences, and nothing else."""
    tiles, x = reads.without(run.tokens(run.call.v, 64)), run.memory(initial_state, None, state, None)
    run.launch(run.plan.state_maps, run.n, *tiles, None, None, None, x)


def write_ends(run: HopperRun, reads: ChunkReads, do: Tensor, ends: Tensor) -> None:
    """Writes what each segment sends back from nothing."""
    tiles, x = reads.with_queries(run.tokens(do, 64)), run.memory(None, None, None, ends)
    run.launch(run.plan.state_ends, run.segmented, *tiles, None, None, x)


def state_output(
    run: HopperRun, reads: ChunkReads, joined: Sequence[Tensor], o: Tensor, state: Tensor, saved: Saved
) -> None:
    """The state pass forward with the output, and with nu and the states that chunks start from if there is memory for them."""
    call = run.call
    x = run.memory(call.initial_state, joined[1] if joined else None, state, None)
    tiles = reads.with_queries(run.tokens(call.v, 64))
    n = run.segmented if joined else run.n
    kernel = run.plan.state_output if saved.nu is None else run.plan.state_output_keep
    kernel = kernel if saved.states is None else run.plan.state_output_save
    run.launch(kernel, n, *tiles, run.tokens(o, 64), *saved_tiles(run, saved), x)


def saved_tiles(run: HopperRun, saved: Saved) -> tuple[Tiles | None, Tiles | None]:
    """The states that chunks start from and nu, as a state pass writes them."""
    states = None if saved.states is None else descriptors.states(saved.states, 64, run.plan.BK)
    return states, None if saved.nu is None else run.tokens(saved.nu, 64)


def save_states(
    run: HopperRun, scored: tuple[ChunkReads, Sequence[Tensor], Any], saved: Saved, given: bool = False
) -> None:
    """The state pass for the states that chunks start from, and nu with corrections unless that is `given`."""
    reads, joined, _ = scored
    x = run.memory(run.call.initial_state, joined[1] if joined else None, None, None)
    states, nu = saved_tiles(run, saved)
    if given:
        assert nu is not None
        kernel, tiles, nu = run.plan.state_save_given, reads._replace(T=None).without(nu), None
    else:
        kernel, tiles = run.plan.state_save, reads.without(run.tokens(run.call.v, 64))
    run.launch(kernel, run.segmented if joined else run.n, *tiles, None, states, nu, x)


def gradients(
    run: HopperRun,
    scored: tuple[ChunkReads, Sequence[Tensor], Any],
    grads: tuple[Tensor, Tensor | None, Tensor | None],
    dstates: Tensor,
    saved: Saved,
    found: Gradients,
    counters: Tensor | None = None,
) -> None:
    """Launches what makes the gradients `found`, of what `scores` returns, of those of the output, of final states and of what segments
    leave, and of what is `saved`; `dstates` is memory for the gradients of states. States that are not saved are made again, and nu with
    them, and value heads that share a key head take their turns by `counters`.
    """
    call, (reads, joined, decayed) = run.call, scored
    do, dstate, starts = grads
    n = run.segmented if joined else run.n
    x = run.memory(dstate, starts, found.get("initial_state"), None, counters)
    sent = descriptors.states(dstates, 64, run.plan.BK), run.tokens(found["v"], 64)
    run.launch(run.plan.state_backward, n, *reads.with_queries(run.tokens(do, 64)), *sent, x)
    if saved.states is None:
        kernel, nu, T = (run.plan.walk, call.v, reads.T) if saved.nu is None else (run.plan.walk_given, saved.nu, None)
        read = reads.q, reads.k, run.tokens(nu, 64), T, reads.vectors
        walk_backward(run.base, kernel, n, read, (do, dstates, joined[1] if joined else None, counters), found)
        return
    values = do, found["v"], call.v if saved.nu is None else saved.nu, saved.states, dstates
    if decayed is None:
        output_backward(run, values, reads, found)
    else:
        output_backward_of_channels(run.base, run.plan, run.n, decayed, values, found)


def output_backward(run: HopperRun, values: tuple[Tensor, ...], reads: ChunkReads, found: Gradients) -> None:
    """Makes the gradients of keys, of beta and of the decay."""
    do, dr, nu, states, dstates = values
    BK, BV, n = run.plan.BK, run.plan.BV, run.n
    if BK == 256:  # an item is a value head's
        n = n._replace(items=run.base.chunk_programs)
    programs = min(n.items, gpu.target(run.call.device).multiprocessors)
    sent = run.tokens(dr, BV) if run.call.rule.corrected else None
    rows = 64 if BK == 256 else BV  # of a tile of states
    read = (run.tokens(do, BV), sent, run.tokens(nu, BV), *[descriptors.states(x, rows, 64) for x in (states, dstates)])
    tiles = (reads.q, reads.k, *read, reads.vectors, run.tokens(found["q"], BK), run.tokens(found["k"], BK))
    x = OutputMemory(run.base.where.spans, found.get("beta"), found.get("log_decay"))
    run.plan.output(programs, *tiles, x, n)
