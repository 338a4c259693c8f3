"""The backward of `output` in the walk of the states: one program a (sequence, value head, segment).

The reverse state pass needs neither S nor nu, so it comes first; then this kernel makes S again as `state.py` does, chunk after chunk, and
with it the gradients of the chunk as `output.py` does (equations there). S never goes to memory. nu is GIVEN, or made again too.

Roles: `walkers`, two warpgroups that hold S^T in accumulators and make dq and dk; `pairs`, a warpgroup for dA and <S, dS'>; a producer of
one warp; a `finisher` of one warp, which makes dg and dbeta of the sums that the others leave, and sends dq and dk. Letters of tiles:
`C` = 64 tokens, `K` = 128 channels of keys, `v` and `V` = 128 of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    accumulator,
    await_count,
    count_up,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    in_float32,
    opaque_zero,
    operand,
    overlap,
    pin,
    product,
    products_done,
    reinterpret,
    release,
    shared_rows,
    signal,
    stores_done,
    thread_barrier,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, VECTORS
from flashmix.ops.recurrence.gluon_hopper.output_sums import STATE_ROWS, SUM_STAGE, VSTAGES, WRITTEN, gate_gradients
from flashmix.ops.recurrence.gluon_hopper.place import (
    add_tokens,
    fetch_tile,
    fetch_tokens,
    segment_of,
    store_tokens,
    vector,
)
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    BETA,
    COLUMN_FACTOR,
    ROW_FACTOR,
    fetch_vectors,
    last_factor,
    load_start,
    write_factors,
)
from flashmix.ops.recurrence.gluon_hopper.walk_pairs import pairs
from flashmix.ops.recurrence.gluon_hopper.walk_tiles import walk_tiles

# Of the walkers: S^T [v, K], nu^T [v, C], dq and dk [C, K], whose channels two warpgroups divide, and sums over those of each, [C, 2].
STATE = gl.constexpr(accumulator(128, 128))
NU = gl.constexpr(accumulator(64, 128))
NU_COLUMNS = gl.constexpr(gl.SliceLayout(0, NU.value))
GRADIENT = gl.constexpr(shared_rows(128))
GRADIENT_ROWS = gl.constexpr(gl.SliceLayout(1, GRADIENT.value))
GROUPS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [0, 1]],
        block_bases=[],
        shape=[64, 2],
    )
)
OF_GROUPS = gl.constexpr(gl.SliceLayout(1, GROUPS.value))


@gluon.jit
def producer(program, d, x, numbers, tiles, bars, S: gl.constexpr):
    """Fills the rings: first what the next chunk begins with, then what it needs later and its readers leave later."""
    keys_d, values_d, others_d = d
    q_d, k_d = keys_d
    v_d, T_d, vec_d = values_d
    do_d, dr_d, ds_d = others_d
    nu_parts = reinterpret(tiles.nu, tiles.q.dtype, [S.NUS * 2, 64, 64], TILE)
    at = segment_of(program, x, numbers, False, S)
    for n in range(at.count):
        chunk = at.begin + n
        t = chunk * 64
        row = (at.chunk0 + chunk) * S.HV + at.head
        wait_empty(bars.v.empty, n)
        bar = expect_bytes(bars.v.full, n, 4 * 64 * 4)
        fetch_vectors(vec_d, row, bar, tiles.vectors, n, VSTAGES)
        wait_empty(bars.keys.empty, n)
        bar = expect_bytes(bars.keys.full, n, 2 * 64 * S.BK * 2)
        fetch_tokens(k_d, at.span, t, at.head // S.GROUP, 0, bar, tiles.k.index(n % S.KEYS), S)
        fetch_tokens(q_d, at.span, t, at.head // S.GROUP, 0, bar, tiles.q.index(n % S.KEYS), S)
        if S.CORRECTED and not S.GIVEN:
            wait_empty(bars.tokens.empty, n)
            bar = expect_bytes(bars.tokens.full, n, 64 * S.BV * 2)
            for w in gl.static_range(2):
                fetch_tokens(v_d, at.span, t, at.head, w * 64, bar, tiles.tokens.index(w), S)
            wait_empty(bars.T.empty, n)
            bar = expect_bytes(bars.T.full, n, 64 * 64 * 2)
            fetch_tile(T_d, [row * 64, 0], bar, tiles.T.index(0))
        else:
            wait_empty(bars.nu.empty, n)
            bar = expect_bytes(bars.nu.full, n, 64 * S.BV * 2)
            for w in gl.static_range(2):
                fetch_tokens(v_d, at.span, t, at.head, w * 64, bar, nu_parts.index((n % S.NUS) * 2 + w), S)
        wait_empty(bars.dO.empty, n)
        bar = expect_bytes(bars.dO.full, n, 64 * S.BV * 2)
        fetch_tokens(do_d, at.span, t, at.head, 0, bar, tiles.dO.index(n % S.STAGES), S)
        if S.CORRECTED:
            wait_empty(bars.dR.empty, n)
            bar = expect_bytes(bars.dR.full, n, 64 * S.BV * 2)
            fetch_tokens(dr_d, at.span, t, at.head, 0, bar, tiles.dR.index(0), S)
        wait_empty(bars.dstate.empty, n)
        bar = expect_bytes(bars.dstate.full, n, S.BK * S.BV * 2)
        d_parts = reinterpret(tiles.dstate, tiles.q.dtype, [2, S.BV, 64], TILE)
        for w in gl.static_range(2):
            fetch_tile(ds_d, [row, 0, w * 64], bar, d_parts.index(w))


@gluon.jit
def chunk_nu(s16, k, nu_tile, n, z, tiles, bars, S: gl.constexpr):
    """nu of a chunk, [v, C], which they leave in its place; where it is GIVEN it lies there, and without corrections V."""
    DT: gl.constexpr = tiles.q.dtype
    if S.CORRECTED and not S.GIVEN:
        left = gl.convert_layout(s16, operand(64, 128))
        ks = product(left, k.permute((1, 0)), NU, 128, 64)
        wait_full(bars.tokens.full, n)
        ks, left = products_done(0, deps=[ks, left])
        v = reinterpret(tiles.tokens, DT, [1, 64, 128], TILE).index(z).permute((1, 0)).load(NU)  # [v, C]
        row = vector(tiles.vectors, (n % VSTAGES) * 4 + z + ROW_FACTOR, NU_COLUMNS)
        R = gl.convert_layout((v.to(gl.float32) - ks * row[None, :]).to(DT), operand(64, 128))  # (5.1)
        wait_full(bars.T.full, n)
        nu = product(R, tiles.T.index(z).permute((1, 0)), NU, 128, 64)  # (5.2)
        release(bars.tokens.empty, n)
        wait_empty(bars.nu.empty, n)
        nu, R = products_done(0, deps=[nu, R])
        release(bars.T.empty, n)
        nu_tile.store(nu.to(DT))
        fence_async_shared()
        signal(bars.nu.full, n)
        return nu
    else:
        wait_full(bars.nu.full, n)
        return in_float32(nu_tile.load(NU))


@gluon.jit
def start_of(x, at, S: gl.constexpr):
    """S^T, [v, K], that the walk begins with: a segment's own start, the sequence's state, or 0."""
    if x.starts is not None or x.sequence_state is not None:
        v, k = gl.arange(0, 128, gl.SliceLayout(1, STATE)), gl.arange(0, 128, gl.SliceLayout(0, STATE))
        return load_start(x, at, v, k, S)
    else:
        return gl.zeros([128, 128], gl.float32, STATE)


@gluon.jit
def by_group(x):
    """The sums over the channels of each warpgroup, [C, 2]."""
    return gl.convert_layout(gl.sum(x.reshape([64, 2, 64]), 2), GROUPS)


@gluon.jit
def walkers(program, x, numbers, tiles, bars, S: gl.constexpr):
    """Two warpgroups, each with 64 rows of S^T, and with 64 channels of dq and dk, which are left in the places of q and k.

    They are one role, so that they share a code: two copies of it and `pairs` wait for instructions (docs/lab_notes.md).
    """
    DT: gl.constexpr = tiles.q.dtype
    scale = numbers.scale
    at = segment_of(program, x, numbers, False, S)
    state = start_of(x, at, S)  # [v, K]
    for n in range(at.count):
        z = opaque_zero()  # lest descriptors of tiles with one place be hoisted into registers
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        q = tiles.q.index(n % S.KEYS)  # [C, K]
        S_tile = tiles.state.index(z)  # [V, K]
        dS_tile = tiles.dstate.index(z)  # [V, K]
        nu_tile = tiles.nu.index(n % S.NUS + z)  # [C, v]
        stage = (n % VSTAGES) * 4
        s16 = state.to(DT)
        wait_empty(bars.state.empty, n)
        S_tile.store(s16)
        fence_async_shared()
        signal(bars.state.full, n)
        wait_full(bars.v.full, n)
        state = state * last_factor(tiles.vectors, n, VSTAGES, gl.SliceLayout(0, STATE))[None, :]
        wait_full(bars.keys.full, n)
        nu = chunk_nu(s16, k, nu_tile.permute((1, 0)), n, z, tiles, bars, S)  # [v, C]
        column = write_factors(tiles.vectors, stage, NU_COLUMNS)
        written = gl.convert_layout((nu * column[None, :]).to(DT), operand(128, 128))
        state = warpgroup_mma(written, k, state, is_async=True)  # (5.3)
        wait_full(bars.state.full, n)
        if S.CORRECTED:
            wait_full(bars.dR.full, n)
            d = product(tiles.dR.index(z), S_tile, GRADIENT, 64, 128)  # (6.2)
            state, written = products_done(1, deps=[state, written])
            wait_full(bars.nu.full, n)
        wait_full(bars.dstate.full, n)
        e = product(nu_tile, dS_tile, GRADIENT, 64, 128)
        row = vector(tiles.vectors, stage + ROW_FACTOR, GRADIENT_ROWS)
        if S.CORRECTED:
            d = products_done(1, deps=[d])
            release(bars.dR.empty, n)
            rows = pin(by_group(in_float32(k.load(GRADIENT)) * d))  # [C, 2], of [C, K]
            dk = d * (0.0 - row)[:, None]
            e, dk = products_done(0, deps=[e, dk])
        else:
            state, written = products_done(1, deps=[state, written])
            e = products_done(0, deps=[e])
        release(bars.nu.empty, n)
        release(bars.dstate.empty, n)
        column = vector(tiles.vectors, stage + COLUMN_FACTOR, GRADIENT_ROWS)
        factor = (column * vector(tiles.vectors, stage + BETA, GRADIENT_ROWS))[:, None]
        if S.CORRECTED:
            dk += e * factor
        else:
            dk = e * factor
        written = pin(by_group(in_float32(k.load(GRADIENT)) * e))  # [C, 2], of [C, K]
        written = gl.convert_layout(column, OF_GROUPS)[:, None] * written
        wait_full(bars.dO.full, n)
        dq = product(tiles.dO.index(n % S.STAGES + z), S_tile, GRADIENT, 64, 128)
        wait_full(bars.pairs_q.full, n)
        N_q = tiles.pairs.index(z)  # [C, C]
        dk = warpgroup_mma(N_q.permute((1, 0)), q, dk, is_async=True)  # (3.3)
        dq = products_done(1, deps=[dq])
        release(bars.dO.empty, n)
        release(bars.state.empty, n)
        if S.CORRECTED:
            rows = scale * by_group(in_float32(q.load(GRADIENT)) * dq) - rows  # [C, 2], of [C, K]
        else:
            rows = scale * by_group(in_float32(q.load(GRADIENT)) * dq)  # [C, 2], of [C, K]
        dq = dq * (row * scale)[:, None]
        dq = warpgroup_mma(N_q, k, dq, is_async=True)
        if S.CORRECTED:
            N_a = tiles.pairs.index(1 + z)  # [C, C]
            wait_full(bars.pairs_a.full, n)
            dk = warpgroup_mma(N_a, k, dk, is_async=True)
            dk = warpgroup_mma(N_a.permute((1, 0)), k, dk, is_async=True)
        release(bars.v.empty, n)
        put_walker_sums(rows * gl.convert_layout(row, OF_GROUPS)[:, None], written, n, tiles, bars)
        dq, dk = products_done(0, deps=[dq, dk])
        release(bars.pairs_q.empty, n)
        if S.CORRECTED:
            release(bars.pairs_a.empty, n)
        thread_barrier()  # both have read keys and queries
        q.store(dq.to(DT))
        k.store(dk.to(DT))
        fence_async_shared()
        signal(bars.gradients, n)


@gluon.jit
def put_walker_sums(rows, written, n, tiles, bars):
    """Leaves the walkers' sums of a chunk, [C, 2], to the finisher."""
    wait_empty(bars.sums.empty, n)
    pairs = reinterpret(tiles.sums, gl.float32, [SUM_STAGE, 2, 64], VECTORS)  # of rows
    pairs.index((n % 2) * (SUM_STAGE // 2) + STATE_ROWS // 2).permute((1, 0)).store(rows)
    pairs.index((n % 2) * (SUM_STAGE // 2) + WRITTEN // 2).permute((1, 0)).store(written)
    signal(bars.sums.full, n)


@gluon.jit
def send_keys(dq_d, dk_d, x, at, t, n, numbers, tiles, S: gl.constexpr):
    """Sends dq and dk of a chunk. Those of value heads that share a key head are added up in memory, one after the other: the first
    stores, each waits for the one before it.
    """
    dq = tiles.q.index(n % S.KEYS)
    dk = tiles.k.index(n % S.KEYS)
    if S.GROUP == 1:
        store_tokens(dq_d, at.span, t, at.head, 0, dq, S)
        store_tokens(dk_d, at.span, t, at.head, 0, dk, S)
    else:
        head = at.head // S.GROUP
        if at.head % S.GROUP == 0:
            store_tokens(dq_d, at.span, t, head, 0, dq, S)
            store_tokens(dk_d, at.span, t, head, 0, dk, S)
        else:
            await_count(x.counters + (1 + at.index - numbers.segments), n + 1)
            add_tokens(dq_d, at.span, t, head, 0, dq, S)
            add_tokens(dk_d, at.span, t, head, 0, dk, S)


@gluon.jit
def finisher(program, dq_d, dk_d, x, numbers, tiles, bars, S: gl.constexpr):
    """dg and dbeta of each chunk; sends dq and dk."""
    at = segment_of(program, x, numbers, False, S)
    for n in range(at.count):
        t = (at.begin + n) * 64
        if S.PACKED:
            first = at.span.first.to(gl.int64) + t
        else:
            first = at.span.sequence.to(gl.int64) * numbers.tokens + t
        gate_gradients(x, tiles, bars, n, first, gl.minimum(at.span.length - t, 64), at.head, 1, S)
        wait_full(bars.gradients, n)
        send_keys(dq_d, dk_d, x, at, t, n, numbers, tiles, S)
        stores_done(0)
        release(bars.keys.empty, n)
        if S.GROUP > 1:
            count_up(x.counters + (1 + at.index), 0)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def walk_backward_kernel(q_d, k_d, v_d, T_d, vec_d, do_d, dr_d, ds_d, dq_d, dk_d, x, n, S: gl.constexpr):
    """Gradients of queries and keys, of beta and of the decay."""
    if S.EARLY:
        overlap()
    program = gl.program_id(0)
    if S.GROUP > 1:  # in the order in which programs begin: none waits for one that cannot begin
        program = gl.atomic_add(x.counters, 1)
    tiles, bars = walk_tiles(q_d.dtype, S)
    copies = ((q_d, k_d), (v_d, T_d, vec_d), (do_d, dr_d, ds_d))
    gl.warp_specialize(
        [
            (pairs, (program, x, n, tiles, bars, S)),
            (walkers, (program, x, n, tiles, bars, S)),
            (producer, (program, copies, x, n, tiles, bars, S)),
            (finisher, (program, dq_d, dk_d, x, n, tiles, bars, S)),
        ],
        [8, 1, 1],
        [160, 24, 24],
    )
