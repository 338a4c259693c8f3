"""The warpgroup for pairs of the backward of `output` in the walk of the states (`walk.py`): dA, and the trace <S, dS'>."""

from __future__ import annotations

from flashmix.gpu.hopper import (
    accumulator,
    ex2,
    fence_async_shared,
    gl,
    gluon,
    opaque_zero,
    product,
    products_done,
    reinterpret,
    release,
    signal,
    wait_empty,
    wait_full,
)
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, ROWS_64, TILE
from flashmix.ops.recurrence.gluon_hopper.output_pairs import pairs_of_keys, put_pair_sums, row_and_column_sums
from flashmix.ops.recurrence.gluon_hopper.output_sums import CARRIED, SUM_STAGE, VSTAGES
from flashmix.ops.recurrence.gluon_hopper.place import segment_of, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA

BLOCK = gl.constexpr(accumulator(16))  # 16 columns of sums


@gluon.jit
def diagonal_of(x, z):
    """The diagonal of x, [64, 64] sums; `z` is an opaque zero. Each warp has 16 rows, so of its columns 16 are taken first."""
    a, b = gl.split(x.reshape([64, 2, 2, 16]).permute([0, 3, 1, 2]))  # of both halves of the columns
    a_0, a_1 = gl.split(a)  # [64, 16]
    b_0, b_1 = gl.split(b)
    row = (gl.arange(0, 64, gl.SliceLayout(1, BLOCK)) + z)[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, BLOCK))[None, :]
    own = gl.where(row < 16, gl.convert_layout(a_0, BLOCK), gl.convert_layout(b_1, BLOCK))
    own = gl.where(row // 16 == 1, gl.convert_layout(b_0, BLOCK), own)
    own = gl.where(row // 16 == 2, gl.convert_layout(a_1, BLOCK), own)
    return gl.convert_layout(gl.sum(gl.where(row % 16 == column, own, 0.0), 1), ROWS_64)


@gluon.jit
def put_carried(n, z, tiles, bars, S: gl.constexpr):
    """<S, dS'> of each channel of keys and the 64th after it: the diagonals of S^T dS' of either half of them, added."""
    s_parts = reinterpret(tiles.state, tiles.q.dtype, [2, S.BV, 64], TILE)
    d_parts = reinterpret(tiles.dstate, tiles.q.dtype, [2, S.BV, 64], TILE)
    wait_full(bars.state.full, n)
    wait_full(bars.dstate.full, n)
    first = product(s_parts.index(z).permute((1, 0)), d_parts.index(z), ACC_64, 64, 64)  # [K / 2, K / 2]
    second = product(s_parts.index(1 + z).permute((1, 0)), d_parts.index(1 + z), ACC_64, 64, 64)
    first, second = products_done(0, deps=[first, second])
    release(bars.dstate.empty, n)
    release(bars.state.empty, n)
    carried = diagonal_of(first + second, z)
    wait_empty(bars.sums.empty, n)
    tiles.sums.index((n % 2) * SUM_STAGE + CARRIED).store(carried)


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
            P, beta, more_rows, more_columns = pairs_of_keys(dA, pair, tiles, stage, here, column)
            rows += more_rows
            columns += more_columns
            wait_empty(bars.pairs_a.empty, n)
            tiles.pairs.index(1 + z).store((P * beta[None, :]).to(DT))
            fence_async_shared()
            signal(bars.pairs_a.full, n)
        release(bars.v.empty, n)
        put_pair_sums(rows, columns, diagonal, n, tiles, bars, S)
