"""The `state` phase forward with 256 channels: the equations of `state.py`, two programs for all values of a state (`wide_parts.py`).

A warpgroup of the states makes `K S`, nu and the next S^T; the one for the outputs makes A_qb, and o of S^T and nu as they lie in shared
memory: nothing of the chain from one state to the next waits for it but the places of both. It takes one half of the values after the
other, so that 72 registers are enough.
Letters of tiles: `C` = 64 tokens, `K` = 256 channels of keys, `v` = 64 of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    ex2,
    fence_async_shared,
    gl,
    gluon,
    opaque_zero,
    operand,
    pin,
    product,
    products_done,
    release,
    signal,
    stores_done,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, LEFT_64, ROWS_64
from flashmix.ops.recurrence.gluon_hopper.place import segment_of_program, store_tokens, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    BETA,
    COLUMN_FACTOR,
    ROW_FACTOR,
    load_state,
    put_tokens,
    store_end,
    store_result,
    total_decay,
)
from flashmix.ops.recurrence.gluon_hopper.wide_parts import share_state, wide_producer, wide_tiles


@gluon.jit
def wide_consumer(w: gl.constexpr, d, x, numbers, tiles, bars, MAPS: gl.constexpr, S: gl.constexpr):
    """The rows 64 w ... of S^T."""
    s_d, nu_d = d
    DT: gl.constexpr = tiles.k.dtype
    at = segment_of_program(x, numbers, MAPS, S)
    channel = at.channel + w * 64
    state = load_state(x, at, w, MAPS, S)  # [v, K]
    for n in range(at.count):
        chunk = at.begin + n
        z = opaque_zero()  # lest descriptors be hoisted into registers
        shared = tiles.states.index(w + z)  # [v, K]
        sent = tiles.tokens.index(w + z)  # [C, v]
        stage = (n % S.VALUES) * 4 + z
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        if S.OUTPUT:
            wait_empty(bars.states.empty, n * S.WARPGROUPS + w)
        share_state(state.to(DT), s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, shared, 1, S.SAVE)
        if S.OUTPUT:
            signal(bars.states.full, n * S.WARPGROUPS + w)
        wait_full(bars.vectors.full, n)
        state = (
            state * total_decay(tiles.vectors, n, S.VALUES, S)[None, :]
        )  # before the product, which ptxas would wait for
        wait_full(bars.k.full, n)
        ks = product(shared, k.permute((1, 0)), ACC_64, 64, 64)
        if S.OUTPUT:
            wait_full(bars.v.full, n * S.WARPGROUPS + w)
            v = tiles.v.index(w + z).permute((1, 0)).load(ACC_64)  # [v, C]
        else:
            v = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w + z).permute((1, 0)).load(ACC_64)  # [v, C]
        row = vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64)
        ks, v = products_done(0, deps=[ks, v])
        R = gl.convert_layout((v.to(gl.float32) - ks * row[None, :]).to(DT), LEFT_64)  # (5.1)
        wait_full(bars.A.full, n)
        nu = product(R, tiles.A.index(n % S.PAIRS).permute((1, 0)), ACC_64, 64, 64)  # (5.2)
        column = vector(tiles.vectors, stage + COLUMN_FACTOR, COLUMNS_64) * vector(
            tiles.vectors, stage + BETA, COLUMNS_64
        )
        column = pin(column)
        release(bars.vectors.empty, n)
        nu, R = products_done(0, deps=[nu, R])
        release(bars.A.empty, n)
        written = gl.convert_layout((nu * column[None, :]).to(DT), operand(128))
        state = warpgroup_mma(written, k, state, is_async=True)  # (5.3)
        if S.SAVE:
            put_tokens(nu.to(DT), nu_d, at, chunk * 64, channel, sent, 1, S)
        elif S.OUTPUT:
            sent.permute((1, 0)).store(nu.to(DT))
            fence_async_shared()
            signal(bars.tokens.full, n * S.WARPGROUPS + w)
        state, written = products_done(0, deps=[state, written])
        release(bars.k.empty, n)
    if x.ends is not None:
        store_end(x, at, state, w, MAPS, S)
    if x.result is not None:
        store_result(x, at, state, (at.index + 1) % numbers.segments == 0, w, S)
    stores_done(0)


@gluon.jit
def put_whole_pairs(q, k, vectors, stage, made, scale, z):
    """A_qb of a chunk (3.1) as `put_query_pairs` makes it, in one product: 64 columns read the keys once."""
    A = product(k, q.permute((1, 0)), ACC_64, 64, 64)  # [C, C]
    A = products_done(0, deps=[A])
    key = gl.arange(0, 64, ROWS_64) + z
    query = gl.arange(0, 64, COLUMNS_64) + z
    G = vector(vectors, stage, ROWS_64)
    beta = vector(vectors, stage + BETA, ROWS_64) * scale
    G_query = vector(vectors, stage, COLUMNS_64)
    A = A * (ex2(gl.minimum(G_query[None, :] - G[:, None], 0.0)) * beta[:, None])
    A = gl.where(query[None, :] >= key[:, None], A, 0.0)
    made.permute((1, 0)).store(A.to(k.dtype))


@gluon.jit
def outputs(o_d, x, numbers, tiles, bars, S: gl.constexpr):
    """The warpgroup for A_qb (3.1) and o (1.8)."""
    gl.static_assert(S.WARPGROUPS == 2, "it has the values of two warpgroups")
    at = segment_of_program(x, numbers, False, S)
    for n in range(at.count):
        z = opaque_zero()  # lest masks and descriptors be hoisted into registers
        q = tiles.q.index(n % 2 + z)  # [C, K]
        A_qb = tiles.made.index(z)  # [C, C]
        stage = (n % S.VALUES) * 4 + z
        wait_full(bars.k.full, n)
        wait_full(bars.q.full, n)
        wait_full(bars.vectors.full, n)
        put_whole_pairs(q, tiles.k.index(n % S.KEYS), tiles.vectors, stage, A_qb, numbers.scale, z)
        fence_async_shared()
        release(bars.k.empty, n)
        for w in gl.static_range(2):
            wait_full(bars.states.full, 2 * n + w)
            o = product(tiles.states.index(w + z), q.permute((1, 0)), ACC_64, 64, 64)  # [v, C]
            o = products_done(0, deps=[o])
            release(bars.states.empty, 2 * n + w)
            row = pin(vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64))
            o = o * (row * numbers.scale)[None, :]
            if w == 1:
                release(bars.q.empty, n)
                release(bars.vectors.empty, n)
                stores_done(0)  # o of the first half
                release(bars.v.empty, 2 * n)
            wait_full(bars.tokens.full, 2 * n + w)
            sent = tiles.tokens.index(w + z)
            o = warpgroup_mma(sent.permute((1, 0)), A_qb.permute((1, 0)), o, is_async=True)
            o = products_done(0, deps=[o])
            sent.permute((1, 0)).store(o.to(sent.dtype))  # in the place of nu
            fence_async_shared()
            store_tokens(o_d, at.span, (at.begin + n) * 64, at.head, at.channel + w * 64, sent, S)
        stores_done(0)
        release(bars.v.empty, 2 * n + 1)
    stores_done(0)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def wide_state_forward_kernel(q_d, k_d, v_d, A_d, vec_d, o_d, s_d, nu_d, x, n, S: gl.constexpr):
    """OUTPUT writes o; SAVE writes nu and the state that each chunk starts from; neither, the maps of segments `x.ends`."""
    MAPS: gl.constexpr = x.ends is not None
    tiles, bars = wide_tiles(False, k_d.dtype, S)
    inputs = (q_d, k_d, v_d, A_d, vec_d)
    results = (s_d, nu_d)
    if S.OUTPUT:
        gl.warp_specialize(
            [
                (wide_consumer, (0, results, x, n, tiles, bars, MAPS, S)),
                (wide_consumer, (1, results, x, n, tiles, bars, MAPS, S)),
                (outputs, (o_d, x, n, tiles, bars, S)),
                (wide_producer, (inputs, x, n, tiles, bars, False, MAPS, S)),
            ],
            [4, 4, 1],
            [208, 72, 24],
        )
    else:
        gl.warp_specialize(
            [
                (wide_consumer, (0, results, x, n, tiles, bars, MAPS, S)),
                (wide_consumer, (1, results, x, n, tiles, bars, MAPS, S)),
                (wide_producer, (inputs, x, n, tiles, bars, False, MAPS, S)),
            ],
            [4, 1],
            [240, 24],
        )
