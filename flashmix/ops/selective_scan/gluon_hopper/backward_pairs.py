"""The backward of the selective scan on Hopper, two tokens at a time; the formulas are those of `backward.py`.

A thread has four channels by four states. A chunk's states are recomputed once to keep those before every second token in shared memory;
then, from the last pair of tokens to the first, states and factors are in registers. Sums over states and channels are products
(`product_sums.py`); all else that threads exchange are single numbers per channel of a token (`pair_memory.py`).
Tiles: `t` QUAD tokens, `c` channels, `s` states; of states `[q, i, j, e]`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import await_copies, close_copies, ex2, gl, gluon
from flashmix.gpu.rows import activation, activation_slope, exp_of_minus
from flashmix.ops.selective_scan.gluon_hopper.backward import LN_2
from flashmix.ops.selective_scan.gluon_hopper.forward import LOG2_E, place_of
from flashmix.ops.selective_scan.gluon_hopper.layouts import CHANNELS
from flashmix.ops.selective_scan.gluon_hopper.pair_memory import (
    Copied,
    QuadMemory,
    by_channel,
    by_state,
    channel_numbers,
    channel_weight,
    coming_states,
    convert_chunk,
    copied_quad,
    copy_quad,
    copy_steps,
    copy_weights,
    keep_tile,
    many_numbers,
    many_tiles,
    own_of,
    own_tile,
    put_quad,
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
    """Accumulators of QUAD tokens: over states `dx`, `sum_s A h c` and `y`, over channels dB and dC."""

    dx: Any
    rate: Any
    y: Any
    d_B: Any
    d_C: Any


@gluon.jit
def advanced(h, rates, memory, quad, t: gl.constexpr):
    """The states after a token, and the factors that they were multiplied by."""
    factor = ex2(by_channel(memory.steps, quad, t) * rates)
    return factor * h + by_channel(memory.writes, quad, t) * by_state(memory.B, QUAD * quad + t), factor


@gluon.jit
def keep_pairs(rates, memory, S: gl.constexpr):
    """Writes a chunk's states before every second token."""
    h = own_tile(coming_states(memory, S))
    for quad in gl.static_range(S.CHUNK // QUAD):
        keep_tile(memory.states, 2 * quad, h)
        h, _first = advanced(h, rates, memory, quad, 0)
        h, _second = advanced(h, rates, memory, quad, 1)
        keep_tile(memory.states, 2 * quad + 1, h)
        if quad < S.CHUNK // QUAD - 1:
            h, _third = advanced(h, rates, memory, quad, 2)
            h, _fourth = advanced(h, rates, memory, quad, 3)


@gluon.jit
def token_gradients(memory, rates, quad, t: gl.constexpr, before, factor, c, d_A):
    """Of a token, from the states before it and their factors: the partial sums for dB, `dx` and the rate; `c` and `d_A` go on to the token
    before."""
    flow = c + by_channel(memory.flows, 0, t) * by_state(memory.C, QUAD * quad + t)
    d_B = over_threads(by_channel(memory.writes, quad, t) * flow)
    dx = own_states(flow * by_state(memory.B, QUAD * quad + t))
    c = factor * flow
    part = before * c
    return d_B, dx, own_states(part * rates), c, d_A + by_channel(memory.steps, quad, t) * part


@gluon.jit
def pair_gradients(GATED: gl.constexpr, sums, memory, rates, quad, FIRST: gl.constexpr, c, d_A):
    """Adds the gradients of tokens FIRST and FIRST + 1 of QUAD."""
    before = own_tile(memory.states.index(2 * quad + FIRST // 2))
    between, factor = advanced(before, rates, memory, quad, FIRST)
    after, later_factor = advanced(between, rates, memory, quad, FIRST + 1)
    d_C = over_threads(by_channel(memory.flows, 0, FIRST) * between)
    d_C = add_over_channels(sums.d_C, d_C, over_threads(by_channel(memory.flows, 0, FIRST + 1) * after), FIRST)
    y = sums.y
    if GATED:
        y = own_states(between * by_state(memory.C, QUAD * quad + FIRST))
        y = add_over_states(sums.y, y, own_states(after * by_state(memory.C, QUAD * quad + FIRST + 1)), FIRST)
    later_B, later_dx, later_rate, c, d_A = token_gradients(
        memory, rates, quad, FIRST + 1, between, later_factor, c, d_A
    )
    d_B, dx, rate, c, d_A = token_gradients(memory, rates, quad, FIRST, before, factor, c, d_A)
    d_B = add_over_channels(sums.d_B, d_B, later_B, FIRST)
    dx, rate = add_over_states(sums.dx, dx, later_dx, FIRST), add_over_states(sums.rate, rate, later_rate, FIRST)
    return QuadSums(dx, rate, y, d_B, d_C), c, d_A


@gluon.jit
def put_shared(tensor, total, token, own, S: gl.constexpr):
    """Writes the sums over channels of QUAD tokens' gradients of B or C."""
    ptr, there = quad_weights_at(tensor, token, own, S)
    gl.store(ptr, gl.convert_layout(sums_of_channels(total), quad_weights()), mask=there)  # [t, s]


@gluon.jit
def put_numbers(GATED: gl.constexpr, own, sums, memory, quad, at, S: gl.constexpr):
    """Writes the gradients of u, dt and z of QUAD tokens; returns their parts of those of D and of the bias, [t, c]."""
    there, wide = quad_there(at, own.tokens, own), copied_quad(memory.copied.u, quad)
    skip, dt, dy = channel_weight(memory, 1), read_quad(memory.steps, quad), read_quad(memory.flows, 0)
    dx = sums_of_states(sums.dx)
    gl.store(quad_at(own.d.u, at, S), (dt * dx + skip * dy).to(own.d.u.dtype.element_ty), mask=there)
    d_dt = wide * dx + LN_2 * sums_of_states(sums.rate)
    if S.SOFTPLUS:
        d_dt *= softplus_slope(dt)
    gl.store(quad_at(own.d.dt, at, S), d_dt.to(own.d.dt.dtype.element_ty), mask=there)
    if GATED:
        flow, z = copied_quad(memory.copied.d_y, quad), copied_quad(memory.copied.z, quad)
        y = sums_of_states(sums.y) + skip * wide
        d_z = flow * y * activation_slope(z, "silu", False)
        gl.store(quad_at(own.d.z, at, S), d_z.to(own.d.z.dtype.element_ty), mask=there)
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
    for later in range(S.CHUNK // QUAD):
        quad = S.CHUNK // QUAD - 1 - later
        at = start + QUAD * quad
        dy = copied_quad(memory.copied.d_y, quad)
        if GATED:
            dy = dy * activation(copied_quad(memory.copied.z, quad), "silu", False)
        put_quad(memory.flows, 0, dy)
        sums = QuadSums(no_sums(), no_sums(), no_sums(), no_sums(), no_sums())
        sums, c, d_A = pair_gradients(GATED, sums, memory, rates, quad, 2, c, d_A)
        sums, c, d_A = pair_gradients(GATED, sums, memory, rates, quad, 0, c, d_A)
        put_shared(own.d.B, sums.d_B, at, own, S)
        put_shared(own.d.C, sums.d_C, at, own, S)
        more_skip, more_bias = put_numbers(GATED, own, sums, memory, quad, at, S)
        d_skip += more_skip
        d_bias += more_bias
        copy_quad(GATED, own, memory, quad, before, tokens, S)
        if later == 0:
            copy_weights(own, memory, before, tokens, S)
        if later == 1:
            copy_steps(own, memory, before, tokens, S)
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
        many_tiles(1, 8, 16),
        gl.allocate_shared_memory(gl.float32, [2, CHANNELS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    memory.weights.index(0).store(channel_numbers(x.bias, place))
    memory.weights.index(1).store(channel_numbers(x.D, place))
    nothing = gl.full([QUAD, CHANNELS], 0.0, gl.float32, layout=quad_numbers())
    carried = (c, gl.zeros_like(c), nothing, nothing)
    own, GATED = own_of(x, d, kept, place, n, S), x.z is not None
    last = (own.tokens + S.CHUNK - 1) // S.CHUNK - 1
    start = gl.maximum(last, 0) * S.CHUNK
    copy_weights(own, memory, start, own.tokens, S)
    copy_steps(own, memory, start, own.tokens, S)
    for quad in gl.static_range(S.CHUNK // QUAD):
        copy_quad(GATED, own, memory, quad, start, own.tokens, S)
    close_copies()
    await_copies(0)
    for back in range(last + 1):
        start = (last - back) * S.CHUNK
        convert_chunk(own, memory, start, S)
        keep_pairs(rates, memory, S)
        carried = chunk_gradients(GATED, own, memory, rates, start, carried, S)
    await_copies(0)
    c, d_A, d_skip, d_bias = carried
    put_tile(d.rates, place.sequence, place, d_A, S)
    put_channel_sums(d.channels, 0, d_skip, place, S)
    put_channel_sums(d.channels, 1, d_bias, place, S)
    if d.start is not None:
        put_tile(d.start, place.sequence, place, c, S)
