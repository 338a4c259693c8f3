"""Tiles of Hopper's kernels: rings of them in shared memory, copies into them, products of them, rows written from registers.

A tensor's head has one part or two (`Channels`), so what holds tiles is a pair; the second is the first again where there is one part.
`S` is an `AttentionSpec`. Shapes in comments: K channels of q and k, V of v.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

from flashmix.gpu.hopper import (
    accumulator,
    allocate_barriers,
    coalesced,
    copy_to_shared,
    expect_bytes,
    gl,
    gluon,
    halves_of,
    operand,
    products_done,
    wait_empty,
    warpgroup_mma,
    word_of,
)
from flashmix.ops.attention.gluon_hopper.spec import RAGGED
from flashmix.ops.attention.triton_gpu.spec import Channels

FAR = gl.constexpr(RAGGED)


@gluon.constexpr_function
def result_layout(layout):
    """The layout in shared memory of tiles of two axes that are swizzled as those of `layout`."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


class TileRing(NamedTuple):
    """Tiles in shared memory (a pair), and the barriers that say of each that it has landed, and that all have read it."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def allocate_tiles(count: gl.constexpr, descriptors):
    """`count` buffers for tiles of both descriptors."""
    first, second = descriptors
    a = gl.allocate_shared_memory(first.dtype, [count] + first.block_type.shape, first.layout)
    if second is not None:
        b = gl.allocate_shared_memory(second.dtype, [count] + second.block_type.shape, second.layout)
        return a, b
    else:
        return a, a


@gluon.jit
def ring(count: gl.constexpr, descriptors, readers: gl.constexpr, writers: gl.constexpr = 1):
    """A ring of `count` tiles, each complete after so many writers have arrived, and free after so many readers.

    No readers: tiles that are filled once, or whose readers leave by named barriers; `empty` is `full` again and must not be used.
    """
    tiles = allocate_tiles(count, descriptors)
    full = allocate_barriers(count, writers)
    empty = full
    if readers > 0:
        empty = allocate_barriers(count, readers)
    return TileRing(tiles, full, empty)


@gluon.jit
def allocate_results(count: gl.constexpr, like):
    """`count` buffers for 64 rows of results whose channels are those of the descriptors `like`."""
    first, second = like
    a = gl.allocate_shared_memory(first.dtype, [count, 64, first.block_type.shape[-1]], result_layout(first.layout))
    if second is not None:
        b = gl.allocate_shared_memory(
            second.dtype, [count, 64, second.block_type.shape[-1]], result_layout(second.layout)
        )
        return a, b
    else:
        return a, a


@gluon.jit
def tile_of(buffers, i):
    """Both parts of buffer `i`, `[rows, FIRST]` and `[rows, SECOND]`."""
    first, second = buffers
    rows: gl.constexpr = first.shape[-2]
    return first.index(i).reshape([rows, first.shape[-1]]), second.index(i).reshape([rows, second.shape[-1]])


@gluon.jit
def first_of(buffers, i):
    """The first part of buffer `i`, `[rows, FIRST]`."""
    first, _ = buffers
    return first.index(i).reshape([first.shape[-2], first.shape[-1]])


@gluon.constexpr_function
def held(dim_qk, dim_v):
    """Whether the two passes of the backward hold their own 64 rows in registers, which each product would read from shared memory again.
    With fewer channels the passes are those of gates and slopes, which take registers."""
    return 128 < max(dim_qk, dim_v) <= 192


@gluon.jit
def in_registers(tile, COLUMNS: gl.constexpr, C: gl.constexpr):
    """Both parts of a tile as left operands of products of so many columns."""
    first, second = tile
    L: gl.constexpr = operand(COLUMNS, first.shape[0])
    a = first.load(L)  # [rows, FIRST]
    if C.SECOND > 0:
        b = second.load(L)  # [rows, SECOND]
        return a, b
    else:
        return a, a


@gluon.constexpr_function
def by_halves(channels, width):
    """The parts that `in_halves` gives of a tile so wide, which holds so many channels."""
    return Channels(channels, width // 2, width // 2)


@gluon.jit
def in_halves(tile):
    """A tile of one part as two of half its channels each."""
    whole, _ = tile
    HALF: gl.constexpr = whole.shape[1] // 2
    return whole.slice(0, HALF, dim=1), whole.slice(HALF, HALF, dim=1)


@gluon.jit
def half_in_registers(tile, COLUMNS: gl.constexpr):
    """`in_halves` as left operands of products of so many columns, the first in registers."""
    a, b = in_halves(tile)
    return a.load(operand(COLUMNS, a.shape[0])), b  # [rows, FIRST / 2]


@gluon.jit
def copy_part(descriptor, place, row, column, barrier, buffer, S: gl.constexpr):
    batch, head, start, tokens = place
    if S.PACKED:
        at = [FAR, start + tokens, head, FAR - tokens + row, column]
        copy_to_shared(descriptor, at, barrier, buffer)
    else:
        copy_to_shared(descriptor, [batch, head, row, column], barrier, buffer)


@gluon.jit
def fill_tile(descriptors, place, row, to, use, C: gl.constexpr, S: gl.constexpr):
    """Begins to copy the tile from `row` of a sequence as tile `use` of ring `to`, which is free. Zeros past the last row.

    `place`: batch, head, first row and rows of the sequence.
    """
    first, second = descriptors
    a, b = to.tiles
    stage = use % to.full.shape[0]
    if C.SECOND > 0:
        barrier = expect_bytes(to.full, use, first.block_type.nbytes + second.block_type.nbytes)
        copy_part(second, place, row, C.FIRST, barrier, b.index(stage), S)
        copy_part(first, place, row, 0, barrier, a.index(stage), S)
    else:
        barrier = expect_bytes(to.full, use, first.block_type.nbytes)
        copy_part(first, place, row, 0, barrier, a.index(stage), S)


@gluon.jit
def copy_tile(descriptors, place, row, to, use, C: gl.constexpr, S: gl.constexpr):
    """`fill_tile`, when every reader has left the tile."""
    wait_empty(to.empty, use)
    fill_tile(descriptors, place, row, to, use, C, S)


@gluon.jit
def scores(q, k, C: gl.constexpr):
    """Issues `q k^T` over both parts of the head, `[rows of q, rows of k]`."""
    q_1, q_2 = q
    k_1, k_2 = k
    ROWS: gl.constexpr = q_1.shape[0]
    COLUMNS: gl.constexpr = k_1.shape[0]
    s = gl.full([ROWS, COLUMNS], 0.0, gl.float32, accumulator(COLUMNS, ROWS))
    s = warpgroup_mma(q_1, k_1.permute((1, 0)), s, use_acc=False, is_async=True)
    if C.SECOND > 0:
        s = warpgroup_mma(q_2, k_2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def accumulate(acc, p, v, C: gl.constexpr):
    """Issues `acc + p v` for both parts of the head."""
    acc_1, acc_2 = acc
    p_1, p_2 = p
    v_1, v_2 = v
    acc_1 = warpgroup_mma(p_1, v_1, acc_1, is_async=True)
    if C.SECOND > 0:
        acc_2 = warpgroup_mma(p_2, v_2, acc_2, is_async=True)
        return acc_1, acc_2
    else:
        return acc_1, acc_1


@gluon.jit
def waited(acc, C: gl.constexpr):
    """Both parts of `accumulate`, computed."""
    acc_1, acc_2 = acc
    if C.SECOND > 0:
        acc_1, acc_2 = products_done(0, [acc_1, acc_2])
        return acc_1, acc_2
    else:
        acc_1 = products_done(0, [acc_1])
        return acc_1, acc_1


@gluon.jit
def awaited(pending: gl.constexpr, sums, p, C: gl.constexpr):
    """Both parts of `accumulate` and its left operand, when all but the last `pending` products are done."""
    a, b = sums
    x, y = p
    if C.SECOND > 0:
        a, b, x, y = products_done(pending, [a, b, x, y])
        return (a, b), (x, y)
    else:
        a, x = products_done(pending, [a, x])
        return (a, a), (x, x)


@gluon.jit
def awaited_with(pending: gl.constexpr, found, sums, p, C: gl.constexpr):
    """The sum `found` of another product, and what `awaited` gives."""
    a, b = sums
    x, y = p
    if C.SECOND > 0:
        found, a, b, x, y = products_done(pending, [found, a, b, x, y])
        return found, (a, b), (x, y)
    else:
        found, a, x = products_done(pending, [found, a, x])
        return found, (a, a), (x, x)


@gluon.jit
def as_operand(p, dtype: gl.constexpr, C: gl.constexpr):
    """p in registers as the left operand of `accumulate`."""
    p = p.to(dtype)
    ROWS: gl.constexpr = p.shape[0]
    first = gl.convert_layout(p, operand(C.FIRST, ROWS))
    if C.SECOND > 0:
        return first, gl.convert_layout(p, operand(C.SECOND, ROWS))
    else:
        return first, first


@gluon.jit
def as_words(p, dtype: gl.constexpr):
    """p in registers in words of two numbers of 16 bits, `[rows, columns / 2]`: what a loop carries as such numbers, ptxas may take apart
    and put together each time round, an instruction a word."""
    a, b = gl.split(p.to(dtype).reshape([p.shape[0], p.shape[1] // 2, 2]))
    return word_of(a, b)


@gluon.jit
def operand_of_words(words, dtype: gl.constexpr, C: gl.constexpr):
    """The left operand of `accumulate` whose `as_words` are `words`."""
    a, b = halves_of(words)
    p = gl.join(a, b).reshape([words.shape[0], 2 * words.shape[1]])
    return as_operand(p.to(dtype, bitcast=True), dtype, C)


@gluon.jit
def zero_sums(C: gl.constexpr, ROWS: gl.constexpr = 64):
    """Sums of both parts of a head, `[ROWS, FIRST]` and `[ROWS, SECOND]`."""
    first = gl.full([ROWS, C.FIRST], 0.0, gl.float32, accumulator(C.FIRST, ROWS))
    if C.SECOND > 0:
        return first, gl.full([ROWS, C.SECOND], 0.0, gl.float32, accumulator(C.SECOND, ROWS))
    else:
        return first, first


@gluon.jit
def times_rows(sums, factor, C: gl.constexpr):
    """Both parts of `sums`, each row times its `factor`."""
    a, b = sums
    a = a * gl.convert_layout(factor, gl.SliceLayout(1, accumulator(C.FIRST)))[:, None]
    if C.SECOND > 0:
        return a, b * gl.convert_layout(factor, gl.SliceLayout(1, accumulator(C.SECOND)))[:, None]
    else:
        return a, a


@gluon.jit
def write_part(at, sums, buffer, first, limit, column: gl.constexpr, ALL: gl.constexpr):
    address, stride = at
    ROWS: gl.constexpr = sums.shape[0]
    WIDTH: gl.constexpr = sums.shape[1]
    L: gl.constexpr = coalesced(WIDTH, ROWS)
    buffer.store(sums.to(buffer.dtype))
    tile = buffer.load(L)  # [ROWS, WIDTH]
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    to = address + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    if column + WIDTH > ALL:
        gl.store(to, tile, mask=(rows < limit)[:, None] & (columns < ALL)[None, :])
    else:
        gl.store(to, tile, mask=(rows < limit)[:, None])


@gluon.jit
def write_part_float32(at, sums, first, limit, column: gl.constexpr, ALL: gl.constexpr):
    address, stride = at
    ROWS: gl.constexpr = sums.shape[0]
    WIDTH: gl.constexpr = sums.shape[1]
    L: gl.constexpr = accumulator(WIDTH, ROWS)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    to = address + rows.to(gl.int64)[:, None] * stride + columns[None, :]
    gl.store(to, sums, mask=(rows < limit)[:, None] & (columns < ALL)[None, :])


@gluon.jit
def write_rows(at, sums, buffers, first, limit, C: gl.constexpr):
    """Writes the rows of both parts of `sums` from row `first`, below `limit`, of `(address, stride)`, through shared memory."""
    a, b = sums
    x, y = buffers
    write_part(at, a, x, first, limit, 0, C.ALL)
    if C.SECOND > 0:
        write_part(at, b, y, first, limit, C.FIRST, C.ALL)


@gluon.jit
def write_float32(at, sums, first, limit, C: gl.constexpr):
    """`write_rows` in float32, straight from registers."""
    a, b = sums
    write_part_float32(at, a, first, limit, 0, C.ALL)
    if C.SECOND > 0:
        write_part_float32(at, b, first, limit, C.FIRST, C.ALL)


@gluon.jit
def times(sums, factor, C: gl.constexpr):
    """Both parts of `sums` times a number."""
    a, b = sums
    if C.SECOND > 0:
        return a * factor, b * factor
    else:
        return a * factor, a
