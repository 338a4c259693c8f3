"""Where a program of attention works, what it loads and stores, and products of tiles.

`S` is an `AttentionSpec` (those for products also take a `CacheSpec`), `n` its `AttentionNumbers`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.attention.triton_gpu.packed import find_sequence


class AttentionBlock(NamedTuple):
    """Where a program works: (batch, query head, key head), `bh = batch heads + head`, the first row of its tile, the sequence."""

    batch: Any
    head: Any
    head_k: Any
    bh: Any
    first: Any
    start_q: Any
    tokens_q: Any
    start_k: Any
    tokens_k: Any


class HeadRows(NamedTuple):
    """The rows of one head of a sequence. A function cannot return one: what Triton's functions return is never None."""

    at: Any  # address of row 0, and stride
    tokens: Any
    descriptors: Any  # of both parts, or None each: without TMA
    place: Any  # (batch, head, first row of the sequence) in the descriptors


@triton.jit
def find_head(pid, blocks, heads, at_once):
    """(head, block): `at_once` heads take turns, so that their keys stay in cache, block by block in order."""
    in_group = blocks * at_once
    group = pid // in_group
    rest = pid - group * in_group
    width = tl.minimum(at_once, heads - group * at_once)
    block = rest // width
    return group * at_once + rest - block * width, block


@triton.jit
def keys_of_sequence(batch, table, n, S: tl.constexpr):
    """`(start, tokens)` of the keys of a sequence of the batch; with RANGES the `table` is a `KeyRanges`."""
    if S.RANGES:
        start, end = n.tokens_k * 0, n.tokens_k
        if table.lengths is not None:
            end = tl.minimum(tl.maximum(tl.load(table.lengths + batch).to(tl.int32), 0), n.tokens_k)
        if table.starts is not None:
            start = tl.minimum(tl.maximum(tl.load(table.starts + batch).to(tl.int32), 0), end)
        return start, end - start
    else:
        return n.tokens_k * 0, n.tokens_k


@triton.jit
def find_queries(number, table, n, S: tl.constexpr):
    """Block `number` of BM queries, in the order in which programs take them."""
    blocks = n.blocks
    bh, block = find_head(number, blocks, n.batches * n.heads_q, n.at_once)
    batch, head = bh // n.heads_q, bh % n.heads_q
    start_q, tokens_q = n.tokens_q * 0, n.tokens_q
    start_k, tokens_k = keys_of_sequence(batch, table, n, S)
    if S.PACKED:
        _, start_q, tokens_q, start_k, tokens_k, block = find_sequence(block, table)
        blocks = tl.cdiv(tokens_q, S.BM)
    if S.CAUSAL:
        block = blocks - 1 - block  # the heaviest first
    return AttentionBlock(batch, head, head // n.group, bh, block * S.BM, start_q, tokens_q, start_k, tokens_k)


@triton.jit
def head_of(x, at, place, S: tl.constexpr):
    """Address and stride of the rows of x `[B, T, H, D]`, which has strides `at`, from `place`: (batch, head, first row)."""
    batch, head, start = place
    batch_at, token_at, head_at = at
    x += (
        batch.to(tl.int64) * batch_at * S.UNIT
        + head.to(tl.int64) * head_at * S.UNIT
        + start.to(tl.int64) * token_at * S.UNIT
    )
    return x, token_at * S.UNIT


@triton.jit
def load_rows(
    x, start, FIRST: tl.constexpr, WIDTH: tl.constexpr, ALL: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr
):
    """Rows `start ..` and columns `FIRST ..` of x `[T, ALL]` as `[ROWS, WIDTH]`, zero outside; rows are inside unless MASK."""
    rows = start + tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    address, stride = x.at
    at = address + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASK:
        if FIRST + WIDTH > ALL:
            return tl.load(at, mask=(rows < x.tokens)[:, None] & (columns < ALL)[None, :], other=0.0)
        else:
            return tl.load(at, mask=(rows < x.tokens)[:, None], other=0.0)
    else:
        if FIRST + WIDTH > ALL:
            return tl.load(at, mask=(columns < ALL)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def load_head(x, start, C: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr, S: tl.constexpr):
    """ROWS rows of `HeadRows` in the two parts of its `Channels`, `[ROWS, FIRST]` and `[ROWS, SECOND]` (the first again without one).

    TMA reads zeros past T, but not past a packed sequence or a range of keys. Unless MASK all rows are inside.
    """
    tile, rest = x.descriptors
    if tile is not None and not (MASK and (S.PACKED or S.RANGES)):
        batch, head, first = x.place
        a = tile.load([batch, head, first + start, 0]).reshape([ROWS, C.FIRST])  # [ROWS, FIRST]
        if C.SECOND > 0:
            b = rest.load([batch, head, first + start, C.FIRST]).reshape([ROWS, C.SECOND])  # [ROWS, SECOND]
            return a, b
        else:
            return a, a
    else:
        a = load_rows(x, start, 0, C.FIRST, C.ALL, ROWS, MASK)  # [ROWS, FIRST]
        if C.SECOND > 0:
            b = load_rows(x, start, C.FIRST, C.SECOND, C.ALL, ROWS, MASK)  # [ROWS, SECOND]
            return a, b
        else:
            return a, a


@triton.jit
def result_rows(x, block, heads, head, tokens, start, C: tl.constexpr):
    """The rows of a head of a contiguous result `[B, T, H, ALL]`, from row `start` of the block's batch."""
    x += (block.batch.to(tl.int64) * tokens + start) * heads * C.ALL + head * C.ALL
    return x, heads * C.ALL


@triton.jit
def store_rows(x, tile, start, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """Writes `[ROWS, WIDTH]` to rows `start ..` below `limit` and columns `FIRST ..` of `(address, stride)`."""
    address, stride = x
    rows = start + tl.arange(0, ROWS)
    columns = FIRST + tl.arange(0, WIDTH)
    at = address + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(at, tile.to(address.dtype.element_ty), mask=(rows < limit)[:, None] & (columns < C.ALL)[None, :])


@triton.jit
def product(a, b, SECOND: tl.constexpr, S: tl.constexpr, begin=None):
    """`a b^T` over both parts of the head, and `begin` where there is one."""
    a_1, a_2 = a
    b_1, b_2 = b
    s = tl.dot(a_1, tl.trans(b_1), begin, input_precision=S.PRECISION)
    if SECOND > 0:
        s = tl.dot(a_2, tl.trans(b_2), s, input_precision=S.PRECISION)
    return s


@triton.jit
def accumulated(total, a, b, S: tl.constexpr):
    """`total + a b`. In float32 a tile is summed by itself first: one chain over all rows would lose a digit.

    (Starting from `total * 0` keeps the compiler from making it one chain again.)
    """
    if S.EXACT:
        return total + tl.dot(a, b, total * 0.0, input_precision=S.PRECISION)
    else:
        return tl.dot(a, b, total, input_precision=S.PRECISION)


@triton.jit
def load_decay(gates, at, tokens, MASK: tl.constexpr):
    """The running sum G of the gates at `at`, in two float32 parts; with MASK, outside the sequence that of its end."""
    high, low = gates
    if MASK:
        at = tl.minimum(tl.maximum(at, 0), tokens - 1)
        return tl.load(high + at, mask=at >= 0, other=0.0), tl.load(low + at, mask=at >= 0, other=0.0)  # [len(at)] each
    else:
        return tl.load(high + at), tl.load(low + at)


@triton.jit
def padded_tokens(tokens):
    """The row length of float32 numbers by token: a multiple of 16 bytes, so that they are loaded two or four at a time."""
    return (tokens + 3) // 4 * 4


@triton.jit
def load_numbers(x, at, tokens, other, EDGE: tl.constexpr):
    """Numbers by token `[rows]`; with EDGE `other` past the last one."""
    if EDGE:
        return tl.load(x + at, mask=at < tokens, other=other)
    else:
        return tl.load(x + at)


@triton.jit
def keys_of_rows(first, tokens_k, n, ROWS: tl.constexpr, S: tl.constexpr):
    """The keys that ROWS queries from position `first` see: all in `[low, high)`; whole tiles that all of them see in
    `[inner, outer)`. All are multiples of BN but `high`, and `low <= inner <= outer`."""
    low = 0
    high = tokens_k
    outer = tokens_k
    if S.CAUSAL:
        high = tl.minimum(high, first + ROWS)
        outer = tl.minimum(outer, first + 1)
    elif S.RIGHT:
        high = tl.minimum(high, first + ROWS + n.right)
        outer = tl.minimum(outer, first + 1 + n.right)
    if S.LEFT:
        low = tl.maximum(first - n.left, 0) // S.BN * S.BN
        inner = tl.cdiv(tl.maximum(first + ROWS - 1 - n.left, 0), S.BN) * S.BN
        inner = tl.maximum(tl.minimum(inner, tl.cdiv(tl.maximum(high, 0), S.BN) * S.BN), low)
    else:
        inner = low
    return low, inner, tl.maximum(tl.maximum(outer, 0) // S.BN * S.BN, inner), high


@triton.jit
def rows_of_keys(first, shift, tokens_q, n, S: tl.constexpr):
    """The queries that see some of BN keys from `first`, as `keys_of_rows` has it; query i stands at `i + shift`."""
    low = 0
    high = tokens_q
    inner = 0
    outer = tokens_q
    if S.CAUSAL:
        low = tl.maximum(first - shift, 0) // S.BM * S.BM
        inner = first + S.BN - 1 - shift
    elif S.RIGHT:
        low = tl.maximum(first - n.right - shift, 0) // S.BM * S.BM
        inner = first + S.BN - 1 - n.right - shift
    if S.LEFT:
        high = tl.minimum(high, first + S.BN + n.left - shift)
        outer = tl.minimum(outer, first + n.left - shift + 1)
    inner = tl.cdiv(tl.maximum(inner, 0), S.BM) * S.BM
    inner = tl.maximum(tl.minimum(inner, tl.cdiv(tl.maximum(high, 0), S.BM) * S.BM), low)
    return low, inner, tl.maximum(tl.maximum(outer, 0) // S.BM * S.BM, inner), high
