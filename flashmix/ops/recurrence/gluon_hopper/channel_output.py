"""The backward of `output` and `scores` with a per-channel decay: by way of the states, and of the pairs of rows in range for one pass.

    ~x = e^{G-m} x (x = scale q, -k)    y = e^{m-G} beta k       dA_q = dO nu^T        dA_a = dR nu^T        (6.1)
    dX_q = dO S^T e^m + dA_q y          dX_a = dR S^T e^m + dA_a y                                          (3.3), (6.2)
    dY = dA_q^T ~q + dA_a^T ~a          w = e^{G_C - G} nu dS'^T
    dq = scale e^{G-m} dX_q             d(beta k) = w + e^{m-G} dY                 dk = beta d(beta k) - e^{G-m} dX_a
    dg_t = sum_{i >= t} (~q dX_q + ~a dX_a - y dY - beta k w)_i + sum_i (beta k w)_i + e^{G_C} <S, dS'>      (2.9)

channel by channel, with m = -64 to base 2 for all: so one way has rows that have decayed by up to `2^-REACHED`, and no bit depends on how
far later tokens decay. dO and dR are multiplied by e^m, a power of 2, where they lie. `triton_gpu/channel_pairs.py` adds the pairs of rows
out of range. Without corrections beta is 1, nu is V, and there are no ~a, dA_a and dX_a.

Everything is transposed: a consumer's tiles are `[K, C]`, 64 channels of keys by the tokens of a chunk. So scaled keys are left operands in
registers, what is summed over tokens is summed along rows, and the suffix sums of dg are products with a triangle of ones on the right.
Persistent programs, an item is a (chunk, value head). Roles: `pair_gradients`, a warpgroup for dA; two `consumer` warpgroups; a producer
of one warp; a `finisher` of one warp that sends the gradients to memory. These lie where
q, k and S were: S because the next one is needed last.
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
from flashmix.ops.recurrence.gluon_hopper.channel_copies import (
    DO,
    DR,
    DSTATE,
    NU,
    READERS,
    SLOTS,
    STATE,
    G,
    K,
    Q,
    await_slot,
    channel_finisher,
    channel_item_count,
    channel_producer,
    leave_slot,
)
from flashmix.ops.recurrence.gluon_hopper.channel_scores import REACHED, WHOLE
from flashmix.ops.recurrence.gluon_hopper.layouts import (
    ACC_64,
    COLUMNS_64,
    LEFT_64,
    ROWS_64,
    TILE,
    TILE_32,
    VECTOR,
    VECTORS,
)
from flashmix.ops.recurrence.gluon_hopper.state_parts import ring
from flashmix.ops.recurrence.gluon_hopper.structs import ChannelBarriers, ChannelTiles

MIDDLE = gl.constexpr(-64.0)  # m to base 2
LINES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
SMALLER = gl.constexpr(2.0**-64)  # 2^m


@gluon.jit
def rows_in_range(dA, x, item, far, S: gl.constexpr):
    """dA [C, C] of the rows that reach back to the chunk's start, else 0."""
    if far == 2:
        t = gl.arange(0, 64, ROWS_64)
        reach = gl.load(x.reach + item.to(gl.int64) * ((S.K + 31) // 32 * 64) + t)  # [C]
        dA = gl.where((reach == WHOLE)[:, None], dA, 0.0)
    return dA


@gluon.jit
def make_smaller(tile):
    """dO e^m in the place of dO [C, V]: exact, as e^m is a power of 2 (below 2^-62 as far as denormal numbers go)."""
    x = tile.load(LINES).to(gl.float32)  # [C, V]
    tile.store((x * SMALLER).to(tile.dtype))


@gluon.jit
def pair_gradients(x, numbers, tiles, bars, S: gl.constexpr):
    """dA of the pairs that a row sees, if it is in range for one pass; then dO e^m and dR e^m. Before the first the triangle of ones."""
    DT: gl.constexpr = tiles.slots.dtype
    row = gl.arange(0, 64, ROWS_64)
    column = gl.arange(0, 64, COLUMNS_64)
    tiles.triangle.store(gl.where(row[:, None] >= column[None, :], 1.0, 0.0).to(DT))
    for i in range(channel_item_count(numbers, S)):
        item = gl.program_id(0) + i * gl.num_programs(0)
        far = gl.load(x.far + item)
        here = (row + opaque_zero())[:, None]
        nu = tiles.slots.index(NU).permute((1, 0))  # [V, C]
        await_slot(bars.slots, NU, i)
        await_slot(bars.slots, DO, i)
        dA = product(tiles.slots.index(DO), nu, ACC_64, 64, 64)
        dA = products_done(0, deps=[dA])
        if not S.CORRECTED:
            leave_slot(bars.slots, NU, 1)
        dA = rows_in_range(gl.where(here >= column[None, :], dA, 0.0), x, item, far, S)
        wait_empty(bars.pairs.empty, i)
        tiles.pairs.index(0).store(dA.to(DT))
        make_smaller(tiles.slots.index(DO + opaque_zero()))
        if S.CORRECTED:
            await_slot(bars.slots, DR, i)
            dA = product(tiles.slots.index(DR), nu, ACC_64, 64, 64)
            dA = products_done(0, deps=[dA])
            leave_slot(bars.slots, NU, 1)
            dA = rows_in_range(gl.where(here > column[None, :], dA, 0.0), x, item, far, S)
            tiles.pairs.index(1).store(dA.to(DT))
            make_smaller(tiles.slots.index(DR + opaque_zero()))
        fence_async_shared()
        signal(bars.pairs.full, i)
        leave_slot(bars.slots, DO, 1)
        if S.CORRECTED:
            leave_slot(bars.slots, DR, 1)


@gluon.jit
def float_keys(half):
    """A tile of keys [C, K] as [K, C] in float32."""
    return half.permute((1, 0)).load(ACC_64).to(gl.float32)


@gluon.jit
def float_sums(decay):
    """G [C, K] as [K, C], read anew wherever it is used: registers are scarce."""
    return decay.permute((1, 0)).load(ACC_64)


@gluon.jit
def row_factors(sums):
    """2^(G - m)."""
    return ex2(sums - MIDDLE)


@gluon.jit
def column_factors(sums):
    """2^(m - G), bounded: no pair is seen of a row whose G is lower."""
    return ex2(gl.minimum(MIDDLE - sums, REACHED + MIDDLE))


@gluon.jit
def written_keys(half, beta, S: gl.constexpr):
    """beta k, [K, C] in float32."""
    if S.CORRECTED:
        return float_keys(half) * beta.load(COLUMNS_64)[None, :]
    else:
        return float_keys(half)


@gluon.jit
def by_state(w: gl.constexpr, i, slots, half, decay, beta, bars, S: gl.constexpr):
    """w and -beta k w, [K, C], and of the latter's negative the sum over tokens and e^{G_C}, [K]."""
    z = opaque_zero()
    dstate = reinterpret(slots, slots.dtype, [SLOTS, 128, 64], TILE).index(DSTATE + w + z)  # [V, K]
    await_slot(bars.slots, NU, i)
    await_slot(bars.slots, DSTATE + w, i)
    d = product(dstate.permute((1, 0)), slots.index(NU + z).permute((1, 0)), ACC_64, 64, 64)  # (6.2)
    await_slot(bars.slots, G + w, i)
    sums = float_sums(decay)  # [K, C]
    last = gl.min(sums, 1)  # sums never rise
    column = ex2(last[:, None] - sums)
    d, column = products_done(0, deps=[d, column])
    leave_slot(bars.slots, NU, 1)
    d = d * column
    await_slot(bars.slots, K, i)
    shares = d * written_keys(half, beta, S)
    return d, 0.0 - shares, gl.sum(shares, 1), ex2(last)


@gluon.jit
def diagonal_sums(inner):
    """The diagonal of a product S^T dS', [K, K]: <S, dS'> of each channel."""
    here = gl.arange(0, 64, ROWS_64)
    there = gl.arange(0, 64, COLUMNS_64)
    return gl.sum(gl.where((here + opaque_zero())[:, None] == there[None, :], inner, 0.0), 1)


@gluon.jit
def decayed_rows(half, factor, DT: gl.constexpr):
    """~x, [K, C]."""
    return (float_keys(half) * factor).to(DT)


@gluon.jit
def suffix_sums(z, triangle):
    """Sums of z [K, C] from each token to the chunk's end: a product with a triangle of ones, z in three parts of 16 bits."""
    DT: gl.constexpr = triangle.dtype
    high = z.to(DT)
    z -= high.to(gl.float32)
    middle = z.to(DT)
    z -= middle.to(gl.float32)
    high_left = gl.convert_layout(high, LEFT_64)
    middle_left = gl.convert_layout(middle, LEFT_64)
    low_left = gl.convert_layout(z.to(DT), LEFT_64)
    d = product(low_left, triangle, ACC_64, 64, 64)
    d = warpgroup_mma(middle_left, triangle, d, is_async=True)
    d = warpgroup_mma(high_left, triangle, d, is_async=True)
    d, high_left, middle_left, low_left = products_done(0, deps=[d, high_left, middle_left, low_left])
    return d


@gluon.jit
def store_sums(own, w: gl.constexpr, sums):
    """Leaves the sums of a consumer over each warp's channels, [C], to the finisher."""
    parts = gl.sum(own.reshape([4, 2, 8, 64]), 1)
    parts = gl.sum(parts, 1)  # [4, C]
    reinterpret(sums, gl.float32, [2, 4, 64], VECTORS).index(w).store(parts)


@gluon.jit
def consumer(w: gl.constexpr, dg_d, numbers, tiles, bars, S: gl.constexpr):
    """The channels 64 w ... of dq, dk and dg, which are left in the places of q, k and S."""
    DT: gl.constexpr = tiles.slots.dtype
    scale = numbers.scale
    slots = tiles.slots
    halves = reinterpret(slots, DT, [2 * SLOTS, 64, 64], TILE)
    states = reinterpret(slots, DT, [SLOTS, 128, 64], TILE)
    decays = reinterpret(slots, gl.float32, [SLOTS, 64, 64], TILE_32)
    for i in range(channel_item_count(numbers, S)):
        zero = opaque_zero()  # lest addresses of slots be hoisted into registers
        q = halves.index(2 * Q + w + zero)  # [C, K]
        k = halves.index(2 * K + w + zero)  # [C, K]
        decay = decays.index(G + w + zero)  # [C, K]
        state = states.index(STATE + w + zero).permute((1, 0))  # [K, V]
        dstate = states.index(DSTATE + w + zero)  # [V, K]
        beta = tiles.beta.index(i % 2)
        if S.CORRECTED:
            wait_full(bars.beta, i)
        dk, z, rest, total = by_state(w, i, slots, k, decay, beta, bars, S)  # [K, C] twice, [K] twice
        sums = float_sums(decay)  # [K, C]
        y = (written_keys(k, beta, S) * column_factors(sums)).to(DT)
        row = row_factors(sums)
        await_slot(bars.slots, Q, i)
        q_left = gl.convert_layout(decayed_rows(q, row * scale, DT), LEFT_64)
        if S.CORRECTED:
            a_left = gl.convert_layout(decayed_rows(k, 0.0 - row, DT), LEFT_64)
        wait_full(bars.pairs.full, i)  # of dO and dR too
        d = product(q_left, tiles.pairs.index(zero), ACC_64, 64, 64)  # dY^T, (3.3)
        if S.CORRECTED:
            d = warpgroup_mma(a_left, tiles.pairs.index(1 + zero), d, is_async=True)
            d, q_left, a_left = products_done(0, deps=[d, q_left, a_left])
        else:
            d, q_left = products_done(0, deps=[d, q_left])
        y_left = gl.convert_layout(y, LEFT_64)
        dX = product(y_left, tiles.pairs.index(zero).permute((1, 0)), ACC_64, 64, 64)
        await_slot(bars.slots, STATE + w, i)
        dX = warpgroup_mma(state, slots.index(DO + zero).permute((1, 0)), dX, is_async=True)  # dX_q^T
        z -= y.to(gl.float32) * d
        dk += d * column_factors(float_sums(decay))
        if S.CORRECTED:
            store_sums(float_keys(k) * dk, w, tiles.sums)
            dk = dk * beta.load(COLUMNS_64)[None, :]  # [1, C]
        inner = product(state, dstate, ACC_64, 64, 64)  # [K, K]
        dX, inner, y_left, z, dk = products_done(0, deps=[dX, inner, y_left, z, dk])
        leave_slot(bars.slots, DO, 1)
        leave_slot(bars.slots, DSTATE + w, READERS)
        rest += diagonal_sums(inner) * total
        if S.CORRECTED:
            dX_a = product(y_left, tiles.pairs.index(1 + zero).permute((1, 0)), ACC_64, 64, 64)
            dX_a = warpgroup_mma(state, slots.index(DR + zero).permute((1, 0)), dX_a, is_async=True)  # dX_a^T
        row = row_factors(float_sums(decay))
        z += decayed_rows(q, row * scale, DT).to(gl.float32) * dX
        dq = (dX * (row * scale)).to(DT)
        if S.CORRECTED:
            dX_a, y_left, z, dq = products_done(0, deps=[dX_a, y_left, z, dq])
            leave_slot(bars.slots, DR, 1)
            row = row_factors(float_sums(decay))
            z += decayed_rows(k, 0.0 - row, DT).to(gl.float32) * dX_a
            dk -= dX_a * row
        mbarrier.arrive(bars.pairs.empty.index(0), count=1)
        q.permute((1, 0)).store(dq)
        k.permute((1, 0)).store(dk.to(DT))
        leave_slot(bars.slots, G + w, READERS)  # dk has read it
        dg = suffix_sums(z, tiles.triangle) + rest[:, None]
        if dg_d.dtype == gl.float32:
            decays.index(STATE + w + zero).permute((1, 0)).store(dg)
        else:
            narrow = reinterpret(slots, dg_d.dtype, [2 * SLOTS, 64, 64], TILE)
            narrow.index(2 * (STATE + w) + zero).permute((1, 0)).store(dg.to(dg_d.dtype))
        fence_async_shared()
        signal(bars.gradients, i)


@gluon.jit
def channel_tiles(DT: gl.constexpr, S: gl.constexpr):
    """Shared memory and barriers."""
    tiles = ChannelTiles(
        gl.allocate_shared_memory(DT, [SLOTS, 64, 128], TILE),
        gl.allocate_shared_memory(DT, [2, 64, 64], TILE),
        gl.allocate_shared_memory(DT, [64, 64], TILE),
        gl.allocate_shared_memory(gl.float32, [2, 64], VECTOR),
        gl.allocate_shared_memory(gl.float32, [8, 64], VECTOR),
    )
    gradients = allocate_barriers(1, 2)
    beta = gradients
    if S.CORRECTED:
        beta = allocate_barriers(2, 1)
    return tiles, ChannelBarriers(ring(SLOTS, 1, READERS), ring(1, 1, 2), beta, gradients)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def channel_output_kernel(q_d, k_d, G_d, nu_d, do_d, dr_d, s_d, ds_d, dq_d, dk_d, dg_d, x, n, S: gl.constexpr):
    """Gradients of keys, by value head, of beta and of the decay, by way of the states and of the pairs in range for one pass."""
    tiles, bars = channel_tiles(k_d.dtype, S)
    gl.warp_specialize(
        [
            (pair_gradients, (x, n, tiles, bars, S)),
            (consumer, (0, dg_d, n, tiles, bars, S)),
            (consumer, (1, dg_d, n, tiles, bars, S)),
            (channel_producer, ((q_d, k_d, G_d), (nu_d, do_d, dr_d), (s_d, ds_d), x, n, tiles, bars, S)),
            (channel_finisher, ((dq_d, dk_d, dg_d), x, n, tiles, bars, S)),
        ],
        [4, 4, 1, 1],
        [208, 208, 24, 24],
    )
