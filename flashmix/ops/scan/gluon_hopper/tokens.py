"""Tokens of a scan on Hopper: where a slot lies, rings of groups of tokens in shared memory, states.

A program is a warp with BLOCK channels `c` of one sequence, a thread two of them. Groups of GROUP tokens are copied by `cp.async` into
rings of STAGES groups each; a number outside of its sequence comes as 0, a decay of 0 being a factor of 1.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import copy_later, gl, gluon, reinterpret


class HopperScanNumbers(NamedTuple):
    tokens: Any  # T; packed, of all sequences
    slots: Any
    each: Any  # segments of a dense sequence


class HopperSpan(NamedTuple):
    """Where a slot lies: its sequence, that one's first token, how many it has, and its segments; the slot's place among these in the order
    of the work, and its block's first channel; the slot's number in that order.
    """

    sequence: Any
    start: Any
    tokens: Any
    segments: Any
    place: Any
    column: Any
    order: Any


@gluon.constexpr_function
def rows():
    """The layout in shared memory of tokens row by row."""
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


@gluon.constexpr_function
def row():
    """The layout in shared memory of one token."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def channels(BLOCK):
    """The layout of channels [c] in registers."""
    return gl.BlockedLayout([BLOCK // 32], [32], [1], [0])


@gluon.constexpr_function
def copied(BLOCK, bits):
    """The layout of the addresses of a copy [t, c]: 16 bytes a thread."""
    each = 128 // bits
    lanes = min(BLOCK // each, 32)
    return gl.BlockedLayout([1, each], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.jit
def span_of(work, slots, n, BACKWARD: gl.constexpr, S: gl.constexpr):
    """The span of a piece of work: those of a sequence's segments follow one another, backward from the last to the first."""
    BLOCKS: gl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    SIZE: gl.constexpr = S.GROUP * S.STAGES
    order, column = work // BLOCKS, work % BLOCKS * S.BLOCK
    slot = order
    if S.SEGMENTS and BACKWARD:
        slot = n.slots - 1 - order
    sequence, place = slot, slot * 0
    if S.SEGMENTS:
        if S.PACKED:
            sequence, place = gl.load(slots.sequence + slot).to(gl.int32), gl.load(slots.place + slot).to(gl.int32)
        else:
            sequence, place = slot // n.each, slot % n.each
    if S.PACKED:
        start = gl.maximum(gl.load(slots.cu_seqlens + sequence).to(gl.int64), 0)
        end = gl.minimum(gl.load(slots.cu_seqlens + sequence + 1).to(gl.int64), n.tokens)
        tokens = gl.maximum(end - start, 0).to(gl.int32)
    else:
        start, tokens = sequence.to(gl.int64) * n.tokens, n.tokens
    segments = (tokens + (SIZE - 1)) // SIZE
    if (
        S.PACKED and S.SEGMENTS
    ):  # a slot without a segment has no tokens; no place is before the first slot, whatever the boundaries
        tokens = gl.where(place < 0, 0, tokens)
        segments = gl.where(place < 0, 0, segments)
        place = gl.maximum(place, 0)
    if S.SEGMENTS and BACKWARD:
        place = segments - 1 - place
    if S.PACKED and S.SEGMENTS:
        place = gl.minimum(gl.maximum(place, 0), order)
    return HopperSpan(sequence, start, tokens, segments, place, column, order)


@gluon.jit
def ring_of(tensor, S: gl.constexpr):
    return gl.allocate_shared_memory(tensor.dtype.element_ty, [S.STAGES, S.GROUP, S.BLOCK], rows())


@gluon.jit
def start_copy(ring, slot, tensor, span, token, OFFSET: gl.constexpr, BITS: gl.constexpr, S: gl.constexpr):
    """Starts to copy the GROUP tokens from `token` of a sequence on, those that there are, or (with -1) those before each of them."""
    L: gl.constexpr = copied(S.BLOCK, BITS)
    t, c = gl.arange(0, S.GROUP, layout=gl.SliceLayout(1, L)), gl.arange(0, S.BLOCK, layout=gl.SliceLayout(0, L))
    at = (span.start + token + OFFSET) * S.WIDTH + span.column
    ptr = tensor + at + (t[:, None] * S.WIDTH + c[None, :])
    mask = ((token + t + OFFSET >= 0) & (token + t < span.tokens))[:, None]
    if S.WIDTH % S.BLOCK:
        mask = mask & (span.column + c < S.WIDTH)[None, :]
    else:
        mask = mask & (c >= 0)[None, :]
    copy_later(ring.index(slot), ptr, mask=mask)


@gluon.jit
def token_of(ring, slot, i, tensor, S: gl.constexpr):
    """Token `i` [c] of a group."""
    tile = reinterpret(ring.index(slot), tensor.dtype.element_ty, [S.GROUP, S.BLOCK], row())
    return tile.index(i).load(channels(S.BLOCK)).to(gl.float32)


@gluon.jit
def put_token(tensor, x, first, i, left, column, S: gl.constexpr):
    """Writes token `i` of those from the place `first` on, of which `left` are there."""
    c = gl.arange(0, S.BLOCK, layout=channels(S.BLOCK))
    there = (c >= 0) & (i < left)
    if S.WIDTH % S.BLOCK:
        there = there & (column + c < S.WIDTH)
    gl.store(tensor + first + c + i * S.WIDTH, x.to(tensor.dtype.element_ty), mask=there)


@gluon.jit
def full(VALUE: gl.constexpr, S: gl.constexpr):
    """The same number for all channels [c]."""
    return gl.full([S.BLOCK], VALUE, gl.float32, layout=channels(S.BLOCK))


@gluon.jit
def state_of(states, span, S: gl.constexpr):
    """The state [c] of a sequence, zeros if there are none."""
    if states is None:
        return full(0.0, S)
    else:
        c = span.column + gl.arange(0, S.BLOCK, layout=channels(S.BLOCK))
        return gl.load(states + span.sequence.to(gl.int64) * S.WIDTH + c, mask=c < S.WIDTH, other=0.0)


@gluon.jit
def put_state(states, span, h, S: gl.constexpr):
    if states is not None:
        c = span.column + gl.arange(0, S.BLOCK, layout=channels(S.BLOCK))
        gl.store(states + span.sequence.to(gl.int64) * S.WIDTH + c, h, mask=c < S.WIDTH)
