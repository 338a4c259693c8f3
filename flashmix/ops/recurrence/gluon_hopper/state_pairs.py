"""A_qb of the state passes: with at most one decay per token a warpgroup beside those of the states makes it.

With CHANNEL it comes from memory. Else it is made of the queries and keys that lie in shared memory for the states: no kernel writes it
and none reads it.
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
    signal,
    wait_full,
)
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_32, COLUMNS_32, ROWS_32
from flashmix.ops.recurrence.gluon_hopper.place import segment_of_program, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA, leave_keys, leave_made


@gluon.jit
def put_query_pairs(q, k, vectors, stage, made, scale):
    """A_qb of a chunk (3.1) into a shared tile, [C, C], of its queries, keys and vectors."""
    for half in gl.static_range(2):  # of the queries, the columns of the transposed tile: registers are scarce
        A = product(k, q.slice(half * 32, 32, dim=0).permute((1, 0)), ACC_32, 64, 32)  # [C, C / 2]
        G = vector(vectors, stage, ROWS_32)
        beta = vector(vectors, stage + BETA, ROWS_32)
        G_query = vectors.index(stage).slice(half * 32, 32, dim=0).load(COLUMNS_32)  # [C / 2]
        A = products_done(0, deps=[A])
        A = A * (ex2(gl.minimum(G_query[None, :] - G[:, None], 0.0)) * (beta * scale)[:, None])
        z = opaque_zero()  # lest masks be made before the product is done, in words
        key = gl.arange(0, 64, ROWS_32) + z
        query = gl.arange(half * 32, half * 32 + 32, COLUMNS_32) + z
        A = pin(gl.where(query[None, :] >= key[:, None], A, 0.0))  # in float32: masks of 16 bits are words too
        made.slice(half * 32, 32, dim=0).permute((1, 0)).store(A.to(k.dtype))


@gluon.jit
def query_pairs(x, numbers, tiles, bars, BACK: gl.constexpr, S: gl.constexpr):
    """The warpgroup for A_qb (3.1), a chunk ahead of those of the states; as often as `producer` fetches."""
    at = segment_of_program(x, numbers, False, S)
    count = at.count
    if BACK:
        count = gl.maximum(count, 1)
    for n in range(count):
        stage = (n % S.KEYS) * 4 + opaque_zero()  # lest addresses be hoisted into registers
        q = tiles.q.index(n % S.KEYS)  # [C, K]
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        made = tiles.made.index(n % 2)
        wait_full(bars.k, n)
        leave_made(n, S, WAITS=True)
        put_query_pairs(q, k, tiles.vectors, stage, made, numbers.scale)
        leave_keys(n, S)
        fence_async_shared()
        signal(bars.made, n)


@gluon.jit
def query_pairs_tile(tiles, n, S: gl.constexpr):
    """A_qb of tile n, [C, C]."""
    if S.MAKES:
        return tiles.made.index(n % 2)
    elif S.READS == 2:
        return tiles.A.index(n % S.PAIRS).slice(0, 64, dim=0)
    else:
        return tiles.A.index(n % S.PAIRS)
