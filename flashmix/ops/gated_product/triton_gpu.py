"""Gated products: `y = act(gate) up`, and `dgate = dy up act'(gate)`, `dup = dy act(gate)`, in one pass each."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.rows import Rows, activation, activation_slope, as_rows, power_of_two, row_starts
from flashmix.op.rowwise import Options, Tensors

TILE, WARPS = 2048, 8  # elements of a program
WIDEST_BLOCK = 1024  # of them in one row, where rows are not contiguous


@triton.jit
def places(
    count, sizes, gate_at, up_at, other_at, width,
    WIDTH: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where a program's tile `[ROWS, BLOCK]` lies in gate, up, another tensor and a contiguous one, and what is there.

    Contiguous tensors (OUTER = 0) are one row of `width`; else there are `count` rows of WIDTH.
    """
    if OUTER == 0:
        column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
        return column, column, column, column, column < width
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < count)[:, None] & (column < WIDTH)
    gate = row_starts(row, count, sizes, gate_at, WIDTH, OUTER)[:, None] + column
    up = row_starts(row, count, sizes, up_at, WIDTH, OUTER)[:, None] + column
    other = row_starts(row, count, sizes, other_at, WIDTH, OUTER)[:, None] + column
    return gate, up, other, row[:, None] * WIDTH + column, there


@triton.jit
def load(at, there):
    """Float32 numbers; `there` is None where all of them are in the tensor, whatever its size: wide loads then."""
    if there is None:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def multiply(gate_at, up_at, y_at, there, ACTIVATION: tl.constexpr):
    kind: tl.constexpr = y_at.dtype.element_ty
    y = activation(load(gate_at, there), ACTIVATION, kind == tl.float32) * load(up_at, there)  # [ROWS, BLOCK]
    tl.store(y_at, y.to(kind), mask=there)


@triton.jit(do_not_specialize=["count", "width"])
def gated_forward_kernel(
    gate_ptr, up_ptr, y_ptr, count, sizes, gate_at, up_at, width,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gate, up, _, packed, there = places(count, sizes, gate_at, up_at, up_at, width, WIDTH, OUTER, ROWS, BLOCK)
    if OUTER > 0:  # noqa: SIM114 (a constant and a number make no condition)
        multiply(gate_ptr + gate, up_ptr + up, y_ptr + packed, there, ACTIVATION)
    elif (tl.program_id(0).to(tl.int64) + 1) * BLOCK > width:
        multiply(gate_ptr + gate, up_ptr + up, y_ptr + packed, there, ACTIVATION)
    else:
        multiply(gate_ptr + gate, up_ptr + up, y_ptr + packed, None, ACTIVATION)


@triton.jit
def multiply_backward(gate_at, up_at, dy_at, dgate_ptr, dup_ptr, packed, there, ACTIVATION: tl.constexpr):
    kind: tl.constexpr = gate_at.dtype.element_ty
    gate, dy = load(gate_at, there), load(dy_at, there)  # [ROWS, BLOCK]
    if dgate_ptr is not None:
        dgate = dy * load(up_at, there) * activation_slope(gate, ACTIVATION, kind == tl.float32)
    if dup_ptr is not None:
        dup = dy * activation(gate, ACTIVATION, kind == tl.float32)
        tl.store(dup_ptr + packed, dup.to(kind), mask=there)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + packed, dgate.to(kind), mask=there)


@triton.jit(do_not_specialize=["count", "width"])
def gated_backward_kernel(
    gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, count, sizes, gate_at, up_at, dy_at, width,
    ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gate, up, dy, packed, there = places(count, sizes, gate_at, up_at, dy_at, width, WIDTH, OUTER, ROWS, BLOCK)
    gate, up, dy = gate_ptr + gate, up_ptr + up, dy_ptr + dy
    if OUTER > 0:  # noqa: SIM114 (a constant and a number make no condition)
        multiply_backward(gate, up, dy, dgate_ptr, dup_ptr, packed, there, ACTIVATION)
    elif (tl.program_id(0).to(tl.int64) + 1) * BLOCK > width:
        multiply_backward(gate, up, dy, dgate_ptr, dup_ptr, packed, there, ACTIVATION)
    else:
        multiply_backward(gate, up, dy, dgate_ptr, dup_ptr, packed, None, ACTIVATION)


class Gated:
    """Inputs `gate, up`; option `activation`."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        gate = inputs[0]
        assert gate is not None
        return [torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)], []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        if results[0].numel():
            rows, grid, flags = _tiles(*inputs)
            gated_forward_kernel[grid](
                *rows.tensors, *results, rows.count, rows.sizes, *rows.strides, results[0].numel(), *options, **flags
            )

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        elements = next(t for t in gradients if t is not None).numel()
        if elements:
            rows, grid, flags = _tiles(*inputs, *grads)
            gated_backward_kernel[grid](
                *rows.tensors, *gradients, rows.count, rows.sizes, *rows.strides, elements, *options, **flags
            )


def _tiles(*tensors: Tensor | None) -> tuple[Rows, tuple[int], dict[str, Any]]:
    rows = as_rows(*(t if t is None or t.dim() else t.unsqueeze(0) for t in tensors))
    present = next(t for t in rows.tensors if t is not None)
    if rows.outer == 0:
        flags = {"WIDTH": 1, "ROWS": 1, "BLOCK": TILE}
        programs = triton.cdiv(present.numel(), TILE)
    else:
        width = present.shape[-1]
        block = min(power_of_two(width), WIDEST_BLOCK)
        flags = {"WIDTH": width, "ROWS": TILE // block, "BLOCK": block}
        programs = triton.cdiv(width, block) * triton.cdiv(rows.count, TILE // block)
    return rows, (programs,), {**flags, "OUTER": rows.outer, "num_warps": WARPS}
