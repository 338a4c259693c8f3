"""The backward of the selective scan on a GPU: chunk after chunk from the last one, the states of each recomputed from its first.

    l_t = dy_t C_t + c;  dC_t = dy_t h_t;  dB_t = dt u l_t;  c = e^{dt A} l_t
    dx = sum_s l_t B_t;  du = dt dx + D dy;  ddt = u dx + sum_s A e^{dt A} h_{t-1} l_t;  dA = dt e^{dt A} h_{t-1} l_t

of the gradient dy of `h C + D u`; with a gate that is `dout silu(z)`. A chunk's states are recomputed once to write those of every
GROUP-th token to memory that each program has for itself, then group after group, from the last one, in registers. dB and dC are sums over
channels: first over a warp's, by halves (each lane gives away half of its numbers at each of five steps), then over blocks of channels in
their order.
Tiles: `c` channels, `s` states.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.rows import activation, activation_slope, sigmoid
from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.scan.triton_gpu.kernels import left_of, span_of, tokens_of
from flashmix.ops.selective_scan.triton_gpu.forward import (
    CHUNK,
    LANES,
    advanced,
    first_chunk,
    joined,
    numbers_of,
    optional_tokens,
    place_of,
    power,
    put_states,
    rates_of,
    states_at,
    step_size,
    weights_of,
)


class SelectiveGradients(NamedTuple):
    """The gradient of `y` and those of `u`, `dt`, `z` `[T, D]`; `shared` those of B and C a block of channels, `[blocks, 2, T, G, S]`;
    `channels` those of D and the bias a slot, `[slots, 2, D]`; the pass that finds `ends` has `y` alone."""

    y: Any
    u: Any
    dt: Any
    z: Any
    shared: Any
    channels: Any


class SelectiveStateGradients(NamedTuple):
    """As `SelectiveStates`: `last` the gradient of the last states, `start` of those that came in, `rates` of A a slot `[slots, S, D]`;
    `kept` the states at the starts of chunks, `scratch` `[programs, CHUNK / GROUP, S, LANES]`. The pass that finds `totals` and `ends` has
    no `rates`.
    """

    A: Any
    start: Any
    last: Any
    kept: Any
    totals: Any
    ends: Any
    rates: Any
    scratch: Any


class BackwardNumbers(NamedTuple):
    tokens: Any  # T; packed, of all sequences
    each: Any  # segments of a sequence
    segment: Any  # tokens of a segment
    work: Any  # blocks of channels of all slots
    programs: Any
    rows: Any  # tokens of the whole batch


class Own(NamedTuple):
    """What a program works on: group and block of channels, channels [c], which of these there are, bias, skip weight, rates [c, s]; and
    the tokens of the whole batch."""

    share: Any
    part: Any
    column: Any
    inside: Any
    bias: Any
    skip: Any
    rates: Any
    rows: Any


@triton.jit
def halved(numbers, DISTANCE: tl.constexpr, COUNT: tl.constexpr):
    """Of neighbours among numbers [c, COUNT], lanes with the bit DISTANCE take the second and add what the lane across has of it."""
    first, second = tl.split(tl.reshape(numbers, [LANES, COUNT // 2, 2]))
    lane = tl.arange(0, LANES)[:, None]
    upper = (lane & DISTANCE) != 0
    mine, other = tl.where(upper, second, first), tl.where(upper, first, second)
    across = tl.broadcast_to(lane ^ DISTANCE, [LANES, COUNT // 2])
    return mine + tl.gather(other, across, 0)


@triton.jit
def sums_of(numbers, COUNT: tl.constexpr):
    """Sums over the lanes of numbers [c, COUNT], COUNT from 2 to 32: lane l has that of number `l % COUNT`, [c]."""
    numbers = halved(numbers, 1, COUNT)
    if COUNT >= 4:
        numbers = halved(numbers, 2, COUNT // 2)
    if COUNT >= 8:
        numbers = halved(numbers, 4, COUNT // 4)
    if COUNT >= 16:
        numbers = halved(numbers, 8, COUNT // 8)
    if COUNT >= 32:
        numbers = halved(numbers, 16, COUNT // 16)
    total = tl.reshape(numbers, [LANES])
    lane = tl.arange(0, LANES)
    if COUNT < 4:
        total += tl.gather(total, lane ^ 2, 0)
    if COUNT < 8:
        total += tl.gather(total, lane ^ 4, 0)
    if COUNT < 16:
        total += tl.gather(total, lane ^ 8, 0)
    if COUNT < 32:
        total += tl.gather(total, lane ^ 16, 0)
    return total


@triton.jit
def put_shared(gradients, d_B, d_C, own, token, last, S: tl.constexpr):
    """Writes the sums over the lanes of the gradients [c, s] of B and C of a token."""
    TILE: tl.constexpr = S.TILE
    total = sums_of(tl.reshape(tl.join(d_B, d_C), [LANES, 2 * TILE]), 2 * TILE)
    number = tl.arange(0, LANES)
    which, s = number % 2, number // 2
    at = (((own.part * 2 + which) * own.rows + token) * S.SHARES + own.share) * S.STATES + s
    tl.store(gradients.shared + at, total, mask=(s < S.STATES) & (token < last))


@triton.jit
def gated(d_out, z, S: tl.constexpr):
    """The gradient of what the gate multiplies."""
    if z is None:
        return d_out
    else:
        return d_out * activation(z.to(tl.float32), "silu", S.PRECISE)


@triton.jit
def slot_ends(inputs, gradients, states, slots, n, work, S: tl.constexpr):
    """What a slot adds to the gradient that reaches the states before it, `ends`, and the sum of its step sizes."""
    GROUP: tl.constexpr = S.GROUP
    slot, share, _, column, inside = place_of(work, S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    rates, bias = rates_of(states.A, column, inside, S), numbers_of(inputs.bias, column, inside)
    c, total = states_at(None, slot, column, inside, S), tl.full([LANES], 0.0, tl.float32)
    groups = tl.maximum(span.last - span.first + GROUP - 1, 0) // GROUP
    for back in range(groups):
        at = span.first + (groups - 1 - back) * GROUP
        dts = tokens_of(inputs.dt, at, column, limit, 0.0, S)
        ds = tokens_of(gradients.y, at, column, limit, 0.0, S)
        zs = optional_tokens(inputs.z, at, column, limit, S)
        left = left_of(limit, at)
        for i in tl.static_range(GROUP - 1, -1, -1):
            dt = step_size(dts[i], bias, i < left, S)
            d_y = gated(ds[i].to(tl.float32), None if inputs.z is None else zs[i], S)
            C = weights_of(inputs.C, at + i, share, span.last, S)
            c = power(dt[:, None] * rates, S) * (c + d_y[:, None] * C)
            total += dt
    tl.store(states.totals + slot * S.WIDTH + column, total, mask=inside)
    put_states(states.ends, slot, column, inside, c, S)


@triton.jit
def token_gradients(inputs, gradients, own, at, numbers, before, flow, S: tl.constexpr):
    """The gradients of a token from h_{t-1} [c, s].

    `at` are the token, the one past the last, and whether it exists [c]; `numbers` its `u`, `dt` as it was given, `dout` and `z`.
    `flow` is c and the gradients of A [c, s] and of D and the bias [c] so far, and so is what is returned.
    """
    token, last, exists = at
    c, d_A, d_skip, d_bias = flow
    u, raw, d_out = numbers[0].to(tl.float32), numbers[1], numbers[2].to(tl.float32)
    dt = step_size(raw, own.bias, exists, S)
    d_y = gated(d_out, None if inputs.z is None else numbers[3], S)
    B = weights_of(inputs.B, token, own.share, last, S)
    C = weights_of(inputs.C, token, own.share, last, S)
    # h_t = e^{dt A} h_{t-1} + dt u B,  l = dy C + c
    factor = power(dt[:, None] * own.rates, S)
    decayed = factor * before
    h = decayed + (dt * u)[:, None] * B
    l = c + d_y[:, None] * C
    put_shared(gradients, (dt * u)[:, None] * l, d_y[:, None] * h, own, token, last, S)
    dx = tl.sum(l * B, 1)
    decayed *= l
    rate = tl.sum(decayed * own.rates, 1)
    d_raw = u * dx + (rate if S.PRECISE else rate * 0.6931471805599453)
    if S.SOFTPLUS:
        d_raw *= sigmoid(raw.to(tl.float32) + own.bias, S.PRECISE)
    place = token * S.WIDTH + own.column
    tl.store(gradients.u + place, (dt * dx + own.skip * d_y).to(gradients.u.dtype.element_ty), mask=exists)
    tl.store(gradients.dt + place, d_raw.to(gradients.dt.dtype.element_ty), mask=exists)
    if inputs.z is not None:
        y = tl.sum(h * C, 1) + own.skip * u
        d_z = d_out * y * activation_slope(numbers[3].to(tl.float32), "silu", S.PRECISE)
        tl.store(gradients.z + place, d_z.to(gradients.z.dtype.element_ty), mask=exists)
    return factor * l, d_A + dt[:, None] * decayed, d_skip + d_y * u, d_bias + tl.where(exists, d_raw, 0.0)


@triton.jit
def group_gradients(inputs, gradients, own, tokens, h, flow, S: tl.constexpr):
    """The gradients of GROUP tokens from the states `h` before them; `tokens` are the first and the one past the chunk's last."""
    GROUP: tl.constexpr = S.GROUP
    at, last = tokens
    limit = tl.where(own.inside, last, at)  # [c]
    us = tokens_of(inputs.u, at, own.column, limit, 0.0, S)
    dts = tokens_of(inputs.dt, at, own.column, limit, 0.0, S)
    ds = tokens_of(gradients.y, at, own.column, limit, 0.0, S)
    zs = optional_tokens(inputs.z, at, own.column, limit, S)
    before, left = (), left_of(limit, at)
    for i in tl.static_range(GROUP):
        before = append(before, h)
        dt = step_size(dts[i], own.bias, i < left, S)
        B = weights_of(inputs.B, at + i, own.share, last, S)
        h = advanced(h, own.rates, dt, us[i].to(tl.float32), B, S)
    for i in tl.static_range(GROUP - 1, -1, -1):
        numbers = (us[i], dts[i], ds[i], ds[i] if inputs.z is None else zs[i])
        flow = token_gradients(inputs, gradients, own, (at + i, last, i < left), numbers, before[i], flow, S)
    return flow


@triton.jit
def write_groups(inputs, scratch, own, at, last, h, S: tl.constexpr):
    """Writes the states before every group of a chunk to the program's own memory."""
    GROUP: tl.constexpr = S.GROUP
    limit = tl.where(own.inside, last, at)  # [c]
    for p in range(tl.cdiv(last - at, GROUP)):
        put_own(scratch, p, h, S)
        first = at + p * GROUP
        us = tokens_of(inputs.u, first, own.column, limit, 0.0, S)
        dts = tokens_of(inputs.dt, first, own.column, limit, 0.0, S)
        left = left_of(limit, first)
        for i in tl.static_range(GROUP):
            dt = step_size(dts[i], own.bias, i < left, S)
            B = weights_of(inputs.B, first + i, own.share, last, S)
            h = advanced(h, own.rates, dt, us[i].to(tl.float32), B, S)


@triton.jit
def own_memory(scratch, group, S: tl.constexpr):
    """Addresses [c, s] in the program's own memory."""
    TILE: tl.constexpr = S.TILE
    row = (tl.program_id(0).to(tl.int64) * (CHUNK // S.GROUP) + group) * S.TILE + tl.arange(0, TILE)
    return scratch + (row[None, :] * LANES + tl.arange(0, LANES)[:, None])


@triton.jit
def put_own(scratch, group, h, S: tl.constexpr):
    tl.store(own_memory(scratch, group, S), h)


@triton.jit
def slot_gradients(inputs, gradients, states, slots, n, work, S: tl.constexpr):
    """The gradients of the tokens of a slot and block of channels."""
    GROUP: tl.constexpr = S.GROUP
    slot, share, part, column, inside = place_of(work, S)
    span = span_of(slots, n, slot, S)
    rates = rates_of(states.A, column, inside, S)
    bias, skip = numbers_of(inputs.bias, column, inside), numbers_of(inputs.D, column, inside)
    own = Own(share, part, column, inside, bias, skip, rates, n.rows)
    c = states_at(states.last, span.sequence, column, inside, S)
    if S.SEGMENTS:
        later = tl.maximum(tl.cdiv(span.end - span.start, n.segment) - 1 - span.place, 0)
        later = tl.where(span.place < 0, 0, later)
        c = joined(states, rates, c, slot + later, later, -1, column, inside, S)
    d_A, d_skip, d_bias = c * 0.0, bias * 0.0, bias * 0.0
    chunk = first_chunk(span, n, S)
    chunks = tl.cdiv(tl.maximum(span.last - span.first, 0), CHUNK)
    for back in range(chunks):
        at = span.first + (chunks - 1 - back) * CHUNK
        last = tl.minimum(at + CHUNK, span.last)
        h = states_at(states.kept, chunk + (at - span.start) // CHUNK, column, inside, S)
        write_groups(inputs, states.scratch, own, at, last, h, S)
        groups = tl.cdiv(last - at, GROUP)
        for later_groups in range(groups):
            p = groups - 1 - later_groups
            h = tl.load(own_memory(states.scratch, p, S))  # [c, s]
            flow = (c, d_A, d_skip, d_bias)
            c, d_A, d_skip, d_bias = group_gradients(inputs, gradients, own, (at + p * GROUP, last), h, flow, S)
    put_states(states.rates, slot, column, inside, d_A, S)
    ptr = gradients.channels + slot * 2 * S.WIDTH + column
    tl.store(ptr, d_skip, mask=inside)
    tl.store(ptr + S.WIDTH, d_bias, mask=inside)
    if states.start is not None:
        mine = inside & (span.first == span.start)
        if S.SEGMENTS:
            mine = mine & (span.first < span.last)
        put_states(states.start, span.sequence, column, mine, c, S)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["states"])
def selective_backward_kernel(inputs, gradients, states, slots, n, S: tl.constexpr):
    """The gradients of slots and blocks of channels, every `programs`-th: each program has memory of its own. Without `rates`, only what
    `slot_ends` finds."""
    for work in range(tl.program_id(0), n.work, n.programs):
        if states.rates is None:
            slot_ends(inputs, gradients, states, slots, n, work, S)
        else:
            slot_gradients(inputs, gradients, states, slots, n, work, S)
