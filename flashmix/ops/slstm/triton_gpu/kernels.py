"""The sLSTM with recurrent weights on a GPU, forward, and what its backward shares: a program is one head of one sequence.

    i, f, z, o = logits_t + R y_{t-1};  m_t = max(log sigmoid(f) + m_{t-1}, i);  f' = sigmoid(f) e^{m_{t-1} - m_t},  i' = e^{i - m_t}
    c_t = f' c_{t-1} + i' tanh(z);  n_t = f' n_{t-1} + i';  y_t = sigmoid(o) c_t / n_t

One token follows the other, so that a program waits for its own product with R. The state lies in registers, and so do as many rows of R as
fit; the others are read again at every token, from cache. The four gates of a channel lie side by side, in R as well: a thread that sums
columns of R has all that the state of its channels needs. Logits are loaded two tokens ahead.
Tiles: `d` channels of a head, up to a power of two with zeros; `4d` their gates, channel by channel; `r` and `b` rows of a matrix.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.rows import exp_of_minus, sigmoid
from flashmix.ops.decay.triton_gpu import softplus
from flashmix.ops.scan.triton_gpu.kernels import span_of
from flashmix.ops.scan.triton_gpu.numbers import exponential

LEAST = tl.constexpr(-3.4028234663852886e38)


class CellLogits(NamedTuple):
    """Contiguous logits of the gates `[T, H, D]`, or their gradients."""

    write: Any
    forget: Any
    candidate: Any
    output: Any


class CellStates(NamedTuple):
    """Contiguous states `[N, H, D]`; of gradients those that are given and wanted, there is none of `m`; absent ones None."""

    c: Any
    n: Any
    m: Any
    y: Any


class CellKept(NamedTuple):
    """For the backward, the logits of the gates after the product and `c, n, m` after each token, `[T, H, D]`, or None."""

    write: Any
    forget: Any
    candidate: Any
    output: Any
    c: Any
    n: Any
    m: Any


class CellNumbers(NamedTuple):
    tokens: Any  # T of a sequence; packed, of all
    rows: Any  # of a matrix


class CellSpec(NamedTuple):
    HEADS: int
    CHANNELS: int  # D
    TILE: int  # d
    RESIDENT: int  # rows of the matrix in registers, r
    BLOCK: int  # rows of it that are read at a time, b
    PACKED: bool
    SEGMENTS: bool  # False, for `span_of`


@triton.jit
def cell_place(slots, n, S: tl.constexpr):
    """The program's head, the span of its sequence, its channels [d] of all heads, and which of these there are."""
    TILE: tl.constexpr = S.TILE
    head = tl.program_id(0) % S.HEADS
    span = span_of(slots, n, (tl.program_id(0) // S.HEADS).to(tl.int64), S)
    channel = tl.arange(0, TILE)
    return head, span, head * S.CHANNELS + channel, channel < S.CHANNELS


@triton.jit
def channels_at(tensor, row, column, mask, other, S: tl.constexpr):
    """The channels [d] of a token or a state; `other` where `mask` does not hold or there is no tensor."""
    TILE: tl.constexpr = S.TILE
    if tensor is None:
        return tl.full([TILE], other, tl.float32)
    else:
        width: tl.constexpr = S.HEADS * S.CHANNELS
        return tl.load(tensor + (row * width + column), mask=mask, other=other)  # [d]


@triton.jit
def put_channels(tensor, row, column, mask, x, S: tl.constexpr):
    if tensor is not None:
        width: tl.constexpr = S.HEADS * S.CHANNELS
        tl.store(tensor + (row * width + column), x, mask=mask)


@triton.jit
def logits_at(logits, token, column, mask, S: tl.constexpr):
    """The logits of write, forget, candidate and output of a token, [d] each, zeros where there are none."""
    return (
        channels_at(logits.write, token, column, mask, 0.0, S),
        channels_at(logits.forget, token, column, mask, 0.0, S),
        channels_at(logits.candidate, token, column, mask, 0.0, S),
        channels_at(logits.output, token, column, mask, 0.0, S),
    )


@triton.jit
def put_logits(logits, token, column, mask, i, f, z, o, S: tl.constexpr):
    put_channels(logits.write, token, column, mask, i, S)
    put_channels(logits.forget, token, column, mask, f, S)
    put_channels(logits.candidate, token, column, mask, z, S)
    put_channels(logits.output, token, column, mask, o, S)


@triton.jit
def matrix_rows(matrix, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, height: tl.constexpr, width: tl.constexpr):
    """Rows of a matrix `[height, width]` from `first` on in float32, [ROWS, COLUMNS], zeros past its ends."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (row < height)[:, None] & (column < width)[None, :]
    return tl.load(matrix + (row * width)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def piece_of(x, place, ROWS: tl.constexpr):
    """The numbers [ROWS] of a vector from `place` times ROWS on."""
    SIZE: tl.constexpr = x.shape[0]
    if SIZE == ROWS:
        return x
    else:
        pieces = tl.reshape(x, [SIZE // ROWS, ROWS])
        wanted = tl.arange(0, SIZE // ROWS) == place
        return tl.sum(tl.where(wanted[:, None], pieces, 0.0), 0)


@triton.jit
def times_matrix(
    x, resident, matrix, rows, COLUMNS: tl.constexpr, height: tl.constexpr, width: tl.constexpr, S: tl.constexpr
):
    """A vector times a matrix `[height, width]`, whose first rows are `resident` [r, COLUMNS]; `rows` is the height, which the compiler is
    not to know: unrolled, the loop takes registers for several blocks.
    """
    BLOCK: tl.constexpr = S.BLOCK
    RESIDENT: tl.constexpr = resident.shape[0]
    total = tl.sum(resident * piece_of(x, 0, RESIDENT)[:, None], 0)
    if RESIDENT < height:
        partial = tl.full([BLOCK, COLUMNS], 0.0, tl.float32)  # summed over rows at the end, which threads share
        for first in range(RESIDENT, rows, BLOCK):
            block = matrix_rows(matrix, first, BLOCK, COLUMNS, height, width)  # [b, COLUMNS]
            partial += block * piece_of(x, first // BLOCK, BLOCK)[:, None]
        total += tl.sum(partial, 0)
    return total


@triton.jit
def parts_of(gates, S: tl.constexpr):
    """Four vectors [d], from one that holds their numbers by channel [4d]."""
    TILE: tl.constexpr = S.TILE
    even, odd = tl.split(tl.reshape(gates, [TILE, 2, 2]))
    i, z = tl.split(even)
    f, o = tl.split(odd)
    return i, f, z, o


@triton.jit
def factors_of(i, f, z, o, m):
    """What is kept, the weight of what is written, `tanh(z)`, `sigmoid(o)` and the new maximum, from logits and the maximum before."""
    log_keep = m - softplus(-f, True)
    new = tl.maximum(log_keep, i, propagate_nan=tl.PropagateNan.ALL)
    base = tl.maximum(new, LEAST, propagate_nan=tl.PropagateNan.ALL)
    e = exp_of_minus(2.0 * tl.abs(z), True)
    candidate = tl.div_rn(1.0 - e, 1.0 + e)
    candidate = tl.where(z >= 0, candidate, -candidate)
    return exponential(log_keep - base), exponential(i - base), candidate, sigmoid(o, True), new


@triton.jit(do_not_specialize=["n"])
def cell_kernel(gates, matrices, start, out, kept, last, slots, n, S: tl.constexpr):
    """The outputs `out` `[T, H, D]` of a sequence and head; matrices `[H, D, 4D]`: a row for each channel of the output before."""
    COLUMNS: tl.constexpr = 4 * S.TILE
    RESIDENT: tl.constexpr = S.RESIDENT
    D: tl.constexpr = S.CHANNELS
    head, span, column, inside = cell_place(slots, n, S)
    matrix = matrices + head * (4 * D * D)
    resident = matrix_rows(matrix, 0, RESIDENT, COLUMNS, D, 4 * D)  # [r, 4d]
    c = channels_at(start.c, span.sequence, column, inside, 0.0, S)
    N = channels_at(start.n, span.sequence, column, inside, 1.0, S)
    m = channels_at(start.m, span.sequence, column, inside, 0.0, S)
    y = channels_at(start.y, span.sequence, column, inside, 0.0, S)
    now = logits_at(gates, span.first, column, inside & (span.first < span.last), S)
    later = logits_at(gates, span.first + 1, column, inside & (span.first + 1 < span.last), S)
    for token in range(span.first, span.last):
        i, f, z, o = now
        now = later
        later = logits_at(gates, token + 2, column, inside & (token + 2 < span.last), S)
        gate_i, gate_f, gate_z, gate_o = parts_of(times_matrix(y, resident, matrix, n.rows, COLUMNS, D, 4 * D, S), S)
        i, f, z, o = i + gate_i, f + gate_f, z + gate_z, o + gate_o
        keep, write, candidate, share, m = factors_of(i, f, z, o, m)
        c = keep * c + write * candidate
        N = keep * N + write
        y = tl.div_rn(share * c, N)
        put_channels(out, token, column, inside, y, S)
        put_logits(kept, token, column, inside, i, f, z, o, S)
        put_channels(kept.c, token, column, inside, c, S)
        put_channels(kept.n, token, column, inside, N, S)
        put_channels(kept.m, token, column, inside, m, S)
    put_channels(last.c, span.sequence, column, inside, c, S)
    put_channels(last.n, span.sequence, column, inside, N, S)
    put_channels(last.m, span.sequence, column, inside, m, S)
    put_channels(last.y, span.sequence, column, inside, y, S)
