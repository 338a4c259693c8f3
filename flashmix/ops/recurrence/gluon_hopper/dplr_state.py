"""The `state` phase of DPLR with a per-channel decay, with the `output` of the forward, or saving what the backward reads.

    R = A_ak V + ~a S      nu = T R      o = ~q S + A_qk V + A_qb nu      S <- e^{G_C} S + ^k^T V + ^b^T nu       (5.1) to (5.3), (1.8)

What `state.py` does for the delta rules, with two columns: a warpgroup holds 64 rows of S^T in accumulators, keys come decayed. V is a
left operand as it lies in shared memory. The pairs of q come in a ring of their own, of one stage: they are needed last.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    gl,
    gluon,
    operand,
    product,
    products_done,
    release,
    stores_done,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.dplr_state_parts import dplr_state_producer, dplr_state_tiles, kinds_of
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, LEFT_64
from flashmix.ops.recurrence.gluon_hopper.place import OUTSIDE, segment_of_program
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    load_state,
    put_state,
    put_tokens,
    store_result,
    total_decay,
)


@gluon.jit
def dplr_state_consumer(w: gl.constexpr, d, x, numbers, tiles, bars, S: gl.constexpr):
    """The rows 64 w ... of S^T."""
    o_d, s_d, nu_d = d
    DT: gl.constexpr = tiles.keys.dtype
    BEFORE: gl.constexpr = S.OUTPUT + 2 * S.SAVE - 1  # other copies that are begun between two of one kind
    KINDS: gl.constexpr = kinds_of(S.OUTPUT)
    at = segment_of_program(x, numbers, False, S)
    channel = at.channel + w * 64
    state = load_state(x, at, w, False, S)  # [v, K]
    last = gl.zeros([64, 64], gl.float32, ACC_64)  # o of the chunk before, [v, C]
    for n in range(at.count):
        chunk = at.begin + n
        first = (n % S.KEYS) * KINDS + KINDS - 3
        v = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w).permute((1, 0))  # [v, C]
        s16 = state.to(DT)
        wait_full(bars.v.full, n)
        state = state * total_decay(tiles.vectors, n, S.VALUES, S)[None, :]
        left = gl.convert_layout(s16, LEFT_64)
        last16 = last.to(DT)  # before the products: ptxas does not see that it has landed, and would wait for them
        t = gl.where(n == 0, OUTSIDE, (chunk - 1) * 64)
        wait_full(bars.k.full, n)
        wait_full(bars.A.full, n)
        T = tiles.A.index(n % S.PAIRS).slice(0, 64, dim=0)  # [C, C]
        A_ak = tiles.A.index(n % S.PAIRS).slice(64, 64, dim=0)  # [C, C]
        R = product(left, tiles.keys.index(first).permute((1, 0)), ACC_64, 64, 64)
        R = warpgroup_mma(v, A_ak.permute((1, 0)), R, is_async=True)  # (5.1)
        if S.OUTPUT:
            o = product(left, tiles.keys.index(first - 1).permute((1, 0)), ACC_64, 64, 64)
            put_tokens(last16, o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
            R = products_done(1, deps=[R])
        if S.SAVE:
            put_state(s16, s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, tiles.states.index(w), BEFORE)
            R, left = products_done(0, deps=[R, left])
        R16 = gl.convert_layout(R.to(DT), LEFT_64)
        nu = product(R16, T.permute((1, 0)), ACC_64, 64, 64)  # (5.2)
        state = warpgroup_mma(v, tiles.keys.index(first + 1), state, is_async=True)
        if S.OUTPUT:
            nu, R16, o, left = products_done(1, deps=[nu, R16, o, left])
        else:
            nu, R16 = products_done(1, deps=[nu, R16])
        release(bars.A.empty, n)
        nu16 = nu.to(DT)
        written = gl.convert_layout(nu16, operand(S.BK))
        state = warpgroup_mma(written, tiles.keys.index(first + 2), state, is_async=True)  # (5.3)
        if S.OUTPUT:  # its pairs have the scale
            wait_full(bars.made.full, n)
            of_q = tiles.of_q.index(0)
            nu_left = gl.convert_layout(nu16, LEFT_64)
            o = warpgroup_mma(v, of_q.slice(0, 64, dim=0).permute((1, 0)), o, is_async=True)
            o = warpgroup_mma(nu_left, of_q.slice(64, 64, dim=0).permute((1, 0)), o, is_async=True)  # (1.8)
            state, written = products_done(2, deps=[state, written])
            release(bars.k.empty, n)
            last, nu_left = products_done(0, deps=[o, nu_left])
            release(bars.made.empty, n)
        else:
            put_tokens(nu16, nu_d, at, chunk * 64, channel, tiles.tokens.index(w), BEFORE, S)
            state, written = products_done(0, deps=[state, written])
            release(bars.k.empty, n)
        release(bars.v.empty, n)
    if S.OUTPUT:
        t = gl.where(at.count == 0, OUTSIDE, (at.begin + at.count - 1) * 64)
        put_tokens(last.to(DT), o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
    if x.result is not None:
        store_result(x, at, state, (at.index + 1) % numbers.segments == 0, w, S)
    stores_done(0)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def dplr_state_forward_kernel(keys_d, v_d, A_d, total_d, o_d, s_d, nu_d, x, n, S: gl.constexpr):
    """OUTPUT writes o; SAVE writes nu and the state that each chunk starts from."""
    tiles, bars = dplr_state_tiles(False, keys_d.dtype, S)
    read = (keys_d, v_d, A_d, total_d)
    results = (o_d, s_d, nu_d)
    if S.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (dplr_state_consumer, (0, results, x, n, tiles, bars, S)),
                (dplr_state_consumer, (1, results, x, n, tiles, bars, S)),
                (dplr_state_producer, (read, x, n, tiles, bars, False, S)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (dplr_state_consumer, (0, results, x, n, tiles, bars, S)),
                (dplr_state_producer, (read, x, n, tiles, bars, False, S)),
            ],
            [1],
            [24],
        )
