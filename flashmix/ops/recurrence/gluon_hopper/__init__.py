"""The recurrence on Hopper, in Gluon: phases of docs/chunk_algorithm.md for the tied delta rule and for linear attention.

The phases, what they keep and the tables of a packed batch are those of `triton_gpu`; here are their kernels with warps of different
roles, copies by TMA and the state in the accumulators of `wgmma`. Forward: `scores`, `state` with the output. Backward: `state` for the
states that chunks start from, `state` from the end, then `output`, with the sums over value heads that share a key. With a decay per
channel the state passes read decayed keys, `output`'s backward is `channel_output.py`, and Triton's kernels add the pairs out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import Kernel
from flashmix.gpu.memory import MemoryPart, allocate, views
from flashmix.gpu.series import LaunchSeries
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients, Outputs
from flashmix.op.remember import keep
from flashmix.ops.recurrence import triton_gpu
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule
from flashmix.ops.recurrence.gluon_hopper import descriptors, dplr
from flashmix.ops.recurrence.gluon_hopper.channel import decayed_keys, output_backward_of_channels
from flashmix.ops.recurrence.gluon_hopper.memory import (
    Saved,
    aligned,
    backward_parts,
    kept_parts,
    kind_of,
    ready,
    results,
    sizes_of,
    symbolic_sizes_of,
    walks,
)
from flashmix.ops.recurrence.gluon_hopper.plan import HopperPlan, hopper_plan
from flashmix.ops.recurrence.gluon_hopper.structs import HopperNumbers, OutputMemory, ScoresMemory, StateMemory
from flashmix.ops.recurrence.gluon_hopper.walk_launch import walk_backward
from flashmix.ops.recurrence.step.triton_gpu import step
from flashmix.ops.recurrence.triton_gpu import for_heads, is_step
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.parallel.halves import Halves

__all__ = ["backward", "forward", "halves", "keeps"]

FORWARD: dict[Hashable, LaunchSeries] = {}
SAVING: dict[Hashable, LaunchSeries] = {}  # a forward that keeps nu or states
BACKWARD: dict[Hashable, LaunchSeries] = {}  # by the kind of a call


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

    def programs(self, kernel: Kernel, channels: int | None = None) -> int:
        """Programs of a state pass in which each segment has one state, or a tile of so many `channels` in the place of its values."""
        each = (self.plan.BV if channels is None else channels) // 64 // kernel.spec.WARPGROUPS
        return self.base.rows * self.segmented.segments * each

    def tokens(self, x: Tensor, width: int) -> Tiles:
        return descriptors.tokens(x, width, self.call.packed)

    def memory(self, *given: Tensor | None) -> StateMemory:
        """Of the state to begin with, those of segments, the results for sequences and segments, and the counters of `walk.py`."""
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


def halves(call: RecurrenceCall) -> Halves | None:
    """Both halves of a call over ranks."""
    if call.rule is Rule.DPLR:
        from flashmix.ops.recurrence.gluon_hopper import dplr_ranks

        in_chunks = not is_step(call) and call.tokens > 0 and call.batch > 0
        return dplr_ranks.HALVES if in_chunks else triton_gpu.halves(call)
    from flashmix.ops.recurrence.gluon_hopper import ranks

    return ranks.HALVES


# A run, what `scores` returns of it, the gradients of the output, of final states and of what segments leave, and memory for what is made.
BackwardParts = tuple[
    HopperRun, tuple[ChunkReads, Sequence[Tensor], Any], tuple[Tensor, Tensor | None, Tensor | None], Gradients
]


def launch(
    known: dict[Hashable, LaunchSeries],
    device: torch.device,
    kind: Hashable,
    tensors: Sequence[Tensor | None],
    make: Callable[[], None],
) -> None:
    """Makes the launches of a call, which touch these tensors; as the series of its kind, if it has one."""
    if kind is None:
        make()
        return
    series = known.get(kind)
    if series is None:
        series = LaunchSeries()
        keep(known, kind, series)
    series(device, tensors, make)


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state; keeps T, the vectors of chunks, and the segments' maps and starts; and nu, states or both."""
    if is_step(call):
        return step(call), ()
    if call.tokens == 0 or call.batch == 0:
        return empty(call), ()
    if call.rule is Rule.DPLR:
        return dplr.forward(call, save)
    call, operands = ready(call)
    device, kind = call.q.device, kind_of(call)
    sizes = sizes_of(call, kind)
    o, state = torch.empty_like(call.v), torch.empty(sizes.state, dtype=torch.float32, device=device)
    kept, decayed = allocate(sizes.kept_bytes, device), allocate(sizes.decayed_bytes, device)
    parts = kept_parts(call, sizes) if save else ()
    more = allocate(sum(part.bytes for part in parts), device)
    if call.packed:
        o.zero_()  # tokens past the last sequence

    def make() -> None:
        run = HopperRun(Run.of(call))
        reads, joined, _ = scores(run, views(kept, sizes.kept), views(decayed, sizes.decayed), True)
        if joined:
            maps, starts = joined
            write_maps(run, reads, maps)
            base = run.base
            base.plan.join_forward(base.join_programs(), maps, call.initial_state, starts, None, None, base.segmented)
        state_output(run, reads, joined, o, state, Saved.of(call, views(more, parts)))

    known = FORWARD if more is None else SAVING
    launch(known, device, kind, (*operands, o, state, kept, decayed, more), make)
    return (o, state), tuple(t for t in (kept, more) if t is not None) if save else ()


def empty(call: RecurrenceCall) -> Outputs:
    """The results of a call without tokens."""
    state = call.initial_state
    return torch.empty_like(call.v), call.results()[1].zero_() if state is None else state.clone()


def keeps(call: RecurrenceCall) -> Outputs:
    """Empty tensors like those that `forward` keeps, if it does."""
    if call.rule is Rule.DPLR:
        return triton_gpu.keeps(call)
    sizes = symbolic_sizes_of(call)
    if is_step(call) or not sizes.kept or call.tokens == 0 or call.batch == 0:
        return ()
    more = [sum(part.bytes for part in parts)] if (parts := kept_parts(call, sizes)) else []
    return tuple(torch.empty(size, dtype=torch.uint8, device=call.device) for size in (sizes.kept_bytes, *more))


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all given operands; that of the decay only if it is wanted."""
    if call.tokens == 0 or call.batch == 0:
        found = {name: torch.zeros_like(t) for name in call.names if (t := getattr(call, name)) is not None}
        return found if grads[1] is None or call.initial_state is None else found | {"initial_state": grads[1]}
    if call.rule is Rule.DPLR:
        return dplr.backward(call, kept, grads, wanted)
    call, operands = ready(call)
    return finished(call, launch_backward(call, operands, kept, grads), wanted)


def launch_backward(
    call: RecurrenceCall, operands: list[Tensor | None], kept: Outputs, grads: Sequence[Tensor | None]
) -> Gradients:
    """What `results` has, made. The memory that it is made in, the most of a backward, is free again before value heads are summed."""
    device, kind = call.q.device, kind_of(call)
    sizes = sizes_of(call, kind)
    do, dstate = grads
    do = torch.zeros_like(call.v) if do is None else aligned(do.to(call.dtype))
    dstate = None if dstate is None else dstate.contiguous()
    memory = kept[0] if kept else allocate(sizes.kept_bytes, device)  # of one token a sequence nothing is kept
    decayed, (parts, stretches) = allocate(sizes.decayed_bytes, device), backward_parts(call, sizes)
    saved = Saved.of(call, views(kept[1], kept_parts(call, sizes))) if len(kept) > 1 else Saved()
    walked = saved.states is None and walks(call, sizes)
    missing = tuple(part for part, there in zip(sizes.states, saved, strict=False) if there is None)
    worked = [part.of(parts * stretches) for part in sizes.work + (sizes.counters if walked else missing)]
    worked += [MemoryPart(torch.float32, (stretches - 1, *sizes.state))] if stretches > 1 else []
    work = allocate(sum(part.bytes for part in worked), device)
    found = results(call)

    def make() -> None:
        run = HopperRun(Run.of(call))
        own = views(memory, sizes.kept), views(decayed, sizes.decayed)
        scored = scores(run, *own, not kept and call.decay is not Decay.CHANNEL)
        room = views(work, worked)
        between = room.pop() if stretches > 1 else None
        more = iter(room[len(sizes.work) :])
        counters = next(more, None) if walked else None
        made = saved if walked else Saved(*(next(more, None) if t is None else t for t in saved))
        starts = None
        if scored[1]:
            ends, starts = room[1:3]
            write_ends(run, scored[0], do, ends)
            base = run.base
            base.plan.join_backward(
                base.join_programs(), scored[1][0], ends, dstate, starts, None, None, base.segmented
            )
        whole = run, scored, (do, dstate, starts), found
        each: Iterable[BackwardParts] = [whole]
        if between is not None:
            each = stretches_of(whole, own[0], between)
        elif parts > 1:
            each = sequences(whole, own[0], parts)
        for one, read, given, its in each:
            if made.states is not saved.states:
                save_states(one, read, made, saved.nu is not None)
            gradients(one, read, given, room[0], made, its, counters)

    own = memory, *kept[1:], decayed, work
    launch(BACKWARD, device, kind, (*operands, dstate, *own, do, *found.values()), make)
    return found


def sequences(whole: BackwardParts, kept: Sequence[Tensor], parts: int) -> Iterator[BackwardParts]:
    """The same for each of so many parts of a dense batch that is not cut into segments."""
    run, _, (do, dstate, _), found = whole
    each = run.call.batch // parts
    for first in range(0, run.call.batch, each):
        stop = first + each
        one = HopperRun(run.base.part(first, stop))
        reads = reads_of(one, *(run.base.of_chunks(t, first, stop) for t in kept[:2]))
        given = do[first:stop], None if dstate is None else dstate[first:stop], None
        yield one, (reads, [], None), given, {name: t[first:stop] for name, t in found.items()}


def stretches_of(whole: BackwardParts, kept: Sequence[Tensor], between: Tensor) -> Iterator[BackwardParts]:
    """The same for each stretch of the chunks of one sequence, from the last.

    `between` `[stretches - 1, 1, HV, K, V]` has the states that stretches leave to the next, then the gradients of these.
    """
    run, _, (do, dstate, _), found = whole
    chunks, state, gradient = run.base.n.chunks, run.call.initial_state, found.get("initial_state")
    size = cdiv(chunks, len(between) + 1)
    spans = [(first, min(first + size, chunks)) for first in range(0, chunks, size)]
    runs = [HopperRun(run.base.stretch(*span, s)) for span, s in zip(spans, (state, *between), strict=True)]
    reads = [reads_of(one, *(t[first:stop] for t in kept[:2])) for one, (first, stop) in zip(runs, spans, strict=True)]
    for one, read, left in zip(runs, reads, between, strict=False):
        write_last_state(one, read, one.call.initial_state, left)
    ends, starts = (*between, dstate), (gradient, *between)
    for one, read, span, end, start in reversed(list(zip(runs, reads, spans, ends, starts, strict=True))):
        made = {name: run.base.of_stretch(t, *span) for name, t in found.items() if name != "initial_state"}
        made |= {} if start is None else {"initial_state": start}
        yield one, (read, [], None), (run.base.of_stretch(do, *span), end, None), made


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
    kernel(run.programs(kernel), *tiles, None, states, nu, x, run.segmented if joined else run.n)


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
    run.plan.state_backward(run.programs(run.plan.state_backward), *reads.with_queries(run.tokens(do, 64)), *sent, x, n)
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


def finished(call: RecurrenceCall, found: Gradients, wanted: frozenset[str]) -> Gradients:
    """The gradients in the shapes of their operands; that of the decay only if it is wanted."""
    decay = call.log_decay
    if decay is not None and "log_decay" not in wanted:
        del found["log_decay"]
    elif decay is not None and decay.dim() == 1:
        found["log_decay"] = found["log_decay"].sum((0, 1), dtype=torch.float64).to(decay.dtype)
    elif decay is not None:
        found["log_decay"] = found["log_decay"].to(decay.dtype)
    return found | {name: for_heads(found[name], getattr(call, name)) for name in ("q", "k")}


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


def write_maps(run: HopperRun, reads: ChunkReads, maps: Tensor) -> None:
    """Writes the map of each segment, or of a whole sequence that is not cut, from nothing."""
    tiles = reads.without(run.tokens(run.call.v, 64))
    x = run.memory(None, None, None, maps)
    kernel = run.plan.state_maps
    channels = run.plan.BV + (run.plan.BK if run.call.rule.corrected else 0)
    kernel(run.programs(kernel, channels), *tiles, None, None, None, x, run.segmented)


def write_last_state(run: HopperRun, reads: ChunkReads, initial_state: Tensor | None, state: Tensor) -> None:
    """Writes the final states of sequences, and nothing else."""
    tiles, x = reads.without(run.tokens(run.call.v, 64)), run.memory(initial_state, None, state, None)
    run.plan.state_maps(run.programs(run.plan.state_maps), *tiles, None, None, None, x, run.n)


def write_ends(run: HopperRun, reads: ChunkReads, do: Tensor, ends: Tensor) -> None:
    """Writes what each segment sends back from nothing."""
    tiles, x = reads.with_queries(run.tokens(do, 64)), run.memory(None, None, None, ends)
    run.plan.state_ends(run.programs(run.plan.state_ends), *tiles, None, None, x, run.segmented)


def state_output(
    run: HopperRun,
    reads: ChunkReads,
    joined: Sequence[Tensor],
    o: Tensor,
    state: Tensor,
    saved: Saved = Saved(),  # noqa: B008
) -> None:
    """The state pass forward with the output, and with nu and the states that chunks start from if there is memory for them."""
    call = run.call
    x = run.memory(call.initial_state, joined[1] if joined else None, state, None)
    tiles = reads.with_queries(run.tokens(call.v, 64))
    n = run.segmented if joined else run.n
    kernel = run.plan.state_output if saved.nu is None else run.plan.state_output_keep
    kernel = kernel if saved.states is None else run.plan.state_output_save
    kernel(run.programs(kernel), *tiles, run.tokens(o, 64), *saved_tiles(run, saved), x, n)


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
