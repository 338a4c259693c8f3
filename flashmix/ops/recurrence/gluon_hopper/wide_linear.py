"""The `state` phase of linear attention with 256 channels, forward and backward: two programs for all values of a state.

    o = scale e^G Q S + A_qb V                    S <- e^{G_C} S + K^T (e^{G_C - G} V)                   (1.8), (5.3)
    dV = e^{G_C - G} K dS' + A_qb^T dO            dS = e^{G_C} dS' + Q^T (scale e^G dO)                  (5.4), (5.7)

Without corrections the backward is the forward from the end with queries and keys in each other's place, so that both are one consumer.
One of the two, the `reader`, multiplies the state; what is written goes under the other, the `writer`. A consumer has 64 rows of S^T in
its accumulators, and the same in 16 bits in shared memory, from where it stands on the left of a product (as in `wide_parts.py`). No
other warpgroup reads it: o is made beside the state, and its sums with what is written are all the registers that there are. So the
values of A_qb V come from shared memory. A warpgroup more makes A_qb. The reader has one place: it is free again when the state has been
multiplied, while what is written has two. Where nothing is read, there are three of these.
Letters of tiles: `C` = 64 tokens, `K` = 256 channels of keys, `v` = 64 of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    ex2,
    expect_bytes,
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
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, ROWS_64, TILE, VECTOR, columns
from flashmix.ops.recurrence.gluon_hopper.place import fetch_tokens, segment_of_program, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import (
    COLUMN_FACTOR,
    ROW_FACTOR,
    fetch_values,
    load_state,
    put_tokens,
    ring,
    store_end,
    store_result,
    store_total,
    total_decay,
)
from flashmix.ops.recurrence.gluon_hopper.structs import LinearBarriers, LinearTiles
from flashmix.ops.recurrence.gluon_hopper.wide_parts import share_state


@gluon.jit
def linear_tiles(DT: gl.constexpr, S: gl.constexpr):
    """Shared memory of a pass, as far as it has use for it, and its barriers."""
    READERS: gl.constexpr = S.WARPGROUPS + (1 if S.MAKES else 0)
    writer = gl.allocate_shared_memory(DT, [S.KEYS, 64, S.BK], TILE)
    v = gl.allocate_shared_memory(DT, [S.WARPGROUPS * S.VALUES, 64, 64], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [4 * S.VALUES, 64], VECTOR)
    writers = ring(S.KEYS, 1, READERS)
    values = ring(S.VALUES, 1, READERS)
    reader = writer
    made = v
    states = writer
    tokens = v
    readers = writers
    pairs = values
    if S.MAKES:
        reader = gl.allocate_shared_memory(DT, [1, 64, S.BK], TILE)
        made = gl.allocate_shared_memory(DT, [S.PAIRS, 64, 64], TILE)
        tokens = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, 64], TILE)
        readers = ring(1, 1, READERS)
        pairs = ring(S.PAIRS, 1, S.WARPGROUPS)
    if S.MAKES or S.SAVE:
        states = gl.allocate_shared_memory(DT, [S.WARPGROUPS, 64, S.BK], TILE)
    tiles = LinearTiles(reader, writer, v, vectors, made, states, tokens)
    return tiles, LinearBarriers(readers, writers, values, pairs)


@gluon.jit
def tile_of(at, n, BACK: gl.constexpr):
    """The chunk of turn n, from the first or from the last."""
    if BACK:
        return at.begin + at.count - 1 - n
    else:
        return at.begin + n


@gluon.jit
def linear_producer(d, x, numbers, tiles, bars, BACK: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr):
    """Fills the rings, forward or from the end."""
    reader_d, writer_d, v_d, vec_d = d
    at = segment_of_program(x, numbers, MAPS, S)
    for n in range(at.count):
        chunk = tile_of(at, n, BACK)
        t = chunk * 64
        key_head = at.head // S.GROUP
        wait_empty(bars.v.empty, n)
        fetch_values((v_d, vec_d), at, t, (at.chunk0 + chunk) * S.HV + at.head, n, tiles, bars.v.full, MAPS, S)
        wait_empty(bars.writer.empty, n)
        bar = expect_bytes(bars.writer.full, n, 64 * S.BK * 2)
        fetch_tokens(writer_d, at.span, t, key_head, 0, bar, tiles.writer.index(n % S.KEYS), S)
        if S.MAKES:
            wait_empty(bars.reader.empty, n)
            bar = expect_bytes(bars.reader.full, n, 64 * S.BK * 2)
            fetch_tokens(reader_d, at.span, t, key_head, 0, bar, tiles.reader.index(0), S)


@gluon.jit
def linear_pairs(x, numbers, tiles, bars, BACK: gl.constexpr, S: gl.constexpr):
    """The warpgroup for A_qb (3.1), ahead of those of the states as far as there are keys and places."""
    at = segment_of_program(x, numbers, False, S)
    for n in range(at.count):
        z = opaque_zero()  # lest masks and descriptors be hoisted into registers
        stage = (n % S.VALUES) * 4 + z
        if BACK:
            q = tiles.writer.index(n % S.KEYS)  # [C, K]
            k = tiles.reader.index(z)  # [C, K]
        else:
            q = tiles.reader.index(z)  # [C, K]
            k = tiles.writer.index(n % S.KEYS)  # [C, K]
        wait_full(bars.writer.full, n)
        wait_full(bars.reader.full, n)
        A = product(k, q.permute((1, 0)), ACC_64, 64, 64)  # [C, C], transposed: 64 columns read the keys once
        wait_full(bars.v.full, n)
        A = products_done(0, deps=[A])
        release(bars.reader.empty, n)
        release(bars.writer.empty, n)
        key = gl.arange(0, 64, ROWS_64) + z
        query = gl.arange(0, 64, COLUMNS_64) + z
        G = pin(vector(tiles.vectors, stage, ROWS_64))
        G_query = pin(vector(tiles.vectors, stage, COLUMNS_64))
        A = A * (ex2(gl.minimum(G_query[None, :] - G[:, None], 0.0)) * numbers.scale)
        A = gl.where(query[None, :] >= key[:, None], A, 0.0)
        release(bars.v.empty, n)
        wait_empty(bars.made.empty, n)
        tiles.made.index(n % S.PAIRS + z).permute((1, 0)).store(A.to(q.dtype))
        fence_async_shared()
        signal(bars.made.full, n)


@gluon.jit
def factor(tiles, stage, scale, QUERIES: gl.constexpr):
    """What multiplies the tokens of queries or of keys, [C]."""
    if QUERIES:
        return vector(tiles.vectors, stage + ROW_FACTOR, COLUMNS_64) * scale
    else:
        return vector(tiles.vectors, stage + COLUMN_FACTOR, COLUMNS_64)


@gluon.jit
def linear_consumer(
    w: gl.constexpr, d, x, numbers, tiles, bars, BACK: gl.constexpr, MAPS: gl.constexpr, S: gl.constexpr
):
    """The rows 64 w ... of S^T, or of dS^T from the end."""
    result_d, s_d = d
    DT: gl.constexpr = tiles.writer.dtype
    BK: gl.constexpr = S.BK
    BEFORE: gl.constexpr = S.MAKES + S.SAVE - 1  # other copies that are begun between two of one kind
    at = segment_of_program(x, numbers, MAPS, S)
    channel = at.channel + w * 64
    state = load_state(x, at, w, MAPS, S)  # [v, K]
    decay = gl.full([BK], 1.0, gl.float32, columns(BK))
    for n in range(at.count):
        chunk = tile_of(at, n, BACK)
        z = opaque_zero()  # lest descriptors be hoisted into registers
        v = tiles.v.index((n % S.VALUES) * S.WARPGROUPS + w + z).permute((1, 0))  # [v, C]
        stage = (n % S.VALUES) * 4 + z
        if S.MAKES or S.SAVE:
            shared = tiles.states.index(w + z)  # [v, K]
            share_state(state.to(DT), s_d, (at.chunk0 + chunk) * S.HV + at.head, channel, shared, BEFORE, S.SAVE)
        wait_full(bars.v.full, n)
        total = total_decay(tiles.vectors, n, S.VALUES, S)
        state = state * total[None, :]  # before the product, which ptxas would wait for
        if MAPS:
            decay *= total
        if S.MAKES:
            wait_full(bars.reader.full, n)
            o = product(shared, tiles.reader.index(z).permute((1, 0)), ACC_64, 64, 64)
        written = v.load(ACC_64)  # [v, C]
        written = written.to(gl.float32) * factor(tiles, stage, numbers.scale, BACK)[None, :]
        written = gl.convert_layout(written.to(DT), operand(128))
        wait_full(bars.writer.full, n)
        state = warpgroup_mma(written, tiles.writer.index(n % S.KEYS), state, is_async=True)  # (5.3), (5.7)
        if S.MAKES:
            o = products_done(1, deps=[o])
            release(bars.reader.empty, n)
            o = o * factor(tiles, stage, numbers.scale, not BACK)[None, :]
            wait_full(bars.made.full, n)
            A_qb = tiles.made.index(n % S.PAIRS + z)  # [C, C]
            if BACK:
                o = warpgroup_mma(v, A_qb, o, is_async=True)  # (5.4)
            else:
                o = warpgroup_mma(v, A_qb.permute((1, 0)), o, is_async=True)  # (1.8)
            state, written = products_done(1, deps=[state, written])
            release(bars.writer.empty, n)
            o = products_done(0, deps=[o])
            release(bars.made.empty, n)
            release(bars.v.empty, n)
            put_tokens(o.to(DT), result_d, at, chunk * 64, channel, tiles.tokens.index(w + z), BEFORE, S)
        else:
            state, written = products_done(0, deps=[state, written])
            release(bars.v.empty, n)
            release(bars.writer.empty, n)
    if x.ends is not None:
        store_end(x, at, state, w, MAPS, S)
    if MAPS:
        store_total(x, at, decay, S)
    if x.result is not None:
        segment = at.index if BACK else at.index + 1
        store_result(x, at, state, segment % numbers.segments == 0, w, S)
    stores_done(0)


@gluon.jit
def linear_pass(inputs, results, x, n, BACK: gl.constexpr, S: gl.constexpr):
    """A pass of one direction: its roles."""
    MAPS: gl.constexpr = x.ends is not None and not BACK
    _, writer_d, _, _ = inputs
    tiles, bars = linear_tiles(writer_d.dtype, S)
    if S.WARPGROUPS == 2 and S.MAKES:
        gl.warp_specialize(
            [
                (linear_consumer, (0, results, x, n, tiles, bars, BACK, MAPS, S)),
                (linear_consumer, (1, results, x, n, tiles, bars, BACK, MAPS, S)),
                (linear_pairs, (x, n, tiles, bars, BACK, S)),
                (linear_producer, (inputs, x, n, tiles, bars, BACK, MAPS, S)),
            ],
            [4, 4, 1],
            [208, 72, 24],
        )
    elif S.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (linear_consumer, (0, results, x, n, tiles, bars, BACK, MAPS, S)),
                (linear_consumer, (1, results, x, n, tiles, bars, BACK, MAPS, S)),
                (linear_producer, (inputs, x, n, tiles, bars, BACK, MAPS, S)),
            ],
            [4, 1],
            [240, 24],
        )
    elif S.MAKES:
        gl.warp_specialize(
            [
                (linear_consumer, (0, results, x, n, tiles, bars, BACK, MAPS, S)),
                (linear_pairs, (x, n, tiles, bars, BACK, S)),
                (linear_producer, (inputs, x, n, tiles, bars, BACK, MAPS, S)),
            ],
            [4, 1],
            [120, 24],
        )
    else:
        gl.warp_specialize(
            [
                (linear_consumer, (0, results, x, n, tiles, bars, BACK, MAPS, S)),
                (linear_producer, (inputs, x, n, tiles, bars, BACK, MAPS, S)),
            ],
            [1],
            [24],
        )


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def wide_linear_forward_kernel(q_d, k_d, v_d, A_d, vec_d, o_d, s_d, nu_d, x, n, S: gl.constexpr):
    """MAKES writes o; SAVE writes the state that each chunk starts from; neither, the maps of segments `x.ends`, or the last state."""
    linear_pass((q_d, k_d, v_d, vec_d), (o_d, s_d), x, n, False, S)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def wide_linear_backward_kernel(q_d, k_d, do_d, A_d, vec_d, s_d, dv_d, x, n, S: gl.constexpr):
    """MAKES writes dV and the gradient of the state that each chunk leaves; else only what each segment sends back, `x.ends`."""
    linear_pass((k_d, q_d, do_d, vec_d), (dv_d, s_d), x, n, True, S)
