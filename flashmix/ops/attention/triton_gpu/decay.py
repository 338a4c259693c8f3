"""The forget gate: its running sum, which is added to scores, and the gradient of the gates from those of the scores.

    G_t = sum_{s <= t} g_s within a sequence (times log2 e in half precision)
    dg_t = sum_{s >= t} (dG at rows of position s - dG at key s)

Both run in float64, always in pieces counted from the sequence's start, so that a sequence gets the same bits whatever is
packed beside it. G is kept in two float32 parts: the difference of two entries is then exact to float32, however long the
sequence is.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.attention.triton_gpu.launch import Call, Form, Sums, packed_blocks
from flashmix.ops.attention.triton_gpu.tiles import LOG2_E, bounded, find_sequence, padded_tokens

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


@triton.jit
def _piece(pid, table, tokens_k, heads, pieces, PACKED: tl.constexpr):
    """`(batch, head, start of the sequence, tokens of it, piece in it, first slot of it)` of a program."""
    slot, head = pid // heads, pid % heads
    start, tokens, batch, piece = tokens_k * 0, tokens_k, slot // pieces, slot % pieces
    if PACKED:
        _, start, tokens, _, _, piece = find_sequence(slot, table)
        batch = slot * 0
    return batch, head, start, tokens, piece, slot - piece


@triton.jit
def _load_gates(gates, at, tokens, st, EXACT: tl.constexpr):
    """Gates in units of scores, float64."""
    gate = tl.load(gates + at.to(tl.int64) * st, mask=at < tokens, other=0.0).to(tl.float64)
    gate = tl.maximum(gate, STRONGEST_DECAY)
    if not EXACT:
        gate *= LOG2_E
    return gate


@triton.jit(do_not_specialize=["tokens_k", "heads", "pieces", "sb", "st", "sh"])
def decay_totals_kernel(
    gates, totals, table, tokens_k, heads, pieces, sb, st, sh, PACKED: tl.constexpr, PIECE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The sum of each piece of PIECE gates of a head, float64 `[pieces, HQ]`."""
    batch, head, start, tokens, piece, _ = _piece(tl.program_id(0), table, tokens_k, heads, pieces, PACKED)
    gates += batch.to(tl.int64) * sb + head.to(tl.int64) * sh + start.to(tl.int64) * st
    at = piece * PIECE + tl.arange(0, PIECE)
    tl.store(totals + tl.program_id(0), tl.sum(_load_gates(gates, at, tokens, st, EXACT), 0))


@triton.jit(do_not_specialize=["tokens_k", "heads", "batches", "pieces", "sb", "st", "sh"])
def decay_sums_kernel(
    gates, totals, sums, tiles, factor, table, tokens_k, heads, batches, pieces, sb, st, sh, PACKED: tl.constexpr,
    PIECE: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """G of a piece of the gates `[B, Tk, HQ]` as sums `[2, B, HQ, Tk]`; `factor` times what is left of it to the end of each tile."""
    batch, head, start, tokens, piece, first = _piece(tl.program_id(0), table, tokens_k, heads, pieces, PACKED)
    if piece < 0 or piece * PIECE >= tokens:
        return
    gates += batch.to(tl.int64) * sb + head.to(tl.int64) * sh + start.to(tl.int64) * st
    row = (batch * heads + head).to(tl.int64)
    before = tl.zeros([1], tl.float64)
    totals += first.to(tl.int64) * heads + head
    for earlier in range(0, piece, 128):
        number = earlier + tl.arange(0, 128)
        before += tl.sum(tl.load(totals + number.to(tl.int64) * heads, mask=number < piece, other=0.0), 0)
    at = piece * PIECE + tl.arange(0, PIECE)
    inside = tl.cumsum(_load_gates(gates, at, tokens, st, EXACT), 0)
    total = before + inside
    high = total.to(tl.float32)
    sums += row * tokens_k + start
    tl.store(sums + at, high, mask=at < tokens)
    part = batches.to(tl.int64) * heads * tokens_k
    tl.store(sums + part + at, (total - high.to(tl.float64)).to(tl.float32), mask=at < tokens)
    if TILE > 0:
        padded = row * padded_tokens(tokens_k) + start
        by_tile = tl.reshape(inside, [PIECE // TILE, TILE])
        last = tl.arange(0, TILE)[None, :] == TILE - 1
        to_end = tl.sum(tl.where(last, by_tile, 0.0), 1)[:, None] - by_tile
        tl.store(tiles + padded + at, tl.reshape(to_end * factor, [PIECE]).to(tl.float32), mask=at < tokens)


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


def running_sums(x: Call, log_decay: Tensor | None, form: Form | None = None) -> Sums:
    """G in units of scores as float32 `[2, B, HQ, Tk]`: rounded, and what rounding left.

    With the `form` of the forward kernel also, in padded rows of a flat tensor that may be read a tile past the end, what is
    added to the scores of each key for its way to the end of its tile; divided by their scale if it comes before that.
    """
    if log_decay is None:
        return None, None
    device, heads, exact = x.q.device, x.heads_q, x.q.dtype == torch.float32
    sums = torch.empty(2, x.batch, heads, x.tokens_k, dtype=torch.float32, device=device)
    tile, factor, tiles = 0, 1.0, None
    if form is not None:
        tile, factor = form.BN, 1 / x.numbers(form)[0] if form.SCALED else 1.0
        size = x.batch * heads * triton.cdiv(x.tokens_k, 4) * 4 + tile
        tiles = torch.empty(size, dtype=torch.float32, device=device)
    pieces, table = packed_blocks(x.cu_k, x.tokens_k, PIECE)
    programs = pieces * x.batch * heads
    if programs > 0:
        totals = torch.empty(programs, dtype=torch.float64, device=device)
        common = (table, x.tokens_k, heads)
        decay_totals_kernel[(programs,)](
            log_decay, totals, *common, pieces, *log_decay.stride(), x.cu_k is not None, PIECE, exact, num_warps=4,
        )  # fmt: skip
        decay_sums_kernel[(programs,)](
            log_decay, totals, sums, tiles, factor, *common, x.batch, pieces, *log_decay.stride(), x.cu_k is not None,
            PIECE, tile, exact, num_warps=4,
        )  # fmt: skip
    return sums, tiles


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
