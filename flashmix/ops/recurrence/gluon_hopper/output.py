"""The backward of `output` and `scores`: persistent programs, an item is a (chunk, key head), its value heads one after the other.

    dA_q = dO nu^T      dA_a = dR nu^T                                                                   (6.1)
    dO S^T      dR S^T      nu dS'^T                                                                     (6.2)
    N_q = sum scale E beta dA_q      N_a = -sum E beta dA_a          over the value heads, E = e^{G_i - G_j}
    dq = sum scale e^G dO S^T + N_q k
    dk = sum (beta e^{G_C - G} nu dS'^T - e^G dR S^T) + N_q^T q + (N_a + N_a^T) k                        (3.3), (6.5)

dq and dk are summed over the value heads in registers and written once. With W = A dA without beta (A as it is multiplied by beta's
column):

    dbeta_j = sum_i W_ij + e^{G_C - G_j} k_j . (nu dS'^T)_j
    dg_t = sum_{i >= t} in_i + sum_{j < t} beta_j wr_j + e^{G_C} <S, dS'>                                (2.6)

where `wr_j` is the last term of dbeta and `in` are row sums of beta W less its column sums, without the pairs of a token with itself,
which no decay lies between, and the rows by way of the state. Without corrections nu is V, beta 1, and there are no dR, dA_a and N_a.

Roles: a producer of one warp; `pairs`, a warpgroup for dA (`output_pairs.py`); a `consumer` warpgroup for each 64 channels of keys; a
`finisher` of one warp, which also sends dq and dk to memory, so that no consumer waits for that.
Letters of tiles: `C` = 64 tokens, `K` = 64 channels of keys of a consumer, `V` = BV channels of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    opaque_zero,
    overlap,
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
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, ROWS_64, TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.output_pairs import pair_tiles, pairs, pairs_tile
from flashmix.ops.recurrence.gluon_hopper.output_slots import (
    DO,
    STATE,
    await_slot,
    dr_slot,
    dstate_slot,
    fill_slot,
    leave_slot,
    parts_of,
    place_of,
    slot_count,
)
from flashmix.ops.recurrence.gluon_hopper.output_sums import CARRIED, STATE_ROWS, SUM_STAGE, VSTAGES, WRITTEN, finisher
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tokens, item_chunk, item_count, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA, COLUMN_FACTOR, ROW_FACTOR, fetch_vectors, ring
from flashmix.ops.recurrence.gluon_hopper.structs import OutputBarriers, OutputTiles


@gluon.jit
def producer(d, x, numbers, tiles, bars, S: gl.constexpr):
    """Fills the rings: keys and queries of an item; the vectors, nu and the other tiles of each of its value heads."""
    keys_d, values_d, others_d = d
    q_d, k_d = keys_d
    nu_d, vec_d = others_d
    TILES: gl.constexpr = slot_count(S.BK)
    DR: gl.constexpr = dr_slot(S.BK)
    it = 0
    for i in range(item_count(numbers)):
        at = item_chunk(x, numbers, i, S)
        wait_empty(bars.keys.empty, i)
        bar = expect_bytes(bars.keys.full, i, 2 * 64 * S.BK * 2)
        fetch_tokens(q_d, at.span, at.t, at.key_head, 0, bar, tiles.q.index(i % S.KEYS), S)
        fetch_tokens(k_d, at.span, at.t, at.key_head, 0, bar, tiles.k.index(i % S.KEYS), S)
        for r in range(S.GROUP):
            head = at.key_head * S.GROUP + r
            row = at.index * S.HV + head
            wait_empty(bars.v.empty, it)
            bar = expect_bytes(bars.v.full, it, 4 * 64 * 4)
            fetch_vectors(vec_d, row, bar, tiles.vectors, it, VSTAGES)
            for j in gl.static_range(TILES):
                if S.CORRECTED or j != DR:
                    fill_slot(values_d, j, at, head, row, it, tiles, bars, S)
                if j == DO:  # nu is needed from the first product to the last: stages of its own
                    wait_empty(bars.nu.empty, it)
                    bar = expect_bytes(bars.nu.full, it, 64 * S.BV * 2)
                    fetch_tokens(nu_d, at.span, at.t, head, 0, bar, tiles.nu.index(it % S.NUS), S)
            it += 1


@gluon.jit
def with_pairs(dq, dk, N, q, k, S: gl.constexpr):
    """dq and dk with the share of the pairs (3.3)."""
    N_q, N_a = N
    if S.GROUP == 1:
        dq = warpgroup_mma(N_q, k, dq, is_async=True)
        dk = warpgroup_mma(N_q.permute((1, 0)), q, dk, is_async=True)
        if S.CORRECTED:
            dk = warpgroup_mma(N_a, k, dk, is_async=True)
            dk = warpgroup_mma(N_a.permute((1, 0)), k, dk, is_async=True)
        dq, dk = products_done(0, deps=[dq, dk])
    else:  # into dq and dk themselves ptxas would serialise every wgmma
        d = product(N_q, k, ACC_64, 64, 64)
        d = products_done(0, deps=[d])
        dq += d
        d = product(N_q.permute((1, 0)), q, ACC_64, 64, 64)
        if S.CORRECTED:
            d = warpgroup_mma(N_a, k, d, is_async=True)
            d = warpgroup_mma(N_a.permute((1, 0)), k, d, is_async=True)
        d, dq = products_done(0, deps=[d, dq])
        dk += d
    return dq, dk


@gluon.jit
def consumer(w: gl.constexpr, numbers, tiles, bars, S: gl.constexpr):
    """The channels 64 w ... of dq and dk, which are left in the places of q and k."""
    DT: gl.constexpr = tiles.q.dtype
    scale = numbers.scale
    PARTS: gl.constexpr = parts_of(S.BK)
    DR: gl.constexpr = dr_slot(S.BK)
    DSTATE: gl.constexpr = dstate_slot(S.BK)
    READERS: gl.constexpr = 1 + PARTS  # of a slot
    states = reinterpret(tiles.slots, DT, [S.STAGES * slot_count(S.BK), S.BV, 64], TILE)
    q_parts = reinterpret(tiles.q, DT, [S.KEYS * PARTS, 64, 64], TILE)
    k_parts = reinterpret(tiles.k, DT, [S.KEYS * PARTS, 64, 64], TILE)
    here = gl.arange(0, 64, ROWS_64)
    there = gl.arange(0, 64, COLUMNS_64)
    for i in range(item_count(numbers)):
        q = q_parts.index((i % S.KEYS) * PARTS + w)  # [C, K]
        k = k_parts.index((i % S.KEYS) * PARTS + w)  # [C, K]
        dq = gl.zeros([64, 64], gl.float32, ACC_64)
        dk = gl.zeros([64, 64], gl.float32, ACC_64)
        for r in range(S.GROUP):
            it = i * S.GROUP + r
            z = opaque_zero()  # lest addresses of slots be hoisted into registers
            dO = tiles.slots.index(place_of(DO + z, it, S))  # [C, V]
            dR = tiles.slots.index(place_of(DR + z, it, S))  # [C, V]
            nu = tiles.nu.index(it % S.NUS)  # [C, V]
            state = states.index(place_of(STATE + w + z, it, S))  # [V, K]
            dstate = states.index(place_of(DSTATE + w + z, it, S))  # [V, K]
            await_slot(bars, DO, it, S)
            await_slot(bars, STATE + w, it, S)
            d = product(dO, state, ACC_64, 64, 64)  # (6.2)
            wait_full(bars.v.full, it)
            stage = (it % VSTAGES) * 4
            row = vector(tiles.vectors, stage + ROW_FACTOR, ROWS_64)
            if S.CORRECTED:
                await_slot(bars, DR, it, S)
                d_a = product(dR, state, ACC_64, 64, 64)
                d = products_done(1, deps=[d])
            else:
                d = products_done(0, deps=[d])
            leave_slot(bars, DO, it, 1, S)
            if (
                r + z == 0
            ):  # a branch that stays: without one these sums sink below the next product, and registers spill
                wait_full(bars.keys.full, i)
            rows = scale * gl.sum(q.load(ACC_64).to(gl.float32) * d, 1)  # [C, K]
            dq += d * (row * scale)[:, None]
            wait_full(bars.nu.full, it)
            await_slot(bars, DSTATE + w, it, S)
            if S.DECAY:
                inner = product(state.permute((1, 0)), dstate, ACC_64, 64, 64)  # [K, K]
            if S.CORRECTED:
                if S.DECAY:
                    d_a, dq = products_done(1, deps=[d_a, dq])  # dq: lest its sum sink below
                else:
                    d_a, dq = products_done(0, deps=[d_a, dq])
                leave_slot(bars, DR, it, 1, S)
                rows -= gl.sum(k.load(ACC_64).to(gl.float32) * d_a, 1)  # [C, K]
                dk -= d_a * row[:, None]
            if not S.DECAY:
                leave_slot(bars, STATE + w, it, READERS, S)
            d = product(nu, dstate, ACC_64, 64, 64)
            if S.DECAY:
                inner, dk = products_done(1, deps=[inner, dk])
                leave_slot(bars, STATE + w, it, READERS, S)
                carried = gl.sum(gl.where((here + z)[:, None] == there[None, :], inner, 0.0), 1)
            column = pin(vector(tiles.vectors, stage + COLUMN_FACTOR, ROWS_64))
            beta = pin(vector(tiles.vectors, stage + BETA, ROWS_64))
            d, dk = products_done(0, deps=[d, dk])
            release(bars.nu.empty, it)
            leave_slot(bars, DSTATE + w, it, READERS, S)
            release(bars.v.empty, it)
            dk += d * (column * beta)[:, None]
            written = column * gl.sum(k.load(ACC_64).to(gl.float32) * d, 1)  # [C, K]
            sums = (it % 2) * SUM_STAGE
            wait_empty(bars.sums.empty, it)
            tiles.sums.index(sums + STATE_ROWS + w).store(rows * row)
            tiles.sums.index(sums + WRITTEN + w).store(written)
            if S.DECAY:
                tiles.sums.index(sums + CARRIED + w).store(carried)
            signal(bars.sums.full, it)
        wait_full(bars.pairs.full, i)
        N_q = pairs_tile(tiles, i, 0, S)  # [C, C]
        N_a = pairs_tile(tiles, i, 1, S)  # [C, C]
        dq, dk = with_pairs(dq, dk, (N_q, N_a), q, k, S)
        release(bars.pairs.empty, i)
        q.store(dq.to(DT))
        k.store(dk.to(DT))
        fence_async_shared()
        signal(bars.gradients, i)


@gluon.jit
def output_tiles(DT: gl.constexpr, S: gl.constexpr):
    """Shared memory, and barriers: a slot is released by all readers or as often by its one; keys twice by the finisher."""
    PARTS: gl.constexpr = parts_of(S.BK)
    SLOTS: gl.constexpr = S.STAGES * slot_count(S.BK)
    tiles = OutputTiles(
        gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE),
        gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE),
        gl.allocate_shared_memory(DT, [SLOTS, 64, S.BV], TILE),
        gl.allocate_shared_memory(DT, [S.NUS, 64, S.BV], TILE),
        gl.allocate_shared_memory(DT, [pair_tiles(S.BK) if S.GROUP == 1 else 2, 64, 64], TILE),
        gl.allocate_shared_memory(gl.float32, [4 * VSTAGES, 64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2 * SUM_STAGE, 64], VECTOR),
    )
    bars = OutputBarriers(
        ring(SLOTS, 1, 1 + PARTS),
        ring(S.NUS, 1, 1 + PARTS),
        ring(S.KEYS, 1, 3),
        ring(VSTAGES, 1, 2 + PARTS),
        ring(1, 1, PARTS),
        ring(2, 1 + PARTS, 1),
        allocate_barriers(
            S.KEYS, PARTS
        ),  # of as many items as there are keys of: a consumer may end those before others end one
    )
    return tiles, bars


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def output_backward_kernel(q_d, k_d, do_d, dr_d, nu_d, s_d, ds_d, vec_d, dq_d, dk_d, x, n, S: gl.constexpr):
    """Gradients of keys, summed over the value heads that share them, of beta and of the decay."""
    tiles, bars = output_tiles(q_d.dtype, S)
    if S.EARLY:
        overlap()
    copies = ((q_d, k_d), (do_d, dr_d, s_d, ds_d), (nu_d, vec_d))
    if S.BK == 128:
        gl.warp_specialize(
            [
                (pairs, (x, n, tiles, bars, S)),
                (consumer, (0, n, tiles, bars, S)),
                (consumer, (1, n, tiles, bars, S)),
                (producer, (copies, x, n, tiles, bars, S)),
                (finisher, (dq_d, dk_d, x, n, tiles, bars, S)),
            ],
            [4, 4, 1, 1],
            [160, 160, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (pairs, (x, n, tiles, bars, S)),
                (consumer, (0, n, tiles, bars, S)),
                (producer, (copies, x, n, tiles, bars, S)),
                (finisher, (dq_d, dk_d, x, n, tiles, bars, S)),
            ],
            [4, 1, 1],
            [232, 40, 40],
        )
