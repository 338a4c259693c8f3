"""dQ of the backward on Hopper: what programs of keys add to it, block by block of queries and in a fixed order, and dQ of the sums.

A block of BM queries comes whole, or in a piece for each part of the head, in the order in which threads hold it; a warp adds it in
float32 by TMA. A counter for each block says how many blocks of keys have been added to it; each of these waits for the later keys, or,
with every eighth head of `find_keys`, for the earlier ones. Programs draw the numbers by which they find keys in the order in which they
begin with them, and keys wait for those of smaller numbers only. A head's blocks lie one after the other.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.hopper import (
    add_to_global,
    allocate_barriers,
    await_count,
    copy_to_global,
    count_up,
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    release,
    stores_done,
    take_turn,
    wait_empty,
)
from flashmix.ops.attention.gluon_hopper.backward_walk import D_Q_FULL, first_sums, way_of
from flashmix.ops.attention.triton_gpu.packed import find_sequence
from flashmix.ops.attention.triton_gpu.tiles import AttentionBlock, find_head, result_rows, store_rows


@gluon.constexpr_function
def roles_of(first):
    """Roles that divide the keys. `first`: channels of q's first part."""
    return 1 if first == 128 else 2


@gluon.constexpr_function
def pieces_of(first, second):
    """Pieces of a block of dQ: a role makes one, or a single role all. `second`: channels of q's second part, or 0."""
    return max(roles_of(first), 2 if second > 0 else 1)


@gluon.constexpr_function
def piece_shape(piece, first, second):
    """The shape of a piece in memory, 64 queries by the channels of its part."""
    channels = second if piece == 1 and second > 0 else first
    return [channels // 4, 256] if channels >= 64 else [8, 8 * channels]


@gluon.constexpr_function
def piece_begin(piece, first, second):
    """The elements of a block before a piece; of the number of its pieces, all."""
    sizes = [piece_shape(i, first, second) for i in range(piece)]
    return sum(rows * columns for rows, columns in sizes)


class QuerySums(NamedTuple):
    """What dQ is made of: the sums of its blocks, and how many programs have added to each."""

    d_q: Any  # [B, Tq, HQ, K]
    sums: Any
    counters: Any
    blocks: Any  # of a head
    table: Any  # of packed queries


class PieceRing(NamedTuple):
    """A buffer for each piece of a block of dQ (a pair), and the barrier that says that they have left."""

    tiles: Any
    empty: Any


@gluon.jit
def piece_of(pair, piece: gl.constexpr):
    first, second = pair
    if piece == 0:
        return first
    else:
        return second


@triton.jit
def block_size(S: tl.constexpr):
    """The elements of a block of dQ."""
    return piece_begin(pieces_of(S.QK.FIRST, S.QK.SECOND), S.QK.FIRST, S.QK.SECOND)


@gluon.jit
def piece_row(place, piece: gl.constexpr, S: gl.constexpr):
    """The first row of a piece of block number `place`, in rows as long as its own."""
    COLUMNS: gl.constexpr = piece_shape(piece, S.QK.FIRST, S.QK.SECOND)[1]
    BEFORE: gl.constexpr = piece_begin(piece, S.QK.FIRST, S.QK.SECOND)
    return place * (block_size(S) // COLUMNS) + BEFORE // COLUMNS


@gluon.jit
def turn_of(at, steps, block, n, S: gl.constexpr):
    """How many blocks of keys are added to a block of queries before the one `at`: the later ones that it sees, or the earlier ones."""
    last = gl.cdiv(at.tokens_k, S.BN) - 1
    ahead = (block + 1) * S.BM + at.tokens_k - at.tokens_q
    if S.CAUSAL:
        last = gl.minimum(last, (ahead + S.BN - 1) // S.BN - 1)
    elif S.RIGHT:
        last = gl.minimum(last, (ahead + n.right + S.BN - 1) // S.BN - 1)
    if S.TWO_WAYS:
        return gl.where(way_of(at.head, S) > 0, last - at.first // S.BN, at.first // S.BN)
    else:
        return last - at.first // S.BN


@gluon.jit
def backward_sums(warp: gl.constexpr, work, at, steps, base, d_q_d, rings, n, S: gl.constexpr):
    """One of the two warps that add to dQ, every second block each and each in its turn; the first to add stores.

    From the addition of a block until it is in memory it takes about as long as a step of the groups: one warp alone would hold them up.
    """
    PIECES: gl.constexpr = pieces_of(S.QK.FIRST, S.QK.SECOND)
    THREADS: gl.constexpr = 256 // roles_of(S.QK.FIRST) + 32  # who makes a piece, and this warp
    first = (at.batch * n.heads_q + at.head) * work.blocks_q + steps.sums
    begin = (base + warp) % 2
    for own in range((steps.all - begin + 1) // 2):
        i = 2 * own + begin
        use = base + i
        block = steps.first + way_of(at.head, S) * i
        place = first + block
        turn = turn_of(at, steps, block, n, S)
        await_count(work.counters + 1 + place, turn)
        for piece in gl.static_range(PIECES):
            take_turn(D_Q_FULL + 2 * piece, use, THREADS, True)
            row = piece_row(place, piece, S)
            tile = piece_of(rings.d_q.tiles, piece)
            if turn == 0:
                copy_to_global(piece_of(d_q_d, piece), [row, 0], tile)
            else:
                add_to_global(piece_of(d_q_d, piece), [row, 0], tile)
        stores_done(0)
        release(rings.d_q.empty, use)
        count_up(work.counters + 1 + place, 0)


@gluon.jit
def put_piece(piece: gl.constexpr, d_q, i, rings, S: gl.constexpr):
    """Hands a piece of dQ's block to the warp that adds it, in the order in which threads hold it: stores of 16 bytes each.

    A role that makes both hands the first one over first, for which it waits.
    """
    if piece == 0 or roles_of(S.QK.FIRST) == 2:
        wait_empty(rings.d_q.empty, i)
    to = piece_of(rings.d_q.tiles, piece)
    d_q = d_q.reshape([4, 2, 8, d_q.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape(to.shape)
    to.store(d_q)
    fence_async_shared()
    take_turn(D_Q_FULL + 2 * piece, i, 256 // roles_of(S.QK.FIRST) + 32, False)


@gluon.jit
def allocate_pieces(descriptors, S: gl.constexpr):
    """The `PieceRing`; a second piece that is not there is the first again."""
    first, second = descriptors
    PIECES: gl.constexpr = pieces_of(S.QK.FIRST, S.QK.SECOND)
    a = gl.allocate_shared_memory(gl.float32, first.block_type.shape, first.layout)
    b = a
    if PIECES > 1:
        b = gl.allocate_shared_memory(gl.float32, second.block_type.shape, second.layout)
    return PieceRing((a, b), allocate_barriers(1, 1))


@gluon.jit
def piece_in(tile, descriptor):
    """A piece's buffer in the memory of `tile`."""
    return reinterpret(tile, gl.float32, descriptor.block_type.shape, descriptor.layout)


@gluon.jit
def pieces_in(tiles, descriptors, S: gl.constexpr):
    """The `PieceRing` in the memory of v's parts, which lies in registers by then; of a second part that v does not have, in its own."""
    first, second = descriptors
    a = piece_in(tiles[0], first)
    if S.V.SECOND == S.QK.SECOND:
        b = piece_in(tiles[1], second)
    else:
        b = gl.allocate_shared_memory(gl.float32, second.block_type.shape, second.layout)
    return PieceRing((a, b), allocate_barriers(1, 1))


@triton.jit
def load_sums(sums, any_keys, WIDTH: tl.constexpr, S: tl.constexpr):
    """Sums of dQ, `[BM, WIDTH]`, of a part of it: 64 rows and 64 channels one after the other."""
    # element (row, column) of 64 rows and channels, where the thread that held it put it
    row = tl.arange(0, S.BM)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    half = row // 64 + column // 64
    r, c = row % 64, column % 64
    at = c // 8 * 512 + (r // 16 * 32 + r % 8 * 4 + c % 8 // 2) * 4 + r // 8 % 2 * 2 + c % 2
    return tl.load(sums + half * 4096 + at, mask=any_keys & (half >= 0), other=0.0)


@triton.jit(do_not_specialize=["n"])
def query_gradient_kernel(x, n, S: tl.constexpr):
    """dQ of BM queries of a head from its sums, see `put_piece`; 0 where no program has added any."""
    QK: tl.constexpr = S.QK
    bh, block = find_head(tl.program_id(0), n.blocks, n.batches * n.heads_q, n.at_once)
    batch, head = bh // n.heads_q, bh % n.heads_q
    sequence, start_q, tokens_q = bh * 0, n.tokens_q * 0, n.tokens_q
    if S.PACKED:
        sequence, start_q, tokens_q, _, _, block = find_sequence(block, x.table)
    if block * S.BM >= tokens_q:
        return
    place = bh * x.blocks + first_sums(sequence, start_q, S) + block
    any_keys = tl.load(x.counters + 1 + place) > 0
    here = AttentionBlock(batch, head, head, bh, block * S.BM, start_q, tokens_q, start_q, tokens_q)
    to = result_rows(x.d_q, here, n.heads_q, head, n.tokens_q, start_q, QK)
    sums = x.sums + place.to(tl.int64) * block_size(S)
    tile = load_sums(sums, any_keys, QK.FIRST, S)  # [BM, FIRST]
    store_rows(to, tile * n.d_scale, block * S.BM, tokens_q, 0, QK.FIRST, QK, S.BM)
    if QK.SECOND > 0:
        rest = load_sums(sums + piece_begin(1, QK.FIRST, QK.SECOND), any_keys, QK.SECOND, S)  # [BM, SECOND]
        store_rows(to, rest * n.d_scale, block * S.BM, tokens_q, QK.FIRST, QK.SECOND, QK, S.BM)
