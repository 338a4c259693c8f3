"""The warp that copies in the forward of softmax attention on Hopper: the tiles of q, k and v of a program's blocks, and their numbers.

Groups of warps read tiles and leave them, by named barriers or by the rings' own (`left_by_name`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import await_readers, gl, gluon, leave, release, take_turn, wait_empty
from flashmix.ops.attention.gluon_hopper.forward_queue import begin_draw, end_draw, next_block, sent_back, tell_block
from flashmix.ops.attention.gluon_hopper.tiles import copy_tile, fill_tile, tile_of
from flashmix.ops.attention.triton_gpu.tiles import keys_of_rows

# Named barriers of each tile of k and of v, by which its readers leave
K_READ, V_READ = gl.constexpr(8), gl.constexpr(11)


class KeyTiles(NamedTuple):
    """The tiles of keys of BM queries, from token `low`: numbers `begin` to `end` are seen whole by all of them.

    The `i`-th that is read is use `base + i` of the rings; it is number `i`, or with `from_last` number `count - 1 - i`.
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


@gluon.constexpr_function
def from_last(first_max, biased):
    """Whether a block's tiles are read from the last: gates and slopes take more off the scores of keys that are further away, so that
    scores are counted from the largest of those nearby."""
    return first_max and biased


@gluon.jit
def number_of(keys, i, S: gl.constexpr):
    """The number of the `i`-th tile that is read."""
    if from_last(S.FIRST_MAX, S.DECAY or S.ALIBI):
        return keys.count - 1 - i
    else:
        return i


@gluon.jit
def first_key(keys, i, S: gl.constexpr):
    """The first key of the `i`-th tile that is read."""
    return keys.low + number_of(keys, i, S) * S.BN


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
def tile_of_k(rings, keys, i, S: gl.constexpr):
    """Both parts of tile `i` of a block's keys."""
    return tile_of(rings.k.tiles, (keys.base + i) % S.STAGES)


@gluon.jit
def tile_of_v(rings, keys, i, S: gl.constexpr):
    """Both parts of tile `i` of a block's values."""
    return tile_of(rings.v.tiles, (keys.base + i) % S.STAGES)


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
    fill_tile(descriptor, of_k, first_key(keys, i, S), rings.k, keys.base + i, QK, S)


@gluon.jit
def copy_values(i, at, keys, descriptor, rings, S: gl.constexpr):
    """`copy_keys` of a block's values."""
    V: gl.constexpr = S.V
    of_k = (at.batch, at.head_k, at.start_k, at.tokens_k)
    await_all(V_READ, rings.v, keys.base + i, S)
    fill_tile(descriptor, of_k, first_key(keys, i, S), rings.v, keys.base + i, V, S)


@gluon.jit
def copy_queries(at, turn, descriptor, rings, S: gl.constexpr):
    """Copies a block's queries, each group's when it has left those before."""
    QK: gl.constexpr = S.QK
    GROUPS: gl.constexpr = S.BM // 64
    of_q = (at.batch, at.head, at.start_q, at.tokens_q)
    for group in gl.static_range(GROUPS):
        copy_tile(descriptor, of_q, at.first + group * 64, rings.q, turn * GROUPS + group, QK, S)


@gluon.jit
def copy_in_turns(at, keys, k_d, v_d, rings, S: gl.constexpr):
    """Copies a block's k and v, k one tile ahead of v."""
    copy_keys(gl.to_tensor(0), at, keys, k_d, rings, S)
    for i in range(1, keys.count):
        copy_keys(i, at, keys, k_d, rings, S)
        copy_values(i - 1, at, keys, v_d, rings, S)
    copy_values(keys.count - 1, at, keys, v_d, rings, S)


@gluon.jit
def forward_copies(x, descriptors, rings, queue, n, S: gl.constexpr):
    """The warp that copies what the blocks of a program need, one after another, and tells of each before the last tile of the one before.

    The number of the next block is drawn under the last but one: drawn earlier, a program with much left to do would hold a block that
    another one could begin. The first k of a block comes before its q, as its place is free before the groups end with the block before.

    With FIRST_MAX a block that a group's verdict sends back comes again, its tiles twice, when the block after it has been copied.
    """
    q_d, k_d, v_d = descriptors
    turn, base, again = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    number, at = next_block(gl.program_id(0), x, queue, n, S)
    before = gl.to_tensor(-1)  # the number of the block before, if it came the first time
    drawn = gl.to_tensor(-1)  # a number that was drawn and is not used yet
    tell_block(queue, turn, at, again, S)
    while at.first >= 0:
        keys = tiles_of_keys(at, base, n, S)
        if S.FIRST_MAX:
            if again != 0:
                copy_queries(at, turn, q_d, rings, S)
                copy_in_turns(at, keys, k_d, v_d, rings, S)
                base += keys.count
                keys = tiles_of_keys(at, base, n, S)
        copy_keys(gl.to_tensor(0), at, keys, k_d, rings, S)
        if again == 0:
            copy_queries(at, turn, q_d, rings, S)
        following = gl.to_tensor(0)
        for i in range(gl.maximum(keys.count - 1, 1)):
            if i + 2 >= keys.count:  # once
                following = begin_draw(queue, drawn < 0, n)
            if i + 1 < keys.count:  # k one tile ahead of v
                copy_keys(i + 1, at, keys, k_d, rings, S)
                copy_values(i, at, keys, v_d, rings, S)
        following = end_draw(following, n)
        last = keys.count - 1
        if S.FIRST_MAX:
            following = gl.where(drawn < 0, following, drawn)
            came = again
            again = sent_back(before, queue, turn - 1, S)
            drawn = gl.where(again != 0, following, -1)
            following = gl.where(again != 0, before, following)
            before = gl.where(came != 0, -1, number)
            following, then = next_block(following, x, queue, n, S)
            if then.first >= 0:
                tell_block(queue, turn + 1, then, again, S)
            copy_values(last, at, keys, v_d, rings, S)
            if then.first < 0:  # this one may come again
                again = sent_back(before, queue, turn, S)
                if again != 0:
                    before = gl.to_tensor(-1)
                    following, then = number, at
                tell_block(queue, turn + 1, then, again, S)
        else:
            following, then = next_block(following, x, queue, n, S)
            tell_block(queue, turn + 1, then, again, S)
            copy_values(last, at, keys, v_d, rings, S)
        number, at = following, then
        base += keys.count
        turn += 1
