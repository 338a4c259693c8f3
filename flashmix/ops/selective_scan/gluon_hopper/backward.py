"""The backward of the selective scan on Hopper: chunk after chunk from the last one, the states of each recomputed from its first.

    l_t = dy_t C_t + c;  dC_t = dy_t h_t;  dB_t = dt u l_t;  c = e^{dt A} l_t
    dx = sum_s l_t B_t;  du = dt dx + D dy;  ddt = u dx + sum_s A h_{t-1} c;  dA = dt h_{t-1} c

of the gradient dy of `h C + D u`; with a gate that is `dout silu(z)`.

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
from flashmix.ops.selective_scan.gluon_hopper.forward import LOG2_E, numbers_of, place_of
from flashmix.ops.selective_scan.gluon_hopper.layouts import CHANNELS
from flashmix.ops.selective_scan.gluon_hopper.pair_memory import (
    Copied,
    QuadMemory,
    by_channel,
    by_state,
    channel_weight,
    coming,
    coming_states,
    convert_quad,
    copied_quad,
    copy_flows,
    copy_numbers,
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
    raw_quad,
    read_quad,
    tile_at,
)
from flashmix.ops.selective_scan.gluon_hopper.product_sums import (
    QUAD,
    add_over_channels,
    add_over_states,
    columns_of,
    no_states,
    no_sums,
    over_threads,
    own_states,
    quad_columns,
    quad_numbers,
    sums_of_channels,
    sums_of_states,
)

LN_2 = gl.constexpr(0.6931471805599453)


class HopperGradients(NamedTuple):
    """The gradient of `y` and those of `u`, `dt`, `z` `[T, D]`; `shared` those of B and C a block of channels, `[blocks, 2, T, G, S]`;
    `channels` those of D and the bias a sequence, `[N, 2, D]`; those of A a sequence, of the last states and of those that came in
    `[N, D, S]`."""

    y: Any
    u: Any
    dt: Any
    z: Any
    shared: Any
    channels: Any
    rates: Any
    last: Any
    start: Any


class TokenNumbers(NamedTuple):
    """Of a token, in registers: step sizes, `dt u` and `dy` [q, i, 1, 1], B and C [1, 1, j, e]."""

    steps: Any
    writes: Any
    flows: Any
    B: Any
    C: Any


class QuadSums(NamedTuple):
    """Accumulators of QUAD tokens: over states `dx` and `sum_s A h c`, over channels dB."""

    inputs: Any
    d_B: Any


@gluon.jit
def token_numbers(memory, pair, t: gl.constexpr):
    return TokenNumbers(
        by_channel(memory.steps, pair, t),
        by_channel(memory.writes, pair, t),
        by_channel(memory.flows, pair, t),
        by_state(memory.B, 2 * pair + t),
        by_state(memory.C, 2 * pair + t),
    )


@gluon.jit
def pair_numbers(memory, pair):
    return token_numbers(memory, pair, 0), token_numbers(memory, pair, 1)


@gluon.jit
def advanced(h, rates, x):
    """The states after a token."""
    return ex2(x.steps * rates) * h + x.writes * x.B


@gluon.jit
def forward_pair(pair, rates, h, d_C, columns):
    """The states after two tokens, dC with theirs added, and the `own_states` of their outputs."""
    between = advanced(h, rates, pair[0])
    h = advanced(between, rates, pair[1])
    d_C = add_over_channels(d_C, over_threads(pair[0].flows * between), over_threads(pair[1].flows * h), columns)
    return h, d_C, (own_states(between * pair[0].C), own_states(h * pair[1].C))


@gluon.jit
def forward_quad(GATED: gl.constexpr, own, rates, memory, carried, start, quad, S: gl.constexpr):
    """The states after QUAD tokens; keeps those before each pair of them, and writes the gradients of C and z, which need no more.

    `carried`: the states before, and the numbers of the first two tokens; returns also those of the next QUAD. Numbers are read a pair
    ahead, because the compiler takes no read of shared memory above a write to it, and so to be here while the states before are worked on.
    The order of all else was chosen by time: ptxas makes as many instructions of any, 2 % less to 16 % more in time (docs/lab_notes.md).
    """
    h, pair, slope = carried
    next_slope = slope
    if quad + 1 < S.CHUNK // QUAD:  # the next QUAD is converted here: its waits are between products
        raw = raw_quad(GATED, own, memory, quad + 1, S)
        later = pair_numbers(memory, 2 * quad + 1)
        next_slope = convert_quad(GATED, own, memory, raw, start, quad + 1, S)
    else:
        later = pair_numbers(memory, 2 * quad + 1)
    keep_tile(memory.states, 2 * quad, h)
    h, d_C, y = forward_pair(pair, rates, h, no_sums(), columns_of(0))
    keep_tile(memory.states, 2 * quad + 1, h)
    pair = pair_numbers(memory, gl.minimum(2 * quad + 2, S.CHUNK // 2 - 1))  # before the write 2 % slower
    h, d_C, later_y = forward_pair(later, rates, h, d_C, columns_of(2))
    at = start + QUAD * quad
    put_shared(own.d.C, d_C, at, own, S)
    if GATED:
        y = add_over_states(no_states(), (y[0], y[1], later_y[0], later_y[1]), quad_columns())
        whole, _same = sums_of_states(y)
        whole += channel_weight(memory, 1) * copied_quad(memory.copied.u, quad)
        d_z = (slope * whole).to(own.d.z.dtype.element_ty)
        gl.store(quad_at(own.d.z, at, S), d_z, mask=quad_there(at, own.tokens, own))
    return h, pair, next_slope


@gluon.jit
def token_gradients(x, rates, before, factor, c, d_A):
    """Of a token, from the states before it and their factors: the partial sums for dB, `dx` and the rate; `c` and `d_A` go on to the token
    before."""
    flow = c + x.flows * x.C
    d_B = over_threads(x.writes * flow)
    dx = own_states(flow * x.B)
    c = factor * flow
    part = before * c
    return d_B, dx, own_states(part * rates), c, d_A + x.steps * part


@gluon.jit
def pair_gradients(sums, pair, before, rates, columns, c, d_A):
    """Adds the gradients of two tokens of QUAD, whose columns are given."""
    factor, later_factor = ex2(pair[0].steps * rates), ex2(pair[1].steps * rates)
    between = factor * before + pair[0].writes * pair[0].B
    later_B, later_dx, later_rate, c, d_A = token_gradients(pair[1], rates, between, later_factor, c, d_A)
    d_B, dx, rate, c, d_A = token_gradients(pair[0], rates, before, factor, c, d_A)
    d_B = add_over_channels(sums.d_B, d_B, later_B, columns)
    inputs = add_over_states(sums.inputs, (dx, rate, later_dx, later_rate), columns)
    return QuadSums(inputs, d_B), c, d_A


@gluon.jit
def put_shared(tensor, total, token, own, S: gl.constexpr):
    """Writes the sums over channels of QUAD tokens' gradients of B or C."""
    ptr, there = quad_weights_at(tensor, token, own, S)
    gl.store(ptr, gl.convert_layout(sums_of_channels(total), quad_weights()), mask=there)  # [t, s]


@gluon.jit
def put_numbers(own, inputs, memory, quad, at, S: gl.constexpr):
    """Writes the gradients of u and dt of QUAD tokens; returns their parts of those of D and of the bias, [t, c]."""
    there, wide = quad_there(at, own.tokens, own), copied_quad(memory.copied.u, quad)
    skip, dt, dy = channel_weight(memory, 1), read_quad(memory.steps, quad, S), read_quad(memory.flows, quad, S)
    dx, rate = sums_of_states(inputs)
    gl.store(quad_at(own.d.u, at, S), (dt * dx + skip * dy).to(own.d.u.dtype.element_ty), mask=there)
    d_dt = wide * dx + LN_2 * rate
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
    # read a turn ahead, so that a turn begins with products and not with a wait
    pair, states = pair_numbers(memory, S.CHUNK // 2 - 1), own_tile(memory.states.index(S.CHUNK // 2 - 1))
    for part in range(S.CHUNK // QUAD):  # one QUAD at a time: the loops stay in the instruction cache
        quad = S.CHUNK // QUAD - 1 - part
        at = start + QUAD * quad
        sums = QuadSums(no_states(), no_sums())
        sums, c, d_A = pair_gradients(sums, pair, states, rates, columns_of(2), c, d_A)
        states = own_tile(memory.states.index(2 * quad))
        sums, c, d_A = pair_gradients(sums, pair_numbers(memory, 2 * quad), states, rates, columns_of(0), c, d_A)
        put_shared(own.d.B, sums.d_B, at, own, S)
        more_skip, more_bias = put_numbers(own, sums.inputs, memory, quad, at, S)
        d_skip += more_skip
        d_bias += more_bias
        pair = pair_numbers(memory, gl.maximum(2 * quad - 1, 0))
        states = own_tile(memory.states.index(gl.maximum(2 * quad - 1, 0)))
        if part == 1:  # the states of two QUADs are done with
            copy_flows(GATED, own, memory, before, tokens, S)
            copy_weights(own, memory, before, tokens, S)
            copy_numbers(coming(memory, 3, own.x.dt, S), own.x.dt, own, before, tokens, S)
            copy_numbers(coming(memory, 4, own.x.u, S), own.x.u, own, before, tokens, S)
            close_copies()
    return c, d_A, d_skip, d_bias


@gluon.jit
def softplus_slope(dt):
    """`1 - e^-dt` of step sizes `softplus(x)`, which is `sigmoid(x)`."""
    series = dt * (1.0 - dt * (0.5 - dt * 0.16666667))
    return gl.where(dt < 0.0625, series, 1.0 - exp_of_minus(dt, False))


@gluon.jit(do_not_specialize=["n"])
def selective_backward_hopper_kernel(x, d, kept, n, S: gl.constexpr):
    """The gradients of 32 channels of a sequence; `kept` the states at the starts of chunks `[chunks, D, S]`."""
    place = place_of(x, n, S)
    rates = gl.maximum(tile_at(x.A, place.column * 0, place, S), -1e30) * LOG2_E
    c = tile_at(d.last, place.sequence, place, S)
    memory = QuadMemory(
        Copied(many_numbers(x.u, S), many_numbers(x.u, S), many_numbers(x.u, S)),
        many_tiles(S.CHUNK // 2, 8, 8),
        many_tiles(S.CHUNK // 2, 8, 8),
        many_tiles(S.CHUNK, 4, 4),
        many_tiles(S.CHUNK, 4, 4),
        many_tiles(S.CHUNK // 2, 4, 128),
        many_tiles(S.CHUNK // 2, 8, 8),
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
    copy_numbers(coming(memory, 3, own.x.dt, S), own.x.dt, own, start, own.tokens, S)
    copy_numbers(coming(memory, 4, own.x.u, S), own.x.u, own, start, own.tokens, S)
    close_copies()
    for back in range(last + 1):
        start = (last - back) * S.CHUNK
        await_copies(0)
        slope = convert_quad(GATED, own, memory, raw_quad(GATED, own, memory, 0, S), start, 0, S)
        h = own_tile(coming_states(memory, S))
        pair = pair_numbers(memory, 0)
        for quad in range(S.CHUNK // QUAD):
            h, pair, slope = forward_quad(GATED, own, rates, memory, (h, pair, slope), start, quad, S)
        carried = chunk_gradients(GATED, own, memory, rates, start, carried, S)
    await_copies(0)
    c, d_A, d_skip, d_bias = carried
    put_tile(d.rates, place.sequence, place, d_A, S)
    put_channel_sums(d.channels, 0, d_skip, place, S)
    put_channel_sums(d.channels, 1, d_bias, place, S)
    if d.start is not None:
        put_tile(d.start, place.sequence, place, c, S)
