"""The backward of `output` in the walk of the states: one program a (sequence, value head, segment).

The reverse state pass needs neither S nor nu, so it comes first; then this kernel makes S again as `state.py` does, chunk after chunk, and
with it the gradients of the chunk as `output.py` does (equations there). S never goes to memory. nu is GIVEN, or made again too.

Roles: two `walkers`, warpgroups that hold 64 rows of S^T each in accumulators, and make dq and dk of 64 channels of keys each; `pairs`, a
warpgroup for dA and <S, dS'>; a producer of one warp; a `finisher` of one warp, which makes dg and dbeta of the sums that the others leave,
and sends dq and dk. Letters of tiles: `C` = 64 tokens, `K` = 128 channels of keys (or 64 of a walker), `v` = 64 of values, `V` = 128.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    await_count,
    count_up,
    ex2,
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
    signal,
    stores_done,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, LEFT_64, ROWS_64, TILE
from flashmix.ops.recurrence.gluon_hopper.output_pairs import put_pair_sums, row_and_column_sums
from flashmix.ops.recurrence.gluon_hopper.output_sums import (
    CARRIED,
    STATE_ROWS,
    SUM_STAGE,
    VSTAGES,
    WRITTEN,
    gate_gradients,
)
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
    load_state,
    total_decay,
)
from flashmix.ops.recurrence.gluon_hopper.walk_tiles import walk_tiles


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
        for w in gl.static_range(2):
            wait_empty(bars.dstate.empty, 2 * n + w)
            bar = expect_bytes(bars.dstate.full, 2 * n + w, 64 * S.BV * 2)
            fetch_tile(ds_d, [row, 0, w * 64], bar, tiles.dstate.index(w))


@gluon.jit
def chunk_nu(w: gl.constexpr, s16, k, nu_own, n, z, tiles, bars, S: gl.constexpr):
    """nu of a chunk, [v, C], which it leaves in its place; where it is GIVEN it lies there, and without corrections V."""
    DT: gl.constexpr = tiles.q.dtype
    if S.CORRECTED and not S.GIVEN:
        left = gl.convert_layout(s16, LEFT_64)
        ks = product(left, k.permute((1, 0)), ACC_64, 64, 64)
        wait_full(bars.tokens.full, n)
        ks, left = products_done(0, deps=[ks, left])
        v = tiles.tokens.index(w + z).permute((1, 0)).load(ACC_64)  # [v, C]
        row = vector(tiles.vectors, (n % VSTAGES) * 4 + z + ROW_FACTOR, COLUMNS_64)
        R = gl.convert_layout((v.to(gl.float32) - ks * row[None, :]).to(DT), LEFT_64)  # (5.1)
        wait_full(bars.T.full, n)
        nu = product(R, tiles.T.index(z).permute((1, 0)), ACC_64, 64, 64)  # (5.2)
        release(bars.tokens.empty, n)
        wait_empty(bars.nu.empty, n)
        nu, R = products_done(0, deps=[nu, R])
        release(bars.T.empty, n)
        nu_own.store(nu.to(DT))
        fence_async_shared()
        signal(bars.nu.full, n)
        return nu
    else:
        wait_full(bars.nu.full, n)
        return in_float32(nu_own.load(ACC_64))


@gluon.jit
def walker(w: gl.constexpr, program, x, numbers, tiles, bars, S: gl.constexpr):
    """The rows 64 w ... of S^T, and the channels 64 w ... of dq and dk, which are left in the places of q and k."""
    DT: gl.constexpr = tiles.q.dtype
    scale = numbers.scale
    q_parts = reinterpret(tiles.q, DT, [S.KEYS * 2, 64, 64], TILE)
    k_parts = reinterpret(tiles.k, DT, [S.KEYS * 2, 64, 64], TILE)
    s_parts = reinterpret(tiles.state, DT, [2, S.BV, 64], TILE)
    nu_parts = reinterpret(tiles.nu, DT, [S.NUS * 2, 64, 64], TILE)
    at = segment_of(program, x, numbers, False, S)
    state = load_state(x, at, w, False, S)  # [v, K]
    for n in range(at.count):
        z = opaque_zero()  # lest descriptors of tiles with one place be hoisted into registers
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        q_own = q_parts.index((n % S.KEYS) * 2 + w)  # [C, K]
        k_own = k_parts.index((n % S.KEYS) * 2 + w)  # [C, K]
        S_own = s_parts.index(w + z)  # [V, K]
        nu_own = nu_parts.index((n % S.NUS) * 2 + w + z).permute((1, 0))  # [v, C]
        stage = (n % VSTAGES) * 4
        s16 = state.to(DT)
        wait_empty(bars.state.empty, n)
        tiles.state.index(z).slice(64 * w, 64, dim=0).store(s16)
        fence_async_shared()
        signal(bars.state.full, n)
        wait_full(bars.v.full, n)
        state = state * total_decay(tiles.vectors, n, VSTAGES, S)[None, :]
        wait_full(bars.keys.full, n)
        nu = chunk_nu(w, s16, k, nu_own, n, z, tiles, bars, S)  # [v, C]
        column = vector(tiles.vectors, stage + COLUMN_FACTOR, COLUMNS_64) * vector(
            tiles.vectors, stage + BETA, COLUMNS_64
        )
        written = gl.convert_layout((nu * column[None, :]).to(DT), operand(S.BK))
        state = warpgroup_mma(written, k, state, is_async=True)  # (5.3)
        wait_full(bars.state.full, n)
        if S.CORRECTED:
            wait_full(bars.dR.full, n)
            d = product(tiles.dR.index(z), S_own, ACC_64, 64, 64)  # (6.2)
            state, written = products_done(1, deps=[state, written])
            signal(bars.updated, n)
            wait_full(bars.nu.full, n)
        wait_full(bars.dstate.full, 2 * n + w)
        e = product(tiles.nu.index(n % S.NUS + z), tiles.dstate.index(w + z), ACC_64, 64, 64)
        row = vector(tiles.vectors, stage + ROW_FACTOR, ROWS_64)
        if S.CORRECTED:
            d = products_done(1, deps=[d])
            release(bars.dR.empty, n)
            rows = pin(gl.sum(in_float32(k_own.load(ACC_64)) * d, 1))  # [C, K]
            dk = d * (0.0 - row)[:, None]
            e, dk = products_done(0, deps=[e, dk])
        else:
            state, written = products_done(1, deps=[state, written])
            signal(bars.updated, n)
            rows = 0.0
            e = products_done(0, deps=[e])
        release(bars.nu.empty, n)
        release(bars.dstate.empty, 2 * n + w)
        column = vector(tiles.vectors, stage + COLUMN_FACTOR, ROWS_64)
        factor = (column * vector(tiles.vectors, stage + BETA, ROWS_64))[:, None]
        if S.CORRECTED:
            dk += e * factor
        else:
            dk = e * factor
        written = column * pin(gl.sum(in_float32(k_own.load(ACC_64)) * e, 1))  # [C, K]
        wait_full(bars.dO.full, n)
        dq = product(tiles.dO.index(n % S.STAGES + z), S_own, ACC_64, 64, 64)
        wait_full(bars.pairs_q.full, n)
        N_q = tiles.pairs.index(z)  # [C, C]
        dk = warpgroup_mma(N_q.permute((1, 0)), q_own, dk, is_async=True)  # (3.3)
        dq = products_done(1, deps=[dq])
        release(bars.dO.empty, n)
        release(bars.state.empty, n)
        rows = scale * gl.sum(in_float32(q_own.load(ACC_64)) * dq, 1) - rows  # [C, K]
        dq = dq * (row * scale)[:, None]
        dq = warpgroup_mma(N_q, k_own, dq, is_async=True)
        if S.CORRECTED:
            N_a = tiles.pairs.index(1 + z)  # [C, C]
            wait_full(bars.pairs_a.full, n)
            dk = warpgroup_mma(N_a, k_own, dk, is_async=True)
            dk = warpgroup_mma(N_a.permute((1, 0)), k_own, dk, is_async=True)
        release(bars.v.empty, n)
        put_walker_sums(rows * row, written, w, n, tiles, bars)
        dq, dk = products_done(0, deps=[dq, dk])
        release(bars.pairs_q.empty, n)
        if S.CORRECTED:
            release(bars.pairs_a.empty, n)
        wait_full(bars.updated, n)
        q_own.store(dq.to(DT))
        k_own.store(dk.to(DT))
        fence_async_shared()
        signal(bars.gradients, n)


@gluon.jit
def put_walker_sums(rows, written, w: gl.constexpr, n, tiles, bars):
    """Leaves a walker's sums of a chunk to the finisher."""
    sums = (n % 2) * SUM_STAGE
    wait_empty(bars.sums.empty, n)
    tiles.sums.index(sums + STATE_ROWS + w).store(rows)
    tiles.sums.index(sums + WRITTEN + w).store(written)
    signal(bars.sums.full, n)


@gluon.jit
def put_carried(n, z, tiles, bars, S: gl.constexpr):
    """<S, dS'> of each channel of keys: the diagonal of S^T dS'."""
    s_parts = reinterpret(tiles.state, tiles.q.dtype, [2, S.BV, 64], TILE)
    row = gl.arange(0, 64, ROWS_64)[:, None] + z
    column = gl.arange(0, 64, COLUMNS_64)[None, :]
    wait_full(bars.state.full, n)
    wait_empty(bars.sums.empty, n)
    for p in gl.static_range(2):
        wait_full(bars.dstate.full, 2 * n + p)
        inner = product(s_parts.index(p + z).permute((1, 0)), tiles.dstate.index(p + z), ACC_64, 64, 64)  # [K, K]
        inner = products_done(0, deps=[inner])
        release(bars.dstate.empty, 2 * n + p)
        carried = gl.sum(gl.where(row == column, inner, 0.0), 1)
        tiles.sums.index((n % 2) * SUM_STAGE + CARRIED + p).store(carried)
    release(bars.state.empty, n)


@gluon.jit
def pairs(program, x, numbers, tiles, bars, S: gl.constexpr):
    """The warpgroup for dA (6.1): N_q and N_a of each chunk, and the share of pairs in dg and dbeta."""
    DT: gl.constexpr = tiles.q.dtype
    at = segment_of(program, x, numbers, False, S)
    row = gl.arange(0, 64, ROWS_64)
    column = gl.arange(0, 64, COLUMNS_64)[None, :]
    for n in range(at.count):
        z = opaque_zero()
        here = (row + z)[:, None]
        stage = (n % VSTAGES) * 4
        q = tiles.q.index(n % S.KEYS)  # [C, K]
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        nu = tiles.nu.index(n % S.NUS + z)  # [C, V]
        if S.DECAY:
            put_carried(n, z, tiles, bars, S)
        wait_full(bars.keys.full, n)
        pair = product(q, k.permute((1, 0)), ACC_64, 64, 64)
        wait_full(bars.v.full, n)
        wait_full(bars.dO.full, n)
        wait_full(bars.nu.full, n)
        dA = product(tiles.dO.index(n % S.STAGES + z), nu.permute((1, 0)), ACC_64, 64, 64)
        difference = vector(tiles.vectors, stage, ROWS_64)[:, None] - vector(tiles.vectors, stage, COLUMNS_64)[None, :]
        E = gl.where(here >= column, ex2(gl.minimum(difference, 0.0)) * numbers.scale, 0.0)
        pair, dA = products_done(0, deps=[pair, dA])
        release(bars.dO.empty, n)
        P = dA * E
        W = P * pair  # [C, C]
        beta = vector(tiles.vectors, stage + BETA, COLUMNS_64)
        wait_empty(bars.pairs_q.empty, n)
        tiles.pairs.index(z).store((P * beta[None, :]).to(DT))
        fence_async_shared()
        signal(bars.pairs_q.full, n)
        diagonal = gl.sum(gl.where(here == column, W, 0.0), 1)
        if S.DECAY:  # no decay lies between a token and itself: such pairs are in dbeta alone
            W = gl.where(here == column, 0.0, W)
        rows, columns = row_and_column_sums(W, beta)
        if S.CORRECTED:
            pair = product(k, k.permute((1, 0)), ACC_64, 64, 64)
            wait_full(bars.dR.full, n)
            dA = product(tiles.dR.index(z), nu.permute((1, 0)), ACC_64, 64, 64)
            pair, dA = products_done(0, deps=[pair, dA])
            release(bars.dR.empty, n)
        release(bars.nu.empty, n)
        if S.CORRECTED:
            difference = (
                vector(tiles.vectors, stage, ROWS_64)[:, None] - vector(tiles.vectors, stage, COLUMNS_64)[None, :]
            )
            P = dA * gl.where(here > column, 0.0 - ex2(gl.minimum(difference, 0.0)), 0.0)
            beta = vector(tiles.vectors, stage + BETA, COLUMNS_64)  # read anew: registers are scarce
            more_rows, more_columns = row_and_column_sums(P * pair, beta)
            rows += more_rows
            columns += more_columns
            wait_empty(bars.pairs_a.empty, n)
            tiles.pairs.index(1 + z).store((P * beta[None, :]).to(DT))
            fence_async_shared()
            signal(bars.pairs_a.full, n)
        release(bars.v.empty, n)
        put_pair_sums(rows, columns, diagonal, n, tiles, bars, S)


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
        gate_gradients(x, tiles, bars, n, first, gl.minimum(at.span.length - t, 64), at.head, S)
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
            (walker, (0, program, x, n, tiles, bars, S)),
            (walker, (1, program, x, n, tiles, bars, S)),
            (producer, (program, copies, x, n, tiles, bars, S)),
            (finisher, (program, dq_d, dk_d, x, n, tiles, bars, S)),
        ],
        [4, 4, 1, 1],
        [160, 160, 24, 24],
    )
