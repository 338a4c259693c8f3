"""The maps of segments by two warpgroups: N^T and M^T of (7.1) as states that nothing reads meanwhile.

What `state.py` does with a chunk, by half its tokens at a time: `T R` of the first half is written to the state while that of the second
is made, which is where a chain of products would else wait for its last one. T is lower triangular, so a quarter of `T R` is left out.
"""

from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, halves, in_float32, operand, product, products_done, wait_full, warpgroup_mma
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_32, ACC_64, COLUMNS_32, COLUMNS_64, LEFT_64
from flashmix.ops.recurrence.gluon_hopper.place import vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    BETA,
    COLUMN_FACTOR,
    ROW_FACTOR,
    inverse_tile,
    leave_keys,
    leave_pairs,
    leave_values,
    load_state,
    store_end,
    total_decay,
)


@gluon.jit
def begin_halves(R, T):
    """Begins nu = T R (5.2): both halves of its tokens, [v, C / 2], the first of which is done first, and those of R as left operands."""
    first_R, second_R = halves(R)
    first_R, second_R = gl.convert_layout(first_R, LEFT_64), gl.convert_layout(second_R, LEFT_64)
    low = T.slice(32, 32, dim=0)  # rows of the second half
    first = product(first_R, T.slice(0, 32, dim=0).slice(0, 32, dim=1).permute((1, 0)), ACC_32, 64, 32)
    second = product(first_R, low.slice(0, 32, dim=1).permute((1, 0)), ACC_32, 64, 32)
    second = warpgroup_mma(second_R, low.slice(32, 32, dim=1).permute((1, 0)), second, is_async=True)
    return first, second, first_R, second_R


@gluon.jit
def half_factors(vectors, stage, half: gl.constexpr):
    """`write_factors` of half the tokens, [C / 2]."""
    column = vectors.index(stage + COLUMN_FACTOR).slice(half * 32, 32, dim=0).load(COLUMNS_32)  # [C / 2]
    return column * vectors.index(stage + BETA).slice(half * 32, 32, dim=0).load(COLUMNS_32)


@gluon.jit
def written_half(nu, column, DT: gl.constexpr, S: gl.constexpr):
    """Half of nu as the left operand that writes it to the state, its tokens times their factors where keys are not decayed."""
    if S.CHANNEL:
        return gl.convert_layout(nu.to(DT), operand(S.BK))
    else:
        return gl.convert_layout((nu * column[None, :]).to(DT), operand(S.BK))


@gluon.jit
def map_consumer(w: gl.constexpr, x, segment, tiles, bars, S: gl.constexpr):
    """The rows 64 w ... of N^T or M^T of a `segment`: where it lies, and which use of the rings its first chunk is."""
    at, first = segment
    DT: gl.constexpr = tiles.k.dtype
    state = load_state(x, at, w, True, S)  # [v, K]
    for i in range(at.count):
        n = first + i
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        b = tiles.b.index(n % S.KEYS)  # [C, K]
        stage = (n % S.KEYS) * 4
        s16 = state.to(DT)
        wait_full(bars.k, n)
        left = gl.convert_layout(s16, LEFT_64)
        ks = product(left, k.permute((1, 0)), ACC_64, 64, 64)
        first_column, second_column = 0, 0
        if not S.CHANNEL:
            row = vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64)
            first_column = half_factors(tiles.vectors, stage, 0)
            second_column = half_factors(tiles.vectors, stage, 1)
        wait_full(bars.v, n)
        v = in_float32(tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w).permute((1, 0)).load(ACC_64))  # [v, C]
        # a branch, past which ptxas moves nothing of the above: it would, behind the wait for the product
        wait_full(bars.A, n)
        ks, v, left = products_done(0, deps=[ks, v, left])
        if S.CHANNEL:
            R = v + ks
        else:
            R = v - ks * row[None, :]
        first_nu, second_nu, first_R, second_R = begin_halves(R.to(DT), inverse_tile(tiles, n, S))  # (5.1), (5.2)
        leave_values(n, S)
        state = state * total_decay(tiles.vectors, n, S.KEYS, S)[None, :]
        first_nu, state = products_done(2, deps=[first_nu, state])
        first_left = written_half(first_nu, first_column, DT, S)
        state = warpgroup_mma(first_left, b.slice(0, 32, dim=0), state, is_async=True)  # (5.3)
        second_nu, first_R, second_R = products_done(1, deps=[second_nu, first_R, second_R])
        second_left = written_half(second_nu, second_column, DT, S)
        state = warpgroup_mma(second_left, b.slice(32, 32, dim=0), state, is_async=True)
        state, first_left, second_left = products_done(0, deps=[state, first_left, second_left])
        leave_keys(n, S)
        leave_pairs(n, S)
    store_end(x, at, state, w, True, S)
