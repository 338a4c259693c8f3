"""Gated products: `y = act(gate) up`, and `dgate = dy up act'(gate)`, `dup = dy act(gate)`, in one pass each.

Tiles: `r` rows, `c` channels of a row. Contiguous tensors (OUTER = 0) are one row of `n.width`; else there are `n.count` rows of WIDTH.
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
from flashmix.gpu.rows import RowLayout, activation, activation_slope, as_rows, row_starts
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.gated_product.call import GatedCall

TILE, WARPS = 2048, 8  # elements of a program
WIDEST_BLOCK = 1024  # of them in one row, where rows are not contiguous


class GatedInputs(NamedTuple):
    """Gate, up and the gradient `dy` (None in the forward) as `Rows`, and the sizes that they share."""

    gate: Any
    up: Any
    dy: Any
    sizes: Any


class GatedNumbers(NamedTuple):
    count: Any
    width: Any


class GatedSpec(NamedTuple):
    ACTIVATION: str
    WIDTH: int
    OUTER: int
    ROWS: int  # r
    BLOCK: int  # c
    STRIDE: int = 0  # of the rows of both gradients, where rows are not contiguous


@triton.jit
def places(n, S: tl.constexpr):
    """The rows of a program's tile, their channels, and which of them exist; not for contiguous tensors."""
    blocks: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
    return row, column, (row < n.count)[:, None] & (column < S.WIDTH)


@triton.jit
def load(ptr, mask):
    """Float32 numbers; `mask` is None where all of them are in the tensor, whatever its size: wide loads then."""
    if mask is None:
        return tl.load(ptr).to(tl.float32)
    else:
        return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def multiply(gate_ptr, up_ptr, y_ptr, mask, S: tl.constexpr):
    """`y = act(gate) up` of a tile [r, c]."""
    ACTIVATION: tl.constexpr = S.ACTIVATION
    kind: tl.constexpr = y_ptr.dtype.element_ty
    y = activation(load(gate_ptr, mask), ACTIVATION, kind == tl.float32) * load(up_ptr, mask)  # [r, c]
    tl.store(y_ptr, y.to(kind), mask=mask)


@triton.jit(do_not_specialize=["n"])
def gated_forward_kernel(inputs, y, n, S: tl.constexpr):
    if S.OUTER > 0:
        row, column, mask = places(n, S)
        gate = row_starts(row, n.count, inputs.gate.at, inputs.sizes, S)[:, None] + column
        up = row_starts(row, n.count, inputs.up.at, inputs.sizes, S)[:, None] + column
        packed = row[:, None] * S.WIDTH + column
        multiply(inputs.gate.data + gate, inputs.up.data + up, y + packed, mask, S)
    else:
        column = tl.program_id(0).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
        gate, up = inputs.gate.data + column, inputs.up.data + column
        if (tl.program_id(0).to(tl.int64) + 1) * S.BLOCK > n.width:
            multiply(gate, up, y + column, column < n.width, S)
        else:
            multiply(gate, up, y + column, None, S)


@triton.jit
def multiply_backward(pointers, gradients, packed, rows, mask, S: tl.constexpr):
    """The gradients of a tile [r, c], stored at `rows`, and `y` at `packed`; `pointers`: those of the tile in gate, up and dy."""
    ACTIVATION: tl.constexpr = S.ACTIVATION
    gate_ptr, up_ptr, dy_ptr = pointers
    kind: tl.constexpr = gate_ptr.dtype.element_ty
    gate, dy = load(gate_ptr, mask), load(dy_ptr, mask)  # [r, c]
    if gradients.y is not None:
        y = activation(gate, ACTIVATION, kind == tl.float32) * load(up_ptr, mask)  # [r, c]
        tl.store(gradients.y + packed, y.to(kind), mask=mask)
    if gradients.gate is not None:
        dgate = dy * load(up_ptr, mask) * activation_slope(gate, ACTIVATION, kind == tl.float32)
    if gradients.up is not None:
        dup = dy * activation(gate, ACTIVATION, kind == tl.float32)
        tl.store(gradients.up + rows, dup.to(kind), mask=mask)
    if gradients.gate is not None:
        tl.store(gradients.gate + rows, dgate.to(kind), mask=mask)


class GatedGradients(NamedTuple):
    """The gradients, and `y` where it is made again."""

    gate: Any
    up: Any
    y: Any = None


@triton.jit(do_not_specialize=["n"])
def gated_backward_kernel(inputs, gradients, n, S: tl.constexpr):
    if S.OUTER > 0:
        row, column, mask = places(n, S)
        gate = row_starts(row, n.count, inputs.gate.at, inputs.sizes, S)[:, None] + column
        up = row_starts(row, n.count, inputs.up.at, inputs.sizes, S)[:, None] + column
        dy = row_starts(row, n.count, inputs.dy.at, inputs.sizes, S)[:, None] + column
        pointers = inputs.gate.data + gate, inputs.up.data + up, inputs.dy.data + dy
        packed, rows = row[:, None] * S.WIDTH + column, row[:, None] * S.STRIDE + column
        multiply_backward(pointers, gradients, packed, rows, mask, S)
    else:
        column = tl.program_id(0).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
        pointers = inputs.gate.data + column, inputs.up.data + column, inputs.dy.data + column
        if (tl.program_id(0).to(tl.int64) + 1) * S.BLOCK > n.width:
            multiply_backward(pointers, gradients, column, column, column < n.width, S)
        else:
            multiply_backward(pointers, gradients, column, column, None, S)


def forward(call: GatedCall, save: bool) -> tuple[Outputs, Outputs]:
    (y,) = outputs = call.results()
    if y.numel():
        rows = as_rows(*_with_axes(call.gate, call.up))
        gate, up = rows.rows
        kernel, grid, numbers = _launch(gated_forward_kernel, call, rows)
        kernel(grid, GatedInputs(gate, up, None, rows.sizes), y, numbers)
    return outputs, ()


def backward(call: GatedCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    found = {name: torch.empty(size=call.gate.shape, dtype=call.dtype, device=call.device) for name in wanted}
    if call.gate.numel():
        rows = as_rows(*_with_axes(call.gate, call.up, *grads))
        gate, up, dy = rows.rows
        kernel, grid, numbers = _launch(gated_backward_kernel, call, rows)
        gradients = GatedGradients(found.get("gate"), found.get("up"))
        kernel(grid, GatedInputs(gate, up, dy, rows.sizes), gradients, numbers)
    return found


def backward_of_halves(gate_up: Tensor, dy: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of `gate_up` `[..., 2 D]`, whose halves are gate and up, and `y` `[..., D]` made again, in one pass."""
    found = torch.empty(size=gate_up.shape, dtype=gate_up.dtype, device=dy.device)
    y = torch.empty(size=dy.shape, dtype=gate_up.dtype, device=dy.device)
    if y.numel():
        (gate, up), (dgate, dup) = gate_up.chunk(2, dim=-1), found.chunk(2, dim=-1)
        rows = as_rows(gate, up, dy)
        its_gate, its_up, its_dy = rows.rows
        kernel, grid, numbers = _launch(gated_backward_kernel, GatedCall(gate, up, activation), rows, 2 * y.shape[-1])
        kernel(grid, GatedInputs(its_gate, its_up, its_dy, rows.sizes), GatedGradients(dgate, dup, y), numbers)
    return found, y


def _with_axes(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors, single numbers as one row of one."""
    return [t if t is None or t.dim() else t.unsqueeze(0) for t in tensors]


def _launch(
    kernel: Any, call: GatedCall, rows: RowLayout, stride: int | None = None
) -> tuple[Kernel, int, GatedNumbers]:
    """The kernel for tensors that lie so, its programs, and its numbers; `stride`: of the rows of gradients, None of contiguous ones."""
    elements = call.gate.numel()
    if rows.outer == 0:
        spec = GatedSpec(call.activation, 1, 0, ROWS=1, BLOCK=TILE)
        grid = cdiv(elements, TILE)
    else:
        width = call.gate.shape[-1]
        block = min(power_of_two(width), WIDEST_BLOCK)
        spec = GatedSpec(call.activation, width, rows.outer, ROWS=TILE // block, BLOCK=block)
        spec = spec._replace(STRIDE=width if stride is None else stride)
        grid = cdiv(width, block) * cdiv(rows.total, TILE // block)
    return bound(kernel, spec, num_warps=WARPS), grid, GatedNumbers(rows.total, elements)
