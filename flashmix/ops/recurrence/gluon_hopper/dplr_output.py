"""The backward of `output` and `scores` of DPLR with a per-channel decay: by way of the states, and of the pairs in range for one pass.

    ~q = scale e^{G_i} q      ~a = e^{G_{i-1}} a      y_c = e^{-G} c of the columns c = k, b      W_k = V      W_b = nu
    dA_qc = dO W_c^T          dA_ac = dR W_c^T        w_c = e^{G_C - G} W_c dS'^T                               (6.1), (6.2)
    dX_q = dO S^T + dA_qk y_k + dA_qb y_b             dX_a = dR S^T + dA_ak y_k + dA_ab y_b                     (3.3)
    dY_c = dA_qc^T ~q + dA_ac^T ~a                    dc = w_c + e^{-G} dY_c
    dq = scale e^{G_i} dX_q                           da = e^{G_{i-1}} dX_a
    z = ~q dX_q - sum_c (y_c dY_c + c w_c)            rest = sum_i (k w_k + b w_b)_i + e^{G_C} <S, dS'>
    dg_t = sum_{i >= t} z_i + sum_{i > t} (~a dX_a)_i + rest                                                    (2.9)

channel by channel. `triton_gpu/channel_pairs.py` adds the pairs of rows out of range.

The form is that of `channel_output.py`: tiles of 64 channels of keys by the tokens of a chunk; persistent programs, an item is a (chunk,
value head); a warpgroup for dA, two consumers, a producer, a finisher. Three things differ. ~q and ~a come decayed and are operands as they
lie. There is room for two tiles of dA, so those of column k are made, then those of column b, then in their place the triangles of ones
for the sums of dg. A consumer keeps dX_q and dX_a in registers over both columns.
Letters of tiles: `C` = 64 tokens, `K` = 64 channels of keys of a consumer, `V` = 128 channels of values.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    ex2,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque_zero,
    product,
    products_done,
    reinterpret,
    signal,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.channel_copies import READERS, await_slot, channel_item_count, leave_slot
from flashmix.ops.recurrence.gluon_hopper.channel_output import diagonal_sums, float_keys, float_sums, rows_in_range
from flashmix.ops.recurrence.gluon_hopper.channel_scores import LIMIT
from flashmix.ops.recurrence.gluon_hopper.dplr_copies import (
    DO,
    DR,
    DSTATE,
    SLOTS,
    STATE,
    A,
    B,
    G,
    K,
    Q,
    W,
    dplr_finisher,
    dplr_producer,
)
from flashmix.ops.recurrence.gluon_hopper.layouts import ACC_64, COLUMNS_64, LEFT_64, ROWS_64, TILE, TILE_32
from flashmix.ops.recurrence.gluon_hopper.state_parts import ring
from flashmix.ops.recurrence.gluon_hopper.structs import DplrBarriers, DplrTiles


@gluon.jit
def values_of(slot: gl.constexpr, tiles):
    """Values or their gradients, [V, C]."""
    return tiles.slots.index(slot + opaque_zero()).permute((1, 0))


@gluon.jit
def column_pairs(column: gl.constexpr, x, item, far, i, tiles, bars, S: gl.constexpr):
    """dA of the rows q and a with one column, of the pairs that a row sees, if it is in range for one pass.

    Both are made before their places are awaited, so that consumers wait for two stores alone.
    """
    DT: gl.constexpr = tiles.slots.dtype
    here = (gl.arange(0, 64, ROWS_64) + opaque_zero())[:, None]
    there = gl.arange(0, 64, COLUMNS_64)[None, :]
    values = values_of(W, tiles)  # [V, C]
    await_slot(bars.slots, W, 2 * i + column)
    await_slot(bars.slots, DO, i)
    dA = product(tiles.slots.index(DO), values, ACC_64, 64, 64)
    dA = products_done(0, deps=[dA])
    if column == 1:
        leave_slot(bars.slots, DO, 1)
    dA_q = rows_in_range(gl.where(here >= there, dA, 0.0), x, item, far, S).to(DT)
    await_slot(bars.slots, DR, i)
    dA = product(tiles.slots.index(DR), values, ACC_64, 64, 64)
    dA = products_done(0, deps=[dA])
    leave_slot(bars.slots, W, 1)
    if column == 1:
        leave_slot(bars.slots, DR, 1)
    dA_a = rows_in_range(gl.where(here > there, dA, 0.0), x, item, far, S).to(DT)
    wait_empty(bars.pairs.empty, 3 * i + column)
    tiles.pairs.index(0).store(dA_q)
    tiles.pairs.index(1).store(dA_a)
    fence_async_shared()
    signal(bars.pairs.full, 3 * i + column)


@gluon.jit
def pairs_and_triangles(x, numbers, tiles, bars, S: gl.constexpr):
    """dA with column k, dA with column b, then the triangles of ones with and without the diagonal."""
    DT: gl.constexpr = tiles.slots.dtype
    there = gl.arange(0, 64, COLUMNS_64)[None, :]
    for i in range(channel_item_count(numbers, S)):
        item = gl.program_id(0) + i * gl.num_programs(0)
        far = gl.load(x.far + item)
        column_pairs(0, x, item, far, i, tiles, bars, S)
        column_pairs(1, x, item, far, i, tiles, bars, S)
        here = (gl.arange(0, 64, ROWS_64) + opaque_zero())[:, None]
        wait_empty(bars.pairs.empty, 3 * i + 2)
        tiles.pairs.index(0).store(gl.where(here >= there, 1.0, 0.0).to(DT))
        tiles.pairs.index(1).store(gl.where(here > there, 1.0, 0.0).to(DT))
        fence_async_shared()
        signal(bars.pairs.full, 3 * i + 2)


@gluon.jit
def keys_of(slot: gl.constexpr, w: gl.constexpr, tiles):
    """A consumer's half of a slot of tokens, [C, K]. Its index is opaque, so that what was read is read anew: registers are scarce."""
    DT: gl.constexpr = tiles.slots.dtype
    return reinterpret(tiles.slots, DT, [2 * SLOTS, 64, 64], TILE).index(2 * slot + w + opaque_zero())


@gluon.jit
def float_keys_of(slot: gl.constexpr, w: gl.constexpr, tiles):
    """The same as [K, C] in float32."""
    return float_keys(keys_of(slot, w, tiles))


@gluon.jit
def sums_of(w: gl.constexpr, tiles):
    """A consumer's half of G, [K, C]."""
    return float_sums(reinterpret(tiles.slots, gl.float32, [SLOTS, 64, 64], TILE_32).index(G + w + opaque_zero()))


@gluon.jit
def state_of(slot: gl.constexpr, w: gl.constexpr, tiles):
    """A consumer's half of a state, [V, K]."""
    DT: gl.constexpr = tiles.slots.dtype
    return reinterpret(tiles.slots, DT, [SLOTS, 128, 64], TILE).index(slot + w + opaque_zero())


@gluon.jit
def rows_of_pairs(row: gl.constexpr, tiles):
    """The transpose of dA of a row, [C, C]."""
    return tiles.pairs.index(row + opaque_zero()).permute((1, 0))


@gluon.jit
def begin_state(w: gl.constexpr, use, i, tiles, bars):
    """W_c dS'^T of a column, transposed, [K, C], begun."""
    await_slot(bars.slots, W, use)
    await_slot(bars.slots, DSTATE + w, i)
    return product(state_of(DSTATE, w, tiles).permute((1, 0)), values_of(W, tiles), ACC_64, 64, 64)  # (6.2)


@gluon.jit
def back_factor(w: gl.constexpr, tiles):
    """e^{-G}, [K, C]; of rows out of range no pair is seen."""
    return ex2(gl.minimum(0.0 - sums_of(w, tiles), LIMIT))


@gluon.jit
def scaled_keys(slot: gl.constexpr, w: gl.constexpr, tiles):
    """y of a column, [K, C]."""
    return (float_keys_of(slot, w, tiles) * back_factor(w, tiles)).to(tiles.slots.dtype)


@gluon.jit
def begin_column(w: gl.constexpr, tiles):
    """dY^T of a column, [K, C], begun."""
    q = keys_of(Q, w, tiles).permute((1, 0))  # [K, C]
    a = keys_of(A, w, tiles).permute((1, 0))  # [K, C]
    d = product(q, tiles.pairs.index(opaque_zero()), ACC_64, 64, 64)  # (3.3)
    return warpgroup_mma(a, tiles.pairs.index(1 + opaque_zero()), d, is_async=True)


@gluon.jit
def store_keys(slot: gl.constexpr, w: gl.constexpr, gradient, tiles):
    """Leaves a gradient in the place of its key."""
    keys_of(slot, w, tiles).permute((1, 0)).store(gradient.to(tiles.slots.dtype))


@gluon.jit
def pass_on(bars, number: gl.constexpr):
    """Tells the finisher that gradients lie in their places."""
    fence_async_shared()
    mbarrier.arrive(bars.gradients.index(number), count=1)


@gluon.jit
def leave_pairs(bars):
    mbarrier.arrive(bars.pairs.empty.index(0), count=1)


@gluon.jit
def columns(w: gl.constexpr, i, tiles, bars):
    """dk and db, left to the finisher; dX_q and dX_a by way of pairs, z and rest as far as columns go."""
    dk = begin_state(w, 2 * i, i, tiles, bars)
    await_slot(bars.slots, G + w, 2 * i)
    sums = sums_of(w, tiles)  # [K, C]
    last = gl.min(sums, 1)  # [K]; sums never rise
    column = ex2(last[:, None] - sums)
    dk, column = products_done(0, deps=[dk, column])
    leave_slot(bars.slots, W, 1)
    dk = dk * column
    await_slot(bars.slots, K, i)
    shares = dk * float_keys_of(K, w, tiles)
    z = 0.0 - shares
    rest = gl.sum(shares, 1)  # [K]
    y_left = gl.convert_layout(scaled_keys(K, w, tiles), LEFT_64)
    await_slot(bars.slots, Q, i)
    await_slot(bars.slots, A, i)
    wait_full(bars.pairs.full, 3 * i)
    d = begin_column(w, tiles)
    d, dk, z, y_left = products_done(0, deps=[d, dk, z, y_left])
    z -= gl.convert_layout(y_left, ACC_64).to(gl.float32) * d
    dk += d * back_factor(w, tiles)
    store_keys(K, w, dk, tiles)
    pass_on(bars, 0)
    dX_q = product(y_left, rows_of_pairs(0, tiles), ACC_64, 64, 64)
    dX_a = product(y_left, rows_of_pairs(1, tiles), ACC_64, 64, 64)
    await_slot(bars.slots, B, i)
    dX_q, dX_a, y_left, z = products_done(0, deps=[dX_q, dX_a, y_left, z])
    leave_pairs(bars)
    y_left = gl.convert_layout(scaled_keys(B, w, tiles), LEFT_64)
    wait_full(bars.pairs.full, 3 * i + 1)
    d = begin_column(w, tiles)
    dX_q = warpgroup_mma(y_left, rows_of_pairs(0, tiles), dX_q, is_async=True)
    dX_a = warpgroup_mma(y_left, rows_of_pairs(1, tiles), dX_a, is_async=True)
    d, dX_q, dX_a, y_left, z = products_done(0, deps=[d, dX_q, dX_a, y_left, z])
    leave_pairs(bars)
    z -= gl.convert_layout(y_left, ACC_64).to(gl.float32) * d
    db = d * back_factor(w, tiles)
    d = begin_state(w, 2 * i + 1, i, tiles, bars)
    d, dX_q, dX_a, z, db = products_done(0, deps=[d, dX_q, dX_a, z, db])
    leave_slot(bars.slots, W, 1)
    d = d * ex2(last[:, None] - sums_of(w, tiles))
    shares = d * float_keys_of(B, w, tiles)
    z -= shares
    rest += gl.sum(shares, 1)
    store_keys(B, w, db + d, tiles)
    pass_on(bars, 1)
    return dX_q, dX_a, z, rest, last


@gluon.jit
def rows(w: gl.constexpr, i, found, scale, tiles, bars):
    """dq and da, left to the finisher; z, ~a dX_a and rest."""
    dX_q, dX_a, z, rest, last = found
    await_slot(bars.slots, STATE + w, i)
    await_slot(bars.slots, DO, i)
    state = state_of(STATE, w, tiles).permute((1, 0))  # [K, V]
    dX_q = warpgroup_mma(state, values_of(DO, tiles), dX_q, is_async=True)
    inner = product(state, state_of(DSTATE, w, tiles), ACC_64, 64, 64)  # [K, K]
    dX_q, inner, dX_a, z = products_done(0, deps=[dX_q, inner, dX_a, z])
    leave_slot(bars.slots, DO, 1)
    leave_slot(bars.slots, DSTATE + w, READERS)
    await_slot(bars.slots, DR, i)
    state = state_of(STATE, w, tiles).permute((1, 0))  # [K, V]
    dX_a = warpgroup_mma(state, values_of(DR, tiles), dX_a, is_async=True)
    rest += diagonal_sums(inner) * ex2(last)
    z += float_keys_of(Q, w, tiles) * dX_q
    dq = dX_q * (ex2(sums_of(w, tiles)) * scale)
    dX_a, z, dq, rest = products_done(0, deps=[dX_a, z, dq, rest])
    leave_slot(bars.slots, DR, 1)
    leave_slot(bars.slots, G + w, READERS)
    store_keys(Q, w, dq, tiles)
    exclusive = float_keys_of(A, w, tiles) * dX_a
    await_slot(bars.slots, G + w, 2 * i + 1)
    first = (gl.arange(0, 64, COLUMNS_64) == 0)[None, :]  # no decay precedes its read; there lie sums of another chunk
    before = gl.where(first, 0.0, sums_of(w, tiles))  # [K, C]
    store_keys(A, w, dX_a * ex2(before), tiles)
    pass_on(bars, 2)
    leave_slot(bars.slots, G + w, READERS)
    return z, exclusive, rest


@gluon.jit
def add_sums(z, triangle, d, FIRST: gl.constexpr):
    """Adds the sums of z [K, C] over later tokens to d: a product with a triangle of ones, z in three parts of 16 bits."""
    DT: gl.constexpr = triangle.dtype
    high = z.to(DT)
    z -= high.to(gl.float32)
    middle = z.to(DT)
    z -= middle.to(gl.float32)
    high_left = gl.convert_layout(high, LEFT_64)
    middle_left = gl.convert_layout(middle, LEFT_64)
    low_left = gl.convert_layout(z.to(DT), LEFT_64)
    if FIRST:
        d = product(low_left, triangle, ACC_64, 64, 64)
    else:
        d = warpgroup_mma(low_left, triangle, d, is_async=True)
    d = warpgroup_mma(middle_left, triangle, d, is_async=True)
    d = warpgroup_mma(high_left, triangle, d, is_async=True)
    d, high_left, middle_left, low_left = products_done(0, deps=[d, high_left, middle_left, low_left])
    return d


@gluon.jit
def consumer(w: gl.constexpr, dg_d, numbers, tiles, bars, S: gl.constexpr):
    """The channels 64 w ... of dq, da, dk, db and dg, which are left in the places of the keys and of S."""
    slots = tiles.slots
    for i in range(channel_item_count(numbers, S)):
        found = columns(w, i, tiles, bars)
        z, exclusive, rest = rows(w, i, found, numbers.scale, tiles, bars)  # [K, C] twice, [K]
        wait_full(bars.pairs.full, 3 * i + 2)
        dg = add_sums(exclusive, tiles.pairs.index(1 + opaque_zero()), z, True)
        dg = add_sums(z, tiles.pairs.index(opaque_zero()), dg, False) + rest[:, None]
        leave_pairs(bars)
        if dg_d.dtype == gl.float32:
            sums = reinterpret(slots, gl.float32, [SLOTS, 64, 64], TILE_32)
            sums.index(STATE + w + opaque_zero()).permute((1, 0)).store(dg)
        else:
            narrow = reinterpret(slots, dg_d.dtype, [2 * SLOTS, 64, 64], TILE)
            narrow.index(2 * (STATE + w) + opaque_zero()).permute((1, 0)).store(dg.to(dg_d.dtype))
        pass_on(bars, 3)


@gluon.jit
def dplr_tiles(DT: gl.constexpr):
    """Shared memory and barriers."""
    tiles = DplrTiles(
        gl.allocate_shared_memory(DT, [SLOTS, 64, 128], TILE), gl.allocate_shared_memory(DT, [2, 64, 64], TILE)
    )
    return tiles, DplrBarriers(ring(SLOTS, 1, READERS), ring(1, 1, 2), allocate_barriers(4, 2))


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def dplr_output_kernel(
    q_d,
    a_d,
    k_d,
    b_d,
    G_d,
    before_d,
    v_d,
    nu_d,
    do_d,
    dr_d,
    s_d,
    ds_d,
    dq_d,
    da_d,
    dk_d,
    db_d,
    dg_d,
    x,
    n,
    S: gl.constexpr,
):
    """Gradients of keys, by value head, and of the decay, by way of the states and of the pairs in range for one pass."""
    tiles, bars = dplr_tiles(s_d.dtype)
    read = (q_d, a_d), (k_d, b_d), (G_d, before_d), (v_d, nu_d, do_d, dr_d), (s_d, ds_d)
    gl.warp_specialize(
        [
            (pairs_and_triangles, (x, n, tiles, bars, S)),
            (consumer, (0, dg_d, n, tiles, bars, S)),
            (consumer, (1, dg_d, n, tiles, bars, S)),
            (dplr_producer, (read, x, n, tiles, bars, S)),
            (dplr_finisher, ((dq_d, da_d, dk_d, db_d, dg_d), x, n, tiles, bars, S)),
        ],
        [4, 4, 1, 1],
        [192, 192, 24, 24],
    )
