"""Parts of the state passes: shared memory and its rings, who fills them, states at the ends of segments, copies of results.

The vectors of a chunk are `[4, 64]`: G to base 2, beta, 2^G, 2^(G_C - G), the last two 0-based on tokens that exist (beta is 0 past
them). With a decay per channel (CHANNEL) keys come decayed, q, a = -k and b = beta k each for itself (1.6); what is left of the vectors
is 2^(G_C) of each channel. They come with the keys: `query_pairs` then waits for no values, and runs ahead where keys have more stages.

A program has one segment or, if it STAYS, one after another: the next one's first tiles come while it ends with this one.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    await_kernels,
    await_readers,
    copy_to_global,
    copy_to_shared,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    leave,
    reinterpret,
    stores_done,
)
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, VECTOR, columns, rows, sums
from flashmix.ops.recurrence.gluon_hopper.place import (
    OUTSIDE,
    fetch_tile,
    fetch_tokens,
    kind_of_keys,
    own_segments,
    segment_of_program,
    segment_of_turn,
    store_tokens,
    vector,
)
from flashmix.ops.recurrence.gluon_hopper.structs import Ring, StateBarriers, StateTiles

BETA = gl.constexpr(1)  # the vectors of a chunk
ROW_FACTOR = gl.constexpr(2)
COLUMN_FACTOR = gl.constexpr(3)


@gluon.jit
def ring(stages: gl.constexpr, writers: gl.constexpr, readers: gl.constexpr):
    """Barriers of a ring with so many arrivals of writers and of readers."""
    return Ring(allocate_barriers(stages, writers), allocate_barriers(stages, readers))


@gluon.jit
def leave_keys(n, S: gl.constexpr, WAITS: gl.constexpr = False):
    """A reader leaves the keys of tile n, which `producer`, if it WAITS, waits for; likewise below.

    By named barriers (`hopper.leave`): behind those of Triton a number for each stage of keys, of values, of A_qb and of pairs.
    """
    FIRST: gl.constexpr = 1 + S.WARPGROUPS + S.MAKES
    leave_tile(FIRST, n, 128 * (S.WARPGROUPS + S.MAKES) + 32, S.KEYS, WAITS)


@gluon.jit
def leave_values(n, S: gl.constexpr, WAITS: gl.constexpr = False):
    FIRST: gl.constexpr = 1 + S.WARPGROUPS + S.MAKES + S.KEYS
    leave_tile(FIRST, n, 128 * S.WARPGROUPS + 32, S.VALUES, WAITS)


@gluon.jit
def leave_made(n, S: gl.constexpr, WAITS: gl.constexpr = False):
    """Of A_qb, for which `query_pairs` waits."""
    if S.MAKES:
        FIRST: gl.constexpr = 1 + S.WARPGROUPS + S.MAKES + S.KEYS + S.VALUES
        leave_tile(FIRST, n, 128 * (S.WARPGROUPS + 1), 2, WAITS)


@gluon.jit
def leave_pairs(n, S: gl.constexpr, WAITS: gl.constexpr = False):
    """Of pairs that come from memory. T alone, with as many stages as the keys, is left with them."""
    if S.READS > 0 and not (S.CORRECTED and S.READS == 1 and S.PAIRS == S.KEYS):
        FIRST: gl.constexpr = 1 + S.WARPGROUPS + S.MAKES + S.KEYS + S.VALUES + 2 * S.MAKES
        gl.static_assert(FIRST + S.PAIRS <= 16, "so many named barriers")
        leave_tile(FIRST, n, 128 * S.WARPGROUPS + 32, S.PAIRS, WAITS)


@gluon.jit
def leave_tile(number: gl.constexpr, n, threads: gl.constexpr, STAGES: gl.constexpr, WAITS: gl.constexpr):
    if WAITS:
        await_readers(number, n, threads, STAGES)
    else:
        leave(number, n, threads, STAGES)


@gluon.jit
def state_tiles(BACK: gl.constexpr, TOKENS: gl.constexpr, DT: gl.constexpr, S: gl.constexpr):
    """Shared memory of a state pass, as far as it has use for it, with TOKENS kinds of tiles on their way to memory; its barriers."""
    k = gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE)
    v = gl.allocate_shared_memory(DT, [S.WARPGROUPS * S.VALUES, 64, 64], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [(S.BK // 64 if S.CHANNEL else 4) * S.KEYS, 64], VECTOR)
    A = v
    made = v
    q = k
    b = k
    states = k
    tokens = v
    if S.READS > 0:
        A = gl.allocate_shared_memory(DT, [S.PAIRS, S.READS * 64, 64], TILE)
    if S.MAKES:
        made = gl.allocate_shared_memory(DT, [2, 64, 64], TILE)
    if BACK or S.OUTPUT:
        q = gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE)
    if S.CHANNEL and S.CORRECTED:
        b = gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE)
    if S.SAVE:
        states = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, S.BK], TILE)
    if TOKENS > 0:
        tokens = gl.allocate_shared_memory(DT, [TOKENS * S.WARPGROUPS, 64, 64], TILE)
    keys = allocate_barriers(S.KEYS, 1)
    values = allocate_barriers(S.VALUES, 1)
    pairs = values
    own = values
    if S.READS > 0:
        pairs = allocate_barriers(S.PAIRS, 1)
    if S.MAKES:
        own = allocate_barriers(2, 1)
    bars = StateBarriers(keys, values, pairs, own)
    return StateTiles(q, k, b, v, vectors, A, made, states, tokens), bars


@gluon.jit
def fetch_vectors(d, row, bar, vectors, n, STAGES: gl.constexpr):
    """Copies the vectors of a chunk and value head into a stage."""
    WIDTH: gl.constexpr = d.block_type.shape[1]
    view = reinterpret(vectors, gl.float32, [STAGES, 1, WIDTH], d.layout)
    copy_to_shared(d, [row, 0], bar, view.index(n % STAGES))


@gluon.jit
def fetch_keys(d, at, chunk, n, numbers, tiles, bars, QUERIES: gl.constexpr, S: gl.constexpr):
    """Copies the keys of a chunk, the queries and the vectors into their stage, when it is free. With CHANNEL there are a and b, without
    corrections b alone as k.
    """
    q_d, k_d, vec_d = d
    KINDS: gl.constexpr = 2 if S.CHANNEL and S.CORRECTED else 1  # of keys
    stage = n % S.KEYS
    t = chunk * 64
    leave_keys(n, S, WAITS=True)
    VECTORS: gl.constexpr = vec_d.block_type.shape[1] * 4
    bar = expect_bytes(bars.k, n, ((1 if QUERIES else 0) + KINDS) * 64 * S.BK * 2 + VECTORS)
    fetch_vectors(vec_d, (at.chunk0 + chunk) * S.HV + at.head, bar, tiles.vectors, n, S.KEYS)
    if S.CHANNEL:
        if QUERIES:
            fetch_tokens(k_d, at.span, t, at.head, 0, bar, tiles.q.index(stage), S)
        fetch_tokens(k_d, kind_of_keys(at.span, 1, numbers), t, at.head, 0, bar, tiles.k.index(stage), S)
        if S.CORRECTED:
            fetch_tokens(k_d, kind_of_keys(at.span, 2, numbers), t, at.head, 0, bar, tiles.b.index(stage), S)
    else:
        fetch_tokens(k_d, at.span, t, at.head // S.GROUP, 0, bar, tiles.k.index(stage), S)
        if QUERIES:
            fetch_tokens(q_d, at.span, t, at.head // S.GROUP, 0, bar, tiles.q.index(stage), S)


@gluon.jit
def fetch_values(d, at, t, row, n, tiles, full, MAPS: gl.constexpr, S: gl.constexpr):
    """Copies the values of a chunk, or of a map's M none, into their stage, which is free, and its vectors where they lie there too."""
    v_d, vec_d = d
    WARPGROUPS: gl.constexpr = S.WARPGROUPS
    VECTORS: gl.constexpr = 0 if vec_d is None else vec_d.block_type.shape[1] * 4
    bar = expect_bytes(full, n, S.WARPGROUPS * 64 * 64 * 2 + VECTORS)
    t_v = t
    if MAPS:
        if S.CORRECTED:
            t_v = gl.where(at.map == 1, OUTSIDE, t)
    for w in gl.static_range(WARPGROUPS):
        tile = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w)
        fetch_tokens(v_d, at.span, t_v, at.head, at.channel + w * 64, bar, tile, S)
    if vec_d is not None:
        fetch_vectors(vec_d, row, bar, tiles.vectors, n, S.VALUES)


@gluon.jit
def fill_rings(d, segment, numbers, tiles, bars, BACK: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """Fills the rings with a `segment`, which begins with some use of theirs, forward or from the end; backward at least once, for
    consumers that begin a product before their loop.
    """
    q_d, k_d, v_d, A_d, vec_d = d
    at, first = segment
    TILES: gl.constexpr = 2 if S.CHANNEL and S.CORRECTED else 1  # of a chunk in memory
    FIRST: gl.constexpr = S.KEYS >= S.VALUES or S.KEYS == S.PAIRS  # the ring that is free first is filled first
    count = at.count
    if BACK:
        count = gl.maximum(count, 1)
    for i in range(count):
        n = first + i
        if BACK:
            chunk = at.begin + count - 1 - i
        else:
            chunk = at.begin + i
        t = chunk * 64
        row = (at.chunk0 + chunk) * S.HV + at.head
        if FIRST:
            fetch_keys((q_d, k_d, vec_d), at, chunk, n, numbers, tiles, bars, BACK or S.OUTPUT, S)
        leave_values(n, S, WAITS=True)
        fetch_values((v_d, None), at, t, row, n, tiles, bars.v, MAPS, S)
        if S.READS > 0:
            leave_pairs(n, S, WAITS=True)
            bar = expect_bytes(bars.A, n, S.READS * 64 * 64 * 2)
            to = row * (TILES * 64) + (TILES - S.READS) * 64
            fetch_tile(A_d, [to, 0], bar, tiles.A.index(n % S.PAIRS))
        if not FIRST:
            fetch_keys((q_d, k_d, vec_d), at, chunk, n, numbers, tiles, bars, BACK or S.OUTPUT, S)


@gluon.jit
def producer(d, x, numbers, tiles, bars, BACK: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """Fills the rings for each segment of the program."""
    if S.STAYS:
        gl.static_assert(not (BACK or S.MAKES), "`query_pairs` has one segment, and backward an empty one has a chunk")
        first = gl.to_tensor(0)
        for turn in range(own_segments(numbers)):
            at = segment_of_turn(turn, x, numbers, MAPS, S)
            fill_rings(d, (at, first), numbers, tiles, bars, BACK, MAPS, S)
            first += at.count
    else:
        at = segment_of_program(x, numbers, MAPS, S)
        fill_rings(d, (at, 0), numbers, tiles, bars, BACK, MAPS, S)


@gluon.jit
def inverse_tile(tiles, n, S: gl.constexpr):
    """T of tile n, [C, C]."""
    if S.READS == 2:
        return tiles.A.index(n % S.PAIRS).slice(64, 64, dim=0)
    else:
        return tiles.A.index(n % S.PAIRS)


@gluon.jit
def total_decay(vectors, n, STAGES: gl.constexpr, S: gl.constexpr):
    """2^(G_C) of tile n on the columns of a state: [1], the last of the rows' factors; with CHANNEL [K]."""
    if S.CHANNEL:
        return reinterpret(vectors, gl.float32, [STAGES, S.BK], VECTOR).index(n % STAGES).load(columns(S.BK))
    else:
        return last_factor(vectors, n, STAGES, columns(S.BK))


@gluon.jit
def last_factor(vectors, n, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """2^(G_C) of tile n, [1]: the last of the rows' factors."""
    view = reinterpret(vectors, gl.float32, [STAGES * 256, 1], VECTOR)
    return view.index((n % STAGES) * 256 + ROW_FACTOR * 64 + 63).load(LAYOUT)


@gluon.jit
def write_factors(vectors, stage, LAYOUT: gl.constexpr):
    """beta 2^(G_C - G) of the tokens whose vectors begin with row `stage`, [C]."""
    return vector(vectors, stage + COLUMN_FACTOR, LAYOUT) * vector(vectors, stage + BETA, LAYOUT)


@gluon.jit
def state_indices(at, w: gl.constexpr, S: gl.constexpr):
    """Channels of values and of keys of the rows and columns of a warpgroup's accumulators."""
    return at.channel + w * 64 + gl.arange(0, 64, rows(S.BK)), gl.arange(0, S.BK, columns(S.BK))


@gluon.jit
def load_start(x, at, v, k, S: gl.constexpr):
    """S^T, [v, k], that is given to a segment or, where none is, to the sequence."""
    inside = (v < S.V)[:, None] & (k < S.K)[None, :]
    if x.starts is not None:
        start = x.starts + at.index.to(gl.int64) * (S.V * S.K)
        return gl.load(start + v[:, None] * S.K + k[None, :], mask=inside, other=0.0)
    else:
        state = x.sequence_state + at.row.to(gl.int64) * (S.V * S.K)
        return gl.load(state + k[None, :] * S.V + v[:, None], mask=inside, other=0.0)


@gluon.jit
def load_state(x, at, w: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """S^T, [v, K], that a segment begins with: its own start, the sequence's state, 0, or of a map's M the identity."""
    if S.EARLY and S.OUTPUT:  # that pass may have begun while segments are joined
        await_kernels()
    v, k = state_indices(at, w, S)
    if x.starts is not None or x.sequence_state is not None:
        return load_start(x, at, v, k, S)
    elif MAPS and S.CORRECTED:
        return gl.where((v[:, None] == k[None, :]) & (at.map == 1), 1.0, 0.0)
    else:
        BK: gl.constexpr = S.BK
        return gl.zeros([64, BK], gl.float32, sums(BK))


@gluon.jit
def store_result(x, at, state, last, w: gl.constexpr, S: gl.constexpr):
    """Writes a state `[K, V]` of the sequence, from the segment that is the `last` of the pass."""
    v, k = state_indices(at, w, S)
    inside = (v < S.V)[:, None] & (k < S.K)[None, :]
    to = x.result + at.row.to(gl.int64) * (S.V * S.K)
    gl.store(to + k[None, :] * S.V + v[:, None], state, mask=inside & last)


@gluon.jit
def store_whole(x, at, state, w: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """Writes what a segment ends with, transposed: of a map N^T, and M^T under it."""
    v, k = state_indices(at, w, S)
    stored = S.V
    if MAPS:
        to = x.ends + at.index.to(gl.int64) * ((S.V + (S.K if S.CORRECTED else 1)) * S.K)
        if S.CORRECTED:
            stored = gl.where(at.map == 1, S.K, S.V)
            to += at.map * (S.V * S.K)
    else:
        to = x.ends + at.index.to(gl.int64) * (S.V * S.K)
    inside = (v < stored)[:, None] & (k < S.K)[None, :]
    gl.store(to + v[:, None] * S.K + k[None, :], state, mask=inside)


@gluon.jit
def store_map_parts(x, at, state, w: gl.constexpr, S: gl.constexpr):
    """Writes the map of a segment in parts: N^T, or M^T and M."""
    N, M = x.map_parts
    v, k = state_indices(at, w, S)
    if at.map == 1:
        inside = (v < S.K)[:, None] & (k < S.K)[None, :]
        first = at.index.to(gl.int64) * (S.K * S.K)
        gl.store(x.ends + first + v[:, None] * S.K + k[None, :], state, mask=inside)
        gl.store(M + first + k[None, :] * S.K + v[:, None], state, mask=inside)  # 8 threads store 8 numbers of a row
    else:
        inside = (v < S.V)[:, None] & (k < S.K)[None, :]
        first = at.index.to(gl.int64) * (S.V * S.K)
        gl.store(N + first + v[:, None] * S.K + k[None, :], state, mask=inside)


@gluon.jit
def store_end(x, at, state, w: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """Writes what a segment ends with, as one matrix or, of a map that `join` reads, in parts."""
    if x.map_parts is not None:
        store_map_parts(x, at, state, w, S)
    else:
        store_whole(x, at, state, w, MAPS, S)


@gluon.jit
def store_total(x, at, decay, S: gl.constexpr):
    """Writes the diagonal M of a map without corrections under N^T: the decay of the whole segment, [K]."""
    k = gl.arange(0, S.BK, columns(S.BK))
    to = x.ends + at.index.to(gl.int64) * ((S.V + 1) * S.K) + S.V * S.K
    gl.store(to + k, decay, mask=k < S.K)


@gluon.jit
def put_state(state, d, row, channel, tile, BEFORE: gl.constexpr):
    """Stores a warpgroup's rows of a state, [v, K], through its shared tile; at most BEFORE copies were begun since that was last read."""
    stores_done(BEFORE)
    tile.store(state)
    fence_async_shared()
    copy_to_global(d, [row, channel, 0], reinterpret(tile, d.dtype, d.block_type.shape, d.layout))


@gluon.jit
def put_tokens(x, d, at, t, channel, tile, BEFORE: gl.constexpr, S: gl.constexpr):
    """Stores a transposed tile of values, [v, C] in 16 bits, likewise."""
    stores_done(BEFORE)
    tile.permute((1, 0)).store(x)
    fence_async_shared()
    store_tokens(d, at.span, t, at.head, channel, tile, S)
