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
from flashmix.ops.recurrence.gluon_hopper.structs import DplrBarriers, DplrOwnTiles, DplrTiles


@gluon.jit
def column_pairs(column: gl.constexpr, x, item, far, i, tiles, bars, S: gl.constexpr):
    """dA of the rows q and a with one column, of the pairs that a row sees, if it is in range for one pass."""
    DT: gl.constexpr = tiles.slots.dtype
    here = (gl.arange(0, 64, ROWS_64) + opaque_zero())[:, None]
    there = gl.arange(0, 64, COLUMNS_64)[None, :]
    values = tiles.slots.index(W).permute((1, 0))  # [V, C]
    await_slot(bars.slots, W, 2 * i + column)
    await_slot(bars.slots, DO, i)
    dA = product(tiles.slots.index(DO), values, ACC_64, 64, 64)
    dA = products_done(0, deps=[dA])
    if column == 1:
        leave_slot(bars.slots, DO, 1)
    dA = rows_in_range(gl.where(here >= there, dA, 0.0), x, item, far, S)
    wait_empty(bars.pairs.empty, 3 * i + column)
    tiles.pairs.index(0).store(dA.to(DT))
    await_slot(bars.slots, DR, i)
    dA = product(tiles.slots.index(DR), values, ACC_64, 64, 64)
    dA = products_done(0, deps=[dA])
    leave_slot(bars.slots, W, 1)
    if column == 1:
        leave_slot(bars.slots, DR, 1)
    dA = rows_in_range(gl.where(here > there, dA, 0.0), x, item, far, S)
    tiles.pairs.index(1).store(dA.to(DT))
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
def by_state(w: gl.constexpr, use, i, key, own, tiles, bars):
    """w of a column, and its key times that, [K, C]."""
    values = tiles.slots.index(W + opaque_zero()).permute((1, 0))  # [V, C]
    await_slot(bars.slots, W, use)
    await_slot(bars.slots, DSTATE + w, i)
    d = product(own.dstate.permute((1, 0)), values, ACC_64, 64, 64)  # (6.2)
    await_slot(bars.slots, G + w, 2 * i)
    sums = float_sums(own.decay)  # [K, C]
    column = ex2(gl.min(sums, 1)[:, None] - sums)  # sums never rise
    d, column = products_done(0, deps=[d, column])
    leave_slot(bars.slots, W, 1)
    d = d * column
    return d, d * float_keys(key)


@gluon.jit
def back_factor(decay):
    """e^{-G}, [K, C]; of rows out of range no pair is seen."""
    return ex2(gl.minimum(0.0 - float_sums(decay), LIMIT))


@gluon.jit
def scaled_keys(key, own):
    """y of a column, [K, C]."""
    return (float_keys(key) * back_factor(own.decay)).to(key.dtype)


@gluon.jit
def begin_columns(own, tiles):
    """dY^T of a column, [K, C], begun."""
    zero = opaque_zero()
    d = product(own.q.permute((1, 0)), tiles.pairs.index(zero), ACC_64, 64, 64)  # (3.3)
    return warpgroup_mma(own.a.permute((1, 0)), tiles.pairs.index(1 + zero), d, is_async=True)


@gluon.jit
def store_keys(own, gradient, number: gl.constexpr, bars):
    """Leaves the gradient of a column in the place of its key to the finisher."""
    own.permute((1, 0)).store(gradient.to(own.dtype))
    fence_async_shared()
    mbarrier.arrive(bars.gradients.index(number), count=1)


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
def leave_pairs(bars):
    mbarrier.arrive(bars.pairs.empty.index(0), count=1)


@gluon.jit
def columns(w: gl.constexpr, i, own, tiles, bars):
    """dk and db, left to the finisher; dX_q and dX_a by way of pairs, z and rest as far as columns go."""
    await_slot(bars.slots, K, i)
    dk, shares = by_state(w, 2 * i, i, own.k, own, tiles, bars)  # [K, C] twice
    z = 0.0 - shares
    rest = gl.sum(shares, 1)  # [K]
    y = scaled_keys(own.k, own)
    await_slot(bars.slots, Q, i)
    await_slot(bars.slots, A, i)
    wait_full(bars.pairs.full, 3 * i)
    d = begin_columns(own, tiles)
    d, dk, z = products_done(0, deps=[d, dk, z])
    z -= y.to(gl.float32) * d
    dk += d * back_factor(own.decay)
    store_keys(own.k, dk, 0, bars)
    y_left = gl.convert_layout(y, LEFT_64)
    zero = opaque_zero()
    dX_q = product(y_left, tiles.pairs.index(zero).permute((1, 0)), ACC_64, 64, 64)
    dX_a = product(y_left, tiles.pairs.index(1 + zero).permute((1, 0)), ACC_64, 64, 64)
    await_slot(bars.slots, B, i)
    dX_q, dX_a, y_left, z = products_done(0, deps=[dX_q, dX_a, y_left, z])
    leave_pairs(bars)
    y = scaled_keys(own.b, own)
    y_left = gl.convert_layout(y, LEFT_64)
    wait_full(bars.pairs.full, 3 * i + 1)
    d = begin_columns(own, tiles)
    zero = opaque_zero()
    dX_q = warpgroup_mma(y_left, tiles.pairs.index(zero).permute((1, 0)), dX_q, is_async=True)
    dX_a = warpgroup_mma(y_left, tiles.pairs.index(1 + zero).permute((1, 0)), dX_a, is_async=True)
    d, dX_q, dX_a, y_left, z = products_done(0, deps=[d, dX_q, dX_a, y_left, z])
    leave_pairs(bars)
    z -= y.to(gl.float32) * d
    db = d * back_factor(own.decay)
    d, shares = by_state(w, 2 * i + 1, i, own.b, own, tiles, bars)  # [K, C] twice
    z -= shares
    rest += gl.sum(shares, 1)
    store_keys(own.b, db + d, 1, bars)
    return dX_q, dX_a, z, rest


@gluon.jit
def rows(w: gl.constexpr, i, gradients, own, tiles, scale, bars):
    """dq and da, left in the places of q and a; z, ~a dX_a and rest."""
    dX_q, dX_a, z, rest = gradients
    DT: gl.constexpr = tiles.slots.dtype
    zero = opaque_zero()
    await_slot(bars.slots, STATE + w, i)
    await_slot(bars.slots, DO, i)
    dX_q = warpgroup_mma(own.state, tiles.slots.index(DO + zero).permute((1, 0)), dX_q, is_async=True)
    inner = product(own.state, own.dstate, ACC_64, 64, 64)  # [K, K]
    dX_q, inner, dX_a, z = products_done(0, deps=[dX_q, inner, dX_a, z])
    leave_slot(bars.slots, DO, 1)
    leave_slot(bars.slots, DSTATE + w, READERS)
    await_slot(bars.slots, DR, i)
    dX_a = warpgroup_mma(own.state, tiles.slots.index(DR + zero).permute((1, 0)), dX_a, is_async=True)
    sums = float_sums(own.decay)  # [K, C]
    rest += diagonal_sums(inner) * ex2(gl.min(sums, 1))
    row = ex2(sums) * scale
    z += float_keys(own.q) * dX_q
    dq = (dX_q * row).to(DT)
    dX_a, z, dq, rest = products_done(0, deps=[dX_a, z, dq, rest])
    leave_slot(bars.slots, DR, 1)
    leave_slot(bars.slots, G + w, READERS)
    own.q.permute((1, 0)).store(dq)
    exclusive = float_keys(own.a) * dX_a
    await_slot(bars.slots, G + w, 2 * i + 1)
    first = (gl.arange(0, 64, COLUMNS_64) == 0)[
        None, :
    ]  # no decay precedes its read; what lies there is another chunk's
    da = dX_a * ex2(gl.where(first, 0.0, float_sums(own.decay)))
    own.a.permute((1, 0)).store(da.to(DT))
    leave_slot(bars.slots, G + w, READERS)
    return z, exclusive, rest


@gluon.jit
def consumer(w: gl.constexpr, dg_d, numbers, tiles, bars, S: gl.constexpr):
    """The channels 64 w ... of dq, da, dk, db and dg, which are left in the places of the keys and of S."""
    DT: gl.constexpr = tiles.slots.dtype
    slots = tiles.slots
    halves = reinterpret(slots, DT, [2 * SLOTS, 64, 64], TILE)
    states = reinterpret(slots, DT, [SLOTS, 128, 64], TILE)
    decays = reinterpret(slots, gl.float32, [SLOTS, 64, 64], TILE_32)
    for i in range(channel_item_count(numbers, S)):
        zero = opaque_zero()  # lest addresses of slots be hoisted into registers
        own = DplrOwnTiles(
            q=halves.index(2 * Q + w + zero),
            a=halves.index(2 * A + w + zero),
            k=halves.index(2 * K + w + zero),
            b=halves.index(2 * B + w + zero),
            decay=decays.index(G + w + zero),
            state=states.index(STATE + w + zero).permute((1, 0)),
            dstate=states.index(DSTATE + w + zero),
        )
        gradients = columns(w, i, own, tiles, bars)
        z, exclusive, rest = rows(w, i, gradients, own, tiles, numbers.scale, bars)  # [K, C] twice, [K]
        wait_full(bars.pairs.full, 3 * i + 2)
        dg = add_sums(exclusive, tiles.pairs.index(1 + zero), z, True)
        dg = add_sums(z, tiles.pairs.index(zero), dg, False) + rest[:, None]
        leave_pairs(bars)
        if dg_d.dtype == gl.float32:
            decays.index(STATE + w + zero).permute((1, 0)).store(dg)
        else:
            narrow = reinterpret(slots, dg_d.dtype, [2 * SLOTS, 64, 64], TILE)
            narrow.index(2 * (STATE + w) + zero).permute((1, 0)).store(dg.to(dg_d.dtype))
        fence_async_shared()
        mbarrier.arrive(bars.gradients.index(2), count=1)


@gluon.jit
def dplr_tiles(DT: gl.constexpr):
    """Shared memory and barriers."""
    tiles = DplrTiles(
        gl.allocate_shared_memory(DT, [SLOTS, 64, 128], TILE), gl.allocate_shared_memory(DT, [2, 64, 64], TILE)
    )
    return tiles, DplrBarriers(ring(SLOTS, 1, READERS), ring(1, 1, 2), allocate_barriers(3, 2))


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def dplr_output_kernel(
    q_d, a_d, k_d, b_d, G_d, before_d, v_d, nu_d, do_d, dr_d, s_d, ds_d,
    dq_d, da_d, dk_d, db_d, dg_d, x, n, S: gl.constexpr,
):  # fmt: skip
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
        [208, 208, 24, 24],
    )
