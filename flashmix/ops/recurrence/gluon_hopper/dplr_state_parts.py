"""Shared parts of the state passes of DPLR with a per-channel decay: their tiles, and the warp that copies."""

from __future__ import annotations

from flashmix.gpu.hopper import expect_bytes, gl, gluon, wait_empty
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tile, fetch_tokens, kind_of_keys, segment_of_program
from flashmix.ops.recurrence.gluon_hopper.state_parts import fetch_values, ring
from flashmix.ops.recurrence.gluon_hopper.structs import DplrStateTiles, StateBarriers


@gluon.constexpr_function
def kinds_of(queries):
    """Decayed keys that a pass reads: a, k and b, for the output and backward q before them."""
    return 4 if queries else 3


@gluon.jit
def dplr_state_tiles(BACK: gl.constexpr, DT: gl.constexpr, S: gl.constexpr):
    """Shared memory and barriers. Backward there is no room for tokens on their way to memory but in the place of the states."""
    QUERIES: gl.constexpr = BACK or S.OUTPUT
    keys = gl.allocate_shared_memory(DT, [kinds_of(QUERIES) * S.KEYS, 64, S.BK], TILE)
    v = gl.allocate_shared_memory(DT, [S.WARPGROUPS * S.VALUES, 64, 64], TILE)
    A = gl.allocate_shared_memory(DT, [S.PAIRS, 128, 64], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [S.BK // 64 * S.VALUES, 64], VECTOR)
    states = keys
    tokens = keys
    of_q = A
    pairs = ring(S.PAIRS, 1, S.WARPGROUPS)
    made = pairs
    if S.SAVE:
        states = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, S.BK], TILE)
    if not BACK:
        tokens = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, 64], TILE)
    if QUERIES:
        of_q = gl.allocate_shared_memory(DT, [1, 128, 64], TILE)
        made = ring(1, 1, S.WARPGROUPS)
    values = ring(S.VALUES, 1, S.WARPGROUPS)
    bars = StateBarriers(ring(S.KEYS, 1, S.WARPGROUPS), values, pairs, made)
    return DplrStateTiles(keys, v, vectors, A, of_q, states, tokens), bars


@gluon.jit
def dplr_state_producer(d, x, numbers, tiles, bars, BACK: gl.constexpr, S: gl.constexpr):
    """Fills the rings, forward or from the end."""
    keys_d, v_d, A_d, total_d = d
    QUERIES: gl.constexpr = BACK or S.OUTPUT
    KINDS: gl.constexpr = kinds_of(QUERIES)
    at = segment_of_program(x, numbers, False, S)
    for n in range(at.count):
        if BACK:
            chunk = at.begin + at.count - 1 - n
        else:
            chunk = at.begin + n
        row = (at.chunk0 + chunk) * S.HV + at.head
        wait_empty(bars.v.empty, n)
        fetch_values((v_d, total_d), at, chunk * 64, row, n, tiles, bars.v.full, False, S)
        if not BACK:  # what is needed last comes last
            wait_empty(bars.A.empty, n)
            bar = expect_bytes(bars.A.full, n, 128 * 64 * 2)
            fetch_tile(A_d, [row * 256 + 128, 0], bar, tiles.A.index(n % S.PAIRS))
        wait_empty(bars.k.empty, n)
        bar = expect_bytes(bars.k.full, n, KINDS * 64 * S.BK * 2)
        for kind in gl.static_range(KINDS):
            span = kind_of_keys(at.span, 4 - KINDS + kind, numbers)
            fetch_tokens(keys_d, span, chunk * 64, at.head, 0, bar, tiles.keys.index((n % S.KEYS) * KINDS + kind), S)
        if QUERIES:
            wait_empty(bars.made.empty, n)
            bar = expect_bytes(bars.made.full, n, 128 * 64 * 2)
            fetch_tile(A_d, [row * 256, 0], bar, tiles.of_q.index(0))
        if BACK:
            wait_empty(bars.A.empty, n)
            bar = expect_bytes(bars.A.full, n, 128 * 64 * 2)
            fetch_tile(A_d, [row * 256 + 128, 0], bar, tiles.A.index(n % S.PAIRS))
