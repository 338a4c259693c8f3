"""The selective scan on a GPU, forward, and what its backward shares: a warp has 32 channels of one sequence, a thread one channel.

    dt = softplus(dt + bias);  h_t = e^{dt A} h_{t-1} + dt u_t B_t;  y_t = (h_t C_t + D u_t) silu(z_t)

A thread holds all states of its channel, so that no sum over states leaves it: Triton lays out a tile by its loads, and in those of states
channels lie side by side and no alignment is known, so that a thread takes one channel. The next tokens are loaded while those of this
group are computed. The states at the starts of chunks are kept for the backward. Segments are those of the scan: the decay of a segment is
`e^{A s}`, where s is the sum of its step sizes.
Tiles: `c` channels, `s` states, up to a power of two with zeros.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.rows import activation
from flashmix.ops.decay.triton_gpu import softplus
from flashmix.ops.scan.triton_gpu.kernels import left_of, span_of, tokens_of
from flashmix.ops.scan.triton_gpu.numbers import exponential
from flashmix.ops.selective_scan.call import CHUNK as _CHUNK

CHUNK = tl.constexpr(_CHUNK)
LANES = tl.constexpr(32)
JOINED = tl.constexpr(4)  # segments that are read at once


class SelectiveInputs(NamedTuple):
    """Contiguous tensors: `u`, `dt`, `z` `[T, D]`, `B`, `C` `[T, G, S]`, `D` and `bias` `[D]`; absent ones None."""

    u: Any
    dt: Any
    B: Any
    C: Any
    D: Any
    z: Any
    bias: Any


class SelectiveStates(NamedTuple):
    """Tensors of states, whose channels lie side by side: `A` `[S, D]`, the states that come in and the last ones `[N, S, D]`, those at the
    starts of chunks `[chunks, S, D]`; of segments the sums of step sizes `totals` `[slots, D]` and the ends from zero `ends`
    `[slots, S, D]`; absent ones None. The pass that finds `totals` and `ends` has no `last`.
    """

    A: Any
    start: Any
    last: Any
    kept: Any
    totals: Any
    ends: Any


class SelectiveSpec(NamedTuple):
    WIDTH: int  # D, channels
    STATES: int  # S
    TILE: int  # s
    SHARES: int  # G, groups of channels that share B and C
    BLOCKS: int  # of channels of such a group
    GROUP: int  # tokens that are loaded at a time
    PACKED: bool
    SEGMENTS: bool
    SOFTPLUS: bool
    PRECISE: bool  # exponentials to float32's rounding


@triton.jit
def place_of(program, S: tl.constexpr):
    """Slot, group of channels, block in it, channels [c] and which of these there are."""
    SIZE: tl.constexpr = S.WIDTH // S.SHARES
    slot, block = program // (S.SHARES * S.BLOCKS), program % (S.SHARES * S.BLOCKS)
    share, part = block // S.BLOCKS, block % S.BLOCKS
    lane = part * LANES + tl.arange(0, LANES)
    return tl.cast(slot, tl.int64), share, part, share * SIZE + lane, lane < SIZE


@triton.jit
def states_at(states, row, column, inside, S: tl.constexpr):
    """The states [c, s] of a row, zeros if there are none."""
    TILE: tl.constexpr = S.TILE
    if states is None:
        return tl.full([LANES, TILE], 0.0, tl.float32)
    else:
        s = tl.arange(0, TILE)
        ptr = states + ((row * S.STATES + s)[None, :] * S.WIDTH + column[:, None])
        mask = inside[:, None] & (s < S.STATES)[None, :]
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)  # [c, s]


@triton.jit
def put_states(states, row, column, mask, h, S: tl.constexpr):
    TILE: tl.constexpr = S.TILE
    s = tl.arange(0, TILE)
    ptr = states + ((row * S.STATES + s)[None, :] * S.WIDTH + column[:, None])
    tl.store(ptr, h, mask=mask[:, None] & (s < S.STATES)[None, :])


@triton.jit
def rates_of(A, column, inside, S: tl.constexpr):
    """The rates [c, s] in units of the logarithm that `power` takes; -inf as a large number, which a step of 0 makes 0."""
    rate = tl.maximum(states_at(A, tl.program_id(0) * 0, column, inside, S), -1e30)
    return rate if S.PRECISE else rate * 1.4426950408889634


@triton.jit
def power(x, S: tl.constexpr):
    """`e^{dt A}` of `dt` times a rate."""
    if S.PRECISE:
        return exponential(x)
    else:
        return tl.exp2(x)


@triton.jit
def numbers_of(tensor, column, inside):
    """A number a channel [c], zeros if there are none."""
    if tensor is None:
        return tl.full([LANES], 0.0, tl.float32)
    else:
        return tl.load(tensor + column, mask=inside, other=0.0).to(tl.float32)  # [c]


@triton.jit
def step_size(raw, bias, exists, S: tl.constexpr):
    """`dt` of a token, 0 where there is none: it changes nothing."""
    dt = raw.to(tl.float32) + bias
    if S.SOFTPLUS:
        dt = softplus(dt, S.PRECISE)
    return tl.where(exists, dt, 0.0)


@triton.jit
def weights_of(shared, token, share, last, S: tl.constexpr):
    """B or C of a token [1, s]; past the last token that one's, which a step of 0 and a gradient of 0 multiply."""
    TILE: tl.constexpr = S.TILE
    s = tl.arange(0, TILE)
    ptr = shared + ((tl.maximum(tl.minimum(token, last - 1), 0) * S.SHARES + share) * S.STATES + s)
    if S.STATES == TILE:
        return tl.load(ptr).to(tl.float32)[None, :]  # [1, s]
    else:
        return tl.load(ptr, mask=s < S.STATES, other=0.0).to(tl.float32)[None, :]  # [1, s]


@triton.jit
def advanced(h, rates, dt, u, B, S: tl.constexpr):
    """The states [c, s] after a token."""
    return power(dt[:, None] * rates, S) * h + (dt * u)[:, None] * B


@triton.jit
def joined(states, rates, h, slot, count, STEP: tl.constexpr, column, inside, S: tl.constexpr):
    """The states after `count` segments, the slots from `slot` on, every STEP-th."""
    for first in range(0, count, JOINED):
        for i in tl.static_range(JOINED):
            at, mask = slot + STEP * (first + i), inside & (first + i < count)
            total = tl.load(states.totals + at * S.WIDTH + column, mask=mask, other=0.0)  # [c]
            h = power(total[:, None] * rates, S) * h + states_at(states.ends, at, column, mask, S)
    return h


@triton.jit
def optional_tokens(tensor, token, column, limit, S: tl.constexpr):
    """GROUP tokens of a tensor, or of None nothing that is looked at."""
    if tensor is not None:
        return tokens_of(tensor, token, column, limit, 0.0, S)
    else:
        return (column,)


@triton.jit
def first_chunk(span, n, S: tl.constexpr):
    """Where the chunks of a sequence begin; packed there may be gaps between sequences."""
    return span.start // CHUNK + span.sequence if S.PACKED else span.sequence * tl.cdiv(n.tokens, CHUNK)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["states"])
def selective_kernel(inputs, y_ptr, states, slots, n, S: tl.constexpr):
    """The tokens of a slot; without `last`, only the sum of its step sizes and its end from states of zeros."""
    GROUP: tl.constexpr = S.GROUP
    slot, share, _, column, inside = place_of(tl.program_id(0), S)
    span = span_of(slots, n, slot, S)
    limit = tl.where(inside, span.last, span.first)  # [c]
    rates = rates_of(states.A, column, inside, S)
    bias, skip = numbers_of(inputs.bias, column, inside), numbers_of(inputs.D, column, inside)
    total = tl.full([LANES], 0.0, tl.float32)
    if states.last is None:
        h = states_at(None, slot, column, inside, S)
    else:
        h = states_at(states.start, span.sequence, column, inside, S)
        if S.SEGMENTS:
            h = joined(states, rates, h, slot - span.place, span.place, 1, column, inside, S)
    us = tokens_of(inputs.u, span.first, column, limit, 0.0, S)
    dts = tokens_of(inputs.dt, span.first, column, limit, 0.0, S)
    zs = optional_tokens(inputs.z, span.first, column, limit, S)
    B = weights_of(inputs.B, span.first, share, span.last, S)
    C = weights_of(inputs.C, span.first, share, span.last, S)
    later_B = weights_of(inputs.B, span.first + 1, share, span.last, S)
    later_C = weights_of(inputs.C, span.first + 1, share, span.last, S)
    for at in range(span.first, span.last, GROUP):
        next_us = tokens_of(inputs.u, at + GROUP, column, limit, 0.0, S)
        next_dts = tokens_of(inputs.dt, at + GROUP, column, limit, 0.0, S)
        next_zs = optional_tokens(inputs.z, at + GROUP, column, limit, S)
        if states.kept is not None:
            since = at - span.start
            if since % CHUNK == 0:
                put_states(states.kept, first_chunk(span, n, S) + since // CHUNK, column, inside, h, S)
        left = left_of(limit, at)
        for i in tl.static_range(GROUP):
            dt = step_size(dts[i], bias, i < left, S)
            u = us[i].to(tl.float32)
            h = advanced(h, rates, dt, u, B, S)
            if states.last is None:
                total += dt
            else:
                y = tl.sum(h * C, 1) + skip * u
                if inputs.z is not None:
                    y *= activation(zs[i].to(tl.float32), "silu", S.PRECISE)
                place = y_ptr + (at * S.WIDTH + column) + i * S.WIDTH
                tl.store(place, y.to(y_ptr.dtype.element_ty), mask=i < left)
            B, later_B = later_B, weights_of(inputs.B, at + i + 2, share, span.last, S)
            C, later_C = later_C, weights_of(inputs.C, at + i + 2, share, span.last, S)
        us, dts, zs = next_us, next_dts, next_zs
    if states.last is None:
        tl.store(states.totals + slot * S.WIDTH + column, total, mask=inside)
        put_states(states.ends, slot, column, inside, h, S)
    else:
        ends = inside & (span.last == span.end)
        if S.SEGMENTS:  # an empty sequence, which has no segment, keeps the states that its results began with
            ends = ends & (span.first < span.last)
        put_states(states.last, span.sequence, column, ends, h, S)
