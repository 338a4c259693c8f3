"""Memory of a call: one allocation for all that is kept for the backward, and one for all that only the backward works on."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.gpu.memory import MemoryPart
from flashmix.gpu.series import LaunchSeries
from flashmix.op.call import Gradients
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.triton_gpu.layout import count_chunks
from flashmix.ops.recurrence.triton_gpu.plan import plan

TILED = ("q", "k", "v")  # operands that TMA reads
OPERANDS = (*TILED, "beta", "log_decay", "initial_state")
# The states that chunks start from are kept from forward to backward in place of being made again, as far as kernels can.
KEEP_STATES = os.environ.get("FLASHMIX_KEEP_STATES") == "1"
# What they are written with, nu, a third of these bytes, is kept where value heads share a key head, unless it says no: there the
# backward has fewer bytes than time to make it again.
KEEP_VALUES = os.environ.get("FLASHMIX_KEEP_VALUES") != "0"

# The backward of the output in the walk of the states (`walk.py`) takes about as long for few programs as for one on each multiprocessor.
# So it serves where its programs fill more than this part of the rounds that they take, and adds to dq and dk in 16 bits with at most so
# many value heads a key head.
FILLED = 0.65
GROUPED = 8

STRETCHED = 64  # chunks of a sequence from which on its backward is made in two stretches


class CallMemory(NamedTuple):
    """What calls of one kind allocate."""

    # Kept: T (without corrections nothing), vectors of chunks; of segments the maps and the states that they start from. What the
    # backward works on: the gradients of the states that chunks leave; of segments what they send back and receive. Either: the states
    # that chunks start from, nu unless it is V, and what Triton's backward of the output passes through memory; or where value heads
    # share a key head counters of the programs that walk. A per-channel decay has its pairs made again, among the decayed keys, the decay
    # of whole chunks, sums of decays, their reach and marks of chunks.
    state: tuple[int, ...]  # [N, HV, K, V]
    kept: tuple[MemoryPart, ...]
    decayed: tuple[MemoryPart, ...]
    work: tuple[MemoryPart, ...]
    states: tuple[MemoryPart, ...]
    counters: tuple[MemoryPart, ...]
    kept_bytes: int
    decayed_bytes: int
    turned_bytes: int = 0
    # With `join.py` M of the segments' maps, only forward and only until they are joined; M^T and, `in_turn`, N^T and starts are kept.
    turned: tuple[MemoryPart, ...] = ()


def kind_of(call: RecurrenceCall) -> Hashable:
    """What all sizes and launches of a call follow from, but for addresses; None of a packed one, which has tables to be made."""
    if call.of_kind is not None:
        return call.of_kind
    if call.packing is not None:
        return None
    beta, decay = call.beta, call.log_decay
    gate = None if decay is None else (decay.dtype, decay.dim())
    strength = None if beta is None else beta.dtype
    return call.q.shape, call.v.shape, strength, gate, call.scale, call.q.get_device()


def sizes_of(call: RecurrenceCall) -> CallMemory:
    """What a call allocates; its numbers may be symbols of a compiler."""
    N, B, T, HV, K, V = call.sequences, call.batch, call.tokens, call.value_heads, call.K, call.V
    chunks, tiles, dtype = count_chunks(call, 64), plan(call).tiles, call.dtype
    kept, decayed, float32 = [], [], torch.float32
    corrected = call.rule.corrected
    if call.decay is Decay.CHANNEL:
        reach = MemoryPart(torch.int8, (chunks, HV, cdiv(K, tiles.decay.BK), 64))
        sums = MemoryPart(float32, (B, T, HV, K))
        pairs = MemoryPart(dtype, (chunks, HV, 2 if corrected else 1, 64, 64))
        kinds = 3 if corrected else 2
        decayed = [MemoryPart(dtype, (kinds, B, T, HV, K)), pairs, MemoryPart(float32, (chunks, HV, K)), sums, reach]
        decayed.append(MemoryPart(torch.int32, (chunks, HV)))
    else:
        kept = [
            MemoryPart(dtype, (chunks, HV, 1 if corrected else 0, 64, 64)),
            MemoryPart(float32, (chunks, HV, 4, 64)),
        ]
    work = [MemoryPart(dtype, (chunks, HV, V, K))]
    states = [*work, MemoryPart(dtype, (B, T, HV, V))] if corrected else [*work]
    counters = [MemoryPart(torch.int32, (2 * N * HV * tiles.segments + 1,))] if HV > call.heads else []
    turned: tuple[MemoryPart, ...] = ()
    if tiles.segments > 1:
        shape = N, HV, tiles.segments
        if has_join(call):
            turned = (MemoryPart(float32, (*shape, K, K)),)
            starts = MemoryPart(float32, (N * HV * tiles.segments + 1, V, K))
            kept += [*turned, starts]
            work += [starts]
        else:
            starts = MemoryPart(float32, (*shape, V, K))
            kept += [MemoryPart(float32, (*shape, V + (K if corrected else 1), K)), starts]
            work += [starts, starts]
    parts = tuple(kept), tuple(decayed), tuple(work), tuple(states), tuple(counters)
    kept_bytes, decayed_bytes, turned_bytes = (sum(part.bytes for part in some) for some in (*parts[:2], turned))
    return CallMemory((N, HV, K, V), *parts, kept_bytes, decayed_bytes, turned_bytes, turned)


def in_turn(states: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors `[N, HV, segments, V, K]` of states of segments in the same memory, of one state more: number i + 1 of the first is
    number i of the second.

    A segment's own part lies where the next one's start is written, which `join.py` makes of it; that of a sequence's last one is not read.
    """
    shape = *maps.shape[:3], *states.shape[1:]
    return states[:-1].view(shape), states[1:].view(shape)


def starts_of(call: RecurrenceCall, maps: Tensor, states: Tensor) -> Tensor:
    """The states that segments start from, of what is kept of them."""
    return in_turn(states, maps)[0] if has_join(call) else states


def has_join(call: RecurrenceCall) -> bool:
    """Whether segments of a call are joined by `join.py`."""
    return call.rule.corrected and 64 < min(call.K, call.V) and max(call.K, call.V) <= 128


def backward_parts(call: RecurrenceCall, sizes: CallMemory) -> tuple[int, int]:
    """In how many parts of its sequences the backward of a call is made, or in how many stretches of the chunks of its only one; one after
    the other in the same memory.

    With 256 channels S and dS' take 256 KiB a chunk and value head. Linear attention takes as many parts as cost no time; two stretches
    of many chunks cost a pass over the states of the first.
    """
    segmented = len(sizes.work) > 1
    if call.rule.corrected or call.packed or min(call.K, call.V) <= 128 or segmented:
        return 1, 1
    if call.batch == 1:
        return 1, 2 if cdiv(call.tokens, 64) >= STRETCHED else 1
    return parts_of_rounds(call.batch, 2 * call.value_heads, gpu.target(call.device).multiprocessors), 1


@lru_cache(maxsize=1024)
def parts_of_rounds(batch: int, programs: int, multiprocessors: int) -> int:
    """The most parts, up to 16, of so many sequences of so many programs each that take no more rounds than all at once."""
    rounds = cdiv(batch * programs, multiprocessors)
    divisors = [n for n in range(1, min(batch, 16) + 1) if batch % n == 0]
    return max(n for n in divisors if n * cdiv(batch // n * programs, multiprocessors) <= rounds)


def keeps_states(call: RecurrenceCall) -> bool:
    """Whether the forward keeps the states of chunks: they have no room beside the keys of a decay per channel or 256 channels."""
    return KEEP_STATES and call.decay is not Decay.CHANNEL and max(call.K, call.V) <= 128


def keeps_values(call: RecurrenceCall) -> bool:
    """Whether the forward keeps nu, beside the states or alone."""
    alone = KEEP_VALUES and call.value_heads > call.heads and call.decay is not Decay.CHANNEL
    return call.rule.corrected and (keeps_states(call) or (alone and max(call.K, call.V) <= 128))


class Saved(NamedTuple):
    """What the backward of the output reads of the forward's way through the states, as far as it is there."""

    states: Tensor | None = None  # that chunks start from, [chunks, HV, V, K]
    nu: Tensor | None = None  # with corrections, [B, T, HV, V]

    @staticmethod
    def of(call: RecurrenceCall, kept: Sequence[Any]) -> Saved:
        """The tensors of `kept_parts`, or these."""
        rest = iter(kept)
        return Saved(*(next(rest, None) if keeps(call) else None for keeps in (keeps_states, keeps_values)))


def kept_parts(call: RecurrenceCall, sizes: CallMemory) -> tuple[MemoryPart, ...]:
    """What the forward keeps beside `sizes.kept`, in an allocation of its own: states and nu, or either."""
    states, *values = sizes.states
    return (*([states] if keeps_states(call) else []), *(values if keeps_values(call) else []))


def walks(call: RecurrenceCall, sizes: CallMemory) -> bool:
    """Whether one kernel makes the states that chunks start from again and the gradients of keys with them, so that states have no memory.

    That is with tiles of 128 channels and at most one decay per token, where its programs fill most of a card. The gradients have the same
    bits either way with one value head a key head.
    """
    heads, K = call.q.shape[2:]
    value_heads, V = call.v.shape[2:]
    if value_heads > GROUPED * heads or min(K, V) <= 64 or max(K, V) > 128 or call.decay is Decay.CHANNEL:
        return False
    segments = sizes.kept[-2].shape[2] if len(sizes.work) > 1 else 1
    programs, multiprocessors = call.sequences * value_heads * segments, gpu.target(call.device).multiprocessors
    return programs > FILLED * cdiv(programs, multiprocessors) * multiprocessors


class ForwardMemory:
    """What the forward of calls of one `kind` allocates, `more` what it keeps beside `sizes.kept`; its launches, where there is a kind."""

    def __init__(self, call: RecurrenceCall, kind: Hashable, save: bool) -> None:
        self.sizes = sizes_of(call)
        self.more = kept_parts(call, self.sizes) if save else ()
        self.more_bytes = sum(part.bytes for part in self.more)
        self.series = None if kind is None else LaunchSeries()


class BackwardMemory:
    """The same of a backward, to which its forward left one allocation or two, and in how many parts or stretches it is made.

    `walked`: whether `walks`. `work` is what it works on, all of one part.
    """

    def __init__(self, call: RecurrenceCall, kind: Hashable, kept: int) -> None:
        sizes = self.sizes = sizes_of(call)
        self.parts, self.stretches = backward_parts(call, sizes)
        self.more = kept_parts(call, sizes) if kept > 1 else ()
        saved = Saved.of(call, self.more) if self.more else Saved()
        self.walked = saved.states is None and walks(call, sizes)
        missing = tuple(part for part, there in zip(sizes.states, saved, strict=False) if there is None)
        work = [
            part.of(self.parts * self.stretches) for part in sizes.work + (sizes.counters if self.walked else missing)
        ]
        work += [MemoryPart(torch.float32, (self.stretches - 1, *sizes.state))] if self.stretches > 1 else []
        self.work, self.work_bytes = tuple(work), sum(part.bytes for part in work)
        self.series = None if kind is None else LaunchSeries()


def results(call: RecurrenceCall) -> Gradients:
    """Memory for the gradients: those of keys with a decay per channel or 256 channels by value head, that of a decay per head by token in
    float32, and in float32 that of a float64 decay per channel, which the copy engine does not write.
    """
    make_like = torch.zeros_like if call.packed else torch.empty_like
    v, decay, channel = call.v, call.log_decay, call.decay is Decay.CHANNEL
    found: Gradients = {}
    if (channel or max(call.K, call.V) > 128) and call.heads != call.value_heads:
        shape = *v.shape[:3], call.K
        found = {name: v.new_zeros(shape) if call.packed else v.new_empty(shape) for name in ("q", "k")}
    for name in ("q", "k", "v", "beta"):
        t = getattr(call, name)
        if t is not None and name not in found:
            found[name] = make_like(t)
    if decay is not None and (decay.dim() == 1 or (channel and decay.dtype == torch.float64)):
        make = torch.zeros if call.packed else torch.empty
        shape = v.shape[:3] if decay.dim() == 1 else decay.shape
        found["log_decay"] = make(shape, dtype=torch.float32, device=v.device)
    elif decay is not None:
        found["log_decay"] = make_like(decay)
    if call.initial_state is not None:
        found["initial_state"] = torch.empty_like(call.initial_state)
    return found


def aligned(x: Tensor) -> Tensor:
    """The tensor contiguous and at an address that TMA can read from."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def ready(call: RecurrenceCall) -> tuple[RecurrenceCall, list[Tensor | None]]:
    """The call with contiguous operands, those of TMA at addresses that it can read from; and these operands."""
    operands = [call.q, call.k, call.v, call.beta, call.log_decay, call.initial_state]
    contiguous, changed = call.of_kind is not None and call.of_kind.contiguous, {}
    for i, t in enumerate(operands):
        if t is not None and ((i < len(TILED) and t.data_ptr() & 15) or not (contiguous or t.is_contiguous())):
            operands[i] = changed[OPERANDS[i]] = aligned(t)
    return call.but(**changed) if changed else call, operands
