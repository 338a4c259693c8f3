"""The scan on Hopper, `h_t = e^{g_t} h_{t-1} + w_t x_t`: a warp goes through the tokens of 64 channels, whose numbers are copied ahead.

Few channels of long sequences: segments, which wait for the state before them (`segments.py`) with their tokens in shared memory, so that
all tokens are read once.
Tiles: `c` channels.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import await_copies, close_copies, gl, gluon
from flashmix.ops.scan.gluon_hopper.segments import joined, ticket_of
from flashmix.ops.scan.gluon_hopper.tokens import (
    full,
    put_state,
    put_token,
    ring_of,
    span_of,
    start_copy,
    state_of,
    token_of,
)
from flashmix.ops.scan.gluon_hopper.weights import factors_of


class HopperScanInputs(NamedTuple):
    """`x` and `g` `[T, C]`, and the states that come in `[N, C]` or None."""

    x: Any
    g: Any
    start: Any


class HopperScanResults(NamedTuple):
    """`h` `[T, C]` and the last states `[N, C]`; of segments the tickets and words `[2 + slots C]`, all MISSING before."""

    h: Any
    state: Any
    words: Any


@gluon.jit
def start_copies(rings, slot, x, span, token, S: gl.constexpr):
    """Starts to copy GROUP tokens into place `slot` of the rings."""
    start_copy(rings[0], slot, x.x, span, token, 0, S.BITS_X, S)
    start_copy(rings[1], slot, x.g, span, token, 0, S.BITS_G, S)
    close_copies()


@gluon.jit
def step_of(rings, slot, i, x, left, S: gl.constexpr):
    """The factor of a token and what it adds, [c] each."""
    factor, weight = factors_of(token_of(rings[1], slot, i, x.g, S), i < left, S)
    own = token_of(rings[0], slot, i, x.x, S)
    return factor, weight * own if S.COUPLING else own


@gluon.jit
def advanced_over(rings, slot, x, h, out, span, token, S: gl.constexpr):
    """The state [c] after GROUP tokens, whose outputs are written."""
    first, left = (span.start + token) * S.WIDTH + span.column, span.tokens - token
    GROUP_: gl.constexpr = S.GROUP
    for i in gl.static_range(GROUP_):
        factor, own = step_of(rings, slot, i, x, left, S)
        before = h
        h = factor * h + own
        put_token(out, before if S.READ_BEFORE else h, first, i, left, span.column, S)
    return h


@gluon.jit
def summed_over(rings, slot, x, total, h, left, S: gl.constexpr):
    """The product of factors and the end [c] after GROUP more tokens."""
    GROUP_: gl.constexpr = S.GROUP
    for i in gl.static_range(GROUP_):
        factor, own = step_of(rings, slot, i, x, left, S)
        h = factor * h + own
        total = total * factor
    return total, h


@gluon.jit
def sequence_scanned(inputs, results, rings, slots, n, S: gl.constexpr):
    span = span_of(gl.program_id(0), slots, n, False, S)
    h = state_of(inputs.start, span, S)
    AHEAD: gl.constexpr = S.STAGES - 1
    for i in gl.static_range(AHEAD):
        start_copies(rings, i, inputs, span, i * S.GROUP, S)
    slot = 0
    free = S.STAGES - 1
    for token in range(0, span.tokens, S.GROUP):
        LEFT: gl.constexpr = S.STAGES - 2
        await_copies(LEFT)
        start_copies(rings, free, inputs, span, token + AHEAD * S.GROUP, S)
        h = advanced_over(rings, slot, inputs, h, results.h, span, token, S)
        free = slot
        slot = gl.where(slot == S.STAGES - 1, 0, slot + 1)
    await_copies(0)
    put_state(results.state, span, h, S)


@gluon.jit
def segment_scanned(inputs, results, rings, slots, n, S: gl.constexpr):
    span = span_of(ticket_of(results.words), slots, n, False, S)
    first = span.place * (S.GROUP * S.STAGES)
    STAGES_: gl.constexpr = S.STAGES
    for i in gl.static_range(STAGES_):
        start_copies(rings, i, inputs, span, first + i * S.GROUP, S)
    total, end = full(1.0, S), full(0.0, S)
    HALF: gl.constexpr = S.STAGES // 2
    await_copies(HALF)
    for i in range(HALF):
        total, end = summed_over(rings, i, inputs, total, end, span.tokens - first - i * S.GROUP, S)
    await_copies(0)
    for i in range(HALF, S.STAGES):
        total, end = summed_over(rings, i, inputs, total, end, span.tokens - first - i * S.GROUP, S)
    h = joined(results.words, total, end, state_of(inputs.start, span, S), span, S)
    for i in range(S.STAGES):
        h = advanced_over(rings, i, inputs, h, results.h, span, first + i * S.GROUP, S)
    if span.place == span.segments - 1:
        put_state(results.state, span, h, S)


@gluon.jit(do_not_specialize=["n"])
def scan_hopper_kernel(inputs, results, slots, n, S: gl.constexpr):
    rings = (ring_of(inputs.x, S), ring_of(inputs.g, S))
    if S.SEGMENTS:
        segment_scanned(inputs, results, rings, slots, n, S)
    else:
        sequence_scanned(inputs, results, rings, slots, n, S)
