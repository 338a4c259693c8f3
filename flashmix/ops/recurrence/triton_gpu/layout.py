"""Where the chunks of a call lie: by arithmetic in a dense batch, from tables made on the device in a packed one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.op.packing import Packing
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.triton_gpu.structs import ChunkTables
from flashmix.ops.recurrence.triton_gpu.tiles import sequence_span


class PackedNumbers(NamedTuple):
    sequences: Any
    tokens: Any
    chunks: Any  # at most
    steps: Any  # of the search for the sequence of a chunk


class PackedSpec(NamedTuple):
    C: int
    BLOCK: int


@triton.jit(do_not_specialize=["n"])
def chunk_offsets_kernel(cu, offsets, n, S: tl.constexpr):
    """offsets[s]: the first chunk of sequence s; boundaries are read as if they rose from 0 to `tokens`."""
    total = tl.zeros([], tl.int32)
    tl.store(offsets, total)
    for start in range(0, n.sequences, S.BLOCK):
        sequence = start + tl.arange(0, S.BLOCK)
        first, end = sequence_span(cu, sequence, n.tokens, sequence < n.sequences)
        chunks = ((end - first + S.C - 1) // S.C).to(tl.int32)
        last = tl.minimum(total + tl.cumsum(chunks, 0), n.chunks)
        tl.store(offsets + 1 + sequence, last, mask=sequence < n.sequences)
        total = tl.minimum(total + tl.sum(chunks, 0), n.chunks)


@triton.jit(do_not_specialize=["n"])
def chunk_spans_kernel(cu, offsets, spans, n, S: tl.constexpr):
    """spans[c] = (first token, tokens) of chunk c; no tokens where there are fewer chunks than there might be."""
    c = tl.program_id(0) * S.BLOCK + tl.arange(0, S.BLOCK)
    low = tl.full([S.BLOCK], 0, tl.int32)  # the last s with offsets[s] <= c lies in [low, high)
    high = low + n.sequences + 1
    for _ in range(n.steps):
        middle = (low + high) // 2
        before = tl.load(offsets + middle) <= c
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle, low + 1))
    mask = (low < n.sequences) & (c < n.chunks)
    first, end = sequence_span(cu, low, n.tokens, mask)
    row = first + (c - tl.load(offsets + low, mask=mask, other=0)).to(tl.int64) * S.C
    tl.store(spans + c * 2, row, mask=c < n.chunks)
    tl.store(spans + c * 2 + 1, tl.maximum(tl.minimum(end - row, S.C), 0), mask=c < n.chunks)


def count_chunks(call: RecurrenceCall, C: int) -> int:
    """How many chunks there are, at most: N packed sequences of T tokens have no more than `T // C + N`."""
    if call.packed:
        return min(call.tokens, call.tokens // C + call.sequences)
    return call.sequences * cdiv(call.tokens, C)


def chunk_tables(call: RecurrenceCall, C: int) -> ChunkTables:
    """The tables of a packed batch, made once a batch; nothing is read back from the device."""
    packing = call.packing
    if packing is None:
        return ChunkTables()
    return packing.table(("chunks", C), lambda: _tables(packing, C, count_chunks(call, C)))


def _tables(packing: Packing, C: int, chunks: int) -> ChunkTables:
    cu = packing.cu_seqlens.contiguous()
    offsets = torch.empty(packing.count + 1, dtype=torch.int32, device=cu.device)
    spans: Tensor = torch.empty(chunks, 2, dtype=torch.int64, device=cu.device)
    n = PackedNumbers(packing.count, packing.total, chunks, (packing.count + 1).bit_length())
    bound(chunk_offsets_kernel, PackedSpec(C, 1024))(1, cu, offsets, n)
    bound(chunk_spans_kernel, PackedSpec(C, 256))(cdiv(chunks, 256), cu, offsets, spans, n)
    return ChunkTables(cu, offsets, spans)
