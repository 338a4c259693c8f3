"""The forget gate: its running sum, which is added to scores, and the gradient of the gates from those of the scores.

    G_t = sum_{s <= t} log2(e) g_s within a sequence;    dg_t = sum_{s >= t} (dG at rows of position s - dG at key s)

Both run in float64, a sequence and head a program, always in pieces counted from the sequence's start, so that a sequence
gets the same bits whatever is packed beside it. G is kept in two float32 parts: the difference of two entries is then
exact to float32, however long the sequence is.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.attention.triton_gpu.launch import Call
from flashmix.ops.attention.triton_gpu.tiles import LOG2_E, bounded

STRONGEST_DECAY = tl.constexpr(-1e6)  # its exponential is 0, and float64 sums of it are still exact to 1e-6
PIECE = 1024


@triton.jit
def _sequence(n, cu_q, cu_k, count, tokens_q, tokens_k, PACKED: tl.constexpr):
    """`(start, tokens)` of the queries and of the keys of sequence n; past the last one what is left."""
    start_q, len_q, start_k, len_k = tokens_q * 0, tokens_q, tokens_k * 0, tokens_k
    if PACKED:
        start_q = bounded(cu_q, n, 0, tokens_q)
        start_k = bounded(cu_k, n, 0, tokens_k)
        last = tl.minimum(n + 1, count)
        len_q = tl.where(n < count, bounded(cu_q, last, start_q, tokens_q) - start_q, 0)
        len_k = tl.where(n < count, bounded(cu_k, last, start_k, tokens_k), tokens_k) - start_k
    return start_q, len_q, start_k, len_k


@triton.jit(do_not_specialize=["tokens_q", "tokens_k", "heads", "sequences", "count", "sb", "st", "sh"])
def decay_sums_kernel(
    gates, sums, cu_q, cu_k, tokens_q, tokens_k, heads, sequences, count, sb, st, sh, PACKED: tl.constexpr,
    PIECE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """G of gates `[B, Tk, HQ]` as sums `[3, B, HQ, Tk]`; the third is G at the end of each tile of TILE keys minus G."""
    n, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    _, _, start, tokens = _sequence(n, cu_q, cu_k, count, tokens_q, tokens_k, PACKED)
    batch = n * 0 if PACKED else n
    gates += batch.to(tl.int64) * sb + head.to(tl.int64) * sh + start.to(tl.int64) * st
    sums += (batch * heads + head).to(tl.int64) * tokens_k + start
    part = sequences.to(tl.int64) * heads * tokens_k
    before = tl.zeros([1], tl.float64)
    for first in range(0, tokens, PIECE):
        at = first + tl.arange(0, PIECE)
        gate = tl.load(gates + at.to(tl.int64) * st, mask=at < tokens, other=0.0).to(tl.float64)
        gate = tl.maximum(gate, STRONGEST_DECAY) * LOG2_E
        inside = tl.cumsum(gate, 0)
        total = before + inside
        before += tl.sum(gate, 0)
        high = total.to(tl.float32)
        tl.store(sums + at, high, mask=at < tokens)
        tl.store(sums + part + at, (total - high.to(tl.float64)).to(tl.float32), mask=at < tokens)
        if TILE > 0:
            tiles = tl.reshape(inside, [PIECE // TILE, TILE])
            last = tl.arange(0, TILE)[None, :] == TILE - 1
            to_end = tl.sum(tl.where(last, tiles, 0.0), 1)[:, None] - tiles
            tl.store(sums + 2 * part + at, tl.reshape(to_end, [PIECE]).to(tl.float32), mask=at < tokens)


@triton.jit(do_not_specialize=["tokens_q", "tokens_k", "heads", "count", "sb", "st", "sh"])
def decay_gradient_kernel(
    gates, at_rows, at_keys, gradient, cu_q, cu_k, tokens_q, tokens_k, heads, count, sb, st, sh, PACKED: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """The gates' gradient `[B, Tk, HQ]` from the sums of dS over rows `[B, HQ, Tq]` and over columns `[B, HQ, Tk]`."""
    n, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start_q, len_q, start, tokens = _sequence(n, cu_q, cu_k, count, tokens_q, tokens_k, PACKED)
    batch = n * 0 if PACKED else n
    at_rows += (batch * heads + head).to(tl.int64) * tokens_q + start_q
    at_keys += (batch * heads + head).to(tl.int64) * tokens_k + start
    gates += batch.to(tl.int64) * sb + head.to(tl.int64) * sh + start.to(tl.int64) * st
    gradient += (batch.to(tl.int64) * tokens_k + start) * heads + head
    after = tl.zeros([1], tl.float64)
    for turn in range(tl.cdiv(tokens, PIECE)):
        at = (tl.cdiv(tokens, PIECE) - 1 - turn) * PIECE + tl.arange(0, PIECE)
        row = at + len_q - tokens
        here = -tl.load(at_keys + at, mask=at < tokens, other=0.0).to(tl.float64)
        here += tl.load(at_rows + row, mask=(at < tokens) & (row >= 0), other=0.0).to(tl.float64)
        total = after + tl.cumsum(here, 0, reverse=True)
        after += tl.sum(here, 0)
        gate = tl.load(gates + at.to(tl.int64) * st, mask=at < tokens, other=0.0)
        total = tl.where(gate < STRONGEST_DECAY, 0.0, total)
        tl.store(gradient + at.to(tl.int64) * heads, total.to(gradient.dtype.element_ty), mask=at < tokens)


def running_sums(x: Call, log_decay: Tensor | None, tile: int = 0) -> Tensor | None:
    """G in log 2 as float32 `[3, B, HQ, Tk]`: rounded, what rounding left, and from each key to the end of its `tile`."""
    if log_decay is None:
        return None
    sums = torch.empty(3 if tile else 2, x.batch, x.heads_q, x.tokens_k, dtype=torch.float32, device=x.q.device)
    programs = (x.batch if x.cu_k is None else x.count + 1) * x.heads_q
    if sums.numel() > 0:
        decay_sums_kernel[(programs,)](
            log_decay, sums, x.cu_q, x.cu_k, x.tokens_q, x.tokens_k, x.heads_q, x.batch, x.count, *log_decay.stride(),
            x.cu_k is not None, PIECE, tile, num_warps=4,
        )  # fmt: skip
    return sums


def sums_of_gradients(x: Call, log_decay: Tensor, at_rows: Tensor, at_keys: Tensor) -> Tensor:
    """The gradient of `log_decay` `[B, Tk, HQ]`."""
    gradient = torch.empty(log_decay.shape, dtype=log_decay.dtype, device=log_decay.device)
    programs = (x.batch if x.cu_k is None else x.count + 1) * x.heads_q
    if gradient.numel() > 0:
        decay_gradient_kernel[(programs,)](
            log_decay, at_rows, at_keys, gradient, x.cu_q, x.cu_k, x.tokens_q, x.tokens_k, x.heads_q, x.count,
            *log_decay.stride(), x.cu_k is not None, PIECE, num_warps=4,
        )  # fmt: skip
    return gradient
