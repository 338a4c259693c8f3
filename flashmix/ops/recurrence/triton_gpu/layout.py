"""Where the chunks of a call lie: by arithmetic in a dense batch, from tables made on the device in a packed one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.sizes import cdiv
from flashmix.ops.recurrence.triton_gpu.adapter import Problem


@triton.jit(do_not_specialize=["N", "T", "BOUND"])
def offsets_kernel(cu, offsets, N, T, BOUND, C: tl.constexpr, BLOCK: tl.constexpr):
    """offsets[n]: the first chunk of sequence n; boundaries are read as if they rose from 0 to T."""
    total = tl.zeros([], tl.int32)
    tl.store(offsets, total)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        first, end = sequence_span(cu, n, T, n < N)
        chunks = ((end - first + C - 1) // C).to(tl.int32)
        last = tl.minimum(total + tl.cumsum(chunks, 0), BOUND)
        tl.store(offsets + 1 + n, last, mask=n < N)
        total = tl.minimum(total + tl.sum(chunks, 0), BOUND)


@triton.jit(do_not_specialize=["N", "T", "BOUND", "STEPS"])
def table_kernel(cu, offsets, table, N, T, BOUND, STEPS, C: tl.constexpr, BLOCK: tl.constexpr):
    """table[c] = (first token, tokens) of chunk c; no tokens where there are fewer chunks than there might be."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)  # the last n with offsets[n] <= c lies in [low, high)
    high = low + N + 1
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(offsets + middle) <= c
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle, low + 1))
    inside = (low < N) & (c < BOUND)
    first, end = sequence_span(cu, low, T, inside)
    row = first + (c - tl.load(offsets + low, mask=inside, other=0)).to(tl.int64) * C
    tl.store(table + c * 2, row, mask=c < BOUND)
    tl.store(table + c * 2 + 1, tl.maximum(tl.minimum(end - row, C), 0), mask=c < BOUND)


@triton.jit
def sequence_span(cu, n, T, mask):
    """First token and end of sequence n, both within [0, T] whatever `cu` holds."""
    first = tl.minimum(tl.maximum(tl.load(cu + n, mask=mask, other=0).to(tl.int64), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu + n + 1, mask=mask, other=0).to(tl.int64), first), T)
    return first, end


@triton.jit
def chunk_span(table, chunk, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """First token (counted over the whole batch) and number of tokens of a chunk."""
    if PACKED:
        first = tl.load(table + chunk.to(tl.int64) * 2)
        count = tl.load(table + chunk.to(tl.int64) * 2 + 1).to(tl.int32)
    else:
        at = (chunk % NT) * C
        first = (chunk // NT).to(tl.int64) * T + at
        count = tl.minimum(T - at, C)
    return first, count


@triton.jit
def sequence_chunks(cu, offsets, n, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """First token, number of tokens, first chunk and number of chunks of sequence n."""
    if PACKED:
        first, end = sequence_span(cu, n, T, True)
        chunk = tl.load(offsets + n)
        return first, (end - first).to(tl.int32), chunk.to(tl.int64), tl.load(offsets + n + 1) - chunk
    return n.to(tl.int64) * T, T, n.to(tl.int64) * NT, NT


@dataclass(frozen=True)
class Layout:
    """The chunks of a call: `chunks` of them, `C` tokens each, `per_sequence` in a dense batch; the tables of a packed one."""

    sequences: int
    tokens: int
    C: int
    chunks: int
    per_sequence: int
    cu_seqlens: Tensor | None
    offsets: Tensor | None
    table: Tensor | None

    @staticmethod
    def count(problem: Problem, C: int) -> int:
        """How many chunks there are, at most: N packed sequences of T tokens have no more than `T // C + N`."""
        if problem.packed:
            return min(problem.tokens, problem.tokens // C + problem.sequences)
        return problem.sequences * cdiv(problem.tokens, C)

    @staticmethod
    def of(problem: Problem, cu_seqlens: Tensor | None, C: int) -> Layout:
        """Where the chunks of a call lie; nothing is read back from the device."""
        N, T = problem.sequences, problem.tokens
        bound = Layout.count(problem, C)
        if cu_seqlens is None:
            return Layout(N, T, C, bound, cdiv(T, C), None, None, None)
        offsets = torch.empty(N + 1, dtype=torch.int32, device=cu_seqlens.device)
        table = torch.empty(bound, 2, dtype=torch.int64, device=cu_seqlens.device)
        cu_seqlens = cu_seqlens.contiguous()
        with gpu.on(cu_seqlens.device):
            offsets_kernel[(1,)](cu_seqlens, offsets, N, T, bound, C=C, BLOCK=1024)
            if bound:
                steps = (N + 1).bit_length()
                table_kernel[(cdiv(bound, 256),)](cu_seqlens, offsets, table, N, T, bound, steps, C=C, BLOCK=256)
        return Layout(N, T, C, bound, 0, cu_seqlens, offsets, table)
