"""The backward of the scan on a GPU: the same token loop, from the last one to the first.

    l_t = dh_t + c_{t+1},  c_t = e^{g_t} l_t, where c after the last token is the gradient of the last state
    dx = l,  dg_t = c_t h_{t-1},  and c of the first token is the gradient of the state that came in
    of complex numbers the factors and h_{t-1} are conjugates
    read_before: l_t = c_{t+1}, c_t = do_t + e^{g_t} l_t
    with a coupling dx = w l, and dg see `state_and_own`

Tiles: `c` channels (with a decay a head: those of one head).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.kernels import (
    columns,
    decay_at,
    decay_places,
    decay_source,
    decays_at,
    decays_moved,
    factors_of,
    joined,
    left_of,
    no_factor,
    put_segment,
    span_of,
    states_at,
)
from flashmix.ops.scan.triton_gpu.numbers import added, chosen, constant, number_of, stored, times, times_conjugate
from flashmix.ops.scan.triton_gpu.places import loaded_once, moved, places
from flashmix.ops.scan.triton_gpu.weights import state_and_own


class TokenPlaces(NamedTuple):
    """Where the tokens of a group lie, `places` of each tensor and `decay_places`; `h` is a token behind unless it is read before."""

    g: Any
    d_h: Any
    h: Any
    x: Any


@triton.jit
def token_places(inputs, results, source, token, column, S: tl.constexpr):
    """`TokenPlaces` of the group at `token`: none of a tensor that the gradients do not need."""
    at, before, own = token * S.WIDTH + column, (), ()
    if results.dg is not None:
        before = places(inputs.h, at if S.READ_BEFORE else at - S.WIDTH, S)
        if S.COUPLING:
            own = places(inputs.x, at, S)
    return TokenPlaces(decay_places(source, token, column, S), places(inputs.d_h, at, S), before, own)


@triton.jit
def places_before(ptrs, S: tl.constexpr):
    """`TokenPlaces` of the group before."""
    STEP: tl.constexpr = -S.GROUP * S.WIDTH
    g = decays_moved(ptrs.g, -S.GROUP, S)
    return TokenPlaces(g, moved(ptrs.d_h, STEP), moved(ptrs.h, STEP), moved(ptrs.x, STEP))


@triton.jit
def no_gradient(S: tl.constexpr):
    """The gradient [c] of an output that has none, as it would be loaded."""
    BLOCK: tl.constexpr = S.BLOCK
    return tl.full([BLOCK], 0, tl.int64 if S.COMPLEX else tl.float32)


@triton.jit
def first_tokens(ptrs, some, left, after, absent, S: tl.constexpr):
    """Tokens [c] of a group as `loaded_once` finds them; `absent` for each of a tensor that is not there, or not needed."""
    GROUP: tl.constexpr = S.GROUP
    if len(ptrs) > 0:
        return loaded_once(ptrs, some, left, 0, after)
    else:
        found = ()
        for _ in tl.static_range(GROUP):
            found = append(found, absent)
        return found


@triton.jit
def loaded_or(ptrs, i: tl.constexpr, exists, absent):
    """A token [c]; `absent` of a tensor that is not there, or not needed."""
    if len(ptrs) > 0:
        return tl.load(ptrs[i], mask=exists, other=0.0)  # [c]
    else:
        return absent


@triton.jit
def first_of(start, token):
    """The place of the sequence's first token, which has none before it, in the group at `token`; -1 if it is before the group."""
    return left_of(start + 1, token) - 1


@triton.jit
def token_at(ptrs, i: tl.constexpr, column, exists, some, first, S: tl.constexpr):
    """The log decay, the gradient of the output, the state before (behind place `first`) and `x` of a token, [c] each."""
    before = exists if S.READ_BEFORE else exists & (i > first)
    d_h, h = loaded_or(ptrs.d_h, i, exists, no_gradient(S)), loaded_or(ptrs.h, i, before, column)
    return decay_at(ptrs.g, i, exists, some, S), d_h, h, loaded_or(ptrs.x, i, exists, column)


@triton.jit
def state_or_begin(h, begin, is_first, S: tl.constexpr):
    """`h_{t-1}` in float32; of a sequence's first token the state `begin` that came in, which no output holds."""
    if S.READ_BEFORE:
        return number_of(h, S)
    else:
        return chosen(is_first, begin, number_of(h, S), S)


@triton.jit
def prepend(tile, tiles):
    """The tuple with one more tile in front."""
    return (tile,) + tiles  # noqa: RUF005 (kernels cannot unpack)


@triton.jit
def no_sums(S: tl.constexpr):
    """The sums of `decay_gradient` before the first token."""
    BLOCK: tl.constexpr = S.BLOCK
    zero = tl.full([BLOCK], 0.0, tl.float32)
    if S.COMPLEX:
        return zero, zero, zero, zero
    else:
        return zero, zero


@triton.jit
def lengthened(sum_, lost, x):
    """A sum and what rounding lost of it, with one more summand."""
    more = x - lost
    after = sum_ + more
    return after, (after - sum_) - more


@triton.jit
def decay_gradient(results, d_g, sums, ptrs, at, OFFSET: tl.constexpr, column, left, S: tl.constexpr):
    """Writes the gradient [c] of one token's decay, or adds that of a constant decay to `sums`: a sum and what rounding lost of it,
    of complex numbers those of both parts. `left` are the tokens from `at` on, of channels [c] and of all,
    `ptrs` the `places` of a gradient by channel.
    """
    exists = OFFSET < left[0]
    if S.DECAY == 2:
        if S.COMPLEX:
            real, lost_real = lengthened(sums[0], sums[1], tl.where(exists, d_g[0], 0.0))
            imaginary, lost_imaginary = lengthened(sums[2], sums[3], tl.where(exists, d_g[1], 0.0))
            sums = (real, lost_real, imaginary, lost_imaginary)
        else:
            sums = lengthened(sums[0], sums[1], tl.where(exists, d_g, 0.0))
    elif S.DECAY == 1:
        heads: tl.constexpr = S.WIDTH // S.HEAD
        ptr = results.dg + (at * heads + tl.min(column, 0) // S.HEAD) + OFFSET * heads
        tl.store(ptr, tl.sum(d_g, 0).to(results.dg.dtype.element_ty), mask=OFFSET < left[1])
    else:
        tl.store(ptrs[OFFSET], stored(d_g, results.dg.dtype.element_ty, S), mask=exists)
    return sums


@triton.jit(do_not_specialize=["n"])
def scan_backward_kernel(inputs, results, slots, n, S: tl.constexpr):
    """The same from the last token to the first."""
    GROUP: tl.constexpr = S.GROUP
    slot, column, inside = columns(S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    total, sums = no_factor(S), no_sums(S)
    if results.totals is not None:
        c = constant(0.0, S)
    else:
        c = states_at(inputs.d_state, span.sequence, column, inside, S)
        if S.SEGMENTS:
            later = tl.maximum(tl.cdiv(span.end - span.start, n.segment) - 1 - span.place, 0)
            later = tl.where(span.place < 0, 0, later)
            c = joined(inputs, c, slot + later, later, -1, column, inside, S)
    begin = states_at(inputs.start, span.sequence, column, inside, S)
    source = decay_source(inputs, column, inside, S)
    groups = tl.maximum(span.last - span.first + GROUP - 1, 0) // GROUP
    at = span.first + tl.maximum(groups - 1, 0) * GROUP
    ptrs = token_places(inputs, results, source, at, column, S)
    dx_at, dg_at = places(results.dx, at * S.WIDTH + column, S), ()
    if S.DECAY == 0:
        dg_at = places(results.dg, at * S.WIDTH + column, S)
    nonempty, left = groups > 0, left_of(limit, at)
    gs, ds = (
        decays_at(ptrs.g, nonempty, left, left_of(span.last, at), S),
        first_tokens(ptrs.d_h, nonempty, left, -1, no_gradient(S), S),
    )
    hs = first_tokens(ptrs.h, nonempty, left, -1 if S.READ_BEFORE else first_of(span.start, at), column, S)
    xs, ptrs = first_tokens(ptrs.x, nonempty, left, -1, column, S), places_before(ptrs, S)
    for _ in range(groups):
        before = at - GROUP  # no token of it is wanted if it begins before the segment
        some = before >= span.first
        wanted, first = inside & some, first_of(span.start, before)
        left, some_left = left_of(limit, at), left_of(span.last, at)
        next_gs, next_ds, next_hs, next_xs = (), (), (), ()
        for j in tl.static_range(GROUP - 1, -1, -1):
            factor, weight = factors_of(gs[j], j < left, S)
            d_h = number_of(ds[j], S)
            d_x = c if S.READ_BEFORE else added(d_h, c, S)
            decayed = times(factor, d_x, S, True)
            c = added(d_h, decayed, S) if S.READ_BEFORE else decayed
            if results.totals is not None:
                total = times(factor, total, S, True) if S.TURNING else total * factor
            else:
                found = weight * d_x if S.COUPLING else d_x
                tl.store(dx_at[j], stored(found, results.dx.dtype.element_ty, S), mask=j < left)
                if results.dg is not None:
                    h = state_or_begin(hs[j], begin, at + j == span.start, S)
                    if S.COUPLING:
                        h = state_and_own(h, xs[j].to(tl.float32), factor, weight, S)
                    sums = decay_gradient(
                        results, times_conjugate(decayed, h, S), sums, dg_at, at, j, column, (left, some_left), S
                    )
            g, d_h, h_before, x = token_at(ptrs, j, column, wanted, some, first, S)
            next_gs, next_ds = prepend(g, next_gs), prepend(d_h, next_ds)
            next_hs, next_xs = prepend(h_before, next_hs), prepend(x, next_xs)
        gs, ds, hs, xs = next_gs, next_ds, next_hs, next_xs
        ptrs, dx_at, dg_at = places_before(ptrs, S), moved(dx_at, -GROUP * S.WIDTH), moved(dg_at, -GROUP * S.WIDTH)
        at = before
    if results.totals is not None:
        put_segment(results, slot * S.WIDTH + column, inside, total, c, S)
    else:
        if results.dg is not None and S.DECAY == 2:
            sum_ = (sums[0], sums[2]) if S.COMPLEX else sums[0]
            tl.store(results.dg + slot * S.WIDTH + column, stored(sum_, results.dg.dtype.element_ty, S), mask=inside)
        if results.state is not None:
            mine = inside & (span.first == span.start)
            if S.SEGMENTS:
                mine = mine & (span.first < span.last)
            place = span.sequence * S.WIDTH + column
            tl.store(results.state + place, stored(c, results.state.dtype.element_ty, S), mask=mine)
