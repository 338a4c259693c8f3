"""Parts of the state passes with 256 channels: shared memory, its rings and who fills them.

A program has 256 keys by 128 of the values: 64 rows of `S^T` in the accumulators of each of two warpgroups are 128 registers a thread, and
the same in 16 bits, which stands on the left of a product, would be 64 more. So it lies in shared memory, from where `wgmma`, TMA and
the warpgroup for the outputs read it. Beside it there is room for two stages of keys and one of queries; T and A_qb have one each. The
pass with OUTPUT has two stages of queries: values have one, where nu and then o take their place, and the vectors of a chunk a ring of
their own.
"""

from __future__ import annotations

from flashmix.gpu.hopper import allocate_barriers, expect_bytes, fence_async_shared, gl, gluon, wait_empty
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tile, fetch_tokens, segment_of_program
from flashmix.ops.recurrence.gluon_hopper.state_parts import fetch_values, fetch_vectors, put_state, ring
from flashmix.ops.recurrence.gluon_hopper.structs import Ring, StateTiles, WideBarriers


@gluon.jit
def wide_tiles(BACK: gl.constexpr, DT: gl.constexpr, S: gl.constexpr):
    """Shared memory of a pass, as far as it has use for it, and its barriers."""
    gl.static_assert(not (S.OUTPUT and S.SAVE), "there is no room for both")
    STAGES: gl.constexpr = 1 if BACK else 2  # of queries
    k = gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE)
    v = gl.allocate_shared_memory(DT, [S.WARPGROUPS * (1 if S.OUTPUT else S.VALUES), 64, 64], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [4 * S.VALUES, 64], VECTOR)
    T = gl.allocate_shared_memory(DT, [S.PAIRS, 64, 64], TILE)
    states = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, S.BK], TILE)
    q = k
    made = T
    tokens = v
    if S.MAKES:
        q = gl.allocate_shared_memory(DT, [STAGES, 64, S.BK], TILE)
        made = gl.allocate_shared_memory(DT, [1, 64, 64], TILE)
    if S.SAVE:
        tokens = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, 64], TILE)
    READERS: gl.constexpr = S.WARPGROUPS + (1 if S.MAKES else 0)
    keys = ring(S.KEYS, 1, READERS)
    vectors_ring = ring(S.VALUES, 1, READERS)
    values = vectors_ring
    if S.OUTPUT:
        values = ring(S.WARPGROUPS, 1, 1)
    inverses = ring(S.PAIRS, 1, S.WARPGROUPS)
    queries = keys
    own = keys
    read = keys
    sent = keys
    if S.MAKES:
        queries = ring(STAGES, 1, READERS if BACK else 1)
        if BACK:
            own = ring(1, 1, S.WARPGROUPS)
        else:
            read = ring(S.WARPGROUPS, 1, 1)
            landed = allocate_barriers(S.WARPGROUPS, 1)
            sent = Ring(landed, landed)  # where nu is, v tells when its place is free
    bars = WideBarriers(keys, queries, values, inverses, own, read, sent, vectors_ring)
    return StateTiles(q, k, k, v, vectors, T, made, states, tokens), bars


@gluon.jit
def wide_producer(d, x, numbers, tiles, bars, BACK: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """Fills the rings, forward or from the end."""
    q_d, k_d, v_d, T_d, vec_d = d
    at = segment_of_program(x, numbers, MAPS, S)
    STAGES: gl.constexpr = 1 if BACK else 2  # of queries
    for n in range(at.count):
        if BACK:
            chunk = at.begin + at.count - 1 - n
        else:
            chunk = at.begin + n
        row = (at.chunk0 + chunk) * S.HV + at.head
        if S.OUTPUT:
            wait_empty(bars.vectors.empty, n)
            bar = expect_bytes(bars.vectors.full, n, 4 * 64 * 4)
            fetch_vectors(vec_d, row, bar, tiles.vectors, n, S.VALUES)
        else:
            wait_empty(bars.v.empty, n)
            fetch_values((v_d, vec_d), at, chunk * 64, row, n, tiles, bars.v.full, MAPS, S)
        wait_empty(bars.k.empty, n)
        bar = expect_bytes(bars.k.full, n, 64 * S.BK * 2)
        fetch_tokens(k_d, at.span, chunk * 64, at.head // S.GROUP, 0, bar, tiles.k.index(n % S.KEYS), S)
        if S.MAKES:
            wait_empty(bars.q.empty, n)
            bar = expect_bytes(bars.q.full, n, 64 * S.BK * 2)
            fetch_tokens(q_d, at.span, chunk * 64, at.head // S.GROUP, 0, bar, tiles.q.index(n % STAGES), S)
        wait_empty(bars.A.empty, n)
        bar = expect_bytes(bars.A.full, n, 64 * 64 * 2)
        fetch_tile(T_d, [row * 64, 0], bar, tiles.A.index(n % S.PAIRS))
        if S.OUTPUT:  # last: o of the chunk before leaves through their places
            for w in gl.static_range(2):
                wait_empty(bars.v.empty, 2 * n + w)
                bar = expect_bytes(bars.v.full, 2 * n + w, 64 * 64 * 2)
                fetch_tokens(v_d, at.span, chunk * 64, at.head, at.channel + w * 64, bar, tiles.v.index(w), S)


@gluon.jit
def share_state(s16, d, row, channel, tile, BEFORE: gl.constexpr, SAVE: gl.constexpr):
    """Puts a warpgroup's rows of a state, [v, K] in 16 bits, where products read them, with SAVE on their way to memory too.

    At most BEFORE copies were begun since the last of a state.
    """
    if SAVE:
        put_state(s16, d, row, channel, tile, BEFORE)
    else:
        tile.store(s16)
        fence_async_shared()
