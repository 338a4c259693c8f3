"""Norm kernels, for rows that one program holds whole (wider ones: `wide.py`).

    h = x + residual;  n = (h - mean) scale,  scale = 1 / sqrt(sum((h - mean)^2) / DIVISOR + eps)
    y = (n weight + bias) act(gate)

Backward, with `dn = dy act(gate) weight`: `dh = scale (dn - n sum(n dn) / DIVISOR)`, less its own mean if the mean was
taken off. It reads `h`, `dy` and the gate once; a program sums `dweight` and `dbias` over its own rows.
A row is a group of `WIDTH` channels; row r has the weights of group `r % GROUPS`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.rows import (
    activation,
    activation_slope,
    as_rows,
    contiguous,
    fill_with_zeros,
    power_of_two,
    programs_for,
    row_starts,
    sum_columns,
)
from flashmix.op.rowwise import Options, Tensors
from flashmix.ops.norm.triton_gpu import wide
from flashmix.ops.norm.triton_gpu.wide import load_sum

WIDEST = 8192  # channels of a row that one program holds


@triton.jit(do_not_specialize=["count"])
def norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, gate_ptr, y_ptr, h_ptr, scale_ptr, mean_ptr,
    count, sizes, x_at, residual_at, gate_at, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, DIVISOR: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """AGAIN: rows are read a second time, from the cache, so that more programs have registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    there = (row < count)[:, None] & (column < WIDTH)
    packed = row[:, None] * WIDTH + column  # places in contiguous tensors
    x_here = row_starts(row, count, sizes, x_at, WIDTH, OUTER)[:, None] + column
    residual_here = x_here
    if residual_ptr is not None:
        residual_here = row_starts(row, count, sizes, residual_at, WIDTH, OUTER)[:, None] + column
    h = load_sum(x_ptr, residual_ptr, h_ptr, x_here, residual_here, there, "evict_last")  # [ROWS, BLOCK]
    if gate_ptr is not None:
        gate_here = row_starts(row, count, sizes, gate_at, WIDTH, OUTER)[:, None] + column
        gate = tl.load(gate_ptr + gate_here, mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if residual_ptr is not None and h_ptr is not None and not AGAIN:
        tl.store(h_ptr + packed, h.to(h_ptr.dtype.element_ty), mask=there)
    if CENTER:
        mean = tl.div_rn(tl.sum(h, 1), WIDTH * 1.0)
        h = tl.where(column < WIDTH, h - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, mask=row < count)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(h * h, 1), DIVISOR * 1.0) + eps))
    tl.store(scale_ptr + row, scale, mask=row < count)
    if AGAIN:
        h = load_sum(x_ptr, residual_ptr, h_ptr, x_here, residual_here, there, "evict_first")  # [ROWS, BLOCK]
        if residual_ptr is not None and h_ptr is not None:
            tl.store(h_ptr + packed, h.to(h_ptr.dtype.element_ty), mask=there)
        if CENTER:
            h -= mean[:, None]
    y = h * scale[:, None]
    shared = (row % GROUPS)[:, None] * WIDTH + column if GROUPS > 1 else column
    inside = column < WIDTH
    if weight_ptr is not None:  # [1 or ROWS, BLOCK]
        y *= tl.load(weight_ptr + shared, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + shared, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    if gate_ptr is not None:
        y *= activation(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(y_ptr + packed, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["count"])
def norm_backward_kernel(
    h_ptr, weight_ptr, bias_ptr, gate_ptr, dy_ptr, extra_ptr, scale_ptr, mean_ptr,
    dh_ptr, dgate_ptr, dweight_ptr, dbias_ptr,
    count, sizes, h_at, gate_at, dy_at, extra_at,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, DIVISOR: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr,
    OUTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p takes the tiles p // GROUPS, p // GROUPS + programs / GROUPS, ... of group p % GROUPS."""
    tokens = count // GROUPS
    group = tl.program_id(0) % GROUPS
    first = tl.program_id(0) // GROUPS
    column = tl.arange(0, BLOCK)[None, :]
    shared = group * WIDTH + column
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + shared, mask=column < WIDTH, other=0.0).to(tl.float32)  # [1, BLOCK]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + shared, mask=column < WIDTH, other=0.0).to(tl.float32)  # [1, BLOCK]
    if dweight_ptr is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(first, tl.cdiv(tokens, ROWS), tl.num_programs(0) // GROUPS, num_stages=STAGES):
        token = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        row = token * GROUPS + group
        there = (token < tokens)[:, None] & (column < WIDTH)
        packed = row[:, None] * WIDTH + column
        start = row_starts(row, count, sizes, h_at, WIDTH, OUTER)
        n = tl.load(h_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        start = row_starts(row, count, sizes, dy_at, WIDTH, OUTER)
        dy = tl.load(dy_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        if gate_ptr is not None:
            start = row_starts(row, count, sizes, gate_at, WIDTH, OUTER)
            gate = tl.load(gate_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)  # [ROWS, BLOCK]
        scale = tl.load(scale_ptr + row, mask=token < tokens, other=0.0)[:, None]
        if CENTER:
            n = tl.where(there, n - tl.load(mean_ptr + row, mask=token < tokens, other=0.0)[:, None], 0.0)
        n *= scale
        if gate_ptr is not None:
            if dgate_ptr is not None:
                affine = n * weight if weight_ptr is not None else n
                affine = affine + bias if bias_ptr is not None else affine
                dgate = dy * affine * activation_slope(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
                tl.store(dgate_ptr + packed, dgate.to(dgate_ptr.dtype.element_ty), mask=there)
            dy *= activation(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
        if dbias_ptr is not None:
            dbias += dy
        if dweight_ptr is not None:
            dweight += dy * n
        if dh_ptr is not None:
            dn = dy * weight if weight_ptr is not None else dy
            if CENTER:  # the mean of what is taken off is that of dn: n has mean 0 but for rounding
                along, total = tl.reduce((dn * n, dn), 1, add_pairs)
                dn -= n * (along / DIVISOR)[:, None] + (total / WIDTH)[:, None]
            else:
                dn -= n * (tl.sum(dn * n, 1) / DIVISOR)[:, None]
            dh = dn * scale
            if extra_ptr is not None:
                start = row_starts(row, count, sizes, extra_at, WIDTH, OUTER)
                dh += tl.load(extra_ptr + start[:, None] + column, mask=there, other=0.0).to(tl.float32)
            tl.store(dh_ptr + packed, dh.to(dh_ptr.dtype.element_ty), mask=there)
    partial = first.to(tl.int64) * GROUPS * WIDTH + group * WIDTH + tl.arange(0, BLOCK)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + partial, tl.sum(dweight, 0), mask=tl.arange(0, BLOCK) < WIDTH)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, 0), mask=tl.arange(0, BLOCK) < WIDTH)


@dataclass(frozen=True)
class Tile:
    """Rows of a program's tile and its warps; with a backward, programs a multiprocessor and tiles on their way at once.

    `again`: the forward reads its rows twice, see the kernel.
    """

    rows: int
    warps: int
    programs: int = 1
    stages: int = 1
    again: bool = False


# Programs of 4 warps that the registers of a multiprocessor hold at once: narrow and float32 rows, plain, with a bias, with
# a gate, with both. One more would run when these are done.
PROGRAMS = {2: (6, 5, 5, 3), 4: (4, 4, 2, 2)}


def forward_tile(block: int, residual: bool, center: bool, gate: bool) -> Tile:
    """By what is computed alone: a row's bits must not depend on how many there are."""
    mean = center and not residual and not gate  # two sums, one after the other: few warps wait less
    if block <= 128:
        return Tile(max(1, 512 // block), 1) if gate else Tile(max(1, 1024 // block), 2)
    if block < 4096:
        return Tile(1024 // block, 2) if mean and 512 <= block <= 1024 else Tile(2048 // block, 4)
    if residual or (gate and block > 4096):
        return Tile(1, 16, again=residual and block == 4096)
    return Tile(1, 4 if mean else 8)


def backward_tile(block: int, itemsize: int, bias: bool, gate: bool, shared_memory: int) -> Tile:
    """As many programs as fit at once; where those are few, the next two rows of each are on their way, if there is room."""
    rows, warps = max(1, 2048 // block), max(4, block // 512)
    programs = PROGRAMS[itemsize][bias + 2 * gate] - (block == 512 and itemsize == 2)
    programs = max(1, programs * 4 // warps)
    if block < 2048 or (programs * warps > 16 and not bias and not gate):
        return Tile(rows, warps, programs)
    programs = min(programs, 16 // warps)
    coming = 2 * programs * block * itemsize * (3 + gate)  # h, dy, perhaps a gradient of h itself, the gate
    pays = coming <= shared_memory - 2**14 and not (gate and itemsize == 4)
    return Tile(rows, warps, programs, 3 if pays else 1)


class Norm:
    """Inputs `x, residual, weight, bias, gate`; options `eps, groups, center, mean, activation, dtype`, see `norm.py`.

    The backward's inputs have `h` in place of `x` and no residual; its gradients are those of `y` and of `h`.
    """

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        x, residual, *_ = inputs
        assert x is not None
        _, groups, center, *_, dtype = options
        results = [torch.empty(x.shape, dtype=dtype, device=x.device)]
        if residual is not None:
            h = torch.promote_types(x.dtype, residual.dtype)
            results.append(torch.empty(x.shape, dtype=h, device=x.device))
        return results, _statistics(x, groups, center) if save else []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        eps, groups, center, mean, name, _ = options
        y, h = results[0], results[1] if len(results) > 1 else None
        if y.numel() == 0:
            return
        x, residual, weight, bias, gate = inputs
        width = y.shape[-1] // groups
        rows = as_rows(*_grouped(groups, x, residual, gate))
        x, residual, gate = rows.tensors
        # Kept or not, they are stored: one kernel, and so the same bits, with a gradient and without.
        scale, means = (*(kept or _statistics(y, groups, center)), None)[:2]
        tensors = (x, residual, contiguous(weight), contiguous(bias), gate, y, h, scale, means)
        arguments = (*tensors, rows.count, rows.sizes, *rows.strides, eps)
        flags: dict[str, Any] = {
            "WIDTH": width, "GROUPS": groups, "DIVISOR": width if mean else 1, "CENTER": center, "ACTIVATION": name,
            "OUTER": rows.outer,
        }  # fmt: skip
        if width > WIDEST:
            wide.norm_forward(rows.count, arguments, flags)
            return
        block = power_of_two(width)
        tile = forward_tile(block, residual is not None, center, gate is not None)
        norm_forward_kernel[(triton.cdiv(rows.count, tile.rows),)](
            *arguments, **flags, ROWS=tile.rows, BLOCK=block, AGAIN=tile.again, num_warps=tile.warps
        )

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        _, groups, center, mean, name, _ = options
        h, _, weight, bias, gate = inputs
        assert h is not None
        if h.numel() == 0:
            fill_with_zeros(gradients)
            return
        width = h.shape[-1] // groups
        dy, extra = (*grads, None)[:2]
        rows = as_rows(*_grouped(groups, h, gate, dy, extra))
        h, gate, dy, extra = rows.tensors
        dh, _, dweight, dbias, dgate = gradients
        scale, means = (*kept, None)[:2]
        read = (h, contiguous(weight), contiguous(bias), gate, dy, extra, scale, means)
        where = (rows.sizes, *rows.strides)
        flags: dict[str, Any] = {
            "WIDTH": width, "GROUPS": groups, "DIVISOR": width if mean else 1, "CENTER": center, "ACTIVATION": name,
            "OUTER": rows.outer,
        }  # fmt: skip
        spills = gate is not None and (bias is not None or gate.dtype == torch.float32)
        if width > (WIDEST // 2 if spills else WIDEST):
            wide.norm_backward(rows.count, read, (dh, dgate, dweight, dbias), where, flags)
            return
        block = power_of_two(width)
        size = max(t.element_size() for t in (h, gate, dy) if t is not None)
        shared = gpu.target(rows.device).shared_memory
        tile = backward_tile(block, size, bias is not None, gate is not None, shared)
        each = triton.cdiv(rows.count // groups, tile.rows)
        if dweight is not None or dbias is not None:
            each = programs_for(each, rows.device, max(1, tile.programs // groups))
        partials = [
            None if t is None else t.new_empty((each, t.numel()), dtype=torch.float32) for t in (dweight, dbias)
        ]
        norm_backward_kernel[(each * groups,)](
            *read, dh, dgate, *partials, rows.count, *where, **flags, ROWS=tile.rows, BLOCK=block, STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip
        for partial, out in zip(partials, (dweight, dbias), strict=True):
            if partial is not None and out is not None:
                sum_columns(partial, out)


def _statistics(x: Tensor, groups: int, center: bool) -> list[Tensor]:
    """Of each row (group) its scale, and its mean if that is taken off."""
    return [x.new_empty((*x.shape[:-1], groups), dtype=torch.float32) for _ in range(2 if center else 1)]


def _grouped(groups: int, *tensors: Tensor | None) -> list[Tensor | None]:
    return list(tensors) if groups == 1 else [None if t is None else t.unflatten(-1, (groups, -1)) for t in tensors]
