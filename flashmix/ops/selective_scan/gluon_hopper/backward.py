"""The backward of the selective scan on Hopper: chunk after chunk from the last one, the states of each recomputed from its first.

    l_t = dy_t C_t + c;  dC_t = dy_t h_t;  dB_t = dt u l_t;  c = e^{dt A} l_t
    dx = sum_s l_t B_t;  du = dt dx + D dy;  ddt = u dx + sum_s A h_{t-1} c;  dA = dt h_{t-1} c

of the gradient dy of `h C + D u`; with a gate that is `dout silu(z)`. A chunk's states are recomputed once to keep those of every HALF-th
token in shared memory; then, from the last HALF tokens to the first, their states and factors in registers, each exponential once more.
dB and dC are summed over a program's channels through shared memory and over programs in their order.
Tiles: `t` tokens, `c` channels, `p` pairs of them, `s` states (`layouts.py`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import ex2, gl, gluon
from flashmix.gpu.rows import activation, activation_slope, sigmoid
from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.selective_scan.gluon_hopper.forward import (
    all_of,
    many,
    numbers_of,
    of_token,
    place_of,
    put_states,
    rates_of,
    read_tokens,
    states_at,
    step_sizes,
    tokens_at,
    tokens_of,
    tokens_there,
    weights_of,
    weights_of_token,
)
from flashmix.ops.selective_scan.gluon_hopper.layouts import (
    CHANNELS,
    HALF,
    PAIRS,
    STATES,
    TOKENS,
    pair_memory,
    pair_sums,
    rows,
    tile,
    tokens,
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


class TokenMemory(NamedTuple):
    """Shared memory of TOKENS tokens: step sizes, `dt u` and `dy` [t, c], B and C [t, s]."""

    steps: Any
    writes: Any
    flows: Any
    B: Any
    C: Any


class StateSums(NamedTuple):
    """Shared memory for sums over states, `y`, `dx` and `sum_s A h c` [t, c]; over tokens of the gradients of D and the bias [t, c]; and
    over pairs of channels [p, s], one of each of HALF tokens."""

    y: Any
    dx: Any
    rate: Any
    skip: Any
    bias: Any
    pairs: Any


class Work(NamedTuple):
    """What a program works on: its `ChannelPlace`, the numbers of the call, rates [c, s], its `TokenMemory` and `StateSums`, and in shared
    memory the bias and the skip weight of its channels."""

    place: Any
    n: Any
    rates: Any
    memory: Any
    sums: Any
    weights: Any


@gluon.jit
def weight_of(w, i):
    """The bias (0) or the skip weight (1) of each channel, [c], for tiles of tokens."""
    return w.weights.index(i).load(gl.SliceLayout(0, tokens()))  # [c]


@gluon.jit
def pair_buffers():
    found = ()
    for _ in gl.static_range(HALF):
        found = append(found, gl.allocate_shared_memory(gl.float32, [PAIRS, STATES], pair_memory()))
    return found


@gluon.jit
def over_pairs(x):
    """The sums over each thread's two channels, [p, s], of [c, s]."""
    return gl.sum(gl.reshape(x, [PAIRS, CHANNELS // PAIRS, STATES]), 1)


@gluon.jit
def stacked(x):
    """Four vectors [c] as [c, t]."""
    return gl.reshape(gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])), [CHANNELS, HALF])


@gluon.jit
def put_half(shared, WHICH: gl.constexpr, x):
    """Writes four vectors [c] to the first or second half of TOKENS tokens."""
    all_of(shared).slice(WHICH * HALF, HALF, 0).permute([1, 0]).store(stacked(x))


@gluon.jit
def put_half_back(shared, WHICH: gl.constexpr, x):
    """As `put_half`, the last token first."""
    put_half(shared, WHICH, (x[3], x[2], x[1], x[0]))


@gluon.jit
def put_pairs(d_shared, WHICH: gl.constexpr, pairs, token, place, n, S: gl.constexpr):
    """Writes the sums over pairs of channels of HALF tokens' gradients of B (WHICH 0) or C."""
    s = gl.arange(0, STATES, layout=gl.SliceLayout(0, pair_sums()))
    row = (place.part * 2 + WHICH).to(gl.int64) * n.rows + token
    for i in gl.static_range(HALF):
        parts = pairs[i].load(pair_sums())  # [p, s]
        total = gl.sum(parts, 0)
        ptr = d_shared + ((row + i) * S.SHARES + place.share) * STATES
        gl.store(ptr + s, total, mask=(s >= 0) & (token + i < place.last))


@gluon.jit
def advanced(h, rates, memory, i):
    """The states [c, s] after token i, and the factors that they were multiplied by."""
    factor = ex2(of_token(memory.steps, i)[:, None] * rates)
    return factor * h + of_token(memory.writes, i)[:, None] * weights_of_token(memory.B, i)[None, :], factor


@gluon.jit
def keep_chunk(x, w, h, kept, at, groups, S: gl.constexpr):
    """Writes the states [c, s] before every HALF tokens of a chunk, but the first, to shared memory `kept`."""
    place, memory = w.place, w.memory
    u, raw, B = tokens_of(x.u, at, place, S), tokens_of(x.dt, at, place, S), weights_of(x.B, at, place, S)
    for group in range(groups):
        dt = step_sizes(raw, weight_of(w, 0), tokens_there(at, place), S)
        all_of(memory.steps).store(dt)
        all_of(memory.writes).store(dt * u.to(gl.float32))
        all_of(memory.B).store(B.to(gl.float32))
        at += TOKENS
        u, raw, B = tokens_of(x.u, at, place, S), tokens_of(x.dt, at, place, S), weights_of(x.B, at, place, S)
        if group > 0:
            kept.index(2 * group - 1).store(h)
        for i in gl.static_range(HALF):
            h, _factor = advanced(h, w.rates, memory, i)
        kept.index(2 * group).store(h)
        if group < groups - 1:
            for i in gl.static_range(HALF, TOKENS):
                h, _factor = advanced(h, w.rates, memory, i)


@gluon.jit
def half_gradients(d, w, h, c, d_A, WHICH: gl.constexpr, token, S: gl.constexpr):
    """The gradients of HALF tokens from the states `h` [c, s] before them; `c` and `d_A` [c, s] are carried from token to token."""
    memory, sums = w.memory, w.sums
    before, factors, outputs = (), (), ()
    for i in gl.static_range(HALF):
        before = append(before, h)
        h, factor = advanced(h, w.rates, memory, WHICH * HALF + i)
        factors = append(factors, factor)
        sums.pairs[i].store(over_pairs(of_token(memory.flows, WHICH * HALF + i)[:, None] * h))
        if d.z is not None:
            outputs = append(outputs, gl.sum(h * weights_of_token(memory.C, WHICH * HALF + i)[None, :], 1))
    if d.z is not None:
        put_half(sums.y, WHICH, outputs)
    put_pairs(d.shared, 1, sums.pairs, token, w.place, w.n, S)
    inputs, decays = (), ()
    for i in gl.static_range(HALF - 1, -1, -1):
        flow = (
            c
            + of_token(memory.flows, WHICH * HALF + i)[:, None] * weights_of_token(memory.C, WHICH * HALF + i)[None, :]
        )
        sums.pairs[i].store(over_pairs(of_token(memory.writes, WHICH * HALF + i)[:, None] * flow))
        inputs = append(inputs, gl.sum(flow * weights_of_token(memory.B, WHICH * HALF + i)[None, :], 1))
        c = factors[i] * flow
        part = before[i] * c
        decays = append(decays, gl.sum(part * w.rates, 1))
        d_A += of_token(memory.steps, WHICH * HALF + i)[:, None] * part
    put_half_back(sums.dx, WHICH, inputs)
    put_half_back(sums.rate, WHICH, decays)
    put_pairs(d.shared, 0, sums.pairs, token, w.place, w.n, S)
    return c, d_A


@gluon.jit
def put_tokens(x, d, w, given, at, S: gl.constexpr):
    """Writes the gradients of u, dt and z of TOKENS tokens; `given` are u, dt, z and dout of these as they lie in memory."""
    memory, sums, place = w.memory, w.sums, w.place
    u, raw, z, flow = given
    there = tokens_there(at, place)
    bias, skip = weight_of(w, 0), weight_of(w, 1)
    dt, dy, dx, wide = read_tokens(memory.steps), read_tokens(memory.flows), read_tokens(sums.dx), u.to(gl.float32)
    d_u = dt * dx + skip[None, :] * dy
    gl.store(tokens_at(d.u, at, place, S), d_u.to(d.u.dtype.element_ty), mask=there)
    d_dt = wide * dx + LN_2 * read_tokens(sums.rate)
    if S.SOFTPLUS:
        d_dt *= sigmoid(raw.to(gl.float32) + bias[None, :], False)
    gl.store(tokens_at(d.dt, at, place, S), d_dt.to(d.dt.dtype.element_ty), mask=there)
    all_of(sums.skip).store(read_tokens(sums.skip) + dy * wide)
    all_of(sums.bias).store(read_tokens(sums.bias) + gl.where(there, d_dt, 0.0))
    if x.z is not None:
        y = read_tokens(sums.y) + skip[None, :] * wide
        d_z = flow.to(gl.float32) * y * activation_slope(z.to(gl.float32), "silu", False)
        gl.store(tokens_at(d.z, at, place, S), d_z.to(d.z.dtype.element_ty), mask=there)


@gluon.jit
def put_sums(channels, WHICH: gl.constexpr, sums, place, S: gl.constexpr):
    """Writes sums over tokens [c]."""
    total = gl.sum(read_tokens(sums), 0)
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, tokens()))
    ptr = channels + (place.sequence.to(gl.int64) * 2 + WHICH) * S.WIDTH + place.column
    gl.store(ptr + c, total, mask=c < place.count)


@gluon.jit(do_not_specialize=["n"])
def selective_backward_hopper_kernel(x, d, kept, n, S: gl.constexpr):
    """The gradients of 32 channels of a sequence; `kept` the states at the starts of chunks `[chunks, D, S]`."""
    place = place_of(x, n, S)
    rates, c = rates_of(x.A, place, S), states_at(d.last, place.sequence, place, S)
    d_A = gl.zeros_like(c)
    memory = TokenMemory(
        many(TOKENS, CHANNELS),
        many(TOKENS, CHANNELS),
        many(TOKENS, CHANNELS),
        many(TOKENS, STATES),
        many(TOKENS, STATES),
    )
    sums = StateSums(
        many(TOKENS, CHANNELS),
        many(TOKENS, CHANNELS),
        many(TOKENS, CHANNELS),
        many(TOKENS, CHANNELS),
        many(TOKENS, CHANNELS),
        pair_buffers(),
    )
    weights_here = many(2, CHANNELS)
    weights_here.index(0).store(numbers_of(x.bias, place, tokens()))
    weights_here.index(1).store(numbers_of(x.D, place, tokens()))
    nothing = gl.full([TOKENS, CHANNELS], 0.0, gl.float32, layout=tokens())
    all_of(sums.skip).store(nothing)
    all_of(sums.bias).store(nothing)
    w = Work(place, n, rates, memory, sums, weights_here)
    states = gl.allocate_shared_memory(gl.float32, [S.CHUNK // HALF - 1, CHANNELS, STATES], rows())
    chunks = ((place.last - place.first + S.CHUNK - 1) // S.CHUNK).to(gl.int32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        start = place.first + chunk * S.CHUNK
        groups = gl.minimum((place.last - start + TOKENS - 1) // TOKENS, S.CHUNK // TOKENS).to(gl.int32)
        keep_chunk(x, w, states_at(kept, place.chunk + chunk, place, S), states, start, groups, S)
        at = start + (groups - 1) * TOKENS
        u, raw, z = tokens_of(x.u, at, place, S), tokens_of(x.dt, at, place, S), tokens_of(x.z, at, place, S)
        flow = tokens_of(d.y, at, place, S)
        B, C = weights_of(x.B, at, place, S), weights_of(x.C, at, place, S)
        for later in range(groups):
            group = groups - 1 - later
            dt, dy = step_sizes(raw, weight_of(w, 0), tokens_there(at, place), S), flow.to(gl.float32)
            if x.z is not None:
                dy = dy * activation(z.to(gl.float32), "silu", False)
            all_of(memory.steps).store(dt)
            all_of(memory.writes).store(dt * u.to(gl.float32))
            all_of(memory.flows).store(dy)
            all_of(memory.B).store(B.to(gl.float32))
            all_of(memory.C).store(C.to(gl.float32))
            h = states.index(2 * group).load(tile())  # [c, s]
            c, d_A = half_gradients(d, w, h, c, d_A, 1, at + HALF, S)
            if group > 0:
                h = states.index(2 * group - 1).load(tile())  # [c, s]
            else:
                h = states_at(kept, place.chunk + chunk, place, S)
            c, d_A = half_gradients(d, w, h, c, d_A, 0, at, S)
            done, given = at, (u, raw, z, flow)
            if group > 0:
                at -= TOKENS
            u, raw, z = tokens_of(x.u, at, place, S), tokens_of(x.dt, at, place, S), tokens_of(x.z, at, place, S)
            flow = tokens_of(d.y, at, place, S)
            B, C = weights_of(x.B, at, place, S), weights_of(x.C, at, place, S)
            put_tokens(x, d, w, given, done, S)
    put_states(d.rates, place.sequence, place, True, d_A, S)
    put_sums(d.channels, 0, sums.skip, place, S)
    put_sums(d.channels, 1, sums.bias, place, S)
    if d.start is not None:
        put_states(d.start, place.sequence, place, True, c, S)
