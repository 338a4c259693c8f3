"""The backward of `output` and `scores` with 256 channels: the equations of `output.py`, an item is a (chunk, value head).

The warpgroup for dA and the finisher are those of one value head a key head. Each of two consumers has 64 of 128 channels of keys, then 64
of the other 128: S and dS' go by in tiles of 64 values by 64 keys, of which five are in shared memory (nine without corrections, which have
no dR), while dO, dR and nu stay for the whole item. <S, dS'> is summed by elements, so that no third of the registers of sums is for a
product whose diagonal alone is wanted.
Letters of tiles: `C` = 64 tokens, `K` = 64 channels of keys of a consumer, `V` = 256 of values, `v` = 64 of them.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    expect,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque_zero,
    pin,
    product,
    products_done,
    reinterpret,
    release,
    signal,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, ROWS_64, TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.output_pairs import pairs, pairs_tile
from flashmix.ops.recurrence.gluon_hopper.output_slots import DO, await_slot, fill_slot
from flashmix.ops.recurrence.gluon_hopper.output_sums import CARRIED, STATE_ROWS, SUM_STAGE, VSTAGES, WRITTEN, finisher
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tile, fetch_tokens, item_chunk, item_count, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA, COLUMN_FACTOR, ROW_FACTOR, fetch_vectors, ring
from flashmix.ops.recurrence.gluon_hopper.structs import Ring, WideOutputBarriers, WideOutputTiles

DR = gl.constexpr(1)  # the slot after that of dO
TURNS = gl.constexpr(8)  # of an item: four times 64 values for each of two blocks of keys a consumer


@gluon.constexpr_function
def state_places(corrected):
    """Tiles of the ring of states; without corrections there is no dR, whose place takes four."""
    return 5 if corrected else 9


@gluon.jit
def state_full(bars, own, w: gl.constexpr, S: gl.constexpr):
    """The barrier of what consumer `w` reads as its `own`-th tile: it would miss every second phase of those of the places themselves."""
    STATES: gl.constexpr = state_places(S.CORRECTED)
    return bars.states.full.index(w * STATES + own % STATES)


@gluon.jit
def await_state(own, w: gl.constexpr, tiles, bars, S: gl.constexpr):
    """The `own`-th tile of consumer `w`, [v, K], when it is there; two a turn, S and dS'."""
    STATES: gl.constexpr = state_places(S.CORRECTED)
    mbarrier.wait(state_full(bars, own, w, S), (own // STATES) & 1)
    return tiles.states.index((own * 2 + w) % STATES)


@gluon.jit
def fetch_states(d, row, turn, tiles, bars, S: gl.constexpr):
    """Copies what both consumers read of the states in a turn, as places become free."""
    STATES: gl.constexpr = state_places(S.CORRECTED)
    for kind in gl.static_range(2):
        own = turn * 2 + kind
        for w in gl.static_range(2):
            use = own * 2 + w
            wait_empty(bars.states.empty, use)
            bar = state_full(bars, own, w, S)
            expect(bar, 64 * 64 * 2)
            at = [row, (turn % 4) * 64, ((turn // 4) % 2) * 128 + w * 64]
            fetch_tile(d[kind], at, bar, tiles.states.index(use % STATES))


@gluon.jit
def wide_output_producer(d, x, numbers, tiles, bars, S: gl.constexpr):
    """Fills the rings. Keys and queries come behind the first states: dq and dk of the item before leave through their places."""
    keys_d, values_d, others_d = d
    q_d, k_d = keys_d
    nu_d, vec_d = others_d
    _, _, s_d, ds_d = values_d
    for i in range(item_count(numbers)):
        at = item_chunk(x, numbers, i, S)
        head = at.key_head  # a value head
        row = at.index * S.HV + head
        wait_empty(bars.v.empty, i)
        bar = expect_bytes(bars.v.full, i, 4 * 64 * 4)
        fetch_vectors(vec_d, row, bar, tiles.vectors, i, VSTAGES)
        fill_slot(values_d, DO, at, head, row, i, tiles, bars, S)
        wait_empty(bars.nu.empty, i)
        bar = expect_bytes(bars.nu.full, i, 64 * S.BV * 2)
        fetch_tokens(nu_d, at.span, at.t, head, 0, bar, tiles.nu.index(0), S)
        if S.CORRECTED:
            fill_slot(values_d, DR, at, head, row, i, tiles, bars, S)
        fetch_states((s_d, ds_d), row, i * TURNS, tiles, bars, S)
        wait_empty(bars.keys.empty, i)
        bar = expect_bytes(bars.keys.full, i, 2 * 64 * S.BK * 2)
        fetch_tokens(q_d, at.span, at.t, head // S.SHARED, 0, bar, tiles.q.index(0), S)
        fetch_tokens(k_d, at.span, at.t, head // S.SHARED, 0, bar, tiles.k.index(0), S)
        for turn in range(1, TURNS):
            fetch_states((s_d, ds_d), row, i * TURNS + turn, tiles, bars, S)


@gluon.jit
def state_products(w: gl.constexpr, turn, carried, tiles, bars, S: gl.constexpr):
    """dO S^T, dR S^T (without corrections 0) and nu dS'^T of 64 channels of keys (6.2), [C, K] each, and <S, dS'> added to `carried`, in
    four turns.
    """
    DT: gl.constexpr = tiles.q.dtype
    PARTS: gl.constexpr = S.BV // 64
    sent = reinterpret(tiles.slots, DT, [(2 if S.CORRECTED else 1) * PARTS, 64, 64], TILE)
    nus = reinterpret(tiles.nu, DT, [PARTS, 64, 64], TILE)
    z = opaque_zero()  # lest descriptors be hoisted into registers
    d = gl.zeros([64, 64], gl.float32, ACC_64)
    d_a = gl.zeros([64, 64], gl.float32, ACC_64)
    e = gl.zeros([64, 64], gl.float32, ACC_64)
    for part in gl.static_range(PARTS):
        own = (turn + part) * 2
        state = await_state(own, w, tiles, bars, S)  # [v, K]
        d = warpgroup_mma(sent.index(part + z), state, d, use_acc=part > 0, is_async=True)
        if S.CORRECTED:
            d_a = warpgroup_mma(sent.index(PARTS + part + z), state, d_a, use_acc=part > 0, is_async=True)
        dstate = await_state(own + 1, w, tiles, bars, S)  # [v, K]
        e = warpgroup_mma(nus.index(part + z), dstate, e, use_acc=part > 0, is_async=True)
        if S.DECAY:
            x = state.load(ACC_64)  # [v, K]
            y = dstate.load(ACC_64)  # [v, K]
            carried += gl.sum(x.to(gl.float32) * y.to(gl.float32), 1)
        if S.CORRECTED:
            d, d_a, e = products_done(0, deps=[d, d_a, e])
        else:
            d, e = products_done(0, deps=[d, e])
        if S.DECAY:
            carried = pin(carried)  # x and y have come: a barrier waits for no load, and TMA writes in their places
        release(bars.states.empty, own * 2 + w)
        release(bars.states.empty, own * 2 + 2 + w)
    return d, d_a, e, carried


@gluon.jit
def with_pairs(dq, dk, q, k, i, tiles, bars, S: gl.constexpr):
    """dq and dk of 64 channels with the share of the pairs (3.3), [C, K] each, in the dtype of the keys."""
    DT: gl.constexpr = tiles.q.dtype
    N_q = pairs_tile(tiles, i, 0, S)  # [C, C]
    N_a = pairs_tile(tiles, i, 1, S)  # [C, C]
    wait_full(bars.pairs.full, i)
    d = product(N_q, k, ACC_64, 64, 64)
    d, dq, dk = products_done(0, deps=[d, dq, dk])
    dq = (dq + d).to(DT)
    d = product(N_q.permute((1, 0)), q, ACC_64, 64, 64)
    if S.CORRECTED:
        d = warpgroup_mma(N_a, k, d, is_async=True)
        d = warpgroup_mma(N_a.permute((1, 0)), k, d, is_async=True)
    d, dq, dk = products_done(0, deps=[d, dq, dk])
    return dq, (dk + d).to(DT)


@gluon.jit
def wide_output_consumer(w: gl.constexpr, numbers, tiles, bars, S: gl.constexpr):
    """The channels 64 w ... and 128 + 64 w ... of dq and dk, which are left in the places of q and k."""
    DT: gl.constexpr = tiles.q.dtype
    scale = numbers.scale
    q_parts = reinterpret(tiles.q, DT, [S.BK // 64, 64, 64], TILE)
    k_parts = reinterpret(tiles.k, DT, [S.BK // 64, 64, 64], TILE)
    for i in range(item_count(numbers)):
        rows = gl.zeros([64], gl.float32, ROWS_64)
        written = gl.zeros([64], gl.float32, ROWS_64)
        carried = gl.zeros([64], gl.float32, ROWS_64)
        stage = (i % VSTAGES) * 4
        await_slot(bars, DO, i, S)
        wait_full(bars.nu.full, i)
        if S.CORRECTED:
            await_slot(bars, DR, i, S)
        for j in range(2):
            d, d_a, e, carried = state_products(w, i * TURNS + j * 4, carried, tiles, bars, S)
            release(bars.slots.empty, DO, j == 1)
            if S.CORRECTED:
                release(bars.slots.empty, DR, j == 1)
            release(bars.nu.empty, i, j == 1)
            wait_full(bars.v.full, i)
            row = vector(tiles.vectors, stage + ROW_FACTOR, ROWS_64)
            column = vector(tiles.vectors, stage + COLUMN_FACTOR, ROWS_64)
            beta = vector(tiles.vectors, stage + BETA, ROWS_64)
            wait_full(bars.keys.full, i)
            q = q_parts.index(2 * j + w)  # [C, K]
            k = k_parts.index(2 * j + w)  # [C, K]
            read = scale * gl.sum(q.load(ACC_64).to(gl.float32) * d, 1)  # [C, K]
            k_tile = k.load(ACC_64)  # [C, K]
            if S.CORRECTED:
                read -= gl.sum(k_tile.to(gl.float32) * d_a, 1)
            rows += read * row
            written += column * gl.sum(k_tile.to(gl.float32) * e, 1)
            d = d * (row * scale)[:, None]
            if S.CORRECTED:
                e = e * (column * beta)[:, None] - d_a * row[:, None]
            else:
                e = e * (column * beta)[:, None]
            dq, dk = with_pairs(d, e, q, k, i, tiles, bars, S)
            release(bars.pairs.empty, i, j == 1)
            q.store(dq)
            k.store(dk)
        release(bars.v.empty, i)
        fence_async_shared()
        signal(bars.gradients, i)
        sums = (i % 2) * SUM_STAGE
        wait_empty(bars.sums.empty, i)
        tiles.sums.index(sums + STATE_ROWS + w).store(rows)
        tiles.sums.index(sums + WRITTEN + w).store(written)
        if S.DECAY:
            tiles.sums.index(sums + CARRIED + w).store(carried)
        signal(bars.sums.full, i)


@gluon.jit
def wide_output_tiles(DT: gl.constexpr, S: gl.constexpr):
    """Shared memory, and barriers: dO, dR and nu have three readers, a tile of a state has one; keys are released twice by the finisher."""
    STATES: gl.constexpr = state_places(S.CORRECTED)
    tiles = WideOutputTiles(
        gl.allocate_shared_memory(DT, [1, 64, S.BK], TILE),
        gl.allocate_shared_memory(DT, [1, 64, S.BK], TILE),
        gl.allocate_shared_memory(DT, [2 if S.CORRECTED else 1, 64, S.BV], TILE),
        gl.allocate_shared_memory(DT, [1, 64, S.BV], TILE),
        gl.allocate_shared_memory(DT, [2, 64, 64], TILE),
        gl.allocate_shared_memory(gl.float32, [4 * VSTAGES, 64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2 * SUM_STAGE, 64], VECTOR),
        gl.allocate_shared_memory(DT, [STATES, 64, 64], TILE),
    )
    bars = WideOutputBarriers(
        ring(2, 1, 3),
        ring(1, 1, 3),
        ring(1, 1, 3),
        ring(VSTAGES, 1, 4),
        ring(1, 1, 2),
        ring(2, 3, 1),
        allocate_barriers(1, 2),
        Ring(allocate_barriers(2 * STATES, 1), allocate_barriers(STATES, 1)),
    )
    return tiles, bars


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def wide_output_backward_kernel(q_d, k_d, do_d, dr_d, nu_d, s_d, ds_d, vec_d, dq_d, dk_d, x, n, S: gl.constexpr):
    """Gradients of keys by value head, of beta and of the decay."""
    tiles, bars = wide_output_tiles(q_d.dtype, S)
    copies = ((q_d, k_d), (do_d, dr_d, s_d, ds_d), (nu_d, vec_d))
    gl.warp_specialize(
        [
            (pairs, (x, n, tiles, bars, S)),
            (wide_output_consumer, (0, n, tiles, bars, S)),
            (wide_output_consumer, (1, n, tiles, bars, S)),
            (wide_output_producer, (copies, x, n, tiles, bars, S)),
            (finisher, (dq_d, dk_d, x, n, tiles, bars, S)),
        ],
        [4, 4, 1, 1],
        [160, 160, 24, 24],
    )
