"""The `state` phase backward: one program a (sequence, value head, segment), from the last chunk to the first, as `state.py` goes forward.

    dnu = A_qb^T dO + beta e^{G_C - G} K dS'       dR = T^T dnu                                          (5.4), (5.5)
    dS = e^{G_C} dS' + Q^T (scale e^G dO) - K^T (e^G dR)                                                 (5.7)

Without corrections dV is dnu, which dS does not need, and the last term is not there.

`A_qb^T dO` of the next chunk is begun behind the last update of this one, which takes it off the chain of dependent products.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    gl,
    gluon,
    in_float32,
    operand,
    overlap,
    pin,
    product,
    products_done,
    stores_done,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, LEFT_64
from flashmix.ops.recurrence.gluon_hopper.place import segment_of_program, vector
from flashmix.ops.recurrence.gluon_hopper.state_pairs import query_pairs, query_pairs_tile
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    ROW_FACTOR,
    inverse_tile,
    leave_keys,
    leave_made,
    leave_pairs,
    leave_values,
    load_state,
    producer,
    put_state,
    put_tokens,
    state_tiles,
    store_end,
    store_result,
    total_decay,
    write_factors,
)


@gluon.jit
def query_product(tiles, bars, n, w: gl.constexpr, S: gl.constexpr):
    """(A_qb^T dO)^T of tile n, [v, C], begun."""
    wait_full(bars.v, n)
    if S.MAKES:
        wait_full(bars.made, n)
    else:
        wait_full(bars.A, n)
    dO = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w).permute((1, 0))  # [v, C]
    return product(dO, query_pairs_tile(tiles, n, S), ACC_64, 64, 64)


@gluon.jit
def backward_consumer(w: gl.constexpr, d, x, numbers, tiles, bars, S: gl.constexpr):
    """The rows 64 w ... of dS^T."""
    s_d, dr_d = d
    DT: gl.constexpr = tiles.k.dtype
    MAKES_NU: gl.constexpr = S.CORRECTED or S.SAVE
    at = segment_of_program(x, numbers, False, S)
    channel = at.channel + w * 64
    dstate = load_state(x, at, w, False, S)  # [v, K]
    wait_full(bars.k, 0)  # with those below: a sequence without chunks has its copies waited for
    if MAKES_NU:
        y = query_product(tiles, bars, 0, w, S)
        y = products_done(0, deps=[y])
    else:
        wait_full(bars.v, 0)
    for n in range(at.count):
        if not MAKES_NU:
            wait_full(bars.v, n)
        chunk = at.begin + at.count - 1 - n
        stage = (n % S.KEYS) * 4
        q = tiles.q.index(n % S.KEYS)  # [C, K]
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        b = tiles.b.index(n % S.KEYS)  # [C, K]
        dO = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w).permute((1, 0))  # [v, C]
        d16 = dstate.to(DT)
        wait_full(bars.k, n)
        left = gl.convert_layout(d16, LEFT_64)
        if MAKES_NU:
            written = product(left, b.permute((1, 0)), ACC_64, 64, 64)
        if S.SAVE:
            put_state(d16, s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, tiles.states.index(w), 1)
        z_q = dO.load(ACC_64)  # [v, C]
        if not S.CHANNEL:
            row = vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64)
            z_q = pin((in_float32(z_q) * (row * numbers.scale)[None, :]).to(DT))
            column = write_factors(tiles.vectors, stage, COLUMNS_64)
        z_q = gl.convert_layout(z_q, operand(S.BK))
        dstate = dstate * total_decay(tiles.vectors, n, S.KEYS, S)[None, :]
        if S.CORRECTED and S.MAKES:
            wait_full(
                bars.A, n
            )  # a branch, past which ptxas moves nothing of the above: it would, behind the wait for the product
        if MAKES_NU:
            written, left = products_done(0, deps=[written, left])
            if not S.CHANNEL:
                written = written * column[None, :]
            dR16 = (y + written).to(DT)  # dnu, (5.4)
        if S.CORRECTED:
            T = inverse_tile(tiles, n, S)  # [C, C]
            dnu = gl.convert_layout(dR16, LEFT_64)
            dR = product(dnu, T, ACC_64, 64, 64)  # (5.5)
        dstate = warpgroup_mma(z_q, q, dstate, is_async=True)
        leave_values(n, S)
        if S.CORRECTED:
            dR, dnu = products_done(1, deps=[dR, dnu])
            dR16 = dR.to(DT)
            if S.CHANNEL:
                z_a = gl.convert_layout(dR16, operand(S.BK))
            else:
                z_a = gl.convert_layout((0.0 - dR * row[None, :]).to(DT), operand(S.BK))
            dstate = warpgroup_mma(z_a, k, dstate, is_async=True)  # (5.7)
        leave_pairs(n, S)
        leave_made(n, S)
        if MAKES_NU:  # after the last chunk its own again, for nothing
            y = query_product(tiles, bars, gl.minimum(n + 1, at.count - 1), w, S)
        if S.SAVE:
            put_tokens(dR16, dr_d, at, chunk * 64, channel, tiles.tokens.index(w), 1, S)
        if S.CORRECTED:
            dstate, z_a, z_q = products_done(1, deps=[dstate, z_a, z_q])
        else:
            dstate, z_q = products_done(1 if MAKES_NU else 0, deps=[dstate, z_q])
        leave_keys(n, S)
        if MAKES_NU:
            y = products_done(0, deps=[y])
    if x.ends is not None:
        store_end(x, at, dstate, w, False, S)
    if x.result is not None:
        store_result(x, at, dstate, at.index % numbers.segments == 0, w, S)
    stores_done(0)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def state_backward_kernel(q_d, k_d, do_d, A_d, vec_d, s_d, dr_d, x, n, S: gl.constexpr):
    """SAVE writes dR (dV) and the gradient of the state that each chunk leaves; else only what each segment sends back, `x.ends`."""
    if S.EARLY:
        overlap()
    if x.counters is not None:
        counter = x.counters + gl.program_id(0)
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
    tiles, bars = state_tiles(True, S.SAVE, k_d.dtype, S)
    inputs = (q_d, k_d, do_d, A_d, vec_d)
    results = (s_d, dr_d)
    if S.WARPGROUPS == 2 and S.MAKES:
        gl.warp_specialize(
            [
                (backward_consumer, (0, results, x, n, tiles, bars, S)),
                (backward_consumer, (1, results, x, n, tiles, bars, S)),
                (query_pairs, (x, n, tiles, bars, True, S)),
                (producer, (inputs, x, n, tiles, bars, True, False, S)),
            ],
            [4, 4, 1],
            [216, 56, 24],
        )
    elif S.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (backward_consumer, (0, results, x, n, tiles, bars, S)),
                (backward_consumer, (1, results, x, n, tiles, bars, S)),
                (producer, (inputs, x, n, tiles, bars, True, False, S)),
            ],
            [4, 1],
            [240, 24],
        )
    elif S.MAKES:
        gl.warp_specialize(
            [
                (backward_consumer, (0, results, x, n, tiles, bars, S)),
                (query_pairs, (x, n, tiles, bars, True, S)),
                (producer, (inputs, x, n, tiles, bars, True, False, S)),
            ],
            [4, 1],
            [120, 24],
        )
    else:
        gl.warp_specialize(
            [
                (backward_consumer, (0, results, x, n, tiles, bars, S)),
                (producer, (inputs, x, n, tiles, bars, True, False, S)),
            ],
            [1],
            [24],
        )
