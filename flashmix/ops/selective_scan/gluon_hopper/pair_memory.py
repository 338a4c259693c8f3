"""The shared memory of a program of `backward.py`, and how it is filled.

While a chunk is worked on, from its last token to its first, the tensors of the chunk before it are copied to shared memory (`cp.async`),
as soon as what lies there is no longer needed: u, z and `dout` over those of the same tokens of this chunk; B, C, step sizes and the first
states over this chunk's states.
Tiles: `t` QUAD tokens, or those of a chunk, `c` channels, `s` states; of states `[q, i, j, e]` (`product_sums.py`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import copy_later, gl, gluon, reinterpret
from flashmix.gpu.rows import sigmoid
from flashmix.ops.decay.triton_gpu import softplus
from flashmix.ops.selective_scan.gluon_hopper.layouts import CHANNELS, STATES, rows
from flashmix.ops.selective_scan.gluon_hopper.product_sums import QUAD, quad_numbers, tile


class Copied(NamedTuple):
    """Shared memory of u, z and `dout` of a chunk as they are, [t, c] of each QUAD tokens."""

    u: Any
    z: Any
    d_y: Any


class QuadMemory(NamedTuple):
    """Shared memory of a chunk: what was copied; step sizes and `dt u` of each QUAD tokens `[q, t i]`; B and C of each token `[j, e]`; the
    states before every second token; `dy` as `dt u`; the bias and the skip weight of the channels."""

    copied: Any
    steps: Any
    writes: Any
    B: Any
    C: Any
    states: Any
    flows: Any
    weights: Any


class OwnInputs(NamedTuple):
    """Addresses of the first token of a program's sequence at its channels, and of the states of its first chunk."""

    u: Any
    dt: Any
    z: Any
    B: Any
    C: Any
    d_y: Any
    kept: Any


class OwnResults(NamedTuple):
    """Addresses as `OwnInputs`; of B and C the sums of the program's block of channels."""

    u: Any
    dt: Any
    z: Any
    B: Any
    C: Any


class OwnTensors(NamedTuple):
    """A program's part of the tensors; the tokens of its sequence, the channels that there are."""

    x: Any
    d: Any
    tokens: Any
    count: Any


@gluon.constexpr_function
def quad_memory():
    """In registers, of `[pair q, t i]`: as `quad_numbers`."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[0, 4], [8, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[],
        block_bases=[],
        shape=[16, 8],
    )


@gluon.constexpr_function
def quad_weights():
    """Of `[t, s]`, B or C of QUAD tokens."""
    return gl.BlockedLayout([1, 2], [4, 8], [1, 1], [1, 0])


@gluon.constexpr_function
def own_rows():
    """Of `[i, q j e]`: a thread's numbers of a tile, 16 bytes beside those of its neighbour."""
    return gl.BlockedLayout([4, 4], [1, 32], [1, 1], [1, 0])


@gluon.jit
def many_tiles(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [COUNT, ROWS, COLUMNS], rows())


@gluon.jit
def many_numbers(tensor, S: gl.constexpr):
    """Memory for a chunk's numbers of a tensor."""
    return gl.allocate_shared_memory(tensor.dtype.element_ty, [S.CHUNK // QUAD, QUAD, CHANNELS], rows())


@gluon.jit
def tile_pointers(states, row, place, S: gl.constexpr):
    """Addresses of a row of states `[D, S]`, and which of them there are, [q, i, j, e]."""
    L: gl.constexpr = tile()
    J: gl.constexpr = gl.SliceLayout(3, L)
    I: gl.constexpr = gl.SliceLayout(2, J)
    q, i = gl.arange(0, 8, layout=gl.SliceLayout(1, I)), gl.arange(0, 4, layout=gl.SliceLayout(0, I))
    c = 4 * q[:, None] + i[None, :]
    j = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, J)))
    e = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    at = (c * STATES)[:, :, None] + 4 * j[None, None, :]
    ptr = states + (row.to(gl.int64) * S.WIDTH + place.column) * STATES
    return ptr + (at[:, :, :, None] + e[None, None, None, :]), (c < place.count)[:, :, None, None]


@gluon.jit
def tile_at(states, row, place, S: gl.constexpr):
    """The states of a row, zeros if there are none."""
    if states is None:
        return gl.full([8, 4, 4, 4], 0.0, gl.float32, layout=tile())
    else:
        ptr, there = tile_pointers(states, row, place, S)
        return gl.load(ptr, mask=there, other=0.0).to(gl.float32)  # [q, i, j, e]


@gluon.jit
def put_tile(states, row, place, h, S: gl.constexpr):
    ptr, there = tile_pointers(states, row, place, S)
    gl.store(ptr, h, mask=there)


@gluon.jit
def keep_tile(shared, i, h):
    shared.index(i).store(gl.reshape(h.permute([1, 0, 2, 3]), [4, 128]))


@gluon.jit
def own_tile(shared):
    own = gl.reshape(shared.load(own_rows()), [4, 8, 4, 4])  # [i, q, j, e]
    return gl.convert_layout(own.permute([1, 0, 2, 3]), tile())


@gluon.jit
def by_channel(shared, pair, t: gl.constexpr):
    """The numbers of a token's channels, [q, i, 1, 1]."""
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, tile()))
    return shared.index(pair).slice(4 * t, 4, 1).load(L)[:, :, None, None]


@gluon.jit
def by_state(shared, token):
    """The weights of a token, [1, 1, j, e]."""
    L: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, tile()))
    return shared.index(token).load(L)[None, :, :][:, None, :, :]


@gluon.jit
def read_quad(shared, quad, S: gl.constexpr):
    """Numbers [t, c]."""
    whole = reinterpret(shared, gl.float32, [S.CHUNK // QUAD, 16, 8], rows()).index(quad)
    own = gl.reshape(whole.load(quad_memory()), [2, 8, 2, 4])  # [pair, q, t, i]
    return gl.convert_layout(gl.reshape(own.permute([0, 2, 1, 3]), [4, 32]), quad_numbers())


@gluon.jit
def put_quad(shared, quad, x, S: gl.constexpr):
    whole = reinterpret(shared, gl.float32, [S.CHUNK // QUAD, 16, 8], rows()).index(quad)
    whole.store(gl.reshape(gl.reshape(x, [2, 2, 8, 4]).permute([0, 2, 1, 3]), [16, 8]))


@gluon.jit
def moved(tensor, offset):
    if tensor is None:
        return offset
    else:
        return tensor + offset


@gluon.jit
def own_of(x, d, kept, place, n, S: gl.constexpr):
    numbers = place.first * S.WIDTH + place.column
    weights = (place.first * S.SHARES + place.share) * STATES
    d_B = d.shared + (place.part * 2).to(gl.int64) * n.rows * (S.SHARES * STATES) + weights
    inputs = OwnInputs(
        x.u + numbers,
        x.dt + numbers,
        moved(x.z, numbers),
        x.B + weights,
        x.C + weights,
        d.y + numbers,
        kept + (place.chunk.to(gl.int64) * S.WIDTH + place.column) * STATES,
    )
    d_C = d_B + n.rows.to(gl.int64) * (S.SHARES * STATES)
    results = OwnResults(d.u + numbers, d.dt + numbers, moved(d.z, numbers), d_B, d_C)
    return OwnTensors(inputs, results, (place.last - place.first).to(gl.int32), place.count)


@gluon.jit
def copied_quad(shared, quad):
    """Numbers [t, c] as they were copied, in float32."""
    return shared.index(quad).load(quad_numbers()).to(gl.float32)  # [t, c]


@gluon.jit
def quad_there(token, tokens, own):
    """Which of QUAD tokens from `token` on, of so many, and of its channels, a program has, [t, c]."""
    L: gl.constexpr = quad_numbers()
    t, c = gl.arange(0, QUAD, layout=gl.SliceLayout(1, L)), gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L))
    return (token + t < tokens)[:, None] & (c < own.count)[None, :]


@gluon.jit
def quad_at(tensor, token, S: gl.constexpr):
    """Addresses of QUAD tokens, [t, c]."""
    L: gl.constexpr = quad_numbers()
    t, c = gl.arange(0, QUAD, layout=gl.SliceLayout(1, L)), gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L))
    return tensor + token.to(gl.int64) * S.WIDTH + (t[:, None] * S.WIDTH + c[None, :])


@gluon.jit
def quad_weights_at(tensor, token, own, S: gl.constexpr):
    """Addresses of QUAD tokens of B or C, and which there are, [t, s]."""
    L: gl.constexpr = quad_weights()
    t, s = gl.arange(0, QUAD, layout=gl.SliceLayout(1, L)), gl.arange(0, STATES, layout=gl.SliceLayout(0, L))
    ptr = tensor + token.to(gl.int64) * (S.SHARES * STATES) + (t[:, None] * (S.SHARES * STATES) + s[None, :])
    return ptr, (token + t < own.tokens)[:, None]


@gluon.constexpr_function
def chunk_weights():
    """Of `[t, s]`, B or C of a chunk: 16 bytes a thread of 16-bit numbers."""
    return gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0])


@gluon.constexpr_function
def chunk_numbers():
    """Of `[t, c]`, step sizes of a chunk as they lie in memory."""
    return gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])


@gluon.jit
def coming_weights(memory, own, S: gl.constexpr):
    """Where B (0) and C (1) of the next chunk come, `[2, t, s]`: in place of states that are done with, as all of these."""
    return reinterpret(memory.states.index(S.CHUNK // 2 - 1), own.x.B.dtype.element_ty, [2, S.CHUNK, STATES], rows())


@gluon.jit
def coming(memory, SLOT: gl.constexpr, tensor, S: gl.constexpr):
    """Where step sizes (SLOT 3) and u (4) of the next chunk come, [t, c]."""
    return reinterpret(memory.states.index(S.CHUNK // 2 - SLOT), tensor.dtype.element_ty, [S.CHUNK, CHANNELS], rows())


@gluon.jit
def coming_quads(memory, SLOT: gl.constexpr, tensor, S: gl.constexpr):
    """The same by QUAD tokens."""
    return reinterpret(
        memory.states.index(S.CHUNK // 2 - SLOT), tensor.dtype.element_ty, [S.CHUNK // QUAD, QUAD, CHANNELS], rows()
    )


@gluon.jit
def coming_weight_quads(memory, own, S: gl.constexpr):
    return reinterpret(
        memory.states.index(S.CHUNK // 2 - 1), own.x.B.dtype.element_ty, [2 * S.CHUNK // QUAD, QUAD, STATES], rows()
    )


@gluon.jit
def coming_states(memory, S: gl.constexpr):
    return memory.states.index(S.CHUNK // 2 - 2)


@gluon.jit
def copy_quad(to, tensor, own, quad, start, tokens, S: gl.constexpr):
    """Starts to copy numbers of QUAD tokens of the chunk at `start`, of a sequence of so many `tokens`."""
    token = start + QUAD * quad
    copy_later(to.index(quad), quad_at(tensor, token, S), mask=quad_there(token, tokens, own))


@gluon.jit
def copy_numbers(to, tensor, own, start, tokens, S: gl.constexpr):
    """Starts to copy numbers of the chunk at `start`."""
    L: gl.constexpr = chunk_numbers()
    t, c = gl.arange(0, S.CHUNK, layout=gl.SliceLayout(1, L)), gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, L))
    at = start.to(gl.int64) * S.WIDTH + (t[:, None] * S.WIDTH + c[None, :])
    copy_later(to, tensor + at, mask=(start + t < tokens)[:, None] & (c < own.count)[None, :])


@gluon.jit
def of_chunk(shared, tensor, S: gl.constexpr):
    """The numbers of a chunk that were copied, as one tile."""
    return reinterpret(shared, tensor.dtype.element_ty, [S.CHUNK, CHANNELS], rows())


@gluon.jit
def copy_flows(GATED: gl.constexpr, own, memory, start, tokens, S: gl.constexpr):
    """Starts to copy `dout` and z of the chunk at `start`."""
    copy_numbers(of_chunk(memory.copied.d_y, own.x.d_y, S), own.x.d_y, own, start, tokens, S)
    if GATED:
        copy_numbers(of_chunk(memory.copied.z, own.x.u, S), own.x.z, own, start, tokens, S)


@gluon.jit
def copy_weights(own, memory, start, tokens, S: gl.constexpr):
    """Starts to copy B, C and the first states of the chunk at `start`."""
    L: gl.constexpr = chunk_weights()
    t, s = gl.arange(0, S.CHUNK, layout=gl.SliceLayout(1, L)), gl.arange(0, STATES, layout=gl.SliceLayout(0, L))
    at = start.to(gl.int64) * (S.SHARES * STATES) + (t[:, None] * (S.SHARES * STATES) + s[None, :])
    there = (start + t < tokens)[:, None]
    to = coming_weights(memory, own, S)
    copy_later(to.index(0), own.x.B + at, mask=there)
    copy_later(to.index(1), own.x.C + at, mask=there)
    M: gl.constexpr = own_rows()
    i, m = gl.arange(0, 4, layout=gl.SliceLayout(1, M)), gl.arange(0, 128, layout=gl.SliceLayout(0, M))
    c = (4 * (m // STATES))[None, :] + i[:, None]
    at = (start // S.CHUNK).to(gl.int64) * (S.WIDTH * STATES) + (c * STATES + (m % STATES)[None, :])
    copy_later(coming_states(memory, S), own.x.kept + at, mask=(c < own.count) & (start < tokens))


@gluon.jit
def channel_weight(memory, i):
    """The bias (0) or the skip weight (1) of each channel, [1, c]."""
    return memory.weights.index(i).load(gl.SliceLayout(0, quad_numbers()))[None, :]


class RawQuad(NamedTuple):
    """Of QUAD tokens as they were copied: B and C [t, s], the others [t, c]."""

    B: Any
    C: Any
    dt: Any
    u: Any
    d_y: Any
    z: Any


@gluon.jit
def raw_quad(GATED: gl.constexpr, own, memory, quad, S: gl.constexpr):
    L: gl.constexpr = quad_numbers()
    weights = coming_weight_quads(memory, own, S)
    d_y = memory.copied.d_y.index(quad).load(L)  # [t, c]
    z = d_y
    if GATED:
        z = memory.copied.z.index(quad).load(L)  # [t, c]
    B = weights.index(quad).load(quad_weights())  # [t, s]
    C = weights.index(quad + S.CHUNK // QUAD).load(quad_weights())  # [t, s]
    dt = coming_quads(memory, 3, own.x.dt, S).index(quad).load(L)  # [t, c]
    u = coming_quads(memory, 4, own.x.u, S).index(quad).load(L)  # [t, c]
    return RawQuad(B, C, dt, u, d_y, z)


@gluon.jit
def convert_quad(GATED: gl.constexpr, own, memory, raw, start, quad, S: gl.constexpr):
    """Makes step sizes, `dt u`, `dy`, B and C of QUAD tokens from what was copied, and keeps u.

    Returns `dout` times the slope of the gate, [t, c].
    """
    reinterpret(memory.B, gl.float32, [S.CHUNK // QUAD, QUAD, STATES], rows()).index(quad).store(raw.B.to(gl.float32))
    reinterpret(memory.C, gl.float32, [S.CHUNK // QUAD, QUAD, STATES], rows()).index(quad).store(raw.C.to(gl.float32))
    dt = raw.dt.to(gl.float32) + channel_weight(memory, 0)  # [t, c]
    if S.SOFTPLUS:
        dt = softplus(dt, False)
    # where there is no token nothing changes
    dt = gl.where(quad_there(start + QUAD * quad, own.tokens, own), dt, 0.0)
    put_quad(memory.steps, quad, dt, S)
    memory.copied.u.index(quad).store(raw.u)
    put_quad(memory.writes, quad, dt * raw.u.to(gl.float32), S)
    dy = raw.d_y.to(gl.float32)
    slopes = dy
    if GATED:
        z = raw.z.to(gl.float32)
        share = sigmoid(z, False)
        slopes = dy * (share * (1.0 + z * (1.0 - share)))
        dy *= z * share
    put_quad(memory.flows, quad, dy, S)
    return slopes
