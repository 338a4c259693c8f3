"""Blocks of packed sequences: which block of which sequence a program works on.

A table row holds `(sequence, start, tokens, start of the other side, tokens there, block)`. Sequences lie in the order of their lengths,
the longest first: they take the longest, and nothing waits for them at the end.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.launch import bound
from flashmix.op.packing import Packing

COLUMNS = tl.constexpr(8)  # int32 numbers of a row, 6 of them used
MANY = 128


class TableNumbers(NamedTuple):
    tokens_own: Any
    tokens_other: Any
    count: Any
    slots: Any


class TableSpec(NamedTuple):
    BLOCK: int  # tokens of a block
    MANY: int  # sequences, or rows of the table, at once


@triton.jit
def bounded(cu_seqlens, n, low, total):
    """Boundary `n`, whatever the tensor holds between `low` and `total`."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int32), low), total)


@triton.jit
def find_sequence(slot, table):
    """The row of a slot of `blocks_of`.

    Past the last sequence there is one more, of what is left, with nothing on the other side; a free slot has no tokens.
    """
    row = table + slot.to(tl.int64) * COLUMNS
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)


@triton.jit
def own_and_other(sequence, cu_own, cu_other, n):
    """`(start, tokens, start of the other side, tokens there)` of a sequence; of sequence `count` what is left."""
    start = bounded(cu_own, sequence, 0, n.tokens_own)
    last = tl.minimum(sequence + 1, n.count)
    end = tl.where(sequence < n.count, bounded(cu_own, last, start, n.tokens_own), n.tokens_own)
    other = bounded(cu_other, sequence, 0, n.tokens_other)
    other_end = tl.where(sequence < n.count, bounded(cu_other, last, other, n.tokens_other), other)
    return start, end - start, other, other_end - other


@triton.jit(do_not_specialize=["n"])
def block_table_kernel(cu_own, cu_other, table, n, S: tl.constexpr):
    """Writes the rows of one sequence behind those of all longer sequences; what is left comes last."""
    sequence = tl.program_id(0)
    start, tokens, other, tokens_there = own_and_other(sequence, cu_own, cu_other, n)
    blocks = tl.cdiv(tokens, S.BLOCK)
    # first = blocks of the sequences that come before this one
    first = tl.zeros([1], tl.int64)
    for some in range(0, n.count, S.MANY):
        each = tl.minimum(some + tl.arange(0, S.MANY), n.count - 1)
        begin = tl.minimum(tl.maximum(tl.load(cu_own + each).to(tl.int32), 0), n.tokens_own)  # [MANY]
        end = tl.minimum(tl.maximum(tl.load(cu_own + each + 1).to(tl.int32), begin), n.tokens_own)  # [MANY]
        theirs = tl.cdiv(end - begin, S.BLOCK)
        before = (theirs > blocks) | ((theirs == blocks) & (each < sequence)) | (sequence == n.count)
        before = before & (some + tl.arange(0, S.MANY) < n.count)
        first += tl.sum(tl.where(before, theirs, 0).to(tl.int64), 0)
    begin = tl.sum(tl.minimum(first, n.slots), 0).to(tl.int32)
    last = tl.where(sequence < n.count, tl.minimum(begin + blocks, n.slots), n.slots)
    for slot in range(begin, last, S.MANY):
        at = slot + tl.arange(0, S.MANY)
        row = table + at.to(tl.int64) * COLUMNS
        block = at - begin
        tl.store(row, tl.zeros_like(at) + sequence, mask=at < last)
        tl.store(row + 1, tl.zeros_like(at) + start, mask=at < last)
        tl.store(row + 2, tl.where(block < blocks, tokens, 0), mask=at < last)
        tl.store(row + 3, tl.zeros_like(at) + other, mask=at < last)
        tl.store(row + 4, tl.zeros_like(at) + tokens_there, mask=at < last)
        tl.store(row + 5, block, mask=at < last)


def blocks_of(
    packing: Packing | None, tokens: int, block: int, other: Packing | None = None
) -> tuple[int, Tensor | None]:
    """How many blocks of `block` tokens there may be, known to the host, and (packed) the table of them.

    `other`: the packing of the other side of attention; by default the same. The table of one packing is made once a batch.
    """
    if packing is None:
        return -(-tokens // block), None
    if other is None or (other.cu_seqlens is packing.cu_seqlens and other.total == packing.total):
        table = packing.table(("attention blocks", block), lambda: table_of(packing, packing, block))
    else:
        table = table_of(packing, other, block)
    return table.shape[0], table


def table_of(packing: Packing, other: Packing, block: int) -> Tensor:
    """The table of the blocks of `packing`, the own side, whose other side is `other`."""
    count = packing.count
    n = TableNumbers(packing.total, other.total, count, packing.total // block + count + 1)
    table = torch.empty(n.slots, 8, dtype=torch.int32, device=packing.cu_seqlens.device)
    cu_own, cu_other = packing.cu_seqlens.contiguous(), other.cu_seqlens.contiguous()
    bound(block_table_kernel, TableSpec(block, MANY), num_warps=1)(count + 1, cu_own, cu_other, table, n)
    return table
