"""The backward of the scan on a GPU: the same token loop, from the last one to the first.

    l_t = dh_t + c_{t+1},  c_t = e^{g_t} l_t, where c after the last token is the gradient of the last state
    dx = l,  dg_t = c_t h_{t-1},  and c of the first token is the gradient of the state that came in
    read_before: l_t = c_{t+1}, c_t = do_t + e^{g_t} l_t

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
    factor_of,
    joined,
    left_of,
    span_of,
    states_at,
)


@triton.jit
def gradient_at(inputs, token, OFFSET: tl.constexpr, column, exists, S: tl.constexpr):
    """The gradient [c] of a token's output, zeros if there are none."""
    BLOCK: tl.constexpr = S.BLOCK
    if inputs.d_h is None:
        return tl.full([BLOCK], 0.0, tl.float32)
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
def state_or_begin(h, begin, is_first, S: tl.constexpr):
    """`h_{t-1}` in float32; of a sequence's first token the state `begin` that came in, which no output holds."""
    if S.READ_BEFORE:
        return h.to(tl.float32)
    else:
        return tl.where(is_first, begin, h.to(tl.float32))


@triton.jit
def prepend(tile, tiles):
    """The tuple with one more tile in front."""
    return (tile,) + tiles  # noqa: RUF005 (kernels cannot unpack)


@triton.jit
def decay_gradient(results, d_g, sums, at, OFFSET: tl.constexpr, column, left, S: tl.constexpr):
    """Writes the gradient [c] of one token's decay, or adds that of a constant decay to `sums`: a sum and what rounding lost of it.
    `left` are the tokens from `at` on, of channels [c] and of all.
    """
    exists = OFFSET < left[0]
    if S.DECAY == 2:
        sum_, lost = sums
        more = tl.where(exists, d_g, 0.0) - lost
        after = sum_ + more
        sums = (after, (after - sum_) - more)
    elif S.DECAY == 1:
        heads: tl.constexpr = S.WIDTH // S.HEAD
        ptr = results.dg + (at * heads + tl.min(column, 0) // S.HEAD) + OFFSET * heads
        tl.store(ptr, tl.sum(d_g, 0).to(results.dg.dtype.element_ty), mask=OFFSET < left[1])
    else:
        ptr = results.dg + (at * S.WIDTH + column) + OFFSET * S.WIDTH
        tl.store(ptr, d_g.to(results.dg.dtype.element_ty), mask=exists)
    return sums


@triton.jit(do_not_specialize=["n"])
def scan_backward_kernel(inputs, results, slots, n, S: tl.constexpr):
    """The same from the last token to the first."""
    BLOCK: tl.constexpr = S.BLOCK
    GROUP: tl.constexpr = S.GROUP
    slot, column, inside = columns(S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    total, nothing = tl.full([BLOCK], 1.0, tl.float32), tl.full([BLOCK], 0.0, tl.float32)
    sums = (nothing, nothing)
    if results.totals is not None:
        c = tl.full([BLOCK], 0.0, tl.float32)
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
    gs, ds, hs = decays_of(source, at, column, limit, span.last, S), (), ()
    for i in tl.static_range(GROUP):
        exists = i < left_of(limit, at)
        ds = append(ds, gradient_at(inputs, at, i, column, exists, S))
        hs = append(hs, state_before(inputs, results, at, i, column, exists, span.start, S))
    for _ in range(groups):
        before = at - GROUP  # no token of it is wanted if it begins before the segment
        some = before >= span.first
        wanted = inside & some
        place, left, some_left = decay_place(source, before, column, S), left_of(limit, at), left_of(span.last, at)
        next_gs, next_ds, next_hs = (), (), ()
        for j in tl.static_range(GROUP - 1, -1, -1):
            factor = factor_of(gs[j], j < left, S)
            d_x = c if S.READ_BEFORE else ds[j].to(tl.float32) + c
            decayed = factor * d_x
            c = ds[j].to(tl.float32) + decayed if S.READ_BEFORE else decayed
            if results.totals is not None:
                total = total * factor
            else:
                out = results.dx + (at * S.WIDTH + column) + j * S.WIDTH
                tl.store(out, d_x.to(results.dx.dtype.element_ty), mask=j < left)
                if results.dg is not None:
                    sums = decay_gradient(
                        results,
                        decayed * state_or_begin(hs[j], begin, at + j == span.start, S),
                        sums,
                        at,
                        j,
                        column,
                        (left, some_left),
                        S,
                    )
            next_gs = prepend(decay_at(place, j, wanted, some, S), next_gs)
            next_ds = prepend(gradient_at(inputs, before, j, column, wanted, S), next_ds)
            next_hs = prepend(state_before(inputs, results, before, j, column, wanted, span.start, S), next_hs)
        gs, ds, hs = next_gs, next_ds, next_hs
        at = before
    if results.totals is not None:
        tl.store(results.totals + slot * S.WIDTH + column, total, mask=inside)
        tl.store(results.ends + slot * S.WIDTH + column, c, mask=inside)
    else:
        if results.dg is not None and S.DECAY == 2:
            tl.store(results.dg + slot * S.WIDTH + column, sums[0], mask=inside)
        if results.state is not None:
            mine = inside & (span.first == span.start)
            if S.SEGMENTS:
                mine = mine & (span.first < span.last)
            tl.store(results.state + span.sequence * S.WIDTH + column, c, mask=mine)
