"""Kernels of the cross entropy over rows of logits. A row is one program's forward; its gradient may overwrite it.

    z = scale (logits + bias)                       (softcapped: c tanh(z / c))
    lse = ln sum_v e^z_v
    expected = (1 - e) z_target + e sum(z) / total
    loss = lse - expected + z_loss lse^2
    d logits = scale slope g (p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / total),    p = e^(z - level) / whole

From lse alone p would have its rounding, so the largest z of a row, `level`, and `whole = sum e^(z - level)` are kept. Running
maxima and sums belong to a lane until the row ends. Targets outside of the row's vocabulary, a shard of all, contribute nothing.
Tiles: `i` lines of `l` lanes of a row's columns (forward), `c` columns (backward).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import divided, exp_of_minus
from flashmix.ops.losses.call import LossOptions


class LogitRows(NamedTuple):
    """Rows of logits `[N, V]`, `stride` elements apart, `bias [V]`, and how they become scores: `softcap` None is none."""

    z: Any
    stride: Any
    bias: Any
    vocabulary: Any  # V
    scale: Any
    softcap: Any


class RowStatistics(NamedTuple):
    """What the forward finds of each row, float32 `[N]`; `loss` and `expected` None: not wanted."""

    loss: Any
    level: Any
    whole: Any
    expected: Any

    def rows(self, part: slice) -> RowStatistics:
        return RowStatistics(*[None if t is None else t[part] for t in self])


class RowGradient(NamedTuple):
    """The gradient `grad [N]` of the losses, and rows `dz [N, V]`, `stride` elements apart, for that of the logits."""

    grad: Any
    dz: Any
    stride: Any


class LossNumbers(NamedTuple):
    total: Any  # size of the whole vocabulary
    ignore_index: Any
    smoothing: Any
    z_loss: Any


class RowTiles(NamedTuple):
    SMOOTH: bool
    LINES: int  # i
    LANES: int  # l


class ColumnTiles(NamedTuple):
    COLUMNS: int  # c


@triton.jit
def exp_to_one(x, PRECISE: tl.constexpr):
    """`e^x` of `x <= 0`."""
    return exp_of_minus(-x, PRECISE)


@triton.jit
def tanh_and_slope(x, PRECISE: tl.constexpr):
    """tanh and its slope, to float32's precision near 0 too, where (1 - t) / (1 + t) has lost it."""
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    t = exp_to_one(-2 * tl.abs(x), PRECISE)
    large = divided(1 - t, 1 + t, PRECISE)
    y = tl.where(tl.abs(x) < 0.3, small, tl.where(x < 0, -large, large))
    return y, tl.where(tl.abs(y) < 0.7, 1 - y * y, divided(4 * t, (1 + t) * (1 + t), PRECISE))


@triton.jit
def scores(row, logits, column, mask):
    """The scores z at these columns of the row at `row`, float32, and the slope of the cap; anything where masked."""
    z = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)  # [columns]
    if logits.bias is not None:
        z += tl.load(logits.bias + column, mask=mask, other=0.0).to(tl.float32)  # [columns]
    z *= logits.scale
    slope = 1.0
    if logits.softcap is not None:
        PRECISE: tl.constexpr = logits.z.dtype.element_ty == tl.float32
        share, slope = tanh_and_slope(divided(z, logits.softcap, PRECISE), PRECISE)
        z = logits.softcap * share
    return z, slope


@triton.jit
def running_max(largest, tile):
    """The running maximum with a tile's, and the same where it can be subtracted (0 for minus infinity)."""
    new = tl.maximum(largest, tl.max(tile, axis=0))
    return new, tl.where(new == float("-inf"), 0.0, new)


@triton.jit
def over_lanes(largest, total, PRECISE: tl.constexpr):
    """Maximum, and sum relative to it, over the lanes."""
    most = tl.max(largest, axis=0)
    level = tl.where(most == float("-inf"), 0.0, most)
    return level, tl.sum(total * exp_to_one(largest - level, PRECISE), axis=0)


@triton.jit(do_not_specialize=["n"])
def cross_entropy_forward_kernel(logits, target, out, n, S: tl.constexpr):
    """Level, whole, and if they are wanted `expected` and the loss of a row."""
    PRECISE: tl.constexpr = logits.z.dtype.element_ty == tl.float32
    row = tl.program_id(0).to(tl.int64)
    z_row = logits.z + row * logits.stride
    lane = tl.arange(0, S.LINES)[:, None] * S.LANES + tl.arange(0, S.LANES)[None, :]  # [i, l]
    largest = tl.full([S.LANES], float("-inf"), tl.float32)
    sums = tl.full([S.LANES], 0.0, tl.float32)
    totals = tl.full([S.LANES], 0.0, tl.float32)
    # Of each lane: largest = max z, sums = sum e^(z - largest), totals = sum z.
    for start in range(0, logits.vocabulary, S.LINES * S.LANES):
        column = start + lane
        mask = column < logits.vocabulary
        z, _ = scores(z_row, logits, column, mask)  # [i, l]
        if S.SMOOTH:
            totals += tl.sum(tl.where(mask, z, 0.0), axis=0)
        z = tl.where(mask, z, float("-inf"))
        new, level = running_max(largest, z)
        sums = sums * exp_to_one(largest - level, PRECISE) + tl.sum(exp_to_one(z - level[None, :], PRECISE), axis=0)
        largest = new
    level, whole = over_lanes(largest, sums, PRECISE)
    # expected = (1 - e) z_target + e sum(z) / total;    less = level - expected
    wanted = tl.load(target + row)
    here = (wanted >= 0) & (wanted < logits.vocabulary)
    chosen, _ = scores(z_row, logits, wanted, here)
    expected = tl.where(here, (1 - n.smoothing) * chosen, 0.0)
    less = (1 - n.smoothing) * (level - chosen)
    if S.SMOOTH:
        average = tl.sum(totals, axis=0) / n.total
        expected += n.smoothing * average
        less += n.smoothing * (level - average)
    tl.store(out.level + row, level)
    tl.store(out.whole + row, whole)
    if out.expected is not None:
        tl.store(out.expected + row, expected)
    # loss = (level - expected) + ln whole + z_loss lse^2
    if out.loss is not None:
        lse = level + tl.log(whole)
        value = less + tl.log(whole) + n.z_loss * lse * lse
        tl.store(out.loss + row, tl.where(wanted == n.ignore_index, 0.0, value))


@triton.jit(do_not_specialize=["n"])
def cross_entropy_backward_kernel(logits, target, found, out, blocks, n, S: tl.constexpr):
    """A block of the gradient of a row for the gradient `out.grad` of its loss; `out.dz` may be the logits."""
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64)
    column = (pid % blocks) * S.COLUMNS + tl.arange(0, S.COLUMNS)
    mask = column < logits.vocabulary
    grad, wanted = tl.load(out.grad + row).to(tl.float32), tl.load(target + row)
    level, whole = tl.load(found.level + row), tl.load(found.whole + row)
    z, slope = scores(logits.z + row * logits.stride, logits, column, mask)  # [c]
    PRECISE: tl.constexpr = logits.z.dtype.element_ty == tl.float32
    p = exp_to_one(z - level, PRECISE)
    p = divided(p, whole, PRECISE)
    # dz = p (1 + 2 z_loss lse) - (1 - e) onehot(target) - e / total
    dz = (
        p * (1 + 2 * n.z_loss * (level + tl.log(whole)))
        - tl.where(column == wanted, 1 - n.smoothing, 0.0)
        - n.smoothing / n.total
    )
    if logits.softcap is not None:
        dz *= slope
    dz = tl.where(grad == 0, 0.0, dz * (grad * logits.scale))
    tl.store(out.dz + row * out.stride + column, dz.to(out.dz.dtype.element_ty), mask=mask)


def lanes_of(vocabulary: int) -> tuple[int, int, int]:
    """Lines and lanes of a row's program, and its warps."""
    lanes = min(1024, power_of_two(vocabulary))
    lines = min(4, power_of_two(cdiv(vocabulary, lanes)))
    return lines, lanes, max(1, lanes // 256)


def columns_of(vocabulary: int) -> tuple[int, int]:
    """Columns of a gradient's program, and its warps."""
    size = min(4096, power_of_two(vocabulary))
    return size, max(1, min(8, size // 512))


def logit_rows(z: Tensor, bias: Tensor | None, scale: float = 1.0, softcap: float | None = None) -> LogitRows:
    return LogitRows(z, z.stride(0), bias, z.shape[1], scale, softcap)


def numbers(options: LossOptions, total: int) -> LossNumbers:
    return LossNumbers(total, options.ignore_index, options.label_smoothing, options.z_loss)


def rows_forward(
    logits: LogitRows, target: Tensor, out: RowStatistics, options: LossOptions, total: int | None = None
) -> None:
    """Fills `out` for rows of logits; `total`: the size of the whole vocabulary, of which they are a part."""
    lines, lanes, warps = lanes_of(logits.vocabulary)
    spec = RowTiles(options.label_smoothing > 0, lines, lanes)
    kernel = bound(cross_entropy_forward_kernel, spec, num_warps=warps)
    kernel(logits.z.shape[0], logits, target, out, numbers(options, total or logits.vocabulary))


def rows_backward(
    logits: LogitRows,
    target: Tensor,
    found: RowStatistics,
    out: RowGradient,
    options: LossOptions,
    total: int | None = None,
) -> None:
    """Fills `out.dz`, which may be the logits, for the gradient `out.grad` of the losses (0 for rows that are ignored)."""
    size, warps = columns_of(logits.vocabulary)
    blocks = cdiv(logits.vocabulary, size)
    kernel = bound(cross_entropy_backward_kernel, ColumnTiles(size), num_warps=warps)
    kernel(logits.z.shape[0] * blocks, logits, target, found, out, blocks, numbers(options, total or logits.vocabulary))
