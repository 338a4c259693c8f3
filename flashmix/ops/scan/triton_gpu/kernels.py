"""The scan on a GPU, `h_t = e^{g_t} h_{t-1} + x_t`: a warp has a block of channels of one sequence, a thread a channel (or a few).

The next GROUP tokens are loaded while those of this group are computed: a thread has nothing but these loads to wait for. Few channels of
long sequences: each sequence in segments, first only the product of the factors and the end of each, then each from the ends of those
before it, joined in their order. Segments follow from the sizes alone and begin where the sequence does.
Tiles: `c` channels (with a decay a head: those of one head).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.numbers import (
    added,
    constant,
    cosine_and_sine,
    exponential,
    number_of,
    parts_of,
    stored,
    times,
)
from flashmix.ops.scan.triton_gpu.places import loaded_once, moved, places
from flashmix.ops.scan.triton_gpu.weights import factor_and_weight, no_decay

ONE_AS_WORD = tl.constexpr(0x3F800000)  # of complex numbers


class ScanInputs(NamedTuple):
    """Contiguous tensors; of the forward `x`, of the backward `h` and the gradients of the outputs, with a coupling also `x`. `start` is
    the state that comes in (or, backwards, its gradient), `[N, C]`; of segments `totals` are the products of factors and `ends` the ends
    from zero, `[slots, C]`, both None where they are still to be found; absent ones None.
    """

    x: Any
    g: Any
    start: Any
    h: Any
    d_h: Any
    d_state: Any
    totals: Any
    ends: Any


class ScanResults(NamedTuple):
    """`h` and the state, or `dx`, `dg` and `d_state`, the gradient of the state that came in; of a pass over segments alone `totals` and
    `ends`, `[slots, C]`.
    """

    h: Any
    state: Any
    dx: Any
    dg: Any
    totals: Any
    ends: Any


class Slots(NamedTuple):
    """Boundaries of packed sequences; of segments of packed sequences, the sequence of each and its place there (-1: idle)."""

    cu_seqlens: Any
    sequence: Any
    place: Any


class ScanNumbers(NamedTuple):
    tokens: Any  # T; packed, of all sequences
    each: Any  # segments of a sequence
    segment: Any  # tokens of a segment


class SlotSpan(NamedTuple):
    """Where a slot lies: its sequence, that one's first token and the one past its last, and of the slot's segment the same two; its place
    in its sequence."""

    sequence: Any
    start: Any
    end: Any
    first: Any
    last: Any
    place: Any


@triton.jit
def columns(S: tl.constexpr):
    """Slot, channels [c], and which of these there are."""
    BLOCK: tl.constexpr = S.BLOCK
    lane = tl.arange(0, BLOCK)
    if S.DECAY == 1:
        slot, block = tl.program_id(0) // (S.WIDTH // S.HEAD), tl.program_id(0) % (S.WIDTH // S.HEAD)
        column, inside = block * S.HEAD + lane, lane < S.HEAD
    else:
        blocks: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
        slot, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
        column = block * S.BLOCK + lane
        inside = column < S.WIDTH
    return slot.to(tl.int64), column, inside


@triton.jit
def span_of(slots, n, slot, S: tl.constexpr):
    """The `SlotSpan` of a slot."""
    sequence, place = slot, slot * 0
    if S.SEGMENTS:
        if S.PACKED:
            sequence = tl.load(slots.sequence + slot)
            place = tl.load(slots.place + slot)
        else:
            sequence, place = slot // n.each, slot % n.each
    if S.PACKED:
        start = tl.maximum(tl.load(slots.cu_seqlens + sequence).to(tl.int64), 0)
        end = tl.minimum(tl.load(slots.cu_seqlens + sequence + 1).to(tl.int64), n.tokens)
    else:
        start = sequence * n.tokens
        end = start + n.tokens
    first, last = start, end
    if S.SEGMENTS:
        first = tl.where(place < 0, end, start + place * n.segment)
        last = tl.minimum(end, first + n.segment)
    return SlotSpan(sequence, start, end, first, last, place)


@triton.jit
def left_of(limit, token):
    """Tokens from `token` to `limit`, as a small number: 32 bits are enough for masks."""
    return tl.minimum(tl.maximum(limit - token, 0), 1 << 20).to(tl.int32)


@triton.jit
def tokens_of(tensor, token, column, limit, other, S: tl.constexpr):
    """GROUP tokens of a tensor `[T, C]`, [c] each, those before `limit` [c]."""
    GROUP: tl.constexpr = S.GROUP
    found = ()
    ptr, left = tensor + (token * S.WIDTH + column), left_of(limit, token)
    for i in tl.static_range(GROUP):
        found = append(found, tl.load(ptr + i * S.WIDTH, mask=i < left, other=other))  # [c]
    return found


@triton.jit
def decay_places(source, token, column, S: tl.constexpr):
    """Where the log decays of a token and those after it lie: of channels `places`, of a head where the first is, of all tokens the
    decay itself.
    """
    if S.DECAY == 2:
        return (source,)
    elif S.DECAY == 1:
        return (source + (token * (S.WIDTH // S.HEAD) + tl.min(column, 0) // S.HEAD),)
    else:
        return places(source, token * S.WIDTH + column, S)


@triton.jit
def decay_at(ptrs, i: tl.constexpr, exists, some, S: tl.constexpr):
    """A log decay, [c] or a number; that of a factor 1 where no channel `exists`, and where there is not `some` token."""
    if S.DECAY == 2:
        return ptrs[0]
    elif S.DECAY == 1:
        return tl.load(ptrs[0] + i * (S.WIDTH // S.HEAD), mask=some, other=no_decay(S))  # a number
    else:
        return tl.load(ptrs[i], mask=exists, other=no_decay(S))  # [c]


@triton.jit
def decays_moved(ptrs, TOKENS: tl.constexpr, S: tl.constexpr):
    """`decay_places` so many tokens on."""
    if S.DECAY == 2:
        return ptrs
    else:
        return moved(ptrs, TOKENS * (S.WIDTH // S.HEAD if S.DECAY == 1 else S.WIDTH))


@triton.jit
def decays_at(ptrs, some, left, left_of_all, S: tl.constexpr):
    """Log decays of GROUP tokens if there are `some`; a constant decay is the same for all."""
    GROUP: tl.constexpr = S.GROUP
    if S.DECAY == 0:
        return loaded_once(ptrs, some, left, no_decay(S))
    else:
        found = ()
        for i in tl.static_range(GROUP):
            found = append(found, decay_at(ptrs, i, i < left, i < left_of_all, S))
        return found


@triton.jit
def decay_source(inputs, column, inside, S: tl.constexpr):
    """What `decay_places` takes: the tensor, or of a constant decay its factors (with a maximum or a coupling its logarithms) [c]; those of
    complex numbers come as factors.
    """
    if S.DECAY == 2 and S.TURNING:
        return tl.load(inputs.g + column, mask=inside, other=0)  # [c]
    elif S.DECAY == 2:
        power = tl.load(inputs.g + column, mask=inside, other=0.0).to(tl.float32)  # [c]
        return power if S.MAXIMUM or S.COUPLING else exponential(power)
    else:
        return inputs.g


@triton.jit
def factor_of(g, exists, S: tl.constexpr):
    """`e^g` of one token, with a maximum g; of none 1, or 0."""
    if S.TURNING:
        re, im = parts_of(g)
        if S.DECAY == 2:
            return tl.where(exists, re, 1.0), tl.where(exists, im, 0.0)
        else:
            size = exponential(re)
            cosine, sine = cosine_and_sine(im)
            return size * cosine, size * sine
    elif S.DECAY == 2:
        return tl.where(exists, g, 0.0 if S.MAXIMUM else 1.0)
    elif S.MAXIMUM:
        return g.to(tl.float32)
    elif S.PRECISE:
        return exponential(g.to(tl.float32))
    else:
        return tl.exp2(g.to(tl.float32) * 1.4426950408889634)


@triton.jit
def factors_of(g, exists, S: tl.constexpr):
    """`factor_of` one token, and what a coupling multiplies `x` by."""
    if S.COUPLING:
        return factor_and_weight(g, exists, S)
    else:
        factor = factor_of(g, exists, S)
        return factor, factor


@triton.jit
def states_at(states, row, column, inside, S: tl.constexpr):
    """States [c] of a row, zeros if there are none."""
    if states is None:
        return constant(0.0, S)
    else:
        return number_of(tl.load(states + row * S.WIDTH + column, mask=inside, other=0), S)  # [c]


@triton.jit
def with_rest(total, lost, g):
    """A sum [c] and what rounding lost of it, with one more summand; of infinities nothing is lost."""
    after = total + g
    part = after - total
    rest = lost + ((total - (after - part)) + (g - part))
    rest = tl.where(rest == rest, rest, 0.0)
    whole = after + rest
    rest -= whole - after
    return whole, tl.where(rest == rest, rest, 0.0)


@triton.jit
def advanced(h, lost, factor, x, S: tl.constexpr):
    """The state after a step. Of a maximum `lost` [c] is what rounding took from the sums since the last `x`, which one decay after the
    other takes to the same side.
    """
    if S.MAXIMUM:
        aged, rest = with_rest(h, lost, factor)
        return tl.maximum(aged, x, propagate_nan=tl.PropagateNan.ALL), tl.where(aged >= x, rest, 0.0)
    else:
        return added(times(factor, h, S), x, S), lost


@triton.jit
def no_factor(S: tl.constexpr):
    """The product [c] of no factors, with a maximum their sum."""
    BLOCK: tl.constexpr = S.BLOCK
    if S.TURNING:
        return constant(1.0, S)
    else:
        return tl.full([BLOCK], 0.0 if S.MAXIMUM else 1.0, tl.float32)


@triton.jit
def with_factor(total, lost, factor, S: tl.constexpr):
    """The product [c] of factors with one more; with a maximum their sum, and what rounding lost of it."""
    if S.MAXIMUM:
        return with_rest(total, lost, factor)
    elif S.TURNING:
        return times(total, factor, S), lost
    else:
        return total * factor, lost


@triton.jit
def joined(inputs, h, slot, count, STEP: tl.constexpr, column, inside, S: tl.constexpr):
    """The state after `count` segments, the slots from `slot` on, every STEP-th."""
    NOTHING: tl.constexpr = float("-inf") if S.MAXIMUM else 0.0
    ONE: tl.constexpr = ONE_AS_WORD if S.TURNING else 0.0 if S.MAXIMUM else 1.0
    JOINED: tl.constexpr = S.JOINED
    lost = tl.zeros(column.shape, tl.float32)
    for first in range(0, count, JOINED):
        totals, ends = (), ()
        for i in tl.static_range(JOINED):
            at = (slot + STEP * (first + i)) * S.WIDTH + column
            mask = inside & (first + i < count)
            totals = append(totals, tl.load(inputs.totals + at, mask=mask, other=ONE))  # [c]
            ends = append(ends, tl.load(inputs.ends + at, mask=mask, other=NOTHING))  # [c]
        for i in tl.static_range(JOINED):
            factor = parts_of(totals[i]) if S.TURNING else totals[i]
            h, lost = advanced(h, lost, factor, number_of(ends[i], S), S)
    return h


@triton.jit
def put_segment(results, place, inside, total, end, S: tl.constexpr):
    """Writes the product of a segment's factors and its end from a state of zeros, [c] each."""
    tl.store(results.totals + place, stored(total, tl.int64, S) if S.TURNING else total, mask=inside)
    tl.store(results.ends + place, stored(end, results.ends.dtype.element_ty, S), mask=inside)


@triton.jit(do_not_specialize=["n"])
def scan_kernel(inputs, results, slots, n, S: tl.constexpr):
    """The tokens of a slot; with `totals`, only the product of its factors and its end from a state of zeros."""
    GROUP: tl.constexpr = S.GROUP
    STEP: tl.constexpr = GROUP * S.WIDTH
    NOTHING: tl.constexpr = float("-inf") if S.MAXIMUM else 0.0
    slot, column, inside = columns(S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    total, lost = no_factor(S), tl.zeros(column.shape, tl.float32)
    total_lost = lost
    if results.totals is not None:
        h = constant(NOTHING, S)
    else:
        h = states_at(inputs.start, span.sequence, column, inside, S)
        if S.SEGMENTS:
            h = joined(inputs, h, slot - span.place, span.place, 1, column, inside, S)
    source = decay_source(inputs, column, inside, S)
    first, left, some = span.first * S.WIDTH + column, left_of(limit, span.first), span.first < span.last
    x_at, h_at = places(inputs.x, first, S), places(results.h, first, S)
    g_at = decay_places(source, span.first, column, S)
    xs = loaded_once(x_at, some, left, NOTHING)
    gs = decays_at(g_at, some, left, left_of(span.last, span.first), S)
    x_at, g_at = moved(x_at, STEP), decays_moved(g_at, GROUP, S)
    for at in range(span.first, span.last, GROUP):
        left, some_left = left_of(limit, at), left_of(span.last, at)
        next_xs, next_gs = (), ()
        for i in tl.static_range(GROUP):
            factor, weight = factors_of(gs[i], i < left, S)
            before, x = h, number_of(xs[i], S)
            h, lost = advanced(h, lost, factor, weight * x if S.COUPLING else x, S)
            if results.totals is not None:
                total, total_lost = with_factor(total, total_lost, factor, S)
            else:
                y = before if S.READ_BEFORE else h
                tl.store(h_at[i], stored(y, results.h.dtype.element_ty, S), mask=i < left)
            exists = GROUP + i < left
            next_xs = append(next_xs, tl.load(x_at[i], mask=exists, other=NOTHING))  # [c]
            next_gs = append(next_gs, decay_at(g_at, i, exists, GROUP + i < some_left, S))
        xs, gs = next_xs, next_gs
        x_at, g_at, h_at = moved(x_at, STEP), decays_moved(g_at, GROUP, S), moved(h_at, STEP)
    if results.totals is not None:
        put_segment(results, slot * S.WIDTH + column, inside, total, h, S)
    else:
        ends = inside & (span.last == span.end)
        if S.SEGMENTS:  # an empty sequence, which has no segment, keeps the state that its results began with
            ends = ends & (span.first < span.last)
        tl.store(
            results.state + span.sequence * S.WIDTH + column, stored(h, results.state.dtype.element_ty, S), mask=ends
        )
