"""The `state` phase of DPLR with a per-channel decay from the end of a sequence, for the gradients.

    dnu = A_qb^T dO + ^b dS'     dR = T^T dnu     dv = A_qk^T dO + A_ak^T dR + ^k dS'                   (5.4), (5.5), (6.3)
    dS = e^{G_C} dS' + ~q^T dO + ~a^T dR                                                                (5.7)

A warpgroup holds 64 rows of dS^T in accumulators, as those of S^T in `dplr_state.py`. dO is a left operand as it lies in shared memory.
dS', dR and dv go to memory by one place, one after the other.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    gl,
    gluon,
    operand,
    product,
    products_done,
    reinterpret,
    release,
    stores_done,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.dplr_state_parts import dplr_state_producer, dplr_state_tiles
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, LEFT_64, TILE
from flashmix.ops.recurrence.gluon_hopper.place import segment_of_program
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    load_state,
    put_state,
    put_tokens,
    store_result,
    total_decay,
)


@gluon.jit
def dplr_backward_consumer(w: gl.constexpr, d, x, numbers, tiles, bars, S: gl.constexpr):
    """The rows 64 w ... of dS^T."""
    s_d, dr_d, dv_d = d
    DT: gl.constexpr = tiles.keys.dtype
    at = segment_of_program(x, numbers, False, S)
    channel = at.channel + w * 64
    dstate = load_state(x, at, w, False, S)  # [v, K]
    parts = reinterpret(tiles.states, DT, [S.WARPGROUPS * S.BK // 64, 64, 64], TILE)
    for n in range(at.count):
        chunk = at.begin + at.count - 1 - n
        first = (n % S.KEYS) * 4  # q, a, k, b
        dO = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w).permute((1, 0))  # [v, C]
        of_q = tiles.of_q.index(0)
        T = tiles.A.index(n % S.PAIRS).slice(0, 64, dim=0)  # [C, C]
        A_ak = tiles.A.index(n % S.PAIRS).slice(64, 64, dim=0)  # [C, C]
        d16 = dstate.to(DT)
        wait_full(bars.v.full, n)
        dstate = dstate * total_decay(tiles.vectors, n, S.VALUES, S)[None, :]
        left = gl.convert_layout(d16, LEFT_64)
        wait_full(bars.k.full, n)
        wait_full(bars.made.full, n)
        dnu = product(left, tiles.keys.index(first + 3).permute((1, 0)), ACC_64, 64, 64)
        dnu = warpgroup_mma(dO, of_q.slice(64, 64, dim=0), dnu, is_async=True)  # (5.4)
        dv = product(left, tiles.keys.index(first + 2).permute((1, 0)), ACC_64, 64, 64)
        dv = warpgroup_mma(dO, of_q.slice(0, 64, dim=0), dv, is_async=True)
        put_state(d16, s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, tiles.states.index(w), 0)
        dnu = products_done(2, deps=[dnu])
        dnu_left = gl.convert_layout(dnu.to(DT), LEFT_64)
        wait_full(bars.A.full, n)
        dR = product(dnu_left, T, ACC_64, 64, 64)  # (5.5)
        dstate = warpgroup_mma(dO, tiles.keys.index(first), dstate, is_async=True)
        dR, dnu_left, dv, left = products_done(1, deps=[dR, dnu_left, dv, left])
        release(bars.made.empty, n)
        dR16 = dR.to(DT)
        dR_left = gl.convert_layout(dR16, LEFT_64)
        z_a = gl.convert_layout(dR16, operand(S.BK))
        dv = warpgroup_mma(dR_left, A_ak, dv, is_async=True)  # (6.3)
        dstate = warpgroup_mma(z_a, tiles.keys.index(first + 1), dstate, is_async=True)  # (5.7)
        put_tokens(dR16, dr_d, at, chunk * 64, channel, parts.index(2 * w), 0, S)
        dv, dR_left = products_done(1, deps=[dv, dR_left])
        release(bars.A.empty, n)
        put_tokens(dv.to(DT), dv_d, at, chunk * 64, channel, parts.index(2 * w + 1), 1, S)
        dstate, z_a = products_done(0, deps=[dstate, z_a])
        release(bars.k.empty, n)
        release(bars.v.empty, n)
    if x.result is not None:
        store_result(x, at, dstate, at.index % numbers.segments == 0, w, S)
    stores_done(0)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def dplr_state_backward_kernel(keys_d, do_d, A_d, total_d, s_d, dr_d, dv_d, x, n, S: gl.constexpr):
    """Writes dR, dv and the gradient of the state that each chunk leaves."""
    tiles, bars = dplr_state_tiles(True, keys_d.dtype, S)
    read = (keys_d, do_d, A_d, total_d)
    results = (s_d, dr_d, dv_d)
    if S.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (dplr_backward_consumer, (0, results, x, n, tiles, bars, S)),
                (dplr_backward_consumer, (1, results, x, n, tiles, bars, S)),
                (dplr_state_producer, (read, x, n, tiles, bars, True, S)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (dplr_backward_consumer, (0, results, x, n, tiles, bars, S)),
                (dplr_state_producer, (read, x, n, tiles, bars, True, S)),
            ],
            [1],
            [24],
        )
