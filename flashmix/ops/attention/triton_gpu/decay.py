"""The forget gate: its running sum, which is added to scores, and the gradient of the gates from those of the scores.

    G_t = sum_{s <= t} g_s within a sequence (times log2 e in half precision)
    dg_t = sum_{s >= t} (dG at rows of position s - dG at key s)

Both run in float64, always in pieces counted from the sequence's start, so that a sequence gets the same bits whatever is
packed beside it. G is kept in two float32 parts: the difference of two entries is then exact to float32, however long the
sequence is.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.packed import blocks_of, bounded, find_sequence
from flashmix.ops.attention.triton_gpu.scores import LOG2_E
from flashmix.ops.attention.triton_gpu.spec import AttentionSpec, factors
from flashmix.ops.attention.triton_gpu.tiles import padded_tokens

STRONGEST_DECAY = tl.constexpr(-1e6)  # its exponential is 0, and float64 sums of it are still exact to 1e-6
PIECE = 1024
Sums = tuple[Tensor | None, Tensor | None]  # see `running_sums`


class ForgetNumbers(NamedTuple):
    tokens_q: Any
    tokens_k: Any
    heads: Any  # of queries
    batches: Any
    pieces: Any  # slots of a batch, see `packed.blocks_of`
    at: Any  # strides of the gates
    factor: Any  # of what is left of G to the end of a tile


class ForgetSpec(NamedTuple):
    PACKED: bool
    PIECE: int
    TILE: int  # of the forward kernel, 0 without one
    EXACT: bool  # float32, whose scores are natural


class Piece(NamedTuple):
    """PIECE gates of a head: its batch, start and tokens of its sequence, its number in it, the slot of that one's first piece."""

    batch: Any
    head: Any
    start: Any
    tokens: Any
    piece: Any
    slot: Any


@triton.jit
def find_piece(table, n, S: tl.constexpr):
    """The piece of a program."""
    slot, head = tl.program_id(0) // n.heads, tl.program_id(0) % n.heads
    start, tokens, batch, piece = n.tokens_k * 0, n.tokens_k, slot // n.pieces, slot % n.pieces
    if S.PACKED:
        _, start, tokens, _, _, piece = find_sequence(slot, table)
        batch = slot * 0
    return Piece(batch, head, start, tokens, piece, slot - piece)


@triton.jit
def gates_of(gates, at, batch, head, start):
    """The address of the gates of a head from token `start`, and their stride."""
    batch_at, token_at, head_at = at
    gates += batch.to(tl.int64) * batch_at + head.to(tl.int64) * head_at + start.to(tl.int64) * token_at
    return gates, token_at


@triton.jit
def load_gates(gates, at, tokens, S: tl.constexpr):
    """Gates in units of scores, float64."""
    address, token_at = gates
    gate = tl.load(address + at.to(tl.int64) * token_at, mask=at < tokens, other=0.0).to(tl.float64)  # [len(at)]
    gate = tl.maximum(gate, STRONGEST_DECAY)
    if not S.EXACT:
        gate *= LOG2_E
    return gate


@triton.jit(do_not_specialize=["n"])
def decay_totals_kernel(gates, totals, table, n, S: tl.constexpr):
    """The sum of each piece of PIECE gates of a head, float64 `[pieces, HQ]`."""
    x = find_piece(table, n, S)
    gates = gates_of(gates, n.at, x.batch, x.head, x.start)
    at = x.piece * S.PIECE + tl.arange(0, S.PIECE)
    g = load_gates(gates, at, x.tokens, S)  # [PIECE]
    tl.store(totals + tl.program_id(0), tl.sum(g, 0))


@triton.jit(do_not_specialize=["n"])
def decay_sums_kernel(gates, totals, sums, tiles, table, n, S: tl.constexpr):
    """G of a piece of the gates `[B, Tk, HQ]` as sums `[2, B, HQ, Tk]`; `factor` times what is left of it to the end of each tile."""
    x = find_piece(table, n, S)
    if x.piece < 0 or x.piece * S.PIECE >= x.tokens:
        return
    gates = gates_of(gates, n.at, x.batch, x.head, x.start)
    row = (x.batch * n.heads + x.head).to(tl.int64)
    # before = sum of the sequence's earlier pieces
    before = tl.zeros([1], tl.float64)
    totals += x.slot.to(tl.int64) * n.heads + x.head
    for earlier in range(0, x.piece, 128):
        number = earlier + tl.arange(0, 128)
        total = tl.load(totals + number.to(tl.int64) * n.heads, mask=number < x.piece, other=0.0)  # [len(number)]
        before += tl.sum(total, 0)
    # G_t = before + sum_{s <= t} g_s, rounded, and what rounding left
    at = x.piece * S.PIECE + tl.arange(0, S.PIECE)
    inside = tl.cumsum(load_gates(gates, at, x.tokens, S), 0)  # [PIECE]
    total = before + inside
    high = total.to(tl.float32)
    sums += row * n.tokens_k + x.start
    tl.store(sums + at, high, mask=at < x.tokens)
    part = n.batches.to(tl.int64) * n.heads * n.tokens_k
    tl.store(sums + part + at, (total - high.to(tl.float64)).to(tl.float32), mask=at < x.tokens)
    if S.TILE > 0:
        padded = row * padded_tokens(n.tokens_k) + x.start
        by_tile = tl.reshape(inside, [S.PIECE // S.TILE, S.TILE])
        last = tl.arange(0, S.TILE)[None, :] == S.TILE - 1
        to_end = tl.sum(tl.where(last, by_tile, 0.0), 1)[:, None] - by_tile  # G_end - G_t
        tl.store(tiles + padded + at, tl.reshape(to_end * n.factor, [S.PIECE]).to(tl.float32), mask=at < x.tokens)


class GradientNumbers(NamedTuple):
    tokens_q: Any
    tokens_k: Any
    heads: Any
    count: Any  # of packed sequences
    at: Any  # strides of the gates


@triton.jit
def queries_and_keys(sequence, cu_q, cu_k, n, S: tl.constexpr):
    """`(start, tokens)` of the queries and of the keys of a sequence; past the last one what is left."""
    start_q, len_q, start_k, len_k = n.tokens_q * 0, n.tokens_q, n.tokens_k * 0, n.tokens_k
    if S.PACKED:
        start_q = bounded(cu_q, sequence, 0, n.tokens_q)
        start_k = bounded(cu_k, sequence, 0, n.tokens_k)
        last = tl.minimum(sequence + 1, n.count)
        len_q = tl.where(sequence < n.count, bounded(cu_q, last, start_q, n.tokens_q) - start_q, 0)
        len_k = tl.where(sequence < n.count, bounded(cu_k, last, start_k, n.tokens_k), n.tokens_k) - start_k
    return start_q, len_q, start_k, len_k


@triton.jit(do_not_specialize=["n"])
def decay_gradient_kernel(gates, at_rows, at_keys, gradient, cu_q, cu_k, n, S: tl.constexpr):
    """The gates' gradient `[B, Tk, HQ]` from the sums of dS over rows `[B, HQ, Tq]` and over columns `[B, HQ, Tk]`."""
    sequence, head = tl.program_id(0) // n.heads, tl.program_id(0) % n.heads
    start_q, len_q, start, tokens = queries_and_keys(sequence, cu_q, cu_k, n, S)
    batch = sequence * 0 if S.PACKED else sequence
    at_rows += (batch * n.heads + head).to(tl.int64) * n.tokens_q + start_q
    at_keys += (batch * n.heads + head).to(tl.int64) * n.tokens_k + start
    gates, token_at = gates_of(gates, n.at, batch, head, start)
    gradient += (batch.to(tl.int64) * n.tokens_k + start) * n.heads + head
    # dg_t = sum_{s >= t} (dG at rows of position s - dG at key s), from the last piece to the first
    after = tl.zeros([1], tl.float64)
    for turn in range(tl.cdiv(tokens, S.PIECE)):
        at = (tl.cdiv(tokens, S.PIECE) - 1 - turn) * S.PIECE + tl.arange(0, S.PIECE)
        row = at + len_q - tokens
        here = -tl.load(at_keys + at, mask=at < tokens, other=0.0).to(tl.float64)  # [PIECE]
        here += tl.load(at_rows + row, mask=(at < tokens) & (row >= 0), other=0.0).to(tl.float64)  # [PIECE]
        total = after + tl.cumsum(here, 0, reverse=True)
        after += tl.sum(here, 0)
        gate = tl.load(gates + at.to(tl.int64) * token_at, mask=at < tokens, other=0.0)  # [PIECE]
        total = tl.where(gate < STRONGEST_DECAY, 0.0, total)
        tl.store(gradient + at.to(tl.int64) * n.heads, total.to(gradient.dtype.element_ty), mask=at < tokens)


def running_sums(call: AttentionCall, spec: AttentionSpec | None = None) -> Sums:
    """G in units of scores as float32 `[2, B, HQ, Tk]`: rounded, and what rounding left; None without gates.

    With the `spec` of the forward kernel also, in padded rows of a flat tensor that may be read a tile past the end, what is
    added to the scores of each key for its way to the end of its tile; divided by their scale if it comes before that.
    """
    gates = call.log_decay
    if gates is None:
        return None, None
    device, heads, tokens, exact = gates.device, call.heads_q, call.tokens_k, call.dtype == torch.float32
    sums = torch.empty(2, call.batch, heads, tokens, dtype=torch.float32, device=device)
    factor, tiles = 1.0, None
    if spec is not None:
        scale, _ = factors(call.scale, call.softcap, exact)
        factor = 1 / scale if spec.SCALED else 1.0
        size = call.batch * heads * cdiv(tokens, 4) * 4 + spec.BN
        tiles = torch.empty(size, dtype=torch.float32, device=device)
    pieces, table = blocks_of(call.packing_k, tokens, PIECE)
    programs = pieces * call.batch * heads
    totals = torch.empty(programs, dtype=torch.float64, device=device)
    n = ForgetNumbers(call.tokens_q, tokens, heads, call.batch, pieces, gates.stride(), factor)
    S = ForgetSpec(call.packed, PIECE, 0, exact)
    bound(decay_totals_kernel, S, num_warps=4)(programs, gates, totals, table, n)
    if spec is not None:
        S = S._replace(TILE=spec.BN)
    bound(decay_sums_kernel, S, num_warps=4)(programs, gates, totals, sums, tiles, table, n)
    return sums, tiles


def sums_of_gradients(call: AttentionCall, at_rows: Tensor, at_keys: Tensor) -> Tensor:
    """The gradient of `log_decay` `[B, Tk, HQ]`."""
    gates = call.log_decay
    assert gates is not None
    gradient = torch.empty(size=gates.shape, dtype=gates.dtype, device=gates.device)
    if gradient.numel() == 0:
        return gradient
    count = 0 if call.packing is None else call.packing.count
    programs = (count + 1 if call.packed else call.batch) * call.heads_q
    cu_q, cu_k = (None if p is None else p.cu_seqlens.contiguous() for p in (call.packing, call.packing_k))
    n = GradientNumbers(call.tokens_q, call.tokens_k, call.heads_q, count, gates.stride())
    S = ForgetSpec(call.packed, PIECE, 0, call.dtype == torch.float32)
    bound(decay_gradient_kernel, S, num_warps=4)(programs, gates, at_rows, at_keys, gradient, cu_q, cu_k, n)
    return gradient
