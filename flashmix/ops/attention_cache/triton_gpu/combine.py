"""Attention to a whole sequence from what was found for pieces of its keys.

    m = max(sink, max_p m_p);  l = 2^(sink - m) + sum_p 2^(m_p - m) l_p;  o = sum_p 2^(m_p - m) a_p / l

Pieces are combined in order, so a token gets the same bits whatever the batch it is in.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.ops.attention.triton_gpu.scores import LN_2, LOG2_E
from flashmix.ops.attention_cache.triton_gpu.append import sequence_of


class PieceInputs(NamedTuple):
    mixed: Any  # a of each piece, [B T, HQ, pieces, V]
    levels: Any  # m and l, [B T, HQ, pieces, 2]
    sink: Any
    lengths: Any
    cu_seqlens: Any


class CombineNumbers(NamedTuple):
    tokens: Any
    sequences: Any
    heads_q: Any
    capacity: Any  # tokens that a sequence can hold
    piece: Any  # keys of a piece
    pieces: Any
    left: Any
    steps: Any  # of a bisection over the sequences


class CombineSpec(NamedTuple):
    DV: int
    WIDTH: int  # DV, padded
    MANY: int  # pieces at once
    PACKED: bool
    LEFT: bool


@triton.jit(do_not_specialize=["n"])
def cache_combine_kernel(x, o, lse, n, S: tl.constexpr):
    """o `[V]` and lse of one query of one head from the pieces of its sequence's keys, MANY at a time, in order."""
    token = tl.program_id(0) // n.heads_q
    head = tl.program_id(0) % n.heads_q
    if S.PACKED:
        sequence, start, count = sequence_of(token, x.cu_seqlens, n.sequences, n.tokens, n.steps)
        index = token - start
        at_lse = head.to(tl.int64) * n.tokens + token
    else:
        sequence = token // n.tokens
        count, index = n.tokens, token % n.tokens
        at_lse = (sequence.to(tl.int64) * n.heads_q + head) * n.tokens + index
    position = n.tokens * 0 - 1
    if sequence < n.sequences:
        position = tl.minimum(tl.load(x.lengths + sequence), 1 << 30).to(tl.int32) - count + index
    last = tl.cdiv(tl.maximum(tl.minimum(position + 1, n.capacity), 0), n.piece)
    first = n.tokens * 0
    if S.LEFT:
        first = tl.maximum(position - n.left, 0) // n.piece
    # m = max(sink, max_p m_p)
    at = (token.to(tl.int64) * n.heads_q + head) * n.pieces
    top = tl.full([1], -3.0e38, tl.float32)
    if x.sink is not None:
        at_sink = tl.load(x.sink + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, at_sink)
    for begin in range(first, last, S.MANY):
        part = begin + tl.arange(0, S.MANY)
        level = tl.load(x.levels + 2 * (at + part), mask=part < last, other=-3.0e38)  # [MANY]
        top = tl.maximum(top, tl.max(level, 0))
    # l = 2^(sink - m) + sum_p 2^(m_p - m) l_p;  a = sum_p 2^(m_p - m) a_p
    total = tl.zeros([1], tl.float32)
    if x.sink is not None:
        total = tl.exp2(at_sink - top)
    columns = tl.arange(0, S.WIDTH)
    acc = tl.full([S.WIDTH], 0.0, tl.float32)
    for begin in range(first, last, S.MANY):
        part = begin + tl.arange(0, S.MANY)
        here = part < last
        weight = tl.exp2(tl.load(x.levels + 2 * (at + part), mask=here, other=-float("inf")) - top)  # [MANY]
        share = tl.load(x.levels + 2 * (at + part) + 1, mask=here, other=0.0)  # [MANY]
        total += tl.sum(weight * share, 0)
        where = x.mixed + (at + part)[:, None] * S.DV + columns[None, :]
        tile = tl.load(where, mask=here[:, None] & (columns < S.DV)[None, :], other=0.0)  # [MANY, V]
        acc += tl.sum(tile * weight[:, None], 0)
    # o = a / l;  lse = m + log l
    share = 1.0 / tl.where(total == 0, 1.0, total)
    where = o + (token.to(tl.int64) * n.heads_q + head) * S.DV + columns
    tl.store(where, (acc * share).to(o.dtype.element_ty), mask=columns < S.DV)
    if lse is not None:
        tl.store(lse + at_lse + tl.arange(0, 1), (top + tl.log2(total)) * LN_2)
