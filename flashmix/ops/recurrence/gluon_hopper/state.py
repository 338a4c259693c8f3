"""The `state` phase forward, with the `output`: one program a (sequence, value head, segment), chunk after chunk.

    R = V - e^G K S      nu = T R                                                                        (5.1), (5.2)
    o = scale e^G Q S + A_qb nu        S <- e^{G_C} S + K^T (beta e^{G_C - G} nu)                        (1.8), (5.3)

Everything is transposed: each of one or two warpgroups holds 64 rows of `S^T` in the accumulators of `wgmma` for the whole sequence, S, R
and nu are left operands in registers, and factors of tokens multiply columns. A producer warp keeps the rings of keys (and queries), of
values with the vectors of the chunk and of T filled, and a warpgroup more makes A_qb a chunk ahead (`state_parts.py`). Letters of tiles:
`C` = 64 tokens, `K` = BK channels of keys, `v` = 64 channels of values. With tiles of 128 channels registers are SCARCE beside A_qb.

Without corrections (linear attention) nu is V and beta 1: two products a chunk are left, or of a pass that only saves states one. So
it is where nu is GIVEN, which the forward's pass KEEPs.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    begin_next,
    gl,
    gluon,
    in_float32,
    opaque_zero,
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
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, LEFT_64, columns
from flashmix.ops.recurrence.gluon_hopper.place import (
    OUTSIDE,
    own_segments,
    segment_of_program,
    segment_of_turn,
    vector,
)
from flashmix.ops.recurrence.gluon_hopper.state_maps import map_consumer
from flashmix.ops.recurrence.gluon_hopper.state_pairs import query_pairs, query_pairs_tile
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    BETA,
    COLUMN_FACTOR,
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
    store_total,
    total_decay,
    write_factors,
)


@gluon.jit
def forward_consumer(w: gl.constexpr, d, x, segment, numbers, tiles, bars, MAPS: gl.constexpr, S: gl.constexpr):
    """The rows 64 w ... of S^T of a `segment`: where it lies, and which use of the rings its first chunk is."""
    at, first = segment
    o_d, s_d, nu_d = d
    DT: gl.constexpr = tiles.k.dtype
    BEFORE: gl.constexpr = S.OUTPUT + S.KEEP + 2 * S.SAVE - 1  # other copies that are begun between two of one kind
    SCARCE: gl.constexpr = S.MAKES and S.BK == 128
    channel = at.channel + w * 64
    state = load_state(x, at, w, MAPS, S)  # [v, K]
    last = gl.zeros([64, 64], gl.float32, ACC_64)  # o of the chunk before, [v, C]
    for i in range(at.count):
        n = first + i
        chunk = at.begin + i
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        b = tiles.b.index(n % S.KEYS)  # [C, K]
        z = 0
        if SCARCE:  # no addresses hoisted, nothing loaded or kept while two products are made
            z = opaque_zero()
        stage = (n % S.KEYS) * 4 + z
        s16 = state.to(DT)
        wait_full(bars.k, n)
        if S.WARPGROUPS == 1:
            state = state * total_decay(tiles.vectors, n, S.KEYS, S)[None, :]
        left = gl.convert_layout(s16, LEFT_64)
        last16 = last.to(DT)  # before the products: ptxas does not see that it has landed, and would wait for them
        t = gl.where(i == 0, OUTSIDE, (chunk - 1) * 64)
        ks = product(left, k.permute((1, 0)), ACC_64, 64, 64)
        if S.OUTPUT:
            if SCARCE:
                put_tokens(last16, o_d, at, t, channel, tiles.tokens.index(w + z), BEFORE, S)
            q = tiles.q.index(n % S.KEYS)  # [C, K]
            o = product(left, q.permute((1, 0)), ACC_64, 64, 64)
            if not SCARCE:
                put_tokens(last16, o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
        if S.SAVE:
            put_state(s16, s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, tiles.states.index(w), BEFORE)
        if not S.CHANNEL:
            row = vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64)
        if not S.CHANNEL and not SCARCE:
            column = write_factors(tiles.vectors, stage, COLUMNS_64)
        wait_full(bars.v, n)
        v = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w + z).permute((1, 0)).load(ACC_64)  # [v, C]
        if not SCARCE:
            v = in_float32(v)
        wait_full(
            bars.A, n
        )  # a branch, past which ptxas moves nothing of the above: it would, behind the wait for the product
        if S.OUTPUT:
            ks, v = products_done(1, deps=[ks, v])
        else:
            ks, v, left = products_done(0, deps=[ks, v, left])
        if S.CHANNEL:
            R = in_float32(v) + ks
        else:
            R = in_float32(v) - ks * row[None, :]
        R = gl.convert_layout(R.to(DT), LEFT_64)  # (5.1)
        T = inverse_tile(tiles, n, S)  # [C, C]
        nu = product(R, T.permute((1, 0)), ACC_64, 64, 64)  # (5.2)
        if SCARCE:
            column = pin(write_factors(tiles.vectors, stage, COLUMNS_64))
        leave_values(n, S)
        if S.WARPGROUPS == 2:  # under this product, else under the first
            state = state * total_decay(tiles.vectors, n, S.KEYS, S)[None, :]
        if S.OUTPUT:
            o, left = products_done(1, deps=[o, left])
        nu, R = products_done(0, deps=[nu, R])
        nu16 = nu.to(DT)
        if S.CHANNEL:
            written = gl.convert_layout(nu16, operand(S.BK))
        else:
            written = gl.convert_layout((nu * column[None, :]).to(DT), operand(S.BK))
        state = warpgroup_mma(written, b, state, is_async=True)  # (5.3)
        if S.OUTPUT:  # A_qb has the scale
            nu_left = gl.convert_layout(nu16, LEFT_64)
            A_qb = query_pairs_tile(tiles, n, S)  # [C, C]
            if not S.CHANNEL:
                o = o * (row * numbers.scale)[None, :]
            if S.MAKES:
                wait_full(bars.made, n)
            o = warpgroup_mma(nu_left, A_qb.permute((1, 0)), o, is_async=True)  # (1.8)
            if S.SAVE or S.KEEP:
                put_tokens(nu16, nu_d, at, chunk * 64, channel, tiles.tokens.index(S.WARPGROUPS + w), BEFORE, S)
            state, written = products_done(1, deps=[state, written])
            leave_keys(n, S)
            last, nu_left = products_done(0, deps=[o, nu_left])
            leave_made(n, S)
        else:
            if S.SAVE:
                put_tokens(nu16, nu_d, at, chunk * 64, channel, tiles.tokens.index(w), BEFORE, S)
            state, written = products_done(0, deps=[state, written])
            leave_keys(n, S)
        leave_pairs(n, S)
    if S.OUTPUT:
        t = gl.where(at.count == 0, OUTSIDE, (at.begin + at.count - 1) * 64)
        put_tokens(last.to(DT), o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
    if x.ends is not None:
        store_end(x, at, state, w, MAPS, S)
    if x.result is not None:
        store_result(x, at, state, (at.index + 1) % numbers.segments == 0, w, S)
    stores_done(0)


@gluon.jit
def linear_consumer(w: gl.constexpr, d, x, segment, numbers, tiles, bars, MAPS: gl.constexpr, S: gl.constexpr):
    """The same without corrections."""
    at, first = segment
    o_d, s_d, _ = d
    DT: gl.constexpr = tiles.k.dtype
    BEFORE: gl.constexpr = S.OUTPUT + S.SAVE - 1  # other copies that are begun between two of one kind
    SCARCE: gl.constexpr = S.MAKES and S.BK == 128
    channel = at.channel + w * 64
    state = load_state(x, at, w, MAPS, S)  # [v, K]
    last = gl.zeros([64, 64], gl.float32, ACC_64)  # o of the chunk before, [v, C]
    BK: gl.constexpr = S.BK
    decay = gl.full([BK], 1.0, gl.float32, columns(BK))
    for i in range(at.count):
        n = first + i
        chunk = at.begin + i
        k = tiles.k.index(n % S.KEYS)  # [C, K]
        stage = (n % S.KEYS) * 4
        s16 = state.to(DT)
        wait_full(bars.k, n)
        total = total_decay(tiles.vectors, n, S.KEYS, S)
        state = state * total[None, :]
        if MAPS:
            decay *= total
        left = gl.convert_layout(s16, LEFT_64)
        last16 = last.to(DT)
        t = gl.where(i == 0, OUTSIDE, (chunk - 1) * 64)
        if SCARCE:
            put_tokens(last16, o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
        if S.OUTPUT:
            q = tiles.q.index(n % S.KEYS)  # [C, K]
            o = product(left, q.permute((1, 0)), ACC_64, 64, 64)
            if not SCARCE:
                put_tokens(last16, o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
        if S.SAVE:
            put_state(s16, s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, tiles.states.index(w), BEFORE)
        wait_full(bars.v, n)
        v = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w).permute((1, 0)).load(ACC_64)  # [v, C]
        if S.CHANNEL:
            written = gl.convert_layout(v, operand(S.BK))
        else:
            row = vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64)
            column = vector(tiles.vectors, stage + COLUMN_FACTOR, COLUMNS_64)
            if S.GIVEN:
                column *= vector(tiles.vectors, stage + BETA, COLUMNS_64)
            written = gl.convert_layout((in_float32(v) * column[None, :]).to(DT), operand(S.BK))
        state = warpgroup_mma(written, k, state, is_async=True)  # (5.3)
        leave_values(n, S)
        if S.OUTPUT:  # A_qb has the scale
            A_qb = query_pairs_tile(tiles, n, S)  # [C, C]
            pairs = bars.made if S.MAKES else bars.A
            v_left = gl.convert_layout(v, LEFT_64)
            wait_full(pairs, n)
            o, left = products_done(1, deps=[o, left])
            if not S.CHANNEL:
                o = o * (row * numbers.scale)[None, :]
            o = warpgroup_mma(v_left, A_qb.permute((1, 0)), o, is_async=True)  # (1.8)
            state, written = products_done(1, deps=[state, written])
            leave_keys(n, S)
            last, v_left = products_done(0, deps=[o, v_left])
            leave_made(n, S)
            leave_pairs(n, S)
        else:
            state, written = products_done(0, deps=[state, written])
            leave_keys(n, S)
    if S.OUTPUT:
        t = gl.where(at.count == 0, OUTSIDE, (at.begin + at.count - 1) * 64)
        put_tokens(last.to(DT), o_d, at, t, channel, tiles.tokens.index(w), BEFORE, S)
    if MAPS:
        store_end(x, at, state, w, MAPS, S)
        store_total(x, at, decay, S)
    if x.result is not None:
        store_result(x, at, state, (at.index + 1) % numbers.segments == 0, w, S)
    stores_done(0)


@gluon.jit
def segment_states(w: gl.constexpr, d, x, segment, numbers, tiles, bars, MAPS: gl.constexpr, S: gl.constexpr):
    """The rows 64 w ... of S^T of a segment, by the rule."""
    if S.CORRECTED and MAPS and S.WARPGROUPS == 2:
        map_consumer(w, x, segment, tiles, bars, S)
    elif S.CORRECTED:
        forward_consumer(w, d, x, segment, numbers, tiles, bars, MAPS, S)
    else:
        linear_consumer(w, d, x, segment, numbers, tiles, bars, MAPS, S)


@gluon.jit
def state_consumer(w: gl.constexpr, d, x, numbers, tiles, bars, MAPS: gl.constexpr, S: gl.constexpr):
    """The rows 64 w ... of S^T for each segment of the program."""
    if S.STAYS:
        first = gl.to_tensor(0)
        for turn in range(own_segments(numbers)):
            at = segment_of_turn(turn, x, numbers, MAPS, S)
            segment_states(w, d, x, (at, first), numbers, tiles, bars, MAPS, S)
            first += at.count
    else:
        at = segment_of_program(x, numbers, MAPS, S)
        segment_states(w, d, x, (at, 0), numbers, tiles, bars, MAPS, S)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def state_forward_kernel(q_d, k_d, v_d, A_d, vec_d, o_d, s_d, nu_d, x, n, S: gl.constexpr):
    """OUTPUT writes o, and with KEEP nu; SAVE writes nu and the state that each chunk starts from; neither, maps of segments, `x.ends`."""
    MAPS: gl.constexpr = x.ends is not None
    tiles, bars = state_tiles(False, S.OUTPUT + S.KEEP + (S.SAVE and S.CORRECTED), k_d.dtype, S)
    if S.EARLY:
        if S.OUTPUT:  # what reads starts, or writes, waits for the join of segments (`load_state`); the rest is older
            begin_next()
        else:
            overlap()
    inputs = (q_d, k_d, v_d, A_d, vec_d)
    results = (o_d, s_d, nu_d)
    if S.WARPGROUPS == 2 and S.MAKES:
        gl.warp_specialize(
            [
                (state_consumer, (0, results, x, n, tiles, bars, MAPS, S)),
                (state_consumer, (1, results, x, n, tiles, bars, MAPS, S)),
                (query_pairs, (x, n, tiles, bars, False, S)),
                (producer, (inputs, x, n, tiles, bars, False, MAPS, S)),
            ],
            [4, 4, 1],
            [216, 56, 24],
        )
    elif S.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (state_consumer, (0, results, x, n, tiles, bars, MAPS, S)),
                (state_consumer, (1, results, x, n, tiles, bars, MAPS, S)),
                (producer, (inputs, x, n, tiles, bars, False, MAPS, S)),
            ],
            [4, 1],
            [240, 24],
        )
    elif S.MAKES:
        gl.warp_specialize(
            [
                (state_consumer, (0, results, x, n, tiles, bars, MAPS, S)),
                (query_pairs, (x, n, tiles, bars, False, S)),
                (producer, (inputs, x, n, tiles, bars, False, MAPS, S)),
            ],
            [4, 1],
            [120, 24],
        )
    else:
        gl.warp_specialize(
            [
                (state_consumer, (0, results, x, n, tiles, bars, MAPS, S)),
                (producer, (inputs, x, n, tiles, bars, False, MAPS, S)),
            ],
            [1],
            [24],
        )
