"""The backward of the selective scan on Hopper, two tokens at a time; the formulas are those of `backward.py`.

A thread has four channels by four states. A chunk's states are recomputed once, for the gradients of C and z, and those before every second
token are kept in shared memory; then, from the last pair of tokens to the first, states and factors are in registers. Sums over states and
channels are products (`product_sums.py`); all else that threads exchange are single numbers per channel of a token (`pair_memory.py`).
Tiles: `t` QUAD tokens, `c` channels, `s` states; of states `[q, i, j, e]`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import await_copies, close_copies, ex2, gl, gluon
from flashmix.gpu.rows import exp_of_minus
from flashmix.ops.selective_scan.gluon_hopper.backward import LN_2
from flashmix.ops.selective_scan.gluon_hopper.forward import LOG2_E, numbers_of, place_of
from flashmix.ops.selective_scan.gluon_hopper.layouts import CHANNELS
from flashmix.ops.selective_scan.gluon_hopper.pair_memory import (
    Copied,
    QuadMemory,
    by_channel,
    by_state,
    channel_weight,
    coming_states,
    coming_steps,
    convert_chunk,
    copied_quad,
    copy_flows,
    copy_numbers,
    copy_quad,
    copy_weights,
    keep_tile,
    many_numbers,
    many_tiles,
    own_of,
    own_tile,
    put_tile,
    quad_at,
    quad_there,
    quad_weights,
    quad_weights_at,
    read_quad,
    tile_at,
)
from flashmix.ops.selective_scan.gluon_hopper.product_sums import (
    QUAD,
    add_over_channels,
    add_over_states,
    no_sums,
    over_threads,
    own_states,
    quad_numbers,
    sums_of_channels,
    sums_of_states,
)


class QuadSums(NamedTuple):
    """Accumulators of QUAD tokens: over states `dx` and `sum_s A h c`, over channels dB."""

    dx: Any
    rate: Any
    d_B: Any


@gluon.jit
def advanced(h, rates, memory, quad, t: gl.constexpr):
    """The states after a token."""
    factor = ex2(by_channel(memory.steps, quad, t) * rates)
    return factor * h + by_channel(memory.writes, quad, t) * by_state(memory.B, QUAD * quad + t)


@gluon.jit
def forward_quad(GATED: gl.constexpr, own, rates, memory, slope, h, start, quad, S: gl.constexpr):
    """The states after QUAD tokens; keeps those before each pair of them, and writes the gradients of C and z, which need no more."""
    d_C, y = no_sums(), no_sums()
    for FIRST in gl.static_range(0, QUAD, 2):
        keep_tile(memory.states, 2 * quad + FIRST // 2, h)
        between = advanced(h, rates, memory, quad, FIRST)
        h = advanced(between, rates, memory, quad, FIRST + 1)
        later = over_threads(by_channel(memory.flows, quad, FIRST + 1) * h)
        d_C = add_over_channels(d_C, over_threads(by_channel(memory.flows, quad, FIRST) * between), later, FIRST)
        if GATED:
            read = own_states(between * by_state(memory.C, QUAD * quad + FIRST))
            y = add_over_states(y, read, own_states(h * by_state(memory.C, QUAD * quad + FIRST + 1)), FIRST)
    at = start + QUAD * quad
    put_shared(own.d.C, d_C, at, own, S)
    if GATED:
        whole = sums_of_states(y) + channel_weight(memory, 1) * copied_quad(memory.copied.u, quad)
        d_z = (slope * whole).to(own.d.z.dtype.element_ty)
        gl.store(quad_at(own.d.z, at, S), d_z, mask=quad_there(at, own.tokens, own))
    return h


@gluon.jit
def token_gradients(memory, rates, quad, t: gl.constexpr, before, factor, c, d_A):
    """Of a token, from the states before it and their factors: the partial sums for dB, `dx` and the rate; `c` and `d_A` go on to the token
    before."""
    flow = c + by_channel(memory.flows, quad, t) * by_state(memory.C, QUAD * quad + t)
    d_B = over_threads(by_channel(memory.writes, quad, t) * flow)
    dx = own_states(flow * by_state(memory.B, QUAD * quad + t))
    c = factor * flow
    part = before * c
    return d_B, dx, own_states(part * rates), c, d_A + by_channel(memory.steps, quad, t) * part


@gluon.jit
def pair_gradients(sums, memory, rates, quad, FIRST: gl.constexpr, c, d_A):
    """Adds the gradients of tokens FIRST and FIRST + 1 of QUAD."""
    before = own_tile(memory.states.index(2 * quad + FIRST // 2))
    factor = ex2(by_channel(memory.steps, quad, FIRST) * rates)
    later_factor = ex2(by_channel(memory.steps, quad, FIRST + 1) * rates)
    between = factor * before + by_channel(memory.writes, quad, FIRST) * by_state(memory.B, QUAD * quad + FIRST)
    later_B, later_dx, later_rate, c, d_A = token_gradients(
        memory, rates, quad, FIRST + 1, between, later_factor, c, d_A
    )
    d_B, dx, rate, c, d_A = token_gradients(memory, rates, quad, FIRST, before, factor, c, d_A)
    d_B = add_over_channels(sums.d_B, d_B, later_B, FIRST)
    dx, rate = add_over_states(sums.dx, dx, later_dx, FIRST), add_over_states(sums.rate, rate, later_rate, FIRST)
    return QuadSums(dx, rate, d_B), c, d_A


@gluon.jit
def put_shared(tensor, total, token, own, S: gl.constexpr):
    """Writes the sums over channels of QUAD tokens' gradients of B or C."""
    ptr, there = quad_weights_at(tensor, token, own, S)
    gl.store(ptr, gl.convert_layout(sums_of_channels(total), quad_weights()), mask=there)  # [t, s]


@gluon.jit
def put_numbers(own, sums, memory, quad, at, S: gl.constexpr):
    """Writes the gradients of u and dt of QUAD tokens; returns their parts of those of D and of the bias, [t, c]."""
    there, wide = quad_there(at, own.tokens, own), copied_quad(memory.copied.u, quad)
    skip, dt, dy = channel_weight(memory, 1), read_quad(memory.steps, quad), read_quad(memory.flows, quad)
    dx = sums_of_states(sums.dx)
    gl.store(quad_at(own.d.u, at, S), (dt * dx + skip * dy).to(own.d.u.dtype.element_ty), mask=there)
    d_dt = wide * dx + LN_2 * sums_of_states(sums.rate)
    if S.SOFTPLUS:
        d_dt *= softplus_slope(dt)
    gl.store(quad_at(own.d.dt, at, S), d_dt.to(own.d.dt.dtype.element_ty), mask=there)
    return dy * wide, gl.where(there, d_dt, 0.0)


@gluon.jit
def put_channel_sums(channels, WHICH: gl.constexpr, total, place, S: gl.constexpr):
    """Writes sums over tokens of [t, c]."""
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, quad_numbers()))
    ptr = channels + (place.sequence.to(gl.int64) * 2 + WHICH) * S.WIDTH + place.column
    gl.store(ptr + c, gl.sum(total, 0), mask=c < place.count)


@gluon.jit
def chunk_gradients(GATED: gl.constexpr, own, memory, rates, start, carried, S: gl.constexpr):
    """The gradients of a chunk's tokens from its memory, where meanwhile the chunk before comes."""
    c, d_A, d_skip, d_bias = carried
    before, tokens = gl.maximum(start - S.CHUNK, 0), gl.where(start > 0, own.tokens, 0)
    for part in range(S.CHUNK // QUAD // 2):  # two QUADs at a time, so that one's sums are awaited under the other
        for later in gl.static_range(2):
            quad = S.CHUNK // QUAD - 1 - 2 * part - later
            at = start + QUAD * quad
            sums = QuadSums(no_sums(), no_sums(), no_sums())
            sums, c, d_A = pair_gradients(sums, memory, rates, quad, 2, c, d_A)
            sums, c, d_A = pair_gradients(sums, memory, rates, quad, 0, c, d_A)
            put_shared(own.d.B, sums.d_B, at, own, S)
            more_skip, more_bias = put_numbers(own, sums, memory, quad, at, S)
            d_skip += more_skip
            d_bias += more_bias
        for later in gl.static_range(2):
            quad = S.CHUNK // QUAD - 1 - 2 * part - later
            copy_quad(memory.copied.u, own.x.u, own, quad, before, tokens, S)
        if part == 0:
            copy_flows(GATED, own, memory, before, tokens, S)
            copy_weights(own, memory, before, tokens, S)
            copy_numbers(coming_steps(memory, own, S), own.x.dt, own, before, tokens, S)
        close_copies()
    return c, d_A, d_skip, d_bias


@gluon.jit
def softplus_slope(dt):
    """`1 - e^-dt` of step sizes `softplus(x)`, which is `sigmoid(x)`."""
    series = dt * (1.0 - dt * (0.5 - dt * 0.16666667))
    return gl.where(dt < 0.0625, series, 1.0 - exp_of_minus(dt, False))


@gluon.jit(do_not_specialize=["n"])
def selective_backward_pairs_kernel(x, d, kept, n, S: gl.constexpr):
    """The gradients of 32 channels of a sequence; `kept` the states at the starts of chunks `[chunks, D, S]`."""
    place = place_of(x, n, S)
    rates = gl.maximum(tile_at(x.A, place.column * 0, place, S), -1e30) * LOG2_E
    c = tile_at(d.last, place.sequence, place, S)
    memory = QuadMemory(
        Copied(many_numbers(x.u, S), many_numbers(x.u, S), many_numbers(x.u, S)),
        many_tiles(S.CHUNK // QUAD, 8, 16),
        many_tiles(S.CHUNK // QUAD, 8, 16),
        many_tiles(S.CHUNK, 4, 4),
        many_tiles(S.CHUNK, 4, 4),
        many_tiles(S.CHUNK // 2, 4, 128),
        many_tiles(S.CHUNK // QUAD, 8, 16),
        gl.allocate_shared_memory(gl.float32, [2, CHANNELS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    memory.weights.index(0).store(numbers_of(x.bias, place, quad_numbers()))
    memory.weights.index(1).store(numbers_of(x.D, place, quad_numbers()))
    nothing = gl.full([QUAD, CHANNELS], 0.0, gl.float32, layout=quad_numbers())
    carried = (c, gl.zeros_like(c), nothing, nothing)
    own = own_of(x, d, kept, place, n, S)
    GATED: gl.constexpr = x.z is not None
    last = (own.tokens + S.CHUNK - 1) // S.CHUNK - 1
    start = gl.maximum(last, 0) * S.CHUNK
    copy_flows(GATED, own, memory, start, own.tokens, S)
    copy_weights(own, memory, start, own.tokens, S)
    copy_numbers(coming_steps(memory, own, S), own.x.dt, own, start, own.tokens, S)
    for quad in gl.static_range(S.CHUNK // QUAD):
        copy_quad(memory.copied.u, own.x.u, own, quad, start, own.tokens, S)
    close_copies()
    await_copies(0)
    for back in range(last + 1):
        start = (last - back) * S.CHUNK
        slopes = convert_chunk(GATED, own, memory, start, S)
        h = own_tile(coming_states(memory, S))
        for part in range(S.CHUNK // QUAD // 2):
            for k in gl.static_range(2):
                slope = gl.where(part == 0, slopes[k], slopes[2 + k])
                h = forward_quad(GATED, own, rates, memory, slope, h, start, 2 * part + k, S)
        carried = chunk_gradients(GATED, own, memory, rates, start, carried, S)
    await_copies(0)
    c, d_A, d_skip, d_bias = carried
    put_tile(d.rates, place.sequence, place, d_A, S)
    put_channel_sums(d.channels, 0, d_skip, place, S)
    put_channel_sums(d.channels, 1, d_bias, place, S)
    if d.start is not None:
        put_tile(d.start, place.sequence, place, c, S)
