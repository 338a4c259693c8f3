"""The gates of recurrences, `g` of `z = x + dt_bias` with `a = e^{A_log}`, and their gradients in one pass.

    softplus_decay   g = -a log(1 + e^z)       dx = -a s(z) dg                      dA_log = sum g dg
    bounded_decay    g = lower s(a z)          dx = lower s'(a z) a dg              dA_log = sum lower s'(a z) a z dg
    write_strength   g = factor s(x)           dx = factor s'(x) dg

`s` is the sigmoid; `ddt_bias` is the sum of `dx` over rows. A row is all heads of a token.
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
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import (
    RowLayout,
    as_rows,
    contiguous,
    exp_of_minus,
    programs_for,
    row_starts,
    sigmoid,
    sigmoid_slope,
    sum_columns,
)
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.decay.call import GateCall

TILE, TILE_BACKWARD, WARPS, WIDEST_BLOCK = 2048, 1024, 4, 128
# Backward: programs that a multiprocessor holds at once (narrow, float32), tiles on their way.
PROGRAMS, STAGES = {2: 6, 4: 4}, 3


class GateInputs(NamedTuple):
    """x and the gradient `dg` (None in the forward) as `Rows`, the parameters, and the sizes that x and dg share."""

    x: Any
    A_log: Any
    dt_bias: Any
    dg: Any
    sizes: Any


class GateGradients(NamedTuple):
    """Contiguous `x`; partial sums `[parts, WIDTH]` of the others, of A_log for each channel."""

    x: Any
    A_log: Any
    dt_bias: Any


class GateNumbers(NamedTuple):
    count: Any  # rows
    parts: Any  # backward: programs that share a block of columns
    factor: Any


class GateSpec(NamedTuple):
    KIND: str
    WIDTH: int
    CHANNELS: int  # of a head
    OUTER: int
    ROWS: int  # r
    BLOCK: int  # c
    STAGES: int = 1


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
def parameters(inputs, column, S: tl.constexpr):
    """`e^{A_log}` and `dt_bias` of columns; nothing for those past the end."""
    power = tl.load(inputs.A_log + column // S.CHANNELS, mask=column < S.WIDTH, other=0.0).to(tl.float32)  # [1, c]
    small = exp_of_minus(tl.abs(power), True)
    bias = tl.load(inputs.dt_bias + column, mask=column < S.WIDTH, other=0.0).to(tl.float32)  # [1, c]
    return tl.where(power > 0, tl.div_rn(1.0, small), small), bias


@triton.jit(do_not_specialize=["n"])
def gate_forward_kernel(inputs, g_ptr, n, S: tl.constexpr):
    PRECISE: tl.constexpr = inputs.x.data.dtype.element_ty == tl.float32
    blocks: tl.constexpr = (S.WIDTH + S.BLOCK - 1) // S.BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    column = (tl.program_id(0) % blocks).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)[None, :]
    mask = (row < n.count)[:, None] & (column < S.WIDTH)
    start = row_starts(row, n.count, inputs.x.at, inputs.sizes, S)
    z = tl.load(inputs.x.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
    if S.KIND == "write_strength":
        g = n.factor * sigmoid(z, PRECISE)
    else:
        rate, bias = parameters(inputs, column, S)  # [1, c]
        z += bias
        g = -rate * softplus(z, PRECISE) if S.KIND == "softplus_decay" else n.factor * sigmoid(rate * z, PRECISE)
    tl.store(g_ptr + row[:, None] * S.WIDTH + column, g, mask=mask)


@triton.jit(do_not_specialize=["n"])
def gate_backward_kernel(inputs, gradients, n, S: tl.constexpr):
    """Program p sums a block of columns over every `parts`-th tile of rows."""
    ROWS: tl.constexpr = S.ROWS
    BLOCK: tl.constexpr = S.BLOCK
    PRECISE: tl.constexpr = inputs.x.data.dtype.element_ty == tl.float32
    part = tl.program_id(0) % n.parts
    line = (tl.program_id(0) // n.parts).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)
    column = line[None, :]
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    dA = tl.zeros([ROWS, BLOCK], tl.float32)
    if S.KIND != "write_strength":
        rate, bias = parameters(inputs, column, S)  # [1, c]
    for tile in tl.range(part, tl.cdiv(n.count, S.ROWS), n.parts, num_stages=S.STAGES):
        row = tl.cast(tile, tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
        mask = (row < n.count)[:, None] & (column < S.WIDTH)
        start = row_starts(row, n.count, inputs.x.at, inputs.sizes, S)
        z = tl.load(inputs.x.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        start = row_starts(row, n.count, inputs.dg.at, inputs.sizes, S)
        dg = tl.load(inputs.dg.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        if S.KIND == "write_strength":
            dx = n.factor * sigmoid_slope(z, PRECISE) * dg
        else:
            z += bias
            if S.KIND == "softplus_decay":
                dA -= softplus(z, PRECISE) * dg  # times the rate at the end
                dx = -rate * sigmoid(z, PRECISE) * dg
            else:
                dx = n.factor * sigmoid_slope(rate * z, PRECISE) * rate * dg
                dA += dx * z
            dbias += dx
        if gradients.x is not None:
            tl.store(gradients.x + row[:, None] * S.WIDTH + column, dx.to(gradients.x.dtype.element_ty), mask=mask)
    place = part.to(tl.int64) * S.WIDTH + line
    if gradients.A_log is not None:
        if S.KIND == "softplus_decay":
            dA *= rate
        tl.store(gradients.A_log + place, tl.sum(dA, 0), mask=line < S.WIDTH)
    if gradients.dt_bias is not None:
        tl.store(gradients.dt_bias + place, tl.sum(dbias, 0), mask=line < S.WIDTH)


def forward(call: GateCall, save: bool) -> tuple[Outputs, Outputs]:
    (g,) = outputs = call.results()
    if g.numel() == 0:
        return outputs, ()
    rows = _tokens(call, call.x)
    (x,) = rows.rows
    width, block = _columns(rows)
    spec = GateSpec(call.kind, width, call.channels, rows.outer, ROWS=TILE // block, BLOCK=block)
    grid = cdiv(rows.total, TILE // block) * cdiv(width, block)
    inputs = GateInputs(x, contiguous(call.A_log), contiguous(call.dt_bias), None, rows.sizes)
    bound(gate_forward_kernel, spec, num_warps=WARPS)(grid, inputs, g, GateNumbers(rows.total, 1, call.factor))
    return outputs, ()


def backward(call: GateCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    found = {name: (t := getattr(call, name)).new_empty(t.shape) for name in wanted}
    if call.x.numel() == 0:
        return {name: gradient.zero_() for name, gradient in found.items()}
    rows = _tokens(call, call.x, *grads)
    x, dg = rows.rows
    width, block = _columns(rows)
    blocks, tiles = cdiv(width, block), cdiv(rows.total, TILE_BACKWARD // block)
    parts = min(tiles, max(1, programs_for(2**31 - 1, call.device, PROGRAMS[call.x.element_size()]) // blocks))
    dA, dbias = (
        torch.empty((parts, width), dtype=torch.float32, device=call.device) if name in found else None
        for name in ("A_log", "dt_bias")
    )
    spec = GateSpec(
        call.kind, width, call.channels, rows.outer, ROWS=TILE_BACKWARD // block, BLOCK=block, STAGES=STAGES
    )
    inputs = GateInputs(x, contiguous(call.A_log), contiguous(call.dt_bias), dg, rows.sizes)
    gradients, numbers = GateGradients(found.get("x"), dA, dbias), GateNumbers(rows.total, parts, call.factor)
    bound(gate_backward_kernel, spec, num_warps=WARPS)(blocks * parts, inputs, gradients, numbers)
    if dA is not None:
        _sum_rates(dA, found["A_log"], call.channels)
    if dbias is not None:
        sum_columns(dbias, found["dt_bias"])
    return found


def _sum_rates(partial: Tensor, out: Tensor, channels: int) -> None:
    """The gradient of A_log: sums over programs, then over the channels of a head."""
    if channels == 1:
        sum_columns(partial, out)
        return
    each = partial.new_empty(partial.shape[1])
    sum_columns(partial, each)
    out.copy_(each.view(-1, channels).sum(1))


def _tokens(call: GateCall, *tensors: Tensor | None) -> RowLayout:
    """The tensors as rows of all heads' channels (of single elements without a bias)."""
    if call.dt_bias is not None and call.dt_bias.dim() == 2:
        return as_rows(*[None if t is None else t.flatten(-2) for t in tensors])
    return as_rows(*[t if t is None or t.dim() else t.reshape(1) for t in tensors])


def _columns(rows: RowLayout) -> tuple[int, int]:
    """Channels of a row, and those of a tile."""
    width = rows.rows[0].data.shape[-1]
    return width, min(power_of_two(width), WIDEST_BLOCK)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(size=like.shape, dtype=like.dtype, device=like.device)
