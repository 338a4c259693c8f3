"""The backward of the scan on Hopper: the same from the last token to the first.

    l_t = dh_t + c_{t+1},  c_t = e^{g_t} l_t, where c after the last token is the gradient of the last state
    dx = w l,  dg_t = c_t h_{t-1}, with a coupling see `state_and_own`; c of the first token is the gradient of the state that came in
    read_before: l_t = c_{t+1}, c_t = do_t + e^{g_t} l_t

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
from flashmix.ops.scan.gluon_hopper.weights import factors_of, state_and_own


class HopperBackwardInputs(NamedTuple):
    """Gradients of the outputs, log decays, outputs and, with a coupling, `x`, each `[T, C]`; the gradients of the last states and the
    states that came in, `[N, C]` or None.
    """

    d_h: Any
    g: Any
    h: Any
    x: Any
    d_state: Any
    start: Any


class HopperBackwardResults(NamedTuple):
    """Gradients of `x`, of the log decays or None, `[T, C]`, and of the states that came in, `[N, C]` or None; `words` as forward."""

    dx: Any
    dg: Any
    d_start: Any
    words: Any


@gluon.jit
def start_flows(rings, slot, x, span, token, S: gl.constexpr):
    """Starts to copy what the carry needs of GROUP tokens."""
    start_copy(rings[0], slot, x.d_h, span, token, 0, S.BITS_X, S)
    start_copy(rings[1], slot, x.g, span, token, 0, S.BITS_G, S)


@gluon.jit
def start_states(rings, slot, x, results, span, token, S: gl.constexpr):
    """Starts to copy what the gradient of the decay needs besides."""
    if results.dg is not None:
        start_copy(rings[2], slot, x.h, span, token, 0 if S.READ_BEFORE else -1, S.BITS_X, S)
        if S.COUPLING:
            start_copy(rings[3], slot, x.x, span, token, 0, S.BITS_X, S)


@gluon.jit
def carried(d_h, factor, c, S: gl.constexpr):
    """`l` of a token and the carry before it, [c] each."""
    if S.READ_BEFORE:
        return c, d_h + factor * c
    else:
        return d_h + c, factor * (d_h + c)


@gluon.jit
def returned_over(rings, slot, x, c, begin, results, span, token, S: gl.constexpr):
    """The carry [c] before GROUP tokens, whose gradients are written; `begin` is the state that came in."""
    first, left = (span.start + token) * S.WIDTH + span.column, span.tokens - token
    GROUP_: gl.constexpr = S.GROUP
    for i in gl.static_range(GROUP_ - 1, -1, -1):
        factor, weight = factors_of(token_of(rings[1], slot, i, x.g, S), i < left, S)
        flow, after = carried(token_of(rings[0], slot, i, x.d_h, S), factor, c, S)
        put_token(results.dx, weight * flow if S.COUPLING else flow, first, i, left, span.column, S)
        if results.dg is not None:
            h = token_of(rings[2], slot, i, x.h, S)
            if not S.READ_BEFORE:
                if i == 0:
                    h = gl.where(token == 0, begin, h)
            if S.COUPLING:
                h = state_and_own(h, token_of(rings[3], slot, i, x.x, S), factor, weight, S)
            put_token(results.dg, (factor * flow) * h, first, i, left, span.column, S)
        c = after
    return c


@gluon.jit
def summed_back(rings, slot, x, total, c, left, S: gl.constexpr):
    """The product of factors and the carry [c] before GROUP more tokens."""
    GROUP_: gl.constexpr = S.GROUP
    for i in gl.static_range(GROUP_ - 1, -1, -1):
        factor, _ = factors_of(token_of(rings[1], slot, i, x.g, S), i < left, S)
        _, c = carried(token_of(rings[0], slot, i, x.d_h, S), factor, c, S)
        total = total * factor
    return total, c


@gluon.jit
def sequence_returned(inputs, results, rings, slots, n, S: gl.constexpr):
    span = span_of(gl.program_id(0), slots, n, True, S)
    c, begin = state_of(inputs.d_state, span, S), state_of(inputs.start, span, S)
    last = (span.tokens + S.GROUP - 1) // S.GROUP * S.GROUP - S.GROUP
    AHEAD: gl.constexpr = S.STAGES - 1
    for i in gl.static_range(AHEAD):
        start_flows(rings, i, inputs, span, last - i * S.GROUP, S)
        start_states(rings, i, inputs, results, span, last - i * S.GROUP, S)
        close_copies()
    slot = 0
    free = S.STAGES - 1
    for done in range(0, span.tokens, S.GROUP):
        LEFT: gl.constexpr = S.STAGES - 2
        await_copies(LEFT)
        token = last - done
        start_flows(rings, free, inputs, span, token - AHEAD * S.GROUP, S)
        start_states(rings, free, inputs, results, span, token - AHEAD * S.GROUP, S)
        close_copies()
        c = returned_over(rings, slot, inputs, c, begin, results, span, token, S)
        free = slot
        slot = gl.where(slot == S.STAGES - 1, 0, slot + 1)
    await_copies(0)
    put_state(results.d_start, span, c, S)


@gluon.jit
def segment_returned(inputs, results, rings, slots, n, S: gl.constexpr):
    span = span_of(ticket_of(results.words), slots, n, True, S)
    first = gl.maximum(span.segments - 1 - span.place, 0) * (S.GROUP * S.STAGES)
    STAGES_: gl.constexpr = S.STAGES
    for i in gl.static_range(STAGES_ - 1, -1, -1):
        start_flows(rings, i, inputs, span, first + i * S.GROUP, S)
        close_copies()
    for i in gl.static_range(STAGES_):
        start_states(rings, i, inputs, results, span, first + i * S.GROUP, S)
    close_copies()
    total, c = full(1.0, S), full(0.0, S)
    HALF: gl.constexpr = S.STAGES // 2
    AFTER: gl.constexpr = HALF + 1
    await_copies(AFTER)
    for j in range(HALF):
        group = STAGES_ - 1 - j
        total, c = summed_back(rings, group, inputs, total, c, span.tokens - first - group * S.GROUP, S)
    await_copies(1)
    for j in range(HALF, S.STAGES):
        group = STAGES_ - 1 - j
        total, c = summed_back(rings, group, inputs, total, c, span.tokens - first - group * S.GROUP, S)
    begin = state_of(inputs.start, span, S)
    c = joined(results.words, total, c, state_of(inputs.d_state, span, S), span, S)
    await_copies(0)
    for j in range(S.STAGES):
        group = STAGES_ - 1 - j
        c = returned_over(rings, group, inputs, c, begin, results, span, first + group * S.GROUP, S)
    if span.place == span.segments - 1:
        put_state(results.d_start, span, c, S)


@gluon.jit
def rings_of(inputs, results, S: gl.constexpr):
    """Those of flows, decays and, for the gradient of the decay, states and (with a coupling) x."""
    flows, decays = ring_of(inputs.d_h, S), ring_of(inputs.g, S)
    if results.dg is None:
        return flows, decays
    elif S.COUPLING:
        return flows, decays, ring_of(inputs.h, S), ring_of(inputs.x, S)
    else:
        return flows, decays, ring_of(inputs.h, S)


@gluon.jit(do_not_specialize=["n"])
def scan_backward_hopper_kernel(inputs, results, slots, n, S: gl.constexpr):
    rings = rings_of(inputs, results, S)
    if S.SEGMENTS:
        segment_returned(inputs, results, rings, slots, n, S)
    else:
        sequence_returned(inputs, results, rings, slots, n, S)
