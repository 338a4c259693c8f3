"""Tensors as TMA reads them: shape, strides and the block that a copy moves."""

from __future__ import annotations

from torch import Tensor

from flashmix.gpu.tma import Tiles

# Of a packed batch: the extent of the two dimensions before the tokens, that of the tokens, and the stride of the first, which with the
# coordinate 2^30 comes to 2^64 bytes or a multiple and so moves nothing but what the tokens' stride takes off it (`place.py`).
FAR, RAGGED, AROUND = 0x7FFF0000, 1 << 30, 1 << 34


def tokens(x: Tensor, width: int, packed: bool) -> Tiles:
    """`[B, T, heads, channels]` in blocks of 64 tokens and `width` channels of one head."""
    _, T, heads, channels = x.shape
    row = heads * channels
    if packed:
        shape, strides = (FAR, FAR, RAGGED, heads, channels), (AROUND - row, row, row, channels, 1)
        return Tiles(x, shape, strides, (1, 1, 64, 1, width))
    return Tiles(x, x.shape, (T * row, row, channels, 1), (1, 64, 1, width))


def pairs(A: Tensor, tiles: int) -> Tiles:
    """`[chunks, HV, 2, 64, 64]` in blocks of one or two tiles."""
    return Tiles(A, (A.numel() // 64, 64), (64, 1), (64 * tiles, 64))


def vectors(x: Tensor) -> Tiles:
    """`[chunks, HV, 4, 64]` in blocks of the four vectors of a chunk and head."""
    return Tiles(x, (x.numel() // 256, 256), (256, 1), (1, 256), swizzle=0)


def totals(x: Tensor) -> Tiles:
    """`[chunks, HV, K]` in blocks of the channels of a chunk and head."""
    K = x.shape[2]
    return Tiles(x, (x.numel() // K, K), (K, 1), (1, 128), swizzle=0)


def segments(x: Tensor, block: int) -> Tiles:
    """`[N, HV, segments, V or K, K]` in float32, in blocks of `block` rows of a segment."""
    rows, K = x.shape[3:]
    return Tiles(x, (x.numel() // (rows * K), rows, K), (rows * K, K, 1), (1, block, 128))


def states(x: Tensor, rows: int, columns: int) -> Tiles:
    """`[chunks, HV, V, K]` in blocks of `rows` by `columns` of a state."""
    chunks, heads, V, K = x.shape
    return Tiles(x, (chunks * heads, V, K), (V * K, K, 1), (1, rows, columns))
