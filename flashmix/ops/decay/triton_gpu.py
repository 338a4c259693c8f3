"""The gates of recurrences, `g` of `z = x + dt_bias` with `a = e^{A_log}`, and their gradients in one pass.

    softplus_decay   g = -a log(1 + e^z)       dx = -a s(z) dg                      dA_log = sum g dg
    bounded_decay    g = lower s(a z)          dx = lower s'(a z) a dg              dA_log = sum lower s'(a z) a z dg
    write_strength   g = factor s(x)           dx = factor s'(x) dg

`s` is the sigmoid; `ddt_bias` is the sum of `dx` over rows. A row is all heads of a token.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.rows import (
    Rows,
    as_rows,
    contiguous,
    exp_of_minus,
    fill_with_zeros,
    power_of_two,
    programs_for,
    row_starts,
    sigmoid,
    sigmoid_slope,
    sum_columns,
)
from flashmix.op.rowwise import Options, Tensors

TILE, TILE_BACKWARD, WARPS, WIDEST_BLOCK = 2048, 1024, 4, 128
PROGRAMS, STAGES = (
    {2: 6, 4: 4},
    3,
)  # backward: programs that a multiprocessor holds at once (narrow, float32), tiles on their way


@triton.jit
def softplus(z, PRECISE: tl.constexpr):
    """`log(1 + e^z)`, its digits kept where it is small: log(1 + e) / e as a polynomial, to 3e-8 for e up to 1."""
    e = exp_of_minus(tl.abs(z), PRECISE)
    series = e * 0.00525345779962444 - 0.029588507403629928
    series = series * e + 0.07836166803700736
    series = series * e - 0.1367476970718675
    series = series * e + 0.19111431081441546
    series = series * e - 0.2484436989272617
    series = series * e + 0.33319271342543477
    series = series * e - 0.4999950151679037
    series = series * e + 0.9999999705406577
    return tl.where(z > 0, z, 0.0) + e * series


@triton.jit
def parameters(A_ptr, bias_ptr, column, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """`e^{A_log}` and `dt_bias` of columns; nothing for those past the end."""
    power = tl.load(A_ptr + column // CHANNELS, mask=column < WIDTH, other=0.0).to(tl.float32)
    small = exp_of_minus(tl.abs(power), True)
    return tl.where(power > 0, tl.div_rn(1.0, small), small), tl.load(
        bias_ptr + column, mask=column < WIDTH, other=0.0
    ).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def gate_forward_kernel(
    x_ptr, A_ptr, bias_ptr, g_ptr, count, sizes, x_at, factor,
    KIND: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < count)[:, None] & (column < WIDTH)
    start = row_starts(row, count, sizes, x_at, WIDTH, OUTER)
    z = tl.load(x_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
    if KIND == "write_strength":
        g = factor * sigmoid(z, PRECISE)
    else:
        rate, bias = parameters(A_ptr, bias_ptr, column, WIDTH, CHANNELS)  # [1, BLOCK]
        z += bias
        g = -rate * softplus(z, PRECISE) if KIND == "softplus_decay" else factor * sigmoid(rate * z, PRECISE)
    tl.store(g_ptr + row[:, None] * WIDTH + column, g, mask=there)


@triton.jit(do_not_specialize=["count", "parts"])
def gate_backward_kernel(
    x_ptr, A_ptr, bias_ptr, dg_ptr, dx_ptr, dA_ptr, dbias_ptr, count, parts, sizes, x_at, dg_at, factor,
    KIND: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p sums a block of columns over every `parts`-th tile of rows."""
    PRECISE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    part = tl.program_id(0) % parts
    line = (tl.program_id(0) // parts).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = line[None, :]
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    dA = tl.zeros([ROWS, BLOCK], tl.float32)
    if KIND != "write_strength":
        rate, bias = parameters(A_ptr, bias_ptr, column, WIDTH, CHANNELS)  # [1, BLOCK]
    for tile in tl.range(part, tl.cdiv(count, ROWS), parts, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        there = (row < count)[:, None] & (column < WIDTH)
        start = row_starts(row, count, sizes, x_at, WIDTH, OUTER)
        z = tl.load(x_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        start = row_starts(row, count, sizes, dg_at, WIDTH, OUTER)
        dg = tl.load(dg_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        if KIND == "write_strength":
            dx = factor * sigmoid_slope(z, PRECISE) * dg
        else:
            z += bias
            if KIND == "softplus_decay":
                dA -= softplus(z, PRECISE) * dg  # times the rate at the end
                dx = -rate * sigmoid(z, PRECISE) * dg
            else:
                dx = factor * sigmoid_slope(rate * z, PRECISE) * rate * dg
                dA += dx * z
            dbias += dx
        if dx_ptr is not None:
            tl.store(dx_ptr + row[:, None] * WIDTH + column, dx.to(dx_ptr.dtype.element_ty), mask=there)
    place = part.to(tl.int64) * WIDTH + line
    if dA_ptr is not None:
        if KIND == "softplus_decay":
            dA *= rate
        tl.store(dA_ptr + place, tl.sum(dA, 0), mask=line < WIDTH)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + place, tl.sum(dbias, 0), mask=line < WIDTH)


class Gate:
    """Inputs `x, A_log, dt_bias`; options `kind` and `factor` (the floor, or what a write strength reaches to)."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        x = inputs[0]
        assert x is not None
        return [torch.empty(x.shape, dtype=torch.float32, device=x.device)], []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        (x, A_log, bias), (kind, factor) = inputs, options
        if results[0].numel() == 0:
            return
        rows, channels = _tokens(bias, x)
        width, block = rows.tensors[0].shape[-1], _block(rows)  # type: ignore[union-attr]
        gate_forward_kernel[(triton.cdiv(rows.count, TILE // block) * triton.cdiv(width, block),)](
            rows.tensors[0], contiguous(A_log), contiguous(bias), results[0], rows.count, rows.sizes, rows.strides[0], factor,
            KIND=kind, WIDTH=width, CHANNELS=channels, OUTER=rows.outer, ROWS=TILE // block, BLOCK=block,
            num_warps=WARPS,
        )  # fmt: skip

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        (x, A_log, bias), (kind, factor), (dx, dA, dbias) = inputs, options, gradients
        assert x is not None
        if x.numel() == 0:
            fill_with_zeros(gradients)
            return
        rows, channels = _tokens(bias, x, grads[0])
        width, block = rows.tensors[0].shape[-1], _block(rows)  # type: ignore[union-attr]
        blocks, tiles = triton.cdiv(width, block), triton.cdiv(rows.count, TILE_BACKWARD // block)
        parts = min(tiles, max(1, programs_for(2**31 - 1, x.device, PROGRAMS[x.element_size()]) // blocks))
        partials = [None if t is None else x.new_empty((parts, width), dtype=torch.float32) for t in (dA, dbias)]
        gate_backward_kernel[(blocks * parts,)](
            rows.tensors[0], contiguous(A_log), contiguous(bias), rows.tensors[1], dx, *partials, rows.count, parts, rows.sizes,
            *rows.strides, factor,
            KIND=kind, WIDTH=width, CHANNELS=channels, OUTER=rows.outer, ROWS=TILE_BACKWARD // block, BLOCK=block,
            STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
        if partials[0] is not None and dA is not None:
            each = dA if channels == 1 else dA.new_empty(width, dtype=torch.float32)
            sum_columns(partials[0], each)
            if channels > 1:
                dA.copy_(each.view(-1, channels).sum(1))
        if partials[1] is not None and dbias is not None:
            sum_columns(partials[1], dbias)


def _tokens(bias: Tensor | None, *tensors: Tensor | None) -> tuple[Rows, int]:
    """The tensors as rows of all heads' channels (of single elements without a bias), and the channels of a head."""
    if bias is None:
        flat = [None if t is None else t.reshape(1) if t.dim() == 0 else t for t in tensors]
        return as_rows(*flat), 1
    if bias.dim() == 1:
        return as_rows(*tensors), 1
    return as_rows(*(None if t is None else t.flatten(-2) for t in tensors)), bias.shape[1]


def _block(rows: Rows) -> int:
    return min(power_of_two(rows.tensors[0].shape[-1]), WIDEST_BLOCK)  # type: ignore[union-attr]
