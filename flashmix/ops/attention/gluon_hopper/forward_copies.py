"""The warp that copies in the forward of softmax attention on Hopper: the tiles of q, k and v of a program's blocks, and their numbers.

Groups of warps read tiles and leave them, by named barriers or by the rings' own (`left_by_name`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import (
    allocate_barriers,
    await_readers,
    begin_count,
    counted,
    expect_bytes,
    gl,
    gluon,
    leave,
    plain,
    release,
    signal,
    take_turn,
    wait_empty,
    wait_full,
)
from flashmix.ops.attention.gluon_hopper.tiles import copy_part, copy_tile, fill_tile, parts_of, tile_of
from flashmix.ops.attention.triton_gpu.tiles import AttentionBlock, find_queries, keys_of_rows

# Named barriers of each tile of k and of v, by which its readers leave
K_READ, V_READ = gl.constexpr(8), gl.constexpr(11)


class KeyTiles(NamedTuple):
    """The tiles of keys of BM queries, from token `low`: numbers `begin` to `end` are seen whole by all of them.

    Tile `i` is use `base + i` of the rings.
    """

    base: Any
    low: Any
    begin: Any
    end: Any
    count: Any
    tokens: Any  # of the sequence


class ForwardRings(NamedTuple):
    """Rings of q `[64, K]`, one a group, of k `[BN, K]` and v `[BN, V]`, and results `[64, V]`, one a group."""

    q: Any
    k: Any
    v: Any
    o: Any


class Queue(NamedTuple):
    """The blocks that a program works on, one after another: the counter of their numbers in memory, and a ring that tells of each some
    numbers, which lie one after another."""

    counter: Any
    numbers: Any
    full: Any
    empty: Any


@gluon.jit
def tiles_of_keys(at, base, n, S: gl.constexpr):
    """The `KeyTiles` of a block: one at least."""
    low, inner, outer, high = keys_of_rows(at.first + at.tokens_k - at.tokens_q, at.tokens_k, n, S.BM, S)
    count = gl.maximum((high - low + S.BN - 1) // S.BN, 1)
    return KeyTiles(base, low, (inner - low) // S.BN, (outer - low) // S.BN, count, at.tokens_k)


@gluon.constexpr_function
def walks_alone(rows, columns, biased):
    """Whether a group leaves out the tiles of `columns` keys that none of its 64 queries sees, of those that a block of `rows` does."""
    return rows > columns and not biased


@gluon.jit
def tiles_of_group(group: gl.constexpr, at, keys, n, S: gl.constexpr):
    """The `KeyTiles` of 64 of a block's queries, in the numbers of the block's: one at least."""
    first = at.first + group * 64 + at.tokens_k - at.tokens_q
    _, inner, outer, high = keys_of_rows(first, at.tokens_k, n, 64, S)
    begin = (inner - keys.low) // S.BN
    end = gl.maximum((outer - keys.low) // S.BN, begin)
    count = gl.maximum(gl.minimum((high - keys.low + S.BN - 1) // S.BN, keys.count), 1)
    return KeyTiles(keys.base, keys.low, begin, end, count, keys.tokens)


@gluon.jit
def order_of_k(i):
    """The place of tile `i` of k among a block's tiles in the order in which they are read, k0 k1 v0 k2 v1 ... v."""
    return gl.maximum(2 * i - 1, 0)


@gluon.jit
def order_of_v(keys, i):
    """`order_of_k` of tile `i` of v."""
    return gl.minimum(2 * i + 2, 2 * keys.count - 1)


@gluon.jit
def tile_at(ring_of, use, order, S: gl.constexpr):
    """Both parts of use `use` of a ring. Second parts that k and v share come by their order; programs that share them take one block."""
    if S.SECONDS:
        return parts_of(ring_of.tiles, use % S.STAGES, order % S.SECONDS)
    else:
        return tile_of(ring_of.tiles, use % S.STAGES)


@gluon.jit
def tile_of_k(rings, keys, i, S: gl.constexpr):
    """Both parts of tile `i` of a block's keys."""
    return tile_at(rings.k, keys.base + i, order_of_k(i), S)


@gluon.jit
def tile_of_v(rings, keys, i, S: gl.constexpr):
    """Both parts of tile `i` of a block's values."""
    return tile_at(rings.v, keys.base + i, order_of_v(keys, i), S)


@gluon.constexpr_function
def left_by_name(first, second):
    """Whether groups leave tiles of k and v, of so many channels, by named barriers, at which no warp waits for the others of its group.
    With up to 64 channels and above 192 that gains nothing."""
    return 64 < first + second <= 192


@gluon.jit
def let_go(barrier: gl.constexpr, ring_of, use, S: gl.constexpr):
    """A group leaves a tile of k or v: by a named barrier, or by the ring's own."""
    if left_by_name(S.QK.FIRST, S.QK.SECOND):
        if S.DECAY or S.ALIBI:  # several loops have no register for the barrier's number
            take_turn(barrier, use, 2 * S.BM + 32, False, S.STAGES)
        else:
            leave(barrier, use, 2 * S.BM + 32, S.STAGES)
    else:
        release(ring_of.empty, use)


@gluon.jit
def await_all(barrier: gl.constexpr, ring_of, use, S: gl.constexpr):
    """Until all groups have left, by `let_go`, the tile that use `use` fills."""
    if left_by_name(S.QK.FIRST, S.QK.SECOND):
        await_readers(barrier, use, 2 * S.BM + 32, S.STAGES)
    else:
        wait_empty(ring_of.empty, use)


@gluon.jit
def copy_keys(i, at, keys, descriptor, rings, S: gl.constexpr):
    """Copies tile `i` of a block's keys, when all groups have left the tile whose place it takes."""
    QK: gl.constexpr = S.QK
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    await_all(K_READ, rings.k, keys.base + i, S)
    fill_tile(descriptor, of_k, keys.low + i * S.BN, rings.k, keys.base + i, QK, S)


@gluon.jit
def copy_values(i, at, keys, descriptor, rings, S: gl.constexpr):
    """`copy_keys` of a block's values."""
    V: gl.constexpr = S.V
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    await_all(V_READ, rings.v, keys.base + i, S)
    fill_tile(descriptor, of_k, keys.low + i * S.BN, rings.v, keys.base + i, V, S)


@gluon.jit
def fill_first(i, at, keys, descriptors, to, S: gl.constexpr):
    """Begins to copy the first part of tile `i` of k or v, whose barrier then waits for both."""
    of_k, use = (at.batch, at.head_k, at.start_k, at.tokens_k), keys.base + i
    first, second = descriptors
    tiles, _ = to.tiles
    barrier = expect_bytes(to.full, use, first.block_type.nbytes + second.block_type.nbytes)
    copy_part(first, of_k, keys.low + i * S.BN, 0, barrier, tiles.index(use % S.STAGES), S)


@gluon.jit
def fill_second(i, at, keys, descriptors, to, order, C: gl.constexpr, S: gl.constexpr):
    """Begins to copy the second part of tile `i`, to the shared buffer that its order says."""
    of_k, use = (at.batch, at.head_k, at.start_k, at.tokens_k), keys.base + i
    _, second = descriptors
    _, tiles = to.tiles
    barrier = to.full.index(use % S.STAGES)
    copy_part(second, of_k, keys.low + i * S.BN, C.FIRST, barrier, tiles.index(order % S.SECONDS), S)


@gluon.jit
def copy_sharing(at, keys, k_d, v_d, rings, S: gl.constexpr):
    """Copies a block's k and v whose second parts share buffers: a tile's first part when the tile two before has been left, its second
    when the tile of three uses before has, which for a v is the k of the same number."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    fill_first(0, at, keys, k_d, rings.k, S)
    fill_second(0, at, keys, k_d, rings.k, 0, QK, S)
    for i in range(keys.count):
        await_all(V_READ, rings.v, i, S)
        if i + 1 < keys.count:
            fill_first(i + 1, at, keys, k_d, rings.k, S)
            fill_second(i + 1, at, keys, k_d, rings.k, order_of_k(i + 1), QK, S)
        fill_first(i, at, keys, v_d, rings.v, S)
        if i + 1 < keys.count:
            await_all(K_READ, rings.k, i + S.STAGES, S)
        fill_second(i, at, keys, v_d, rings.v, order_of_v(keys, i), V, S)


@gluon.jit
def copy_queries(at, turn, descriptor, rings, S: gl.constexpr):
    """Copies a block's queries, each group's when it has left those before."""
    QK: gl.constexpr = S.QK
    GROUPS: gl.constexpr = S.BM // 64
    of_q = (at.batch, at.head, at.start_q, at.tokens_q)
    for group in gl.static_range(GROUPS):
        copy_tile(descriptor, of_q, at.first + group * 64, rings.q, turn * GROUPS + group, QK, S)


@gluon.jit
def copy_block(at, keys, descriptors, rings, S: gl.constexpr):
    """Copies what the one block of a program needs: q and the first k, then k and v in the order in which they are read."""
    q_d, k_d, v_d = descriptors
    copy_queries(at, gl.to_tensor(0), q_d, rings, S)
    if S.SECONDS:
        copy_sharing(at, keys, k_d, v_d, rings, S)
    else:
        copy_keys(gl.to_tensor(0), at, keys, k_d, rings, S)
        for i in range(1, keys.count):  # k one tile ahead of v
            copy_keys(i, at, keys, k_d, rings, S)
            copy_values(i - 1, at, keys, v_d, rings, S)
        copy_values(keys.count - 1, at, keys, v_d, rings, S)


@gluon.jit
def copy_blocks(x, descriptors, rings, queue, n, S: gl.constexpr):
    """Copies what the blocks of a program need, one after another, and tells of each before the last tile of the one before.

    The number of the next block is drawn under the last but one: drawn earlier, a program with much left to do would hold a block that
    another one could begin. The first k of a block comes before its q, as its place is free before the groups end with the block before.
    """
    q_d, k_d, v_d = descriptors
    turn, base = gl.to_tensor(0), gl.to_tensor(0)
    at = next_block(gl.program_id(0), x, queue, n, S)
    tell_block(queue, turn, at, S)
    while at.first >= 0:
        keys = tiles_of_keys(at, base, n, S)
        copy_keys(gl.to_tensor(0), at, keys, k_d, rings, S)
        copy_queries(at, turn, q_d, rings, S)
        following = gl.to_tensor(0)
        for i in range(gl.maximum(keys.count - 1, 1)):
            if i + 2 >= keys.count:  # once
                following = begin_draw(queue, n)
            if i + 1 < keys.count:  # k one tile ahead of v
                copy_keys(i + 1, at, keys, k_d, rings, S)
                copy_values(i, at, keys, v_d, rings, S)
        then = next_block(end_draw(following, n), x, queue, n, S)
        tell_block(queue, turn + 1, then, S)
        copy_values(keys.count - 1, at, keys, v_d, rings, S)
        at = then
        base += keys.count
        turn += 1


@gluon.jit
def forward_copies(x, descriptors, rings, queue, n, S: gl.constexpr):
    """The warp that copies, and draws the numbers of the program's blocks."""
    if S.OWN_RESULTS:
        copy_blocks(x, descriptors, rings, queue, n, S)
    else:
        at = find_queries(gl.program_id(0), x.table, n, S)
        if has_queries(at):
            copy_block(at, tiles_of_keys(at, gl.to_tensor(0), n, S), descriptors, rings, S)


@gluon.jit
def blocks_of_call(n):
    """How many blocks of queries a call has, and slots of a packed table that have none."""
    return n.blocks * n.batches * n.heads_q


@gluon.jit
def begin_draw(queue, n):
    """Begins to draw the number of a block that no program has, which `end_draw` gives. Where every program has the only one, nothing is
    counted."""
    return begin_count(queue.counter, blocks_of_call(n) > gl.num_programs(0))


@gluon.jit
def end_draw(begun, n):
    """The number that was drawn; at least `blocks_of_call` if there is none."""
    return gl.num_programs(0) + counted(begun)


@gluon.jit
def next_block(number, x, queue, n, S: gl.constexpr):
    """Where block `number` lies, or the first drawn after it that has queries; `first` is -1 past the last one."""
    blocks = blocks_of_call(n)
    at = find_queries(gl.minimum(number, blocks - 1), x.table, n, S)
    if S.PACKED:  # slots of the table may be free
        while (number < blocks) & (not has_queries(at)):
            number = end_draw(begin_draw(queue, n), n)
            at = find_queries(gl.minimum(number, blocks - 1), x.table, n, S)
    first = gl.where(number < blocks, at.first, -1)
    return AttentionBlock(at.batch, at.head, at.head_k, at.bh, first, at.start_q, at.tokens_q, at.start_k, at.tokens_k)


@gluon.jit
def tell_block(queue, turn, at, S: gl.constexpr):
    """Tells of a program's `turn`-th block, as `told_block` reads it."""
    if S.PACKED:
        lengths = (at.start_q, at.tokens_q, at.start_k, at.tokens_k)
        tell(queue, turn, (at.first, at.batch, at.head, at.head_k) + lengths)
    else:
        tell(queue, turn, (at.first, at.batch, at.head, at.head_k))


@gluon.jit
def has_queries(at):
    """Whether a block has queries; a free slot of a packed table has none."""
    return (at.first >= 0) & (at.first < at.tokens_q)


@gluon.constexpr_function
def place_of_queries(packed):
    """How many numbers tell a block's place."""
    return 8 if packed else 4


@gluon.jit
def block_queue(counter, S: gl.constexpr):
    """The `Queue` of a program that takes several blocks; where it has one block, nothing that is used."""
    if S.OWN_RESULTS:
        PLACE: gl.constexpr = place_of_queries(S.PACKED)
        numbers = gl.allocate_shared_memory(gl.int32, [2 * PLACE, 1], plain())
        return Queue(counter, numbers, allocate_barriers(2, 1), allocate_barriers(2, S.BM // 64))
    else:
        return counter


@gluon.jit
def told_block(queue, turn, n, S: gl.constexpr):
    """The `AttentionBlock` of a program's `turn`-th block; `first` is -1 past the last one."""
    COUNT: gl.constexpr = place_of_queries(S.PACKED)
    wait_full(queue.full, turn)
    first = told_number(queue, turn, 0, COUNT)
    batch = told_number(queue, turn, 1, COUNT)
    head = told_number(queue, turn, 2, COUNT)
    head_k = told_number(queue, turn, 3, COUNT)
    start_q, tokens_q, start_k, tokens_k = first * 0, n.tokens_q, first * 0, n.tokens_k
    if S.PACKED:
        start_q = told_number(queue, turn, 4, COUNT)
        tokens_q = told_number(queue, turn, 5, COUNT)
        start_k = told_number(queue, turn, 6, COUNT)
        tokens_k = told_number(queue, turn, 7, COUNT)
    release(queue.empty, turn)
    return AttentionBlock(batch, head, head_k, batch * n.heads_q + head, first, start_q, tokens_q, start_k, tokens_k)


@gluon.jit
def tell(queue, use, numbers):
    """The copying warp tells other roles some numbers of a block; `use` counts how often."""
    COUNT: gl.constexpr = len(numbers)
    wait_empty(queue.empty, use)
    slot = use % queue.full.shape[0]
    for i in gl.static_range(COUNT):
        to = queue.numbers.index(slot * COUNT + i)
        to.store(gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    signal(queue.full, use)


@gluon.jit
def told_number(queue, use, i, COUNT: gl.constexpr, WARPS: gl.constexpr = 4):
    """Number `i` of COUNT that `tell` told and that have come, to a role of so many warps."""
    at = use % queue.full.shape[0] * COUNT + i
    number = queue.numbers.index(at).load(gl.BlockedLayout([1], [32], [WARPS], [0]))  # [1]
    return gl.max(number, 0)


@gluon.jit
def told(queue, use, WARPS: gl.constexpr):
    """The one number that `tell` told, to a role of so many warps."""
    wait_full(queue.full, use)
    number = told_number(queue, use, 0, 1, WARPS)
    release(queue.empty, use)
    return number
