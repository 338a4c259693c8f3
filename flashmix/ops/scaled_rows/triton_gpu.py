"""Rows with a factor each, `y = x factor`, and `dx = dy factor`, `dfactor = sum x dy`, in one pass each.

Tiles: `r` rows, `c` channels of a row.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import Kernel, bound
from flashmix.gpu.rows import RowLayout, as_rows, row_starts
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scaled_rows.call import ScaledCall

TILE, WARPS = 4096, 8  # elements of a program at a time
WIDEST_BLOCK = 1024  # of them in one row


class ScaledInputs(NamedTuple):
    """x and the gradient `dy` (None in the forward) as `Rows`, the factors `[rows]`, and the sizes that x and dy share."""

    x: Any
    factor: Any
    dy: Any
    sizes: Any


class ScaledGradients(NamedTuple):
    x: Any
    factor: Any


class ScaledNumbers(NamedTuple):
    count: Any  # rows


class ScaledSpec(NamedTuple):
    WIDTH: int
    OUTER: int
    ROWS: int  # r
    BLOCK: int  # c


@triton.jit
def rows_of_program(inputs, n, S: tl.constexpr):
    """Numbers of a program's rows, which of them exist, and their factors [r]."""
    row = tl.program_id(0).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    inside = row < n.count
    return row, inside, tl.load(inputs.factor + row, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n"])
def scaled_rows_forward_kernel(inputs, y, n, S: tl.constexpr):
    row, inside, factor = rows_of_program(inputs, n, S)
    x_ptr = inputs.x.data + row_starts(row, n.count, inputs.x.at, inputs.sizes, S)[:, None]
    BLOCKS: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    for block in range(BLOCKS):
        column = block * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
        mask = inside[:, None] & (column < S.WIDTH)
        x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        tl.store(y + row[:, None] * S.WIDTH + column, (x * factor[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n"])
def scaled_rows_backward_kernel(inputs, gradients, n, S: tl.constexpr):
    row, inside, factor = rows_of_program(inputs, n, S)
    x_ptr = inputs.x.data + row_starts(row, n.count, inputs.x.at, inputs.sizes, S)[:, None]
    dy_ptr = inputs.dy.data + row_starts(row, n.count, inputs.dy.at, inputs.sizes, S)[:, None]
    total = tl.zeros_like(factor)
    BLOCKS: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    for block in range(BLOCKS):
        column = block * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
        mask = inside[:, None] & (column < S.WIDTH)
        dy = tl.load(dy_ptr + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        if gradients.x is not None:
            dx = (dy * factor[:, None]).to(gradients.x.dtype.element_ty)
            tl.store(gradients.x + row[:, None] * S.WIDTH + column, dx, mask=mask)
        if gradients.factor is not None:
            x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
            total += tl.sum(x * dy, 1)
    if gradients.factor is not None:
        tl.store(gradients.factor + row, total.to(gradients.factor.dtype.element_ty), mask=inside)


def forward(call: ScaledCall, save: bool) -> tuple[Outputs, Outputs]:
    (y,) = outputs = call.results()
    if y.numel():
        rows = as_rows(call.x)
        kernel, grid, numbers = _launch(scaled_rows_forward_kernel, call.x, rows)
        kernel(grid, ScaledInputs(rows.rows[0], call.factor.contiguous(), None, rows.sizes), y, numbers)
    return outputs, ()


def backward(call: ScaledCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    x, factor = call.x, call.factor
    found = {}
    for name in wanted:
        like = getattr(call, name)
        found[name] = torch.empty(size=like.shape, dtype=like.dtype, device=like.device)
    if x.numel():
        rows = as_rows(x, *grads)
        its_x, dy = rows.rows
        kernel, grid, numbers = _launch(scaled_rows_backward_kernel, x, rows)
        gradients = ScaledGradients(found.get("x"), found.get("factor"))
        kernel(grid, ScaledInputs(its_x, factor.contiguous(), dy, rows.sizes), gradients, numbers)
    elif "factor" in found:
        found["factor"].zero_()  # of rows without channels
    return found


def _launch(kernel: Any, x: Tensor, rows: RowLayout) -> tuple[Kernel, int, ScaledNumbers]:
    """The kernel for tensors that lie so, its programs, and its numbers."""
    block = min(power_of_two(x.shape[-1]), WIDEST_BLOCK)
    spec = ScaledSpec(x.shape[-1], rows.outer, ROWS=TILE // block, BLOCK=block)
    return bound(kernel, spec, num_warps=WARPS), cdiv(rows.total, TILE // block), ScaledNumbers(rows.total)
