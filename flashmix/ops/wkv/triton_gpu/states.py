"""States of RWKV-4's averages on a GPU: weights of two of them, and the states that segments start from.

A state is `a` and `b` over `e^m`, and `m` as the key that it was last and the tokens since then. Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.numbers import exponential

NONE = tl.constexpr(float("-inf"))  # m of no tokens, and the key of a token that is not there


@triton.jit
def power(x, S: tl.constexpr):
    """`e^x` of x up to 0."""
    if S.PRECISE:
        return exponential(x)
    else:
        return tl.exp2(x * 1.4426950408889634)


@triton.jit
def weights(first, second, S: tl.constexpr):
    """`e` to each of two numbers less the larger of them."""
    is_first = first >= second
    small = power(-tl.abs(first - second), S)
    return tl.where(is_first, 1.0, small), tl.where(is_first, small, 1.0)


@triton.jit
def sums_of(tensor, place, mask, S: tl.constexpr):
    """Numbers [c] of a state, zeros if there are none."""
    if tensor is None:
        return tl.full([S.BLOCK], 0.0, tl.float32)
    else:
        return tl.load(tensor + place, mask=mask, other=0.0)


@triton.jit
def ends_of(span, inside, outermost, S: tl.constexpr):
    """The channels of a slot at the end of its sequence; an empty sequence, which has no segment, keeps its state."""
    if S.SEGMENTS:
        return inside & outermost & (span.first < span.last)
    else:
        return inside


@triton.jit
def with_part(found, parts, n, slot, column, mask, COUNT: tl.constexpr, OTHER: tl.constexpr, S: tl.constexpr):
    """Numbers [c] and those of one more segment; where there is none the first is OTHER and the others are 0."""
    for j in tl.static_range(COUNT):
        ptr = parts + ((j * n.slots + slot) * S.WIDTH + column)
        found = append(found, tl.load(ptr, mask=mask, other=OTHER if j == 0 else 0.0))  # [c]
    return found


@triton.jit
def put_part(parts, n, slot, column, inside, numbers, S: tl.constexpr):
    """Writes the numbers [c] of a segment."""
    for j in tl.static_range(len(numbers)):
        tl.store(parts + ((j * n.slots + slot) * S.WIDTH + column), numbers[j], mask=inside)


@triton.jit
def past_of(x, n, state, w, slot, place, column, inside, S: tl.constexpr):
    """A state [c] after so many segments, the slots before `slot`."""
    JOINED: tl.constexpr = S.JOINED
    a, b, top = state
    for first in range(0, place, JOINED):
        parts = ()
        for i in tl.static_range(JOINED):
            mask = inside & (first + i < place)
            parts = with_part(parts, x.parts, n, slot - place + first + i, column, mask, 4, NONE, S)
        for i in tl.static_range(JOINED):
            exists, own = first + i < place, tl.fma(parts[4 * i + 1], w, parts[4 * i])  # m of the segment
            own = tl.where(parts[4 * i + 1] == 0.0, parts[4 * i], own)  # 0 times a decay of -inf is no number
            aged = top[2] + n.segment.to(tl.float32)
            past = tl.where(exists, tl.fma(aged, w, top[1]), top[0])
            after = tl.maximum(past, own, propagate_nan=tl.PropagateNan.ALL)
            older, nothing = past >= own, after == NONE
            f, e = weights(tl.where(nothing, 0.0, past), tl.where(nothing, 0.0, own), S)
            e = tl.where(nothing, 0.0, e)
            a, b = f * a + e * parts[4 * i + 2], f * b + e * parts[4 * i + 3]
            aged = tl.where(exists, aged, top[2])
            top = (after, tl.where(older, top[1], parts[4 * i]), tl.where(older, aged, parts[4 * i + 1]))
    return a, b, top


@triton.jit
def first_state(x, n, span, w, slot, column, inside, ALONE: tl.constexpr, S: tl.constexpr):
    """The state [c] that a slot starts from, ALONE that of no past."""
    state, zero = span.sequence * S.WIDTH + column, tl.full([S.BLOCK], 0.0, tl.float32)
    if ALONE:
        nothing = tl.full([S.BLOCK], NONE, tl.float32)
        return zero, zero, (nothing, nothing, zero)
    else:
        a, b = tl.load(x.a + state, mask=inside, other=0.0), tl.load(x.b + state, mask=inside, other=0.0)  # [c]
        m = tl.load(x.m + state, mask=inside, other=0.0)  # [c]
        if S.SEGMENTS:
            return past_of(x, n, (a, b, (m, m, zero)), w, slot, span.place, column, inside, S)
        else:
            return a, b, (m, m, zero)


@triton.jit
def last_flows(x, n, span, slot, column, inside, ALONE: tl.constexpr, S: tl.constexpr):
    """`c` and `z` [c] after a slot's last token, ALONE none."""
    JOINED: tl.constexpr = S.JOINED
    state, c, z = (
        span.sequence * S.WIDTH + column,
        tl.full([S.BLOCK], 0.0, tl.float32),
        tl.full([S.BLOCK], 0.0, tl.float32),
    )
    if not ALONE:
        c, z = sums_of(x.d_a, state, inside, S), sums_of(x.d_b, state, inside, S)
        if S.SEGMENTS:
            later = tl.maximum(tl.cdiv(span.end - span.start, n.segment) - 1 - span.place, 0)
            later = tl.where(span.place < 0, 0, later)
            for first in range(0, later, JOINED):
                parts = ()
                for i in tl.static_range(JOINED):
                    mask = inside & (first + i < later)
                    parts = with_part(parts, x.parts, n, slot + later - first - i, column, mask, 3, 1.0, S)
                for i in tl.static_range(JOINED):
                    c, z = parts[3 * i] * c + parts[3 * i + 1], parts[3 * i] * z + parts[3 * i + 2]
    return c, z
