"""The `state` phase backward with 256 channels: the equations of `state_backward.py`, two programs for all values (`wide_parts.py`).

dS'^T in 16 bits is read from shared memory by `K dS'` and by the copy that saves it. `A_qb^T dO` is added to `K dS'`, so that there are no
registers for both; the product of the queries is begun before it, so that their place is free for those of the next chunk.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
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
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, LEFT_64
from flashmix.ops.recurrence.gluon_hopper.place import segment_of_program, vector
from flashmix.ops.recurrence.gluon_hopper.state_pairs import put_query_pairs
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
def wide_query_pairs(x, numbers, tiles, bars, S: gl.constexpr):
    """The warpgroup for A_qb (3.1), ahead of those of the states as far as its one tile and that of the queries are free."""
    at = segment_of_program(x, numbers, False, S)
    for n in range(at.count):
        z = opaque_zero()  # lest masks and descriptors be hoisted into registers
        wait_full(bars.k.full, n)
        wait_full(bars.q.full, n)
        wait_full(bars.v.full, n)
        wait_empty(bars.made.empty, n)
        stage = (n % S.VALUES) * 4 + z
        q = tiles.q.index(z)  # [C, K]
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        put_query_pairs(q, k, tiles.vectors, stage, tiles.made.index(z), numbers.scale)
        release(bars.k.empty, n)
        release(bars.q.empty, n)
        release(bars.v.empty, n)
        fence_async_shared()
        signal(bars.made.full, n)


@gluon.jit
def wide_backward_consumer(w: gl.constexpr, d, x, numbers, tiles, bars, S: gl.constexpr):
    """The rows 64 w ... of dS^T."""
    s_d, dr_d = d
    DT: gl.constexpr = tiles.k.dtype
    at = segment_of_program(x, numbers, False, S)
    channel = at.channel + w * 64
    dstate = load_state(x, at, w, False, S)  # [v, K]
    for n in range(at.count):
        chunk = at.begin + at.count - 1 - n
        z = opaque_zero()  # lest descriptors be hoisted into registers
        shared = tiles.states.index(w + z)  # [v, K]
        q = tiles.q.index(z)  # [C, K]
        A_qb = tiles.made.index(z)  # [C, C]
        stage = (n % S.VALUES) * 4 + z
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        dO = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w + z).permute((1, 0))  # [v, C]
        share_state(dstate.to(DT), s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, shared, 1, S.SAVE)
        wait_full(bars.v.full, n)
        dstate = (
            dstate * total_decay(tiles.vectors, n, S.VALUES, S)[None, :]
        )  # before the product, which ptxas would wait for
        wait_full(bars.k.full, n)
        dnu = product(shared, k.permute((1, 0)), ACC_64, 64, 64)
        row = vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64)
        z_q = dO.load(ACC_64)  # [v, C]
        z_q = (z_q.to(gl.float32) * (row * numbers.scale)[None, :]).to(DT)
        z_q = gl.convert_layout(z_q, operand(128))
        wait_full(bars.q.full, n)
        dstate = warpgroup_mma(z_q, q, dstate, is_async=True)
        column = vector(tiles.vectors, stage + COLUMN_FACTOR, COLUMNS_64) * vector(
            tiles.vectors, stage + BETA, COLUMNS_64
        )
        dnu = products_done(1, deps=[dnu])
        dnu = dnu * column[None, :]
        wait_full(bars.made.full, n)
        dnu = warpgroup_mma(dO, A_qb, dnu, is_async=True)  # (5.4)
        dstate, z_q, dnu = products_done(0, deps=[dstate, z_q, dnu])
        release(bars.q.empty, n)
        release(bars.made.empty, n)
        dnu16 = gl.convert_layout(dnu.to(DT), LEFT_64)
        wait_full(bars.A.full, n)
        dR = product(dnu16, tiles.A.index(n % S.PAIRS), ACC_64, 64, 64)  # (5.5)
        row = pin(vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64))
        dR, dnu16 = products_done(0, deps=[dR, dnu16])
        release(bars.v.empty, n)
        release(bars.A.empty, n)
        z_a = gl.convert_layout((dR * (0.0 - row)[None, :]).to(DT), operand(128))
        dstate = warpgroup_mma(z_a, k, dstate, is_async=True)  # (5.7)
        if S.SAVE:
            put_tokens(dR.to(DT), dr_d, at, chunk * 64, channel, tiles.tokens.index(w + z), 1, S)
        dstate, z_a = products_done(0, deps=[dstate, z_a])
        release(bars.k.empty, n)
    if x.ends is not None:
        store_end(x, at, dstate, w, False, S)
    if x.result is not None:
        store_result(x, at, dstate, at.index % numbers.segments == 0, w, S)
    stores_done(0)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def wide_state_backward_kernel(q_d, k_d, do_d, A_d, vec_d, s_d, dr_d, x, n, S: gl.constexpr):
    """SAVE writes dR and the gradient of the state that each chunk leaves; else only what each segment sends back, `x.ends`."""
    tiles, bars = wide_tiles(True, k_d.dtype, S)
    inputs = (q_d, k_d, do_d, A_d, vec_d)
    results = (s_d, dr_d)
    gl.warp_specialize(
        [
            (wide_backward_consumer, (0, results, x, n, tiles, bars, S)),
            (wide_backward_consumer, (1, results, x, n, tiles, bars, S)),
            (wide_query_pairs, (x, n, tiles, bars, S)),
            (wide_producer, (inputs, x, n, tiles, bars, True, False, S)),
        ],
        [4, 4, 1],
        [208, 72, 24],
    )
