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

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.kernels import (
    columns,
    decay_at,
    decay_place,
    decay_source,
    decays_of,
    factors_of,
    joined,
    left_of,
    no_factor,
    put_segment,
    span_of,
    states_at,
)
from flashmix.ops.scan.triton_gpu.numbers import added, chosen, constant, number_of, stored, times, times_conjugate
from flashmix.ops.scan.triton_gpu.weights import state_and_own


@triton.jit
def gradient_at(inputs, token, OFFSET: tl.constexpr, column, exists, S: tl.constexpr):
    """The gradient [c] of a token's output, zeros if there are none."""
    BLOCK: tl.constexpr = S.BLOCK
    if inputs.d_h is None:
        return tl.full([BLOCK], 0, tl.int64 if S.COMPLEX else tl.float32)
    else:
        return tl.load(inputs.d_h + (token * S.WIDTH + column) + OFFSET * S.WIDTH, mask=exists, other=0.0)  # [c]


@triton.jit
def state_before(inputs, results, token, OFFSET: tl.constexpr, column, exists, start, S: tl.constexpr):
    """`h_{t-1}` of a token, [c], but of the sequence's first; nothing that matters where no decay has a gradient."""
    if results.dg is None:
        return column
    elif S.READ_BEFORE:
        return tl.load(inputs.h + (token * S.WIDTH + column) + OFFSET * S.WIDTH, mask=exists, other=0.0)  # [c]
    else:
        mask = exists & (token + OFFSET > start)
        return tl.load(inputs.h + (token * S.WIDTH + column) + (OFFSET - 1) * S.WIDTH, mask=mask, other=0.0)  # [c]


@triton.jit
def own_at(inputs, results, token, OFFSET: tl.constexpr, column, exists, S: tl.constexpr):
    """`x` [c] of a token where the gradient of its decay needs it."""
    if S.COUPLING == 0 or results.dg is None:
        return column
    else:
        return tl.load(inputs.x + (token * S.WIDTH + column) + OFFSET * S.WIDTH, mask=exists, other=0.0)  # [c]


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
def decay_gradient(results, d_g, sums, at, OFFSET: tl.constexpr, column, left, S: tl.constexpr):
    """Writes the gradient [c] of one token's decay, or adds that of a constant decay to `sums`: a sum and what rounding lost of it,
    of complex numbers those of both parts. `left` are the tokens from `at` on, of channels [c] and of all.
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
        ptr = results.dg + (at * S.WIDTH + column) + OFFSET * S.WIDTH
        tl.store(ptr, stored(d_g, results.dg.dtype.element_ty, S), mask=exists)
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
    gs, ds, hs, xs = decays_of(source, at, column, limit, span.last, S), (), (), ()
    for i in tl.static_range(GROUP):
        exists = i < left_of(limit, at)
        ds = append(ds, gradient_at(inputs, at, i, column, exists, S))
        hs = append(hs, state_before(inputs, results, at, i, column, exists, span.start, S))
        xs = append(xs, own_at(inputs, results, at, i, column, exists, S))
    for _ in range(groups):
        before = at - GROUP  # no token of it is wanted if it begins before the segment
        some = before >= span.first
        wanted = inside & some
        place, left, some_left = decay_place(source, before, column, S), left_of(limit, at), left_of(span.last, at)
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
                out = results.dx + (at * S.WIDTH + column) + j * S.WIDTH
                found = weight * d_x if S.COUPLING else d_x
                tl.store(out, stored(found, results.dx.dtype.element_ty, S), mask=j < left)
                if results.dg is not None:
                    h = state_or_begin(hs[j], begin, at + j == span.start, S)
                    if S.COUPLING:
                        h = state_and_own(h, xs[j].to(tl.float32), factor, weight, S)
                    sums = decay_gradient(
                        results, times_conjugate(decayed, h, S), sums, at, j, column, (left, some_left), S
                    )
            next_gs = prepend(decay_at(place, j, wanted, some, S), next_gs)
            next_ds = prepend(gradient_at(inputs, before, j, column, wanted, S), next_ds)
            next_hs = prepend(state_before(inputs, results, before, j, column, wanted, span.start, S), next_hs)
            next_xs = prepend(own_at(inputs, results, before, j, column, wanted, S), next_xs)
        gs, ds, hs, xs = next_gs, next_ds, next_hs, next_xs
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
