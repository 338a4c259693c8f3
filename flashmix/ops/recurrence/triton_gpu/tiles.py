"""Tile functions that the phases share: places of chunks, loads and stores of token rows, the inverse of a chunk.

Letters of tiles: `C` tokens of a chunk, `d` or `BK` channels of keys, `BV` channels of values. Tokens past the chunk's count and channels
past the head's are zero, in the decay too: such a token neither decays nor reads nor writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.structs import Place


@triton.jit
def sequence_span(cu, n, tokens, mask):
    """First token and end of sequence n, a number or a tile, both within [0, tokens] whatever `cu` holds."""
    first = tl.minimum(tl.maximum(tl.load(cu + n, mask=mask, other=0).to(tl.int64), 0), tokens)  # [n]
    end = tl.minimum(tl.maximum(tl.load(cu + n + 1, mask=mask, other=0).to(tl.int64), first), tokens)  # [n]
    return first, end


@triton.jit
def sequence_chunks(where, sequence, n, S: tl.constexpr):
    """First token, number of tokens, first chunk and number of chunks of a sequence."""
    if S.PACKED:
        first, end = sequence_span(where.cu_seqlens, sequence, n.tokens, True)
        chunk = tl.load(where.offsets + sequence)
        return first, (end - first).to(tl.int32), chunk.to(tl.int64), tl.load(where.offsets + sequence + 1) - chunk
    return sequence.to(tl.int64) * n.tokens, n.tokens, sequence.to(tl.int64) * n.chunks, n.chunks


@triton.jit
def chunk_place(chunk, head, where, n, S: tl.constexpr):
    """The place of a chunk; it has no tokens where a packed batch has fewer chunks than it might have."""
    if S.PACKED:
        first = tl.load(where.spans + chunk.to(tl.int64) * 2)
        count = tl.load(where.spans + chunk.to(tl.int64) * 2 + 1).to(tl.int32)
    else:
        start = (chunk % n.chunks) * S.C
        first = (chunk // n.chunks).to(tl.int64) * n.tokens + start
        count = tl.minimum(n.tokens - start, S.C)
    return Place(chunk, head, first, count)


@triton.jit
def load_rows(x, at, HEADS: tl.constexpr, D: tl.constexpr, d, S: tl.constexpr, SHIFT: tl.constexpr = 0):
    """Channels `d` of the chunk's tokens of `[tokens, HEADS, D]`, [C, d]; outside the chunk 0. SHIFT 1: of the next tokens."""
    t = tl.arange(0, S.C) + SHIFT
    head = at.head // (S.HV // HEADS)
    offset = (at.first + t)[:, None] * (HEADS * D) + head * D + d[None, :]  # shared by tensors of the same heads
    return tl.load(x + offset, mask=((t >= 0) & (t < at.count))[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(x, tile, at, D: tl.constexpr, d, S: tl.constexpr, ADD: tl.constexpr = False):
    """Writes a tile of `[tokens, HV, D]`, or ADDs it to what is there; nothing where `x` is None."""
    if x is not None:
        t = tl.arange(0, S.C)
        offset = (at.first + t)[:, None] * (S.HV * D) + at.head * D + d[None, :]
        mask = (t < at.count)[:, None] & (d < D)[None, :]
        if ADD:
            tile += tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)  # [C, d]
        tl.store(x + offset, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_numbers(x, at, S: tl.constexpr, SHIFT: tl.constexpr = 0):
    """One number per token of `[tokens, HV]`, float32: [C]; outside the chunk 0."""
    t = tl.arange(0, S.C) + SHIFT
    return tl.load(x + (at.first + t) * S.HV + at.head, mask=(t >= 0) & (t < at.count), other=0.0).to(tl.float32)


@triton.jit
def store_numbers(x, numbers, at, S: tl.constexpr):
    """Writes one number per token of `[tokens, HV]`."""
    t = tl.arange(0, S.C)
    offset = (at.first + t) * S.HV + at.head
    tl.store(x + offset, numbers.to(x.dtype.element_ty), mask=t < at.count)


@triton.jit
def append(tiles, tile):
    """The tuple with one more tile."""
    return tiles + (tile,)  # noqa: RUF005 (kernels cannot unpack)


@triton.jit
def replaced(tiles, INDEX: tl.constexpr, tile):
    """The tuple with another tile at INDEX."""
    COUNT: tl.constexpr = len(tiles)
    found = ()
    for n in tl.static_range(COUNT):
        if n == INDEX:
            found = append(found, tile)
        else:
            found = append(found, tiles[n])
    return found


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """COUNT float32 tiles [ROWS, COLUMNS] of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = append(found, tl.zeros([ROWS, COLUMNS], tl.float32))
    return found


@triton.jit
def zero_vectors(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """COUNT float32 vectors [SIZE] of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = append(found, tl.zeros([SIZE], tl.float32))
    return found


@triton.jit
def inverse_product(x, y, S: tl.constexpr):
    """x y of float32 tiles; "fp16" rounds the operands to float16 (as precise as tf32, at half the traffic)."""
    if S.INVERSE_PRECISION == "fp16":
        return tl.dot(x.to(tl.float16), y.to(tl.float16))
    else:
        return tl.dot(x, y, input_precision=S.INVERSE_PRECISION)


@triton.jit
def inverse(A, S: tl.constexpr):
    """(I - A)^-1 of a strictly lower triangular A, [C, C], float32 (4.4): inverses of blocks of h become those of 2h.

    The loop is not unrolled: the masks of all levels at once need so many registers that ptxas serializes all products, or spills.
    """
    i = tl.arange(0, S.C)[:, None]
    j = tl.arange(0, S.C)[None, :]
    D = tl.where(i == j, 1.0, 0.0) + tl.where((i // 2 == j // 2) & (i > j), A, 0.0)
    i //= 2  # so that the two columns of a register have one mask
    j //= 2
    for level in tl.range(0, S.LEVELS - 1, num_stages=1):
        below = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level), A, 0.0)
        D += inverse_product(D, inverse_product(below, D, S), S)
    return D


@triton.jit
def pair_tile(A, at, PAIR: tl.constexpr, S: tl.constexpr):
    """Pointers to one `[C, C]` tile of `[chunks, HV, pairs, C, C]`."""
    PAIRS: tl.constexpr = len(S.ROW)
    t = tl.arange(0, S.C)
    base = ((at.chunk.to(tl.int64) * S.HV + at.head) * PAIRS + PAIR) * (S.C * S.C)
    return A + base + t[:, None] * S.C + t[None, :]


@triton.jit
def factor_vector(factors, at, SLOT: tl.constexpr, S: tl.constexpr):
    """Pointers to the [C] factors of one row or column of `[chunks, HV, rows + columns, C]`."""
    SLOTS: tl.constexpr = len(S.ROW_HEADS) + len(S.COLUMN_HEADS)
    return factors + ((at.chunk.to(tl.int64) * S.HV + at.head) * SLOTS + SLOT) * S.C + tl.arange(0, S.C)


@triton.jit
def state_tile(x, index, v, k, S: tl.constexpr):
    """Pointers to a tile `[v, k]` of state `index` of the caller's `[..., K, V]`, or `[..., V, K]` if TRANSPOSED."""
    if S.TRANSPOSED:
        return saved_tile(x, index, v, k, S)
    else:
        return x + index.to(tl.int64) * (S.K * S.V) + k[None, :] * S.V + v[:, None]


@triton.jit
def saved_tile(x, index, v, k, S: tl.constexpr):
    """Pointers to a tile `[v, k]` of state `index` of `[..., V, K]`."""
    return x + index.to(tl.int64) * (S.V * S.K) + v[:, None] * S.K + k[None, :]


@triton.jit
def map_tile(maps, index, rows, k, S: tl.constexpr):
    """Pointers to a tile `[rows, k]` of map `index` of `[..., V + K, K]`: N^T, under it M^T (7.1); of one that is DIAGONAL,
    `[..., V + 1, K]`, under N^T its diagonal.
    """
    SIZE: tl.constexpr = (S.V + 1) * S.K if S.DIAGONAL else (S.V + S.K) * S.K
    return maps + index.to(tl.int64) * SIZE + rows[:, None] * S.K + k[None, :]
