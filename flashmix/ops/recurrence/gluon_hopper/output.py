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

Roles: a producer of one warp; `pairs`, a warpgroup for dA (`output_pairs.py`); two `consumer` warpgroups, 64 channels of keys each; a
`finisher` of one warp, which also sends dq and dk to memory, so that no consumer waits for that.
Letters of tiles: `C` = 64 tokens, `K` = 64 channels of keys of a consumer, `V` = 128 channels of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque_zero,
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
from flashmix.ops.recurrence.gluon_hopper.output_pairs import (
    DO,
    DR,
    DSTATE,
    PAIR_TILES,
    STATE,
    TILES,
    pairs,
    pairs_tile,
)
from flashmix.ops.recurrence.gluon_hopper.output_sums import CARRIED, STATE_ROWS, SUM_STAGE, VSTAGES, WRITTEN, finisher
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tile, fetch_tokens, item_chunk, item_count, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA, COLUMN_FACTOR, ROW_FACTOR, fetch_vectors, ring
from flashmix.ops.recurrence.gluon_hopper.structs import OutputBarriers, OutputTiles


@gluon.jit
def fetch_slot(d, j: gl.constexpr, at, head, row, bar, slot, S: gl.constexpr):
    """Copies tile `j` of a value head into its slot."""
    do_d, dr_d, s_d, ds_d = d
    if j == DO:
        fetch_tokens(do_d, at.span, at.t, head, 0, bar, slot, S)
    elif j == DR:
        fetch_tokens(dr_d, at.span, at.t, head, 0, bar, slot, S)
    elif j == STATE or j == STATE + 1:
        fetch_tile(s_d, [row, 0, (j - STATE) * 64], bar, slot)
    else:
        fetch_tile(ds_d, [row, 0, (j - DSTATE) * 64], bar, slot)


@gluon.jit
def producer(keys_d, values_d, others_d, x, numbers, tiles, bars, S: gl.constexpr):
    """Fills the rings: keys and queries of an item; the vectors and the seven tiles of each of its value heads."""
    q_d, k_d = keys_d
    nu_d, vec_d = others_d
    it = 0
    for i in range(item_count(numbers)):
        at = item_chunk(x, numbers, i, S)
        wait_empty(bars.keys.empty, i)
        bar = expect_bytes(bars.keys.full, i, 2 * 64 * 128 * 2)
        fetch_tokens(q_d, at.span, at.t, at.key_head, 0, bar, tiles.q.index(i % 2), S)
        fetch_tokens(k_d, at.span, at.t, at.key_head, 0, bar, tiles.k.index(i % 2), S)
        for r in range(S.GROUP):
            head = at.key_head * S.GROUP + r
            row = at.index * S.HV + head
            wait_empty(bars.v.empty, it)
            bar = expect_bytes(bars.v.full, it, 4 * 64 * 4)
            fetch_vectors(vec_d, row, bar, tiles.vectors, it, VSTAGES)
            for j in gl.static_range(TILES):
                if S.CORRECTED or j != DR:
                    mbarrier.wait(bars.slots.empty.index(j), (it & 1) ^ 1)
                    bar = bars.slots.full.index(j)
                    mbarrier.expect(bar, 64 * 128 * 2)
                    fetch_slot(values_d, j, at, head, row, bar, tiles.slots.index(j), S)
                if j == DO:  # nu is needed from the first product to the last: two stages of its own
                    wait_empty(bars.nu.empty, it)
                    bar = expect_bytes(bars.nu.full, it, 64 * 128 * 2)
                    fetch_tokens(nu_d, at.span, at.t, head, 0, bar, tiles.nu.index(it % 2), S)
            it += 1


@gluon.jit
def consumer(w: gl.constexpr, numbers, tiles, bars, S: gl.constexpr):
    """The channels 64 w ... of dq and dk, which are left in the places of q and k."""
    DT: gl.constexpr = tiles.q.dtype
    scale = numbers.scale
    states = reinterpret(tiles.slots, DT, [S.SLOTS, 128, 64], TILE)
    q_halves = reinterpret(tiles.q, DT, [4, 64, 64], TILE)
    k_halves = reinterpret(tiles.k, DT, [4, 64, 64], TILE)
    here = gl.arange(0, 64, ROWS_64)
    there = gl.arange(0, 64, COLUMNS_64)
    for i in range(item_count(numbers)):
        q = q_halves.index((i % 2) * 2 + w)  # [C, K]
        k = k_halves.index((i % 2) * 2 + w)  # [C, K]
        dq = gl.zeros([64, 64], gl.float32, ACC_64)
        dk = gl.zeros([64, 64], gl.float32, ACC_64)
        for r in range(S.GROUP):
            it = i * S.GROUP + r
            z = opaque_zero()  # lest addresses of slots be hoisted into registers
            dO = tiles.slots.index(DO + z)  # [C, V]
            dR = tiles.slots.index(DR + z)  # [C, V]
            nu = tiles.nu.index(it % 2)  # [C, V]
            state = states.index(STATE + w + z)  # [V, K]
            dstate = states.index(DSTATE + w + z)  # [V, K]
            mbarrier.wait(bars.slots.full.index(DO), it & 1)
            mbarrier.wait(bars.slots.full.index(STATE + w), it & 1)
            d = product(dO, state, ACC_64, 64, 64)  # (6.2)
            wait_full(bars.v.full, it)
            stage = (it % VSTAGES) * 4
            row = vector(tiles.vectors, stage + ROW_FACTOR, ROWS_64)
            if S.CORRECTED:
                mbarrier.wait(bars.slots.full.index(DR), it & 1)
                d_a = product(dR, state, ACC_64, 64, 64)
                d = products_done(1, deps=[d])
            else:
                d = products_done(0, deps=[d])
            mbarrier.arrive(bars.slots.empty.index(DO), count=1)
            if (
                r + z == 0
            ):  # a branch that stays: without one these sums sink below the next product, and registers spill
                wait_full(bars.keys.full, i)
            rows = scale * gl.sum(q.load(ACC_64).to(gl.float32) * d, 1)  # [C, K]
            dq += d * (row * scale)[:, None]
            wait_full(bars.nu.full, it)
            mbarrier.wait(bars.slots.full.index(DSTATE + w), it & 1)
            if S.DECAY:
                inner = product(state.permute((1, 0)), dstate, ACC_64, 64, 64)  # [K, K]
            if S.CORRECTED:
                if S.DECAY:
                    d_a, dq = products_done(1, deps=[d_a, dq])  # dq: lest its sum sink below
                else:
                    d_a, dq = products_done(0, deps=[d_a, dq])
                mbarrier.arrive(bars.slots.empty.index(DR), count=1)
                rows -= gl.sum(k.load(ACC_64).to(gl.float32) * d_a, 1)  # [C, K]
                dk -= d_a * row[:, None]
            if not S.DECAY:
                mbarrier.arrive(bars.slots.empty.index(STATE + w), count=3)
            d = product(nu, dstate, ACC_64, 64, 64)
            if S.DECAY:
                inner, dk = products_done(1, deps=[inner, dk])
                mbarrier.arrive(bars.slots.empty.index(STATE + w), count=3)
                carried = gl.sum(gl.where((here + z)[:, None] == there[None, :], inner, 0.0), 1)
            column = vector(tiles.vectors, stage + COLUMN_FACTOR, ROWS_64)
            beta = vector(tiles.vectors, stage + BETA, ROWS_64)
            d, dk = products_done(0, deps=[d, dk])
            release(bars.nu.empty, it)
            mbarrier.arrive(bars.slots.empty.index(DSTATE + w), count=3)
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
        d = product(N_q, k, ACC_64, 64, 64)  # (3.3); into dq and dk themselves ptxas would serialise every wgmma
        d = products_done(0, deps=[d])
        dq += d
        d = product(N_q.permute((1, 0)), q, ACC_64, 64, 64)
        if S.CORRECTED:
            d = warpgroup_mma(N_a, k, d, is_async=True)
            d = warpgroup_mma(N_a.permute((1, 0)), k, d, is_async=True)
        d, dq = products_done(0, deps=[d, dq])
        dk += d
        release(bars.pairs.empty, i)
        q.store(dq.to(DT))
        k.store(dk.to(DT))
        fence_async_shared()
        signal(bars.gradients, i)


@gluon.jit
def output_tiles(DT: gl.constexpr, S: gl.constexpr):
    """Shared memory, and barriers: a slot is released three times, by all readers or thrice by its one; keys twice by the finisher."""
    tiles = OutputTiles(
        gl.allocate_shared_memory(DT, [2, 64, 128], TILE),
        gl.allocate_shared_memory(DT, [2, 64, 128], TILE),
        gl.allocate_shared_memory(DT, [S.SLOTS, 64, 128], TILE),
        gl.allocate_shared_memory(DT, [2, 64, 128], TILE),
        gl.allocate_shared_memory(DT, [PAIR_TILES if S.GROUP == 1 else 2, 64, 64], TILE),
        gl.allocate_shared_memory(gl.float32, [4 * VSTAGES, 64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [2 * SUM_STAGE, 64], VECTOR),
    )
    bars = OutputBarriers(
        ring(S.SLOTS, 1, 3),
        ring(2, 1, 3),
        ring(2, 1, 3),
        ring(VSTAGES, 1, 4),
        ring(1, 1, 2),
        ring(2, 3, 1),
        allocate_barriers(2, 2),  # of two items: one consumer may end the next before the other has ended this one
    )
    return tiles, bars


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def output_backward_kernel(q_d, k_d, do_d, dr_d, nu_d, s_d, ds_d, vec_d, dq_d, dk_d, x, n, S: gl.constexpr):
    """Gradients of keys, summed over the value heads that share them, of beta and of the decay."""
    tiles, bars = output_tiles(q_d.dtype, S)
    gl.warp_specialize(
        [
            (pairs, (x, n, tiles, bars, S)),
            (consumer, (0, n, tiles, bars, S)),
            (consumer, (1, n, tiles, bars, S)),
            (producer, ((q_d, k_d), (do_d, dr_d, s_d, ds_d), (nu_d, vec_d), x, n, tiles, bars, S)),
            (finisher, (dq_d, dk_d, x, n, tiles, bars, S)),
        ],
        [4, 4, 1, 1],
        [160, 160, 24, 24],
    )
