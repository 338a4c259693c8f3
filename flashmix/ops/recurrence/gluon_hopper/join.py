"""The join of segments with corrections, 65 to 128 channels of keys: one program per (row, BV channels of values), segment after segment.

    S_out = M S_in + N        dS_in = M^T dS_out + dN                                                   (7.1)

As the Triton kernels of `triton_gpu/segments.py`, but the maps come by TMA and are left operands of `wgmma` in shared memory, float32 read
as TF32, with rows of the result as their rows: M forward, M^T backward, and the map pass leaves both. The state lies in shared memory as
it does in `starts`, [BV, 128]: it is the right operand of its segment and on its way to memory at once. It has two tiles in turn, and the
accumulators begin with N. Rows and columns past K and V are 0.

What a segment leaves from nothing, N^T or dN^T, lies in memory where the start of the next one is written, by the program that has read it.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    await_kernels,
    begin_next,
    copy_to_global,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    products_done,
    release,
    stores_done,
    wait_empty,
    wait_full,
    warpgroup_mma,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE_32
from flashmix.ops.recurrence.gluon_hopper.place import block_of, fetch_tile
from flashmix.ops.recurrence.gluon_hopper.state_parts import ring
from flashmix.ops.recurrence.gluon_hopper.structs import JoinBarriers, JoinTiles


@gluon.constexpr_function
def join_sums(columns):
    """The layout of `[128, columns]` sums of eight warps, products of TF32."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, columns, 8])


@gluon.jit
def join_place(i, n, S: gl.constexpr):
    """The row of this program, its first channel of values, and which of all segments is number `i` on its way."""
    BLOCKS: gl.constexpr = (S.V + S.BV - 1) // S.BV
    row = gl.program_id(0) // BLOCKS
    number = n.segments - 1 - i if S.BACK else i
    return row, (gl.program_id(0) % BLOCKS) * S.BV, row * n.segments + number


@gluon.jit
def join_tiles(S: gl.constexpr):
    """Shared memory and its rings."""
    tiles = JoinTiles(
        maps=gl.allocate_shared_memory(gl.float32, [S.STAGES, 128, 128], TILE_32),
        own=gl.allocate_shared_memory(gl.float32, [2, S.BV, 128], TILE_32),
        states=gl.allocate_shared_memory(gl.float32, [2, S.BV, 128], TILE_32),
    )
    return tiles, JoinBarriers(ring(S.STAGES, 1, 1), ring(2, 1, 1))


@gluon.jit
def first_state(x, row, v0, S: gl.constexpr):
    """The state, or gradient, of the sequence that enters the first segment on the way, [128, BV]."""
    BV: gl.constexpr = S.BV
    SUMS: gl.constexpr = join_sums(S.BV)
    if x is None:
        return gl.zeros([128, BV], gl.float32, SUMS)
    else:
        k, v = gl.arange(0, 128, gl.SliceLayout(1, SUMS)), v0 + gl.arange(0, BV, gl.SliceLayout(0, SUMS))
        state = x + row.to(gl.int64) * (S.K * S.V)
        inside = (k < S.K)[:, None] & (v < S.V)[None, :]
        return gl.load(state + k[:, None] * S.V + v[None, :], mask=inside, other=0.0)


@gluon.jit
def put_start(state, starts_d, i, n, tiles, S: gl.constexpr):
    """Stores the state that segment number `i` begins with, [128, BV], as the right operand of its map, and writes it to `starts`."""
    _, v0, index = join_place(i, n, S)
    tile = tiles.states.index(i % 2)  # [BV, 128]
    tile.permute((1, 0)).store(state)
    fence_async_shared()
    copy_to_global(starts_d, [index, v0, 0], block_of(starts_d, tile))


@gluon.jit
def take_own(tiles, bars, i, S: gl.constexpr):
    """What segment number `i` leaves from nothing, [128, BV]."""
    SUMS: gl.constexpr = join_sums(S.BV)
    wait_full(bars.own.full, i)
    own = tiles.own.index(i % 2).permute((1, 0)).load(SUMS)  # [128, BV]
    release(bars.own.empty, i)
    return own


@gluon.jit
def join_states(starts_d, x, n, tiles, bars, S: gl.constexpr):
    """The chain of products. A state of 0 that enters a sequence has none.

    All that makes warps wait for each other, but for the state itself, is done while a product is made.
    """
    FIRST: gl.constexpr = 1 if x is None else 0
    row, v0, _ = join_place(0, n, S)
    start = first_state(x, row, v0, S)
    own = take_own(tiles, bars, 0, S)
    if x is None:
        put_start(start, starts_d, 0, n, tiles, S)
        start = own
        own = take_own(tiles, bars, 1, S)
    put_start(start, starts_d, FIRST, n, tiles, S)
    for i in range(FIRST, n.segments - 1):
        number = i - FIRST  # of the map
        state = tiles.states.index(i % 2).permute((1, 0))  # [128, BV]
        wait_full(bars.maps.full, number)
        left = warpgroup_mma(tiles.maps.index(number % S.STAGES), state, own, is_async=True)  # (7.1)
        release(bars.maps.empty, number + S.STAGES - 1, pred=number > 0)  # both warpgroups have read the map before
        own = take_own(tiles, bars, i + 1, S)
        stores_done(1)  # the start before this one has left its tile
        left = products_done(0, deps=[left])
        put_start(left, starts_d, i + 1, n, tiles, S)
    stores_done(0)


@gluon.jit
def join_producer(maps_d, own_d, x, n, tiles, bars, S: gl.constexpr):
    """Fills the rings of maps and of what segments add."""
    FIRST: gl.constexpr = 1 if x is None else 0
    for i in range(n.segments):  # what the last one leaves is taken and not used
        _, v0, index = join_place(i, n, S)
        wait_empty(bars.own.empty, i)
        bar = expect_bytes(bars.own.full, i, S.BV * 128 * 4)
        fetch_tile(own_d, [index, v0, 0], bar, tiles.own.index(i % 2))
        if (i >= FIRST) & (i < n.segments - 1):
            number = i - FIRST
            wait_empty(bars.maps.empty, number)
            bar = expect_bytes(bars.maps.full, number, 128 * 128 * 4)
            fetch_tile(maps_d, [index, 0, 0], bar, tiles.maps.index(number % S.STAGES))


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def join_kernel(maps_d, own_d, starts_d, x, n, S: gl.constexpr):
    """Writes `starts` from maps, from what each segment leaves (sends back), and from the state `x` of sequences, None for 0."""
    tiles, bars = join_tiles(S)
    await_kernels()
    begin_next()
    gl.warp_specialize(
        [(join_states, (starts_d, x, n, tiles, bars, S)), (join_producer, (maps_d, own_d, x, n, tiles, bars, S))],
        [1],
        [24],
    )
