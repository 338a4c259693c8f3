"""The warp that copies in the forward of softmax attention on Hopper: the tiles of q, k and v of a program's blocks, and their numbers.

Groups of warps read tiles and leave them; where tiles have 128 channels, by named barriers.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import await_readers, gl, gluon, leave, release, signal, wait_empty, wait_full
from flashmix.ops.attention.gluon_hopper.tiles import copy_tile, fill_tile
from flashmix.ops.attention.triton_gpu.tiles import find_queries, keys_of_rows

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
    """The numbers of the blocks that a program works on, one after another: a counter in memory, and a ring that tells them."""

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


@gluon.constexpr_function
def left_by_name(first, second):
    """Whether groups leave tiles of k and v, of so many channels, by named barriers: where tiles have 128 channels, that is quicker."""
    return first == 128 and second == 0


@gluon.jit
def let_go(barrier: gl.constexpr, ring_of, use, S: gl.constexpr):
    """A group leaves a tile of k or v: by a named barrier, or by the ring's own."""
    if left_by_name(S.QK.FIRST, S.QK.SECOND):
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
def copy_block(at, keys, turn, descriptors, rings, S: gl.constexpr):
    """Copies what a block needs: q, then k and v in the order in which they are read. `turn` counts the program's blocks."""
    QK: gl.constexpr = S.QK
    V: gl.constexpr = S.V
    GROUPS: gl.constexpr = S.BM // 64
    q_d, k_d, v_d = descriptors
    of_q = (at.batch, at.head, at.start_q, at.tokens_q)
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    for group in gl.static_range(GROUPS):
        copy_tile(q_d, of_q, at.first + group * 64, rings.q, turn * GROUPS + group, QK, S)
    for i in range(keys.count + 1):  # k one tile ahead of v
        use = keys.base + i
        if i < keys.count:
            await_all(K_READ, rings.k, use, S)
            fill_tile(k_d, of_k, keys.low + i * S.BN, rings.k, use, QK, S)
        if i > 0:
            await_all(V_READ, rings.v, use - 1, S)
            fill_tile(v_d, of_k, keys.low + (i - 1) * S.BN, rings.v, use - 1, V, S)


@gluon.jit
def forward_copies(x, descriptors, rings, queue, n, S: gl.constexpr):
    """The warp that copies, and draws the numbers of the program's blocks."""
    blocks = n.blocks * n.batches * n.heads_q
    number, drawn, turn, base = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    while number < blocks:
        following = gl.to_tensor(blocks)
        if blocks > gl.num_programs(0):
            following = gl.atomic_add(queue.counter, 1) + gl.num_programs(0)
        tell(queue, drawn, following)
        at = find_queries(number, x.table, n, S)
        if (at.first >= 0) & (at.first < at.tokens_q):
            keys = tiles_of_keys(at, base, n, S)
            copy_block(at, keys, turn, descriptors, rings, S)
            base += keys.count
            turn += 1
        number = following
        drawn += 1


@gluon.jit
def tell(queue, drawn, number):
    """The copying warp tells the groups the number of a block; `drawn` counts them."""
    wait_empty(queue.empty, drawn)
    slot = drawn % queue.full.shape[0]
    queue.numbers.index(slot).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    signal(queue.full, drawn)


@gluon.jit
def told(queue, drawn, WARPS: gl.constexpr = 4):
    """The number that `tell` told, to a role of so many warps."""
    wait_full(queue.full, drawn)
    number = queue.numbers.index(drawn % queue.full.shape[0]).load(gl.BlockedLayout([1], [32], [WARPS], [0]))  # [1]
    release(queue.empty, drawn)
    return gl.max(number, 0)
