"""The scan on a GPU: a program has a block of channels of one sequence, tile of tokens after tile.

    forward    h_t = e^{g_t} h_{t-1} + x_t
    backward   l_t = dh_t + e^{g_{t+1}} l_{t+1}, where l after the last token is the state's gradient and its factor is 1
               dx = l,  dg_t = e^{g_t} h_{t-1} l_t;  read_before: l_t = do_{t+1} + e^{g_{t+1}} l_{t+1}

Within a tile by an associative scan, whose factors are products. Few channels of long sequences: each sequence in segments, first only the
product and the end of each, then where each begins, then all. Segments follow from the sizes alone, and both they and tiles begin where the
sequence does. Tiles: `t` tokens, `c` channels (with a decay a head: those of one head).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class ScanInputs(NamedTuple):
    """Contiguous tensors; of the forward `x`, of the backward `h` and the gradients of the outputs. `start` is the state that comes in,
    `[N, C]`, `begins` the one that each segment starts from, `[slots, C]`; absent ones None.
    """

    x: Any
    g: Any
    start: Any
    begins: Any
    h: Any
    d_h: Any
    d_state: Any


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


@triton.jit
def join(a, x, b, y):
    """Two steps `h -> a h + x` as one."""
    return a * b, b * x + y


@triton.jit
def join_maxima(a, x, b, y):
    """Two steps `h -> max(h + a, x)` as one."""
    return a + b, tl.maximum(x + b, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exponential(x):
    """`e^x` to float32's rounding for `x` up to 0: the card's own errs by two steps, which a factor that comes back for thousands of tokens
    multiplies. With `x = n log 2 + r`; below -87.3 it is 0.
    """
    least: tl.constexpr = -87.3
    part = tl.maximum(x, least, propagate_nan=tl.PropagateNan.ALL)
    n = tl.floor(part * 1.44269504 + 0.5)
    r = part - n * 0.693359375 + n * 2.12194440e-4
    y = ((r * 1.9875691500e-4 + 1.3981999507e-3) * r + 8.3334519073e-3) * r + 4.1665795894e-2
    y = ((y * r + 1.6666665459e-1) * r + 5.0000001201e-1) * r * r + r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < least, 0.0, y * power)


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
def tokens_of(slots, n, slot, S: tl.constexpr):
    """The sequence of a slot, its first token and the one past its last, and the same two of the slot's segment."""
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
    return sequence, start, end, first, last


@triton.jit
def factors(g, token, valid, column, inside, S: tl.constexpr):
    """`e^g` of tokens and channels [t, c], 1 where there are none; with a maximum g and 0."""
    if S.DECAY == 2:
        power = tl.load(g + column, mask=inside, other=0.0)[None, :]  # [1, c]
    elif S.DECAY == 1:
        head = tl.min(column, 0) // S.HEAD
        power = tl.load(g + token * (S.WIDTH // S.HEAD) + head, mask=valid, other=0.0)[:, None]  # [t, 1]
    else:
        ptr = g + token[:, None] * S.WIDTH + column[None, :]
        power = tl.load(ptr, mask=valid[:, None] & inside[None, :], other=0.0)  # [t, c]
    power = power.to(tl.float32)
    if S.MAXIMUM:
        return tl.where(valid[:, None] & inside[None, :], power, 0.0)
    else:
        return tl.where(valid[:, None] & inside[None, :], exponential(power), 1.0)


@triton.jit
def first_row(tile, index, row):
    """Row `row` of a tile [t, c]: [c]."""
    return tl.sum(tl.where((index == row)[:, None], tile, 0.0), 0)


@triton.jit
def states_at(states, row, column, inside, S: tl.constexpr):
    """States [c] of a row, zeros if there are none."""
    BLOCK: tl.constexpr = S.BLOCK
    if states is None:
        return tl.full([BLOCK], 0.0, tl.float32)
    else:
        return tl.load(states + row * S.WIDTH + column, mask=inside, other=0.0).to(tl.float32)  # [c]


@triton.jit(do_not_specialize=["n"])
def scan_kernel(inputs, results, slots, n, S: tl.constexpr):
    """The tokens of a slot; with `totals`, only the product of its factors and its end from a state of zeros."""
    TIME: tl.constexpr = S.TIME
    BLOCK: tl.constexpr = S.BLOCK
    row = tl.arange(0, TIME)
    slot, column, inside = columns(S)
    sequence, start, end, first, last = tokens_of(slots, n, slot, S)
    NOTHING: tl.constexpr = float("-inf") if S.MAXIMUM else 0.0
    ONE: tl.constexpr = 0.0 if S.MAXIMUM else 1.0
    total = tl.full([BLOCK], ONE, tl.float32)
    if results.totals is not None:
        h = tl.full([BLOCK], NOTHING, tl.float32)
    elif S.SEGMENTS:
        h = states_at(inputs.begins, slot, column, inside, S)
    else:
        h = states_at(inputs.start, sequence, column, inside, S)
    if S.READ_BEFORE and results.totals is None:
        begins = inside & (first == start) & (first < last)
        tl.store(results.h + start * S.WIDTH + column, h.to(results.h.dtype.element_ty), mask=begins)
    for at in range(first, last, TIME):
        token = at + row
        valid = token < last
        mask = valid[:, None] & inside[None, :]
        place = token[:, None] * S.WIDTH + column[None, :]
        x = tl.load(inputs.x + place, mask=mask, other=NOTHING).to(tl.float32)  # [t, c]
        factor = factors(inputs.g, token, valid, column, inside, S)
        if S.MAXIMUM:
            product, local = tl.associative_scan((factor, x), 0, join_maxima)
            after = tl.maximum(product + h[None, :], local, propagate_nan=tl.PropagateNan.ALL)
        else:
            product, local = tl.associative_scan((factor, x), 0, join)
            after = product * h[None, :] + local
        h = first_row(after, row, TIME - 1)
        if results.totals is not None:
            more = first_row(product, row, TIME - 1)
            total = total + more if S.MAXIMUM else total * more
        elif S.READ_BEFORE:  # the next token finds it
            late = mask & (token + 1 < end)[:, None]
            tl.store(results.h + place + S.WIDTH, after.to(results.h.dtype.element_ty), mask=late)
        else:
            tl.store(results.h + place, after.to(results.h.dtype.element_ty), mask=mask)
    if results.totals is not None:
        tl.store(results.totals + slot * S.WIDTH + column, total, mask=inside)
        tl.store(results.ends + slot * S.WIDTH + column, h, mask=inside)
    else:
        ends = inside & (last == end)
        if S.SEGMENTS:  # an empty sequence, which has no segment, keeps the state that its results began with
            ends = ends & (first < last)
        tl.store(results.state + sequence * S.WIDTH + column, h, mask=ends)


@triton.jit
def flows(inputs, token, last, end, column, inside, S: tl.constexpr):
    """Factor and addend of `l_t = f_t l_{t+1} + y_t` for tokens before `last`, [t, c] each; the others change nothing."""
    within = (token + 1 < end) & (token < last)
    f = factors(inputs.g, token + 1, within, column, inside, S)
    late = token + 1 if S.READ_BEFORE else token
    valid = within if S.READ_BEFORE else token < last
    y = tl.full(f.shape, 0.0, tl.float32)
    if inputs.d_h is not None:
        ptr = inputs.d_h + late[:, None] * S.WIDTH + column[None, :]
        y = tl.load(ptr, mask=valid[:, None] & inside[None, :], other=0.0).to(tl.float32)  # [t, c]
    return f, y


@triton.jit
def states_before(inputs, token, start, sequence, mask, column, inside, S: tl.constexpr):
    """`h_{t-1}` of tokens [t, c]."""
    place = token[:, None] * S.WIDTH + column[None, :]
    if S.READ_BEFORE:
        return tl.load(inputs.h + place, mask=mask, other=0.0).to(tl.float32)  # [t, c]
    else:
        h = tl.load(inputs.h + place - S.WIDTH, mask=mask & (token > start)[:, None], other=0.0)  # [t, c]
        begin = states_at(inputs.start, sequence, column, inside, S)
        return tl.where((token == start)[:, None], begin[None, :], h.to(tl.float32))


@triton.jit(do_not_specialize=["n"])
def scan_backward_kernel(inputs, results, slots, n, S: tl.constexpr):
    """The same from the last token to the first; `begins` are the gradients l that come from the segments after."""
    TIME: tl.constexpr = S.TIME
    BLOCK: tl.constexpr = S.BLOCK
    row = tl.arange(0, TIME)
    slot, column, inside = columns(S)
    sequence, start, end, first, last = tokens_of(slots, n, slot, S)
    total, sums = tl.full([BLOCK], 1.0, tl.float32), tl.full([BLOCK], 0.0, tl.float32)
    if results.totals is not None:
        flow = tl.full([BLOCK], 0.0, tl.float32)
    elif S.SEGMENTS:
        flow = states_at(inputs.begins, slot, column, inside, S)
    else:
        flow = states_at(inputs.d_state, sequence, column, inside, S)
    tiles = tl.maximum(last - first + TIME - 1, 0) // TIME
    for back in range(tiles):
        at = first + (tiles - 1 - back) * TIME
        token = at + row
        valid = token < last
        mask = valid[:, None] & inside[None, :]
        f, y = flows(inputs, token, last, end, column, inside, S)
        product, local = tl.associative_scan((f, y), 0, join, reverse=True)
        d_x = product * flow[None, :] + local
        flow = first_row(d_x, row, 0)
        if results.totals is not None:
            total *= first_row(product, row, 0)
        else:
            place = token[:, None] * S.WIDTH + column[None, :]
            tl.store(results.dx + place, d_x.to(results.dx.dtype.element_ty), mask=mask)
            if results.dg is not None:
                before = states_before(inputs, token, start, sequence, mask, column, inside, S)
                d_g = tl.where(mask, factors(inputs.g, token, valid, column, inside, S) * before * d_x, 0.0)
                if S.DECAY == 2:
                    sums += tl.sum(d_g, 0)
                elif S.DECAY == 1:
                    ptr = results.dg + token * (S.WIDTH // S.HEAD) + tl.min(column, 0) // S.HEAD
                    tl.store(ptr, tl.sum(d_g, 1).to(results.dg.dtype.element_ty), mask=valid)
                else:
                    tl.store(results.dg + place, d_g.to(results.dg.dtype.element_ty), mask=mask)
    if results.totals is not None:
        tl.store(results.totals + slot * S.WIDTH + column, total, mask=inside)
        tl.store(results.ends + slot * S.WIDTH + column, flow, mask=inside)
    else:
        if results.dg is not None and S.DECAY == 2:
            tl.store(results.dg + slot * S.WIDTH + column, sums, mask=inside)
        if results.state is not None:
            some = first < last
            one = tl.full([1], 0, tl.int64) + start
            factor = tl.sum(factors(inputs.g, one, (one < end) & some, column, inside, S), 0)
            d_start = tl.where(some, factor * flow, flow)
            if S.READ_BEFORE and inputs.d_h is not None:
                ptr = inputs.d_h + start * S.WIDTH + column
                d_start += tl.load(ptr, mask=inside & some, other=0.0).to(tl.float32)  # [c]
            mine = inside & (first == start)
            if S.SEGMENTS:
                mine = mine & some
            tl.store(results.state + sequence * S.WIDTH + column, d_start, mask=mine)


class SegmentStates(NamedTuple):
    """What each segment makes of a state, `[slots, C]`, where each begins, and the state that comes in, `[N, C]` or None."""

    totals: Any
    ends: Any
    begins: Any
    start: Any
    first: Any  # packed: the first slot of each sequence and how many it has, else None
    count: Any


@triton.jit(do_not_specialize=["each"])
def scan_segments_kernel(states, each, S: tl.constexpr):
    """Segment after segment of a sequence, REVERSE from the last one."""
    slot, column, inside = columns(S)
    sequence, first, count = slot, slot * each, each
    if states.first is not None:
        first = tl.load(states.first + sequence)
        count = tl.load(states.count + sequence)
    h = states_at(states.start, sequence, column, inside, S)
    for i in range(count):
        at = (first + (count - 1 - i if S.REVERSE else i)) * S.WIDTH + column
        tl.store(states.begins + at, h, mask=inside)
        total = tl.load(states.totals + at, mask=inside, other=0.0)  # [c]
        end = tl.load(states.ends + at, mask=inside, other=0.0)  # [c]
        if S.MAXIMUM:
            h = tl.maximum(total + h, end, propagate_nan=tl.PropagateNan.ALL)
        else:
            h = total * h + end
