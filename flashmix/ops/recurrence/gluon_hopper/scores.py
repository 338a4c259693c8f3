"""The `scores` phase with the inverse of `transform`: programs of one warp, one a (chunk, key head), its value heads one after the other.

    A_ab = -beta_j k_i . k_j e^{G_i - G_j}, j < i       (3.1)       T = (I - A_ab)^-1       (4.2)

A_qb is made by the state passes that read it, so without corrections only the vectors of chunks are left. A warp has the lower triangle
as ten blocks of 16 x 16, accumulators of `mma`; no barrier is waited for between them. The inverse goes from blocks to blocks of twice
the size (4.4): within 16 by masks, then by blocks. A right operand is an accumulator tile turned round, which costs nothing: `right(X)`
is X^T. So tiles that stand on the right are made transposed, `_t`, and the inverses of diagonal blocks both ways.
"""

from __future__ import annotations

from flashmix.gpu.hopper import (
    allocate_barriers,
    copy_to_global,
    ex2,
    expect_bytes,
    fence_async_shared,
    gl,
    gluon,
    mma_v2,
    overlap,
    plus,
    reinterpret,
    retire,
    stores_done,
    thread_barrier,
    wait_full,
)
from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.gluon_hopper.layouts import TILE, VECTOR
from flashmix.ops.recurrence.gluon_hopper.place import chunk_of_item, fetch_tokens

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))  # accumulators of a warp
BLOCK_ROWS = gl.constexpr(gl.SliceLayout(1, BLOCK.value))
BLOCK_COLUMNS = gl.constexpr(gl.SliceLayout(0, BLOCK.value))
LEFT = gl.constexpr(gl.DotOperandLayout(0, BLOCK.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, BLOCK.value, 2))
TOKENS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
BLOCKS = gl.constexpr(10)  # of the lower triangle: block (i, j) is number i (i + 1) / 2 + j
KEPT = gl.constexpr(gl.SwizzledSharedLayout(2, 1, 8, [1, 0]))


@gluon.jit
def left(x):
    """A tile as the left operand of a product, in float16."""
    return gl.convert_layout(x.to(gl.float16), LEFT)


@gluon.jit
def right(x):
    """The transpose of a tile as the right operand of a product, in float16."""
    return gl.convert_layout(x.to(gl.float16).permute((1, 0)), RIGHT)


@gluon.jit
def times(x, y_t, total):
    """total + x y, [16, 16]; y is given transposed."""
    return mma_v2(left(x), right(y_t), total)


@gluon.jit
def zero_block():
    return gl.zeros([16, 16], gl.float32, BLOCK)


@gluon.jit
def append(tiles, tile):
    """The tuple with one more tile."""
    return tiles + (tile,)


@gluon.jit
def with_block(blocks, INDEX: gl.constexpr, block):
    """The tuple with another block at INDEX."""
    found = ()
    COUNT: gl.constexpr = len(blocks)
    for n in gl.static_range(COUNT):
        if n == INDEX:
            found = append(found, block)
        else:
            found = append(found, blocks[n])
    return found


@gluon.jit
def zero_blocks():
    found = ()
    for _ in gl.static_range(BLOCKS):
        found = append(found, zero_block())
    return found


@gluon.jit
def key_products(k_d, at, landed, k, S: gl.constexpr):
    """k k^T, ten blocks, 64 channels at a time: the less shared memory, the more warps."""
    kk = zero_blocks()
    for part in gl.static_range(S.BK // 64):
        bar = expect_bytes(landed, part, 64 * 64 * 2)
        fetch_tokens(k_d, at.span, at.t, at.key_head, part * 64, bar, k, S)
        wait_full(landed, part)
        for i in gl.static_range(4):
            row = k.slice(i * 16, 16, dim=0).load(LEFT)  # [16, 64]
            for j in gl.static_range(i + 1):
                column = k.slice(j * 16, 16, dim=0).permute((1, 0)).load(RIGHT)  # [64, 16]
                kk = with_block(kk, i * (i + 1) // 2 + j, mma_v2(row, column, kk[i * (i + 1) // 2 + j]))
        thread_barrier()  # before the next channels are written here
    return kk


@gluon.jit
def load_numbers(x, at, head, S: gl.constexpr):
    """beta (1 where there is none) and the log decay of a chunk's tokens, float32; past them beta 0 and no decay."""
    t = gl.arange(0, 64, TOKENS)
    inside = t < at.span.length
    to = (at.row + t) * S.HV + head
    if x.beta is not None:
        beta = gl.load(x.beta + to, mask=inside, other=0.0).to(gl.float32)  # [C]
    else:
        beta = gl.where(inside, 1.0, 0.0)
    decay = gl.zeros([64], gl.float32, TOKENS)
    if S.DECAY:
        if S.PER_HEAD:
            decay = gl.where(inside, gl.load(x.decay + head).to(gl.float32), 0.0)
        else:
            decay = gl.load(x.decay + to, mask=inside, other=0.0).to(gl.float32)  # [C]
    return beta, decay


@gluon.jit
def decay_sums(decay, S: gl.constexpr):
    """G to base 2, 2^G and 2^(G_C - G); a log decay below -160 ln 2 is taken as that."""
    G = decay
    last = 0.0
    if S.DECAY:
        G = gl.associative_scan(gl.maximum(decay * LOG2E, -160.0), 0, plus)
        last = gl.min(G, 0)  # sums never rise
    return G, ex2(G), ex2(gl.minimum(last - G, 0.0))


@gluon.jit
def store_vectors(x, index, G, beta, row, column):
    """Writes the vectors of a chunk and value head, `[chunks, HV, 4, 64]`."""
    to = x.vectors + index.to(gl.int64) * 256 + gl.arange(0, 64, TOKENS)
    gl.store(to, G)
    gl.store(to + 64, beta)
    gl.store(to + 128, row)
    gl.store(to + 192, column)


@gluon.jit
def beside(x, y):
    """Two tiles of 16 rows side by side: registers alone."""
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.join(x, y).permute((0, 2, 1)).reshape([16, 2 * COLUMNS])


@gluon.jit
def store_row(out, i: gl.constexpr, b0, b1, b2, b3):
    """Puts a row of four blocks into a shared tile [64, 64]."""
    DT: gl.constexpr = out.dtype
    row = beside(beside(b0.to(DT), b1.to(DT)), beside(b2.to(DT), b3.to(DT)))
    out.slice(i * 16, 16, dim=0).store(gl.convert_layout(row, BLOCK))


@gluon.jit
def decayed_block(kept, vectors, i: gl.constexpr, j: gl.constexpr):
    """Block (i, j) of A_ab of products that are `kept`, not masked on the diagonal."""
    kk = kept.index(i * (i + 1) // 2 + j).load(BLOCK)  # [16, 16]
    G_row = vectors.slice(i * 16, 16, dim=0).load(BLOCK_ROWS)  # [16]
    G_column = vectors.slice(j * 16, 16, dim=0).load(BLOCK_COLUMNS)  # [16]
    beta = vectors.slice(64 + j * 16, 16, dim=0).load(BLOCK_COLUMNS)  # [16]
    E = ex2(gl.minimum(G_row[:, None] - G_column[None, :], 0.0)) * beta[None, :]
    return 0.0 - kk * E


@gluon.jit
def decayed_diagonal(kept, vectors, i: gl.constexpr):
    """Block (i, i) of A_ab, and the first step of its inverse, transposed."""
    row = gl.arange(0, 16, BLOCK_ROWS)[:, None]
    column = gl.arange(0, 16, BLOCK_COLUMNS)[None, :]
    kk = kept.index(i * (i + 1) // 2 + i).load(BLOCK)  # [16, 16]
    G_row = vectors.slice(i * 16, 16, dim=0).load(BLOCK_ROWS)  # [16]
    G_column = vectors.slice(i * 16, 16, dim=0).load(BLOCK_COLUMNS)  # [16]
    beta_row = vectors.slice(64 + i * 16, 16, dim=0).load(BLOCK_ROWS)  # [16]
    a_t = 0.0 - kk * ex2(gl.minimum(G_column[None, :] - G_row[:, None], 0.0)) * beta_row[:, None]
    unit = gl.where(row == column, 1.0, 0.0)
    first_t = gl.where((row // 2 == column // 2) & (row < column), a_t, unit)
    return gl.where(row > column, decayed_block(kept, vectors, i, i), 0.0), first_t


@gluon.jit
def block_of_pairs(A, i: gl.constexpr, j: gl.constexpr, PRODUCTS: gl.constexpr):
    """Block (i, j) of A_ab below the diagonal: with PRODUCTS made of A, `(kept, vectors)`, else one of A's ten blocks."""
    first, second = A
    if PRODUCTS:
        return decayed_block(first, second, i, j)
    else:
        return first[i * (i + 1) // 2 + j]


@gluon.jit
def diagonal_of_pairs(A, i: gl.constexpr, PRODUCTS: gl.constexpr):
    """The same of block (i, i), with the first step of its inverse, transposed."""
    first, second = A
    if PRODUCTS:
        return decayed_diagonal(first, second, i)
    else:
        return first[i * (i + 1) // 2 + i], second[i]


@gluon.jit
def diagonal_inverse(a, D_t):
    """(I - a)^-1 of a strictly lower triangular block and its transpose, of which the inverses of 2 x 2 blocks are given."""
    row = gl.arange(0, 16, BLOCK_ROWS)[:, None]
    column = gl.arange(0, 16, BLOCK_COLUMNS)[None, :]
    D = gl.where((row // 2 == column // 2) & (row > column), a, gl.where(row == column, 1.0, 0.0))
    for level in gl.static_range(1, 4):
        same = (row >> (level + 1)) == (column >> (level + 1))
        below = gl.where(same & ((row >> level) > (column >> level)), a, 0.0)
        x_t = times(D_t, below, zero_block())  # (below D)^T = D^T below^T
        D, D_t = times(D, x_t, D), times(x_t, D, D_t)
    return D, D_t


@gluon.jit
def diagonal_inverses(A, PRODUCTS: gl.constexpr):
    """The inverses of the four blocks on the diagonal, and their transposes."""
    D, D_t = (), ()
    for i in gl.static_range(4):
        a, first_t = diagonal_of_pairs(A, i, PRODUCTS)
        d, d_t = diagonal_inverse(a, first_t)
        D, D_t = append(D, d), append(D_t, d_t)
    return D, D_t


@gluon.jit
def store_inverse(A, out, PRODUCTS: gl.constexpr):
    """Stores T = (I - A)^-1, made of the inverses of 16 x 16 blocks, then of 32 x 32, then its lower left.

    A block of `decayed_block` is made where a product wants it: all ten would be 80 registers, and fewer warps.
    """
    zero = zero_block()
    D, D_t = diagonal_inverses(A, PRODUCTS)
    x_t = times(D_t[0], block_of_pairs(A, 1, 0, PRODUCTS), zero)  # (A_10 D_0)^T
    T10 = times(D[1], x_t, zero)
    T10_t = times(x_t, D[1], zero)
    x_t = times(D_t[2], block_of_pairs(A, 3, 2, PRODUCTS), zero)  # (A_32 D_2)^T
    T32 = times(D[3], x_t, zero)
    store_row(out, 0, D[0], zero, zero, zero)
    store_row(out, 1, T10, D[1], zero, zero)
    a = block_of_pairs(A, 2, 1, PRODUCTS)
    M20_t = times(D_t[0], block_of_pairs(A, 2, 0, PRODUCTS), times(T10_t, a, zero))  # M = A[2:, :2] T[:2, :2]
    M21_t = times(D_t[1], a, zero)
    a = block_of_pairs(A, 3, 1, PRODUCTS)
    M30_t = times(D_t[0], block_of_pairs(A, 3, 0, PRODUCTS), times(T10_t, a, zero))
    M31_t = times(D_t[1], a, zero)
    store_row(out, 2, times(D[2], M20_t, zero), times(D[2], M21_t, zero), D[2], zero)
    T30 = times(D[3], M30_t, times(T32, M20_t, zero))
    T31 = times(D[3], M31_t, times(T32, M21_t, zero))
    store_row(out, 3, T30, T31, T32, D[3])


@gluon.jit
def keep_blocks(blocks, kept):
    """Puts blocks into shared memory, from where each thread reads its own elements again."""
    for n in gl.static_range(BLOCKS):
        kept.index(n).store(blocks[n])


@gluon.jit
def store_tile(d, row, out):
    """Copies a tile of pairs to memory."""
    fence_async_shared()
    copy_to_global(d, [row, 0], reinterpret(out, d.dtype, d.block_type.shape, d.layout))


@gluon.jit
def inverses(k_d, T_d, x, at, S: gl.constexpr):
    """T and the vectors of a chunk, for each value head of a key head."""
    DT: gl.constexpr = k_d.dtype
    k = gl.allocate_shared_memory(DT, [64, 64], TILE)
    landed = allocate_barriers(1, 1)
    kk = key_products(k_d, at, landed, k, S)
    out = gl.allocate_shared_memory(DT, [64, 64], TILE)
    vectors = gl.allocate_shared_memory(gl.float32, [128], VECTOR)
    kept = gl.allocate_shared_memory(gl.float32, [BLOCKS, 16, 16], KEPT)
    keep_blocks(kk, kept)
    beta, decay = load_numbers(x, at, at.key_head * S.GROUP, S)  # [C]
    for r in range(S.GROUP):
        head = at.key_head * S.GROUP + r
        index = at.index * S.HV + head
        G, row, column = decay_sums(decay, S)
        store_vectors(x, index, G, beta, row, column)
        vectors.slice(0, 64, dim=0).store(G)
        vectors.slice(64, 64, dim=0).store(beta)
        if S.GROUP > 1:
            beta, decay = load_numbers(x, at, gl.minimum(head + 1, S.HV - 1), S)  # of the next value head  # [C]
        stores_done(0)
        store_inverse((kept, vectors), out, True)
        store_tile(T_d, index * 64, out)
    stores_done(0)
    retire(landed)


@with_sound_ptxas
@gluon.jit(do_not_specialize=["n"])
def scores_forward_kernel(k_d, T_d, x, n, S: gl.constexpr):
    """Writes T, `[chunks, HV, 1, 64, 64]`, and the vectors of chunks; without corrections only these."""
    if S.EARLY:
        overlap()
    at = chunk_of_item(gl.program_id(0), x, n, S)
    if S.CORRECTED:
        inverses(k_d, T_d, x, at, S)
    else:
        for r in range(S.GROUP):
            head = at.key_head * S.GROUP + r
            beta, decay = load_numbers(x, at, head, S)  # [C]
            G, row, column = decay_sums(decay, S)
            store_vectors(x, at.index * S.HV + head, G, beta, row, column)
