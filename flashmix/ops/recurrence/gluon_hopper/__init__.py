"""The recurrence on Hopper, in Gluon: phases of docs/chunk_algorithm.md for the tied delta rule and for linear attention.

The phases, what they keep and the tables of a packed batch are those of `triton_gpu`; here are their kernels with warps of different
roles, copies by TMA and the state in the accumulators of `wgmma`. Forward: `scores`, `state` with the output. Backward: `state` for the
states that chunks start from, `state` from the end, then `output`, with the sums over value heads that share a key. With a decay per
channel the state passes read decayed keys, `output`'s backward is `channel_output.py`, and Triton's kernels add the pairs out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.memory import allocate, views
from flashmix.gpu.series import LaunchSeries
from flashmix.op.call import Gradients, Outputs
from flashmix.op.kind import keep
from flashmix.ops.recurrence import triton_gpu
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule
from flashmix.ops.recurrence.gluon_hopper import dplr
from flashmix.ops.recurrence.gluon_hopper.memory import (
    BackwardMemory,
    ForwardMemory,
    Saved,
    aligned,
    kept_parts,
    kind_of,
    ready,
    results,
    sizes_of,
    starts_of,
)
from flashmix.ops.recurrence.gluon_hopper.phases import (
    ChunkReads,
    HopperRun,
    ends_joined,
    gradients,
    maps_joined,
    reads_of,
    save_states,
    scores,
    state_output,
    write_last_state,
)
from flashmix.ops.recurrence.step.triton_gpu import step
from flashmix.ops.recurrence.triton_gpu import for_heads, is_step
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.parallel.halves import Halves

Memory = TypeVar("Memory")
__all__ = ["backward", "forward", "halves", "keeps"]

# By the kind of a call; that of a backward with the number of allocations that its forward left.
FORWARD: dict[Hashable, ForwardMemory] = {}
SAVING: dict[Hashable, ForwardMemory] = {}  # of forwards for a backward
BACKWARD: dict[Hashable, BackwardMemory] = {}


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


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state; keeps T, the vectors of chunks, and the segments' maps and starts; and nu, states or both."""
    known = SAVING if save else FORWARD
    own = known.get(call.of_kind)
    if own is None:
        if is_step(call):
            return step(call), ()
        if call.tokens == 0 or call.batch == 0:
            return empty(call), ()
        if call.rule is Rule.DPLR:
            return dplr.forward(call, save)
    call, operands = ready(call)
    if own is None:
        own = of_kind(known, kind_of(call), lambda kind: ForwardMemory(call, kind, save))
    device, sizes = call.q.device, own.sizes
    o, state = torch.empty_like(call.v), torch.empty(sizes.state, dtype=torch.float32, device=device)
    kept, decayed = allocate(sizes.kept_bytes, device), allocate(sizes.decayed_bytes, device)
    more, turned = allocate(own.more_bytes, device), allocate(sizes.turned_bytes, device)
    if call.packing is not None:
        o.zero_()  # tokens past the last sequence

    def make() -> None:
        run = HopperRun(Run.of(call))
        reads, joined, _ = scores(run, views(kept, sizes.kept), views(decayed, sizes.decayed), True)
        if joined:
            maps, states = joined
            joined = [maps, maps_joined(run, reads, maps, states, views(turned, sizes.turned))]
        state_output(run, reads, joined, o, state, Saved.of(call, views(more, own.more)))

    launch(own.series, device, (*operands, o, state, kept, decayed, more, turned), make)
    return (o, state), tuple([t for t in (kept, more) if t is not None]) if save else ()


def of_kind(known: dict[Hashable, Memory], kind: Hashable, make: Callable[[Hashable], Memory]) -> Memory:
    """What is known of a kind of calls, made if it is not; it is not kept where there is no kind."""
    found = known.get(kind)
    if found is None:
        found = make(kind)
        if kind is not None:
            keep(known, kind, found)
    return found


def launch(
    series: LaunchSeries | None, device: torch.device, tensors: Sequence[Tensor | None], make: Callable[[], None]
) -> None:
    """Makes the launches of a call, which touch these tensors; as the series of its kind, if it has one."""
    if series is None:
        make()
    else:
        series(device, tensors, make)


def empty(call: RecurrenceCall) -> Outputs:
    """The results of a call without tokens."""
    state = call.initial_state
    return torch.empty_like(call.v), call.results()[1].zero_() if state is None else state.clone()


def keeps(call: RecurrenceCall) -> Outputs:
    """Empty tensors like those that `forward` keeps, if it does."""
    if call.rule is Rule.DPLR:
        return triton_gpu.keeps(call)
    sizes = sizes_of(call)
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
    key = None if kind is None else (kind, len(kept))
    own = of_kind(BACKWARD, key, lambda key: BackwardMemory(call, key, len(kept)))
    sizes, parts, stretches = own.sizes, own.parts, own.stretches
    do, dstate = grads
    do = torch.zeros_like(call.v) if do is None else aligned(do if do.dtype == call.dtype else do.to(call.dtype))
    dstate = None if dstate is None else dstate.contiguous()
    memory = kept[0] if kept else allocate(sizes.kept_bytes, device)  # of one token a sequence nothing is kept
    decayed, work = allocate(sizes.decayed_bytes, device), allocate(own.work_bytes, device)
    found = results(call)

    def make() -> None:
        run = HopperRun(Run.of(call))
        saved = Saved.of(call, views(kept[1], own.more)) if own.more else Saved()
        scores_of = views(memory, sizes.kept), views(decayed, sizes.decayed)
        scored = scores(run, *scores_of, not kept and call.decay is not Decay.CHANNEL)
        room = views(work, own.work)
        between = room.pop() if stretches > 1 else None
        more = iter(room[len(sizes.work) :])
        counters = next(more, None) if own.walked else None
        made = saved if own.walked else Saved(*(next(more, None) if t is None else t for t in saved))
        starts = None
        if scored[1]:
            reads, (maps, states), pairs = scored
            scored = reads, [maps, starts_of(call, maps, states)], pairs
            starts = ends_joined(run, reads, (do, dstate), maps, room[1 : len(sizes.work)])
        whole = run, scored, (do, dstate, starts), found
        each: Iterable[BackwardParts] = [whole]
        if between is not None:
            each = stretches_of(whole, scores_of[0], between)
        elif parts > 1:
            each = sequences(whole, scores_of[0], parts)
        for one, read, given, its in each:
            if made.states is not saved.states:
                save_states(one, read, made, saved.nu is not None)
            gradients(one, read, given, room[0], made, its, counters)

    launch(own.series, device, (*operands, dstate, memory, *kept[1:], decayed, work, do, *found.values()), make)
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


def finished(call: RecurrenceCall, found: Gradients, wanted: frozenset[str]) -> Gradients:
    """The gradients in the shapes of their operands; that of the decay only if it is wanted."""
    decay = call.log_decay
    if decay is not None and "log_decay" not in wanted:
        del found["log_decay"]
    elif decay is not None and decay.dim() == 1:
        found["log_decay"] = found["log_decay"].sum((0, 1), dtype=torch.float64).to(decay.dtype)
    elif decay is not None and found["log_decay"].dtype != decay.dtype:
        found["log_decay"] = found["log_decay"].to(decay.dtype)
    return found | {name: for_heads(found[name], getattr(call, name)) for name in ("q", "k")}
