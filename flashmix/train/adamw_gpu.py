"""The kernel of AdamW: one pass over parameters, gradients and both moments of all tensors of a group.

    g = scale grad;  p = p - lr wd p;  m = m + (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
    p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps),    copy = p in its own dtype

The operations and their order are those of torch's fused AdamW; numbers are float32. A program has one chunk of one tensor; the addresses
of the tensors are a table on the GPU, so that one launch takes all of them. Tiles: `i` entries of a tensor.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, None: None}


class AdamWSpec(NamedTuple):
    P: Any  # dtype of parameters and moments
    G: Any  # dtype of gradients
    C: Any  # dtype of copies, None: there are none
    CHUNK: int  # entries of a program
    BLOCK: int  # entries that it holds at once


class AdamWNumbers(NamedTuple):
    lr: Any
    decay: Any  # lr wd
    eps: Any
    part1: Any  # 1 - beta1
    beta2: Any
    part2: Any  # 1 - beta2
    log1: Any  # ln(beta1)
    log2: Any  # ln(beta2)


class AdamWTables(NamedTuple):
    addresses: Any  # [tensors, 8]: parameter, gradient, both moments, copy, step, and how many entries each has
    chunks: Any  # [programs, 2]: a tensor, and the number of a chunk of it
    scale: Any  # [], of the gradients; None: 1


class AdamWPlaces(NamedTuple):
    p: Any
    g: Any
    m: Any
    v: Any
    copy: Any


@triton.jit
def correction(x):
    """`1 - e^x` for `x < 0`, to float32's precision where it is small."""
    series = 1.0 + x / 8.0
    for k in tl.static_range(6):
        series = 1.0 + x / (7.0 - k) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def place(row, index: tl.constexpr, first, dtype: tl.constexpr):
    """Where a chunk begins; tensors are aligned to 16 bytes, and so are chunks."""
    at = tl.load(row + index).to(tl.pointer_type(dtype)) + first
    return tl.multiple_of(at, 16)


@triton.jit
def update(at, i, mask, scale, size, root, n, S: tl.constexpr):
    p = tl.load(at.p + i, mask=mask).to(tl.float32)  # [i]
    g = tl.load(at.g + i, mask=mask).to(tl.float32) * scale  # [i]
    m = tl.load(at.m + i, mask=mask).to(tl.float32)  # [i]
    v = tl.load(at.v + i, mask=mask).to(tl.float32)  # [i]
    p -= n.decay * p
    m += n.part1 * (g - m)
    v = n.beta2 * v + n.part2 * g * g
    p -= size * m / (tl.sqrt_rn(v) / root + n.eps)
    tl.store(at.p + i, p.to(S.P), mask=mask)
    tl.store(at.m + i, m.to(S.P), mask=mask)
    tl.store(at.v + i, v.to(S.P), mask=mask)
    if S.C is not None:
        tl.store(at.copy + i, p.to(S.C), mask=mask)


@triton.jit(do_not_specialize=["n"])
def adamw_kernel(x, n, S: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    row = x.addresses + tl.load(x.chunks + 2 * pid).to(tl.int64) * 8
    first = tl.load(x.chunks + 2 * pid + 1).to(tl.int64) * S.CHUNK
    copy = None
    if S.C is not None:
        copy = place(row, 4, first, S.C)
    at = AdamWPlaces(
        place(row, 0, first, S.P), place(row, 1, first, S.G), place(row, 2, first, S.P), place(row, 3, first, S.P), copy
    )
    t = tl.load(tl.load(row + 5).to(tl.pointer_type(tl.float32)))
    size, root = n.lr / correction(t * n.log1), tl.sqrt_rn(correction(t * n.log2))
    scale = 1.0
    if x.scale is not None:
        scale = tl.load(x.scale)
    left = tl.minimum(tl.load(row + 6) - first, S.CHUNK).to(tl.int32)
    block = tl.arange(0, S.BLOCK)
    if left == S.CHUNK:
        for done in range(0, S.CHUNK, S.BLOCK):
            update(at, done + block, None, scale, size, root, n, S)
    else:
        for done in range(0, left, S.BLOCK):
            i = done + block
            update(at, i, i < left, scale, size, root, n, S)
