"""Helpers of the row-wise kernels: where rows lie, activations and their slopes, sums over rows in a fixed order."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound

INTERPRETED = tl.constexpr(gpu.interpreted())  # the interpreter knows no assembly


class Rows(NamedTuple):
    """A tensor `[..., D]` as a kernel takes it: rows, and the strides of its outer axes (see `row_starts`)."""

    data: Any
    at: Any


class Strided(NamedTuple):
    """A tensor whose last axis is contiguous, and the strides of its other axes; None of a contiguous one, whose code, and order of sums
    with it, then depends on no number of tokens.
    """

    data: Any
    at: Any


class RowLayout(NamedTuple):
    """Tensors of one shape `[..., D]` as rows: how many, and where row r of each begins.

    `outer` is 0 where all are contiguous: row r begins at `r D`. Else it is the number of outer axes, up to three: r is
    split by `sizes`, those of all but the first, and each tensor has `outer` strides.
    """

    total: int
    outer: int
    sizes: tuple[int, ...]
    rows: tuple[Any, ...]  # a `Rows` of each tensor, None where that is None


def as_rows(*tensors: Tensor | None) -> RowLayout:
    """The rows of tensors of one shape; copies only those with a stride along the row, or with outer axes past three."""
    present = [t for t in tensors if t is not None]
    shape = present[0].shape
    if not [t for t in present if not t.is_contiguous()]:
        total = present[0].numel() // max(shape[-1], 1)
        return RowLayout(total, 0, (), tuple([None if t is None else Rows(t, ()) for t in tensors]))
    tensors = tuple([None if t is None else inner_contiguous(t) for t in tensors])
    axes = _merged(shape[:-1], [t.stride()[:-1] for t in tensors if t is not None])
    if len(axes) > 3:
        return as_rows(*[None if t is None else t.contiguous() for t in tensors])
    axes = axes or [(1, (0,) * len(present))]
    strides = iter(zip(*[steps for _, steps in axes], strict=True))
    rows = tuple([None if t is None else Rows(t, next(strides)) for t in tensors])
    total = present[0].numel() // max(shape[-1], 1)
    return RowLayout(total, len(axes), tuple([size for size, _ in axes[1:]]), rows)


def _merged(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[tuple[int, tuple[int, ...]]]:
    """`(size, stride of each tensor)` of as few axes as reach the same places in the same order."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in zip(sizes, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if axes and all(before == step * size for before, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * size, steps)
        else:
            axes.append((size, steps))
    return axes


def inner_contiguous(x: Tensor) -> Tensor:
    """The tensor with its last axis contiguous; its rows may lie anywhere."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def strided(x: Tensor) -> Strided:
    """`x` as `Strided`, copied where its last axis is not contiguous."""
    if x.is_contiguous():
        return Strided(x, None)
    x = inner_contiguous(x)
    return Strided(x, x.stride()[:-1])


def contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def programs_for(tiles: int, device: torch.device, each: int) -> int:
    """Programs that share `tiles` of rows and sum over their own: at most `each` a multiprocessor."""
    return min(tiles, gpu.target(device).multiprocessors * each)


@triton.jit
def row_starts(row, count, at, sizes, S: tl.constexpr):
    """Offsets of int64 row numbers `row` in a tensor of strides `at`, see `RowLayout`; S has WIDTH and OUTER.

    `count` says whether the quotients of row numbers need 64 bits.
    """
    if S.OUTER == 0:
        return row * S.WIDTH
    elif S.OUTER == 1:
        return row * at[0]
    else:
        row = row.to(count.dtype)
        if S.OUTER == 2:
            above = row // sizes[0]
            return (row % sizes[0]).to(tl.int64) * at[1] + above.to(tl.int64) * at[0]
        else:
            above = row // sizes[1]
            start = (row % sizes[1]).to(tl.int64) * at[2]
            start += (above % sizes[0]).to(tl.int64) * at[1]
            return start + (above // sizes[0]).to(tl.int64) * at[0]


@triton.jit
def exp_of_minus(x, PRECISE: tl.constexpr):
    """`e^-x`. PRECISE: of `x >= 0`, to a rounding step of float32, which the product `x log2(e)` alone would lose.

    Else to some bits more than narrow numbers have, in two instructions: kernels that read those are bound by instructions.
    """
    if PRECISE:
        halvings = tl.floor(x * 1.4426950408889634 + 0.5)
        rest = (x - halvings * 0.693359375) + halvings * 2.12194440e-4  # ln 2 in two parts, the first product exact
        rest = tl.where(x < 200.0, rest, 0.0)  # e^-200 is 0, and inf has no remainder
        series = rest * (-1.0 / 5040.0) + 1.0 / 720.0  # Taylor's, |rest| <= ln(2) / 2
        series = series * rest - 1.0 / 120.0
        series = series * rest + 1.0 / 24.0
        series = series * rest - 1.0 / 6.0
        series = series * rest + 0.5
        series = series * rest - 1.0
        return tl.exp2(-halvings) * (series * rest + 1.0)
    elif INTERPRETED:
        return tl.exp(-x)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.ftz.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def divided(x, y, PRECISE: tl.constexpr):
    """`x / y`; PRECISE: rounded once. Else not for |y| past 2^126, whose reciprocal is taken for 0."""
    if PRECISE:
        return tl.div_rn(x, y)
    elif INTERPRETED:
        return x / y
    else:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def inverse_root(x):
    """`1 / sqrt(x)` to some bits more than narrow numbers have."""
    if INTERPRETED:
        return 1.0 / tl.sqrt(x)
    else:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def sigmoid(x, PRECISE: tl.constexpr):
    """`1 / (1 + e^-x)`; PRECISE: the exponential is of a number below 0."""
    if PRECISE:
        small = exp_of_minus(tl.abs(x), True)
        return divided(tl.where(x >= 0, 1.0, small), 1.0 + small, True)
    else:
        return divided(1.0, 1.0 + exp_of_minus(x, False), False)


@triton.jit
def sigmoid_slope(x, PRECISE: tl.constexpr):
    """`s (1 - s)` of `s = sigmoid(x)`, as `e / (1 + e)^2` of `e = e^-|x|`: 1 - s would lose its digits where s is near 1."""
    small = exp_of_minus(tl.abs(x), PRECISE)
    return divided(small, 1.0 + small * (2.0 + small), PRECISE)


@triton.jit
def activation(x, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """`flashmix.ops.gated_product.portable.ACTIVATIONS[NAME]` of float32 numbers; PRECISE where they were read as such."""
    if NAME == "silu":
        return x * sigmoid(x, PRECISE)
    elif NAME == "sigmoid":
        return sigmoid(x, PRECISE)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        return x * sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x), PRECISE)
    elif NAME == "relu":
        return tl.where(x <= 0, 0.0, x)  # NaN stays
    else:
        tl.static_assert(NAME == "relu2")
        kept = tl.where(x <= 0, 0.0, x)
        return kept * kept


@triton.jit
def activation_slope(x, NAME: tl.constexpr, PRECISE: tl.constexpr):
    """The derivative of `activation`."""
    if NAME == "silu":
        share = sigmoid(x, PRECISE)
        if PRECISE:
            return share + x * sigmoid_slope(x, True)
        else:
            return share * (1.0 + x * (1.0 - share))
    elif NAME == "sigmoid":
        return sigmoid_slope(x, PRECISE)
    elif NAME == "gelu":
        share = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        return share + x * 0.3989422804014327 * exp_of_minus(0.5 * x * x, PRECISE)
    elif NAME == "gelu_tanh":
        z = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return sigmoid(z, PRECISE) + x * sigmoid_slope(z, PRECISE) * inner
    elif NAME == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(NAME == "relu2")
        return tl.where(x <= 0, 0.0, 2.0 * x)


class ColumnSums(NamedTuple):
    LINES: int  # p, rows that are read at once
    BLOCK: int  # c, columns of a program


@triton.jit(do_not_specialize=["programs"])
def column_sums_kernel(partial, out, programs, columns, S: tl.constexpr):
    """`out[c]`, the sum of `partial[p, c]` over p in an order that the shape alone decides."""
    LINES: tl.constexpr = S.LINES
    BLOCK: tl.constexpr = S.BLOCK
    column = tl.program_id(0).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)
    total = tl.zeros([LINES, BLOCK], tl.float32)  # [p, c]
    for first in range(0, programs, S.LINES):
        line = first + tl.arange(0, S.LINES)
        mask = (line < programs)[:, None] & (column < columns)[None, :]
        place = line.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partial + place, mask=mask, other=0.0)  # [p, c]
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)


def sum_columns(partial: Tensor, out: Tensor) -> None:
    """`out = partial.sum(0)` of float32 `partial [programs, ...]`, written in the dtype of `out`."""
    programs, columns = partial.shape[0], out.numel()
    block = 32 if columns >= 32 else power_of_two(columns)
    kernel = bound(column_sums_kernel, ColumnSums(32, block), num_warps=4)
    kernel(cdiv(columns, block), partial, out, programs, columns)
