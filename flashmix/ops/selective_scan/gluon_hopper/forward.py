"""The selective scan on Hopper, forward, of 16-bit numbers and 16 states, and what its backward shares.

    dt = softplus(dt + bias);  h_t = e^{dt A} h_{t-1} + dt u_t B_t;  y_t = (h_t C_t + D u_t) silu(z_t)

The next TOKENS tokens of all tensors are loaded while those before are computed: nothing that comes from memory is waited for. The states
at the starts of chunks are kept for the backward.
Tiles: `t` tokens, `c` channels, `s` states (`layouts.py`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import ex2, gl, gluon, opaque_zero, reinterpret
from flashmix.gpu.rows import activation
from flashmix.ops.decay.triton_gpu import softplus
from flashmix.ops.recurrence.triton_gpu.tiles import append
from flashmix.ops.selective_scan.gluon_hopper.layouts import CHANNELS, STATES, TOKENS, rows, tile, tokens, weights

LOG2_E = gl.constexpr(1.4426950408889634)


class HopperInputs(NamedTuple):
    """Contiguous tensors: `u`, `dt`, `z` `[T, D]`, `B`, `C` `[T, G, S]`, `A` `[D, S]`, `D` and `bias` `[D]`, boundaries of packed
    sequences; absent ones None."""

    u: Any
    dt: Any
    A: Any
    B: Any
    C: Any
    D: Any
    z: Any
    bias: Any
    cu_seqlens: Any


class HopperStates(NamedTuple):
    """States `[N, D, S]` that come in and the last ones, and `[chunks, D, S]` those at the starts of chunks; absent ones None."""

    start: Any
    last: Any
    kept: Any


class ScanHopperSpec(NamedTuple):
    WIDTH: int  # D, channels
    SHARES: int  # G, groups of channels that share B and C
    BLOCKS: int  # of channels of such a group
    SOFTPLUS: bool
    CHUNK: int  # tokens from one kept state to the next


class ScanHopperNumbers(NamedTuple):
    tokens: Any  # T; packed, of all sequences
    rows: Any  # tokens of the whole batch


class ChannelPlace(NamedTuple):
    """Of a program: its sequence, that one's first token and the one past its last, its first chunk; its group of channels, its block in
    that, the first of its channels and how many of them there are."""

    sequence: Any
    first: Any
    last: Any
    chunk: Any
    share: Any
    part: Any
    column: Any
    count: Any


@gluon.jit
def place_of(x, n, S: gl.constexpr):
    SIZE: gl.constexpr = S.WIDTH // S.SHARES
    program = gl.program_id(0)
    sequence, block = program // (S.SHARES * S.BLOCKS), program % (S.SHARES * S.BLOCKS)
    share, part = block // S.BLOCKS, block % S.BLOCKS
    if x.cu_seqlens is None:
        first = sequence.to(gl.int64) * n.tokens
        last = first + n.tokens
        chunk = sequence * ((n.tokens + S.CHUNK - 1) // S.CHUNK)
    else:
        first = gl.minimum(gl.maximum(gl.load(x.cu_seqlens + sequence).to(gl.int64), 0), n.tokens)
        last = gl.minimum(gl.maximum(gl.load(x.cu_seqlens + sequence + 1).to(gl.int64), first), n.tokens)
        chunk = (first // S.CHUNK).to(gl.int32) + sequence  # packed there may be gaps between sequences
    count = gl.minimum(SIZE - part * CHANNELS, CHANNELS)
    return ChannelPlace(sequence, first, last, chunk, share, part, share * SIZE + part * CHANNELS, count)


@gluon.jit
def states_at(states, row, place, S: gl.constexpr):
    """The states [c, s] of a row, zeros if there are none."""
    L: gl.constexpr = tile()
    if states is None:
        return gl.full([CHANNELS, STATES], 0.0, gl.float32, layout=L)
    else:
        c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, L))
        s = gl.arange(0, STATES, layout=gl.SliceLayout(0, L))
        ptr = states + (row.to(gl.int64) * S.WIDTH + place.column) * STATES
        there = gl.load(ptr + (c[:, None] * STATES + s[None, :]), mask=(c < place.count)[:, None], other=0.0)  # [c, s]
        return there.to(gl.float32)


@gluon.jit
def put_states(states, row, place, there, h, S: gl.constexpr):
    L: gl.constexpr = tile()
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, L))
    s = gl.arange(0, STATES, layout=gl.SliceLayout(0, L))
    ptr = states + (row.to(gl.int64) * S.WIDTH + place.column) * STATES
    gl.store(ptr + (c[:, None] * STATES + s[None, :]), h, mask=((c < place.count) & there)[:, None])


@gluon.jit
def rates_of(A, place, S: gl.constexpr):
    """The rates [c, s] in units of the binary logarithm; -inf as a large number, which a step of 0 makes 0."""
    return gl.maximum(states_at(A, place.column * 0, place, S), -1e30) * LOG2_E


@gluon.jit
def numbers_of(tensor, place, TILE: gl.constexpr):
    """A number a channel [c] for tiles [t, c] of this layout, zeros if there are none."""
    L: gl.constexpr = gl.SliceLayout(0, TILE)
    if tensor is None:
        return gl.full([CHANNELS], 0.0, gl.float32, layout=L)
    else:
        c = gl.arange(0, CHANNELS, layout=L)
        return gl.load(tensor + place.column + c, mask=c < place.count, other=0.0).to(gl.float32)  # [c]


@gluon.jit
def tokens_there(token, place):
    """Which of TOKENS tokens from `token` on, and of its channels, a program has, [t, c]."""
    L: gl.constexpr = tokens()
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L))
    left = gl.minimum(gl.maximum(place.last - token, 0), TOKENS).to(gl.int32)
    return (t < left)[:, None] & (c < place.count)[None, :]


@gluon.jit
def tokens_at(tensor, token, place, S: gl.constexpr):
    """Addresses of TOKENS tokens, [t, c]."""
    L: gl.constexpr = tokens()
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L))
    return tensor + (token * S.WIDTH + place.column) + (t[:, None] * S.WIDTH + c[None, :])


@gluon.jit
def tokens_of(tensor, token, place, S: gl.constexpr):
    """TOKENS tokens of a tensor as they lie in memory, [t, c]; of None, the token."""
    if tensor is None:
        return token
    else:
        return gl.load(tokens_at(tensor, token, place, S), mask=tokens_there(token, place), other=0.0)  # [t, c]


@gluon.jit
def weights_of(shared, token, place, S: gl.constexpr):
    """TOKENS tokens of B or C as they lie in memory, [t, s]."""
    L: gl.constexpr = weights()
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, L))
    s = gl.arange(0, STATES, layout=gl.SliceLayout(0, L))
    left = gl.minimum(gl.maximum(place.last - token, 0), TOKENS).to(gl.int32)
    ptr = shared + (token * S.SHARES + place.share) * STATES
    return gl.load(ptr + (t[:, None] * (S.SHARES * STATES) + s[None, :]), mask=(t < left)[:, None], other=0.0)  # [t, s]


@gluon.jit
def step_sizes(raw, bias, there, S: gl.constexpr):
    """`dt` [t, c], 0 where there is no token: it changes nothing."""
    dt = raw.to(gl.float32) + bias[None, :]
    if S.SOFTPLUS:
        dt = softplus(dt, False)
    return gl.where(there, dt, 0.0)


@gluon.jit
def of_token(shared, i):
    """The numbers [c] of a token, of TOKENS tokens in shared memory."""
    return shared.index(i).load(gl.SliceLayout(1, tile()))


@gluon.jit
def weights_of_token(shared, i):
    """The weights [s] of a token."""
    return shared.index(i).load(gl.SliceLayout(0, tile()))


@gluon.jit
def many(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory of float32 numbers, row by row; `all_of` looks at it as one tile."""
    return gl.allocate_shared_memory(gl.float32, [ROWS, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def all_of(shared):
    return reinterpret(shared, gl.float32, shared.shape, rows())


@gluon.jit
def read_tokens(shared):
    """The numbers [t, c] of TOKENS tokens in shared memory."""
    return all_of(shared).load(tokens())  # [t, c]


HALF = gl.constexpr(4)


@gluon.jit
def stacked(x):
    """Four vectors [c] as [c, t]."""
    return gl.reshape(gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])), [CHANNELS, HALF])


@gluon.jit(do_not_specialize=["n"])
def selective_hopper_kernel(x, y_ptr, states, n, S: gl.constexpr):
    """The outputs of 32 channels of a sequence, and its last states."""
    place = place_of(x, n, S)
    h = states_at(states.start, place.sequence, place, S)
    rates = rates_of(x.A, place, S)
    bias, skip = numbers_of(x.bias, place, tokens()), numbers_of(x.D, place, tokens())
    steps, writes, sums = many(TOKENS, CHANNELS), many(TOKENS, CHANNELS), many(TOKENS, CHANNELS)
    reads_B, reads_C = many(TOKENS, STATES), many(TOKENS, STATES)
    at = place.first
    u, raw, z = tokens_of(x.u, at, place, S), tokens_of(x.dt, at, place, S), tokens_of(x.z, at, place, S)
    B, C = weights_of(x.B, at, place, S), weights_of(x.C, at, place, S)
    groups = ((place.last - place.first + TOKENS - 1) // TOKENS).to(gl.int32)
    for group in range(groups):
        there = tokens_there(at, place)
        dt, wide = step_sizes(raw, bias, there, S), u.to(gl.float32)
        all_of(steps).store(dt)
        all_of(writes).store(dt * wide)
        all_of(reads_B).store(B.to(gl.float32))
        all_of(reads_C).store(C.to(gl.float32))
        through, gate = skip[None, :] * wide, z
        later = at + TOKENS
        u, raw, z = tokens_of(x.u, later, place, S), tokens_of(x.dt, later, place, S), tokens_of(x.z, later, place, S)
        B, C = weights_of(x.B, later, place, S), weights_of(x.C, later, place, S)
        if states.kept is not None:
            if group % (S.CHUNK // TOKENS) == 0:
                put_states(states.kept, place.chunk + group // (S.CHUNK // TOKENS), place, True, h, S)
        two = 2 + opaque_zero()
        for half in range(two):
            found = ()
            for i in gl.static_range(HALF):
                token = HALF * half + i
                B_t, C_t = weights_of_token(reads_B, token), weights_of_token(reads_C, token)
                h = ex2(of_token(steps, token)[:, None] * rates) * h + of_token(writes, token)[:, None] * B_t[None, :]
                found = append(found, gl.sum(h * C_t[None, :], 1))
            halves = reinterpret(sums, gl.float32, [2, HALF, CHANNELS], rows())
            halves.index(half).permute([1, 0]).store(stacked(found))
        y = read_tokens(sums) + through
        if x.z is not None:
            y = y * activation(gate.to(gl.float32), "silu", False)
        gl.store(tokens_at(y_ptr, at, place, S), y.to(y_ptr.dtype.element_ty), mask=there)
        at = later
    put_states(states.last, place.sequence, place, True, h, S)
