"""The warpgroup for dA in the backward of `output` (`output.py`): pairs of tokens, summed over value heads; their share in dg, dbeta.

Letters of tiles: `C` = 64 tokens, `K` = BK channels of keys, `V` = BV of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    ex2,
    fence_async_shared,
    gl,
    gluon,
    opaque_zero,
    pin,
    product,
    products_done,
    reinterpret,
    release,
    signal,
    wait_empty,
    wait_full,
)
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, ROWS_64, VECTORS
from flashmix.ops.recurrence.gluon_hopper.output_slots import DO, await_slot, dr_slot, leave_slot, place_of
from flashmix.ops.recurrence.gluon_hopper.output_sums import DIAGONAL, PAIR_ROWS, SUM_STAGE, VSTAGES
from flashmix.ops.recurrence.gluon_hopper.place import item_count, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA


@gluon.constexpr_function
def pair_tiles(BK):
    """Tiles of pairs with one value head a key head; with 256 channels an item begins when the one before has been read."""
    return 2 if BK == 256 else 3


@gluon.jit
def pairs_tile(tiles, i, which: gl.constexpr, S: gl.constexpr):
    """The tile of the queries' (0) or keys' (1) pairs of item i, [C, C].

    With one value head a key head tiles of three follow one another, so that an item's first tile is free while the consumers still
    read both of the item before.
    """
    if S.GROUP == 1:
        return tiles.pairs.index((2 * i + which) % pair_tiles(S.BK))
    else:
        return tiles.pairs.index(which)


@gluon.jit
def begin_pairs(tiles, bars, i, scale, S: gl.constexpr):
    """scale q k^T and -k k^T, below the diagonal, kept in the tiles of pairs: each thread reads its own elements again.

    The diagonal of the first, [C], is returned where there is a decay, else it is in the tile.
    """
    wait_full(bars.keys.full, i)
    q = tiles.q.index(i % S.KEYS)  # [C, K]
    k = tiles.k.index(i % S.KEYS)  # [C, K]
    row = gl.arange(0, 64, ROWS_64)[:, None]
    column = gl.arange(0, 64, COLUMNS_64)[None, :]
    qk = product(q, k.permute((1, 0)), ACC_64, 64, 64)
    if S.CORRECTED:
        kk = product(k, k.permute((1, 0)), ACC_64, 64, 64)
    wait_empty(bars.pairs.empty, i)
    if S.CORRECTED:
        qk = products_done(1, deps=[qk])
    else:
        qk = products_done(0, deps=[qk])
    qk = qk * scale
    diagonal = gl.sum(gl.where(row == column, qk, 0.0), 1)
    if S.DECAY:
        pairs_tile(tiles, i, 0, S).store(gl.where(row > column, qk, 0.0).to(tiles.q.dtype))
    else:
        pairs_tile(tiles, i, 0, S).store(gl.where(row >= column, qk, 0.0).to(tiles.q.dtype))
    if S.CORRECTED:
        kk = products_done(0, deps=[kk])
        pairs_tile(tiles, i, 1, S).store(gl.where(row > column, 0.0 - kk, 0.0).to(tiles.q.dtype))
    release(bars.keys.empty, i)
    return diagonal


@gluon.jit
def pair_sums(N, dA, E, beta, pairs):
    """N with the share of dA, and W = A dA without beta."""
    P = dA * E
    N += P * beta[None, :]
    W = P * pairs.load(ACC_64).to(gl.float32)  # [C, C]
    return N, W


@gluon.jit
def row_and_column_sums(W, beta):
    """The row sums of beta W, and the column sums of W over each thread's rows."""
    return gl.sum(W * beta[None, :], 1), gl.sum(W.reshape([4, 2, 8, 64]), 1)


@gluon.jit
def pairs_of_keys(dA, pair, tiles, stage, here, column):
    """From dA and k k^T, [C, C]: P = -exp(G_row - G_column) dA below the diagonal, beta of the columns, and the sums of P k k^T.

    The vectors are read anew: registers are scarce.
    """
    difference = vector(tiles.vectors, stage, ROWS_64)[:, None] - vector(tiles.vectors, stage, COLUMNS_64)[None, :]
    P = dA * gl.where(here > column, 0.0 - ex2(gl.minimum(difference, 0.0)), 0.0)
    beta = vector(tiles.vectors, stage + BETA, COLUMNS_64)
    rows, columns = row_and_column_sums(P * pair, beta)
    return P, beta, rows, columns


@gluon.jit
def put_pair_sums(rows, columns, diagonal, it, tiles, bars, S: gl.constexpr):
    """Leaves the sums of a value head to the finisher."""
    columns = gl.sum(columns, 1)  # of each warp's rows
    wait_empty(bars.sums.empty, it)
    reinterpret(tiles.sums, gl.float32, [6, 4, 64], VECTORS).index((it % 2) * 3).store(columns)
    tiles.sums.index((it % 2) * SUM_STAGE + PAIR_ROWS).store(rows)
    if S.DECAY:
        tiles.sums.index((it % 2) * SUM_STAGE + DIAGONAL).store(diagonal)
    signal(bars.sums.full, it)


@gluon.jit
def grouped_pairs(x, numbers, tiles, bars, S: gl.constexpr):
    """dA of the pairs (6.1), summed over the value heads, and its share in dg and dbeta."""
    DT: gl.constexpr = tiles.q.dtype
    DR: gl.constexpr = dr_slot(S.BK)
    row = gl.arange(0, 64, ROWS_64)
    column = gl.arange(0, 64, COLUMNS_64)
    for i in range(item_count(numbers)):
        qk_diagonal = begin_pairs(tiles, bars, i, numbers.scale, S)  # [C]
        N_q = gl.zeros([64, 64], gl.float32, ACC_64)
        N_a = gl.zeros([64, 64], gl.float32, ACC_64)
        for r in range(S.GROUP):
            it = i * S.GROUP + r
            z = opaque_zero()
            here = (row + z)[:, None]
            dO = tiles.slots.index(place_of(DO + z, it, S))  # [C, V]
            dR = tiles.slots.index(place_of(DR + z, it, S))  # [C, V]
            nu = tiles.nu.index(it % S.NUS)  # [C, V]
            wait_full(bars.v.full, it)
            stage = (it % VSTAGES) * 4
            G_row = vector(tiles.vectors, stage, ROWS_64)
            G_column = vector(tiles.vectors, stage, COLUMNS_64)
            await_slot(bars, DO, it, S)
            wait_full(bars.nu.full, it)
            dA = product(dO, nu.permute((1, 0)), ACC_64, 64, 64)
            E = ex2(
                gl.minimum(G_row[:, None] - G_column[None, :], 0.0)
            )  # above the diagonal 1: the tiles have zeros there
            beta = vector(tiles.vectors, stage + BETA, COLUMNS_64)
            dA = products_done(0, deps=[dA])
            leave_slot(bars, DO, it, 1, S)
            if S.CORRECTED:
                await_slot(bars, DR, it, S)
            diagonal = qk_diagonal
            if S.DECAY:  # no decay lies between a token and itself: such pairs are in dbeta alone
                diagonal *= gl.sum(gl.where(here == column[None, :], dA, 0.0), 1)
            N_q, W = pair_sums(N_q, dA, E, beta, pairs_tile(tiles, i, 0, S))
            rows, columns = row_and_column_sums(W, beta)
            rows = pin(rows)  # made of all vectors that were read
            if S.CORRECTED:
                dA = product(dR, nu.permute((1, 0)), ACC_64, 64, 64)
                dA = products_done(0, deps=[dA])
                leave_slot(bars, DR, it, 1, S)
            release(bars.nu.empty, it)
            release(bars.v.empty, it)
            if S.CORRECTED:
                N_a, W = pair_sums(N_a, dA, E, beta, pairs_tile(tiles, i, 1, S))
                more_rows, more_columns = row_and_column_sums(W, beta)
                rows += more_rows
                columns += more_columns
            put_pair_sums(rows, columns, diagonal, it, tiles, bars, S)
        pairs_tile(tiles, i, 0, S).store(gl.where(row[:, None] >= column[None, :], N_q * numbers.scale, 0.0).to(DT))
        if S.CORRECTED:
            pairs_tile(tiles, i, 1, S).store(gl.where(row[:, None] > column[None, :], 0.0 - N_a, 0.0).to(DT))
        fence_async_shared()
        signal(bars.pairs.full, i)


@gluon.jit
def lone_pairs(x, numbers, tiles, bars, S: gl.constexpr):
    """The same with one value head a key head: q k^T and k k^T stay in registers, so that a chunk's pairs wait for the consumers of the
    chunk before only when they are made.
    """
    DT: gl.constexpr = tiles.q.dtype
    DR: gl.constexpr = dr_slot(S.BK)
    row = gl.arange(0, 64, ROWS_64)
    column = gl.arange(0, 64, COLUMNS_64)[None, :]
    for i in range(item_count(numbers)):
        z = opaque_zero()
        here = (row + z)[:, None]
        own = 0
        if S.BK == 256:  # a tile has one place: lest descriptors be hoisted
            own = z
        q = tiles.q.index(i % S.KEYS + own)  # [C, K]
        k = tiles.k.index(i % S.KEYS + own)  # [C, K]
        nu = tiles.nu.index(i % S.NUS + own)  # [C, V]
        wait_full(bars.keys.full, i)
        pair = product(q, k.permute((1, 0)), ACC_64, 64, 64)
        wait_full(bars.v.full, i)
        stage = (i % VSTAGES) * 4
        G_row = vector(tiles.vectors, stage, ROWS_64)
        G_column = vector(tiles.vectors, stage, COLUMNS_64)
        beta = vector(tiles.vectors, stage + BETA, COLUMNS_64)
        await_slot(bars, DO, i, S)
        wait_full(bars.nu.full, i)
        dA = product(tiles.slots.index(place_of(DO + z, i, S)), nu.permute((1, 0)), ACC_64, 64, 64)
        E = ex2(gl.minimum(G_row[:, None] - G_column[None, :], 0.0))
        E = gl.where(here >= column, E * numbers.scale, 0.0)
        pair, dA = products_done(0, deps=[pair, dA])
        leave_slot(bars, DO, i, 1, S)
        if S.CORRECTED:
            await_slot(bars, DR, i, S)
        P = dA * E
        W = P * pair  # [C, C]
        pairs_tile(tiles, i, 0, S).store((P * beta[None, :]).to(DT))
        diagonal = gl.sum(gl.where(here == column, W, 0.0), 1)
        if S.DECAY:  # no decay lies between a token and itself: such pairs are in dbeta alone
            W = gl.where(here == column, 0.0, W)
        rows, columns = row_and_column_sums(W, beta)
        if S.CORRECTED:
            pair = product(k, k.permute((1, 0)), ACC_64, 64, 64)
            dA = product(tiles.slots.index(place_of(DR + z, i, S)), nu.permute((1, 0)), ACC_64, 64, 64)
            pair, dA = products_done(0, deps=[pair, dA])
            leave_slot(bars, DR, i, 1, S)
            P, beta, more_rows, more_columns = pairs_of_keys(dA, pair, tiles, stage, here, column)
            rows += more_rows
            columns += more_columns
            N_a = (P * beta[None, :]).to(DT)
        rows = pin(rows)  # made of all vectors that were read
        release(bars.keys.empty, i)
        release(bars.nu.empty, i)
        release(bars.v.empty, i)
        wait_empty(bars.pairs.empty, i)
        if S.CORRECTED:
            pairs_tile(tiles, i, 1, S).store(N_a)
        fence_async_shared()
        signal(bars.pairs.full, i)
        put_pair_sums(rows, columns, diagonal, i, tiles, bars, S)


@gluon.jit
def pairs(x, numbers, tiles, bars, S: gl.constexpr):
    """The warpgroup for dA."""
    if S.GROUP == 1:
        lone_pairs(x, numbers, tiles, bars, S)
    else:
        grouped_pairs(x, numbers, tiles, bars, S)
