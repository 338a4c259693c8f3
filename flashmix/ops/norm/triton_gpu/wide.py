"""Norm kernels for rows too wide for one program's registers: it goes over a row block by block, again from the cache.

The equations are those of `rows.py`. Gradients of weights are another pass over memory, by columns.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.rows import activation, activation_slope, programs_for, row_starts, sum_columns

BLOCK, WARPS = 4096, 8
COLUMNS, LINES, EACH = 128, 16, 4  # of the pass over columns: channels, rows at a time, programs a multiprocessor


@triton.jit
def load_sum(x_ptr, residual_ptr, h_ptr, x_at, residual_at, there, EVICT: tl.constexpr):
    """`x + residual`, rounded as it is kept.

    EVICT: what the caches throw away first. Lines that are read and kept for long ("evict_last") leave room where others are
    written: 3 to 5 % of a forward on an H200.
    """
    h = tl.load(x_ptr + x_at, mask=there, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if residual_ptr is not None:
        h += tl.load(residual_ptr + residual_at, mask=there, other=0.0, eviction_policy=EVICT).to(tl.float32)
        if h_ptr is not None:
            h = h.to(h_ptr.dtype.element_ty).to(tl.float32)
    return h


@triton.jit(do_not_specialize=["count"])
def norm_forward_wide_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, gate_ptr, y_ptr, h_ptr, scale_ptr, mean_ptr,
    count, sizes, x_at, residual_at, gate_at, eps,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, DIVISOR: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr,
    OUTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_start = row_starts(row, count, sizes, x_at, WIDTH, OUTER)
    residual_start = row_starts(row, count, sizes, residual_at, WIDTH, OUTER)
    gate_start = row_starts(row, count, sizes, gate_at, WIDTH, OUTER)
    column = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTER:
        total = tl.zeros([BLOCK], tl.float32)
        for block in range((WIDTH + BLOCK - 1) // BLOCK):
            first = tl.cast(block, tl.int64) * BLOCK
            here = first + column
            total += load_sum(
                x_ptr, residual_ptr, h_ptr, x_start + here, residual_start + here, here < WIDTH, "evict_last"
            )  # [BLOCK]
        mean = tl.div_rn(tl.sum(total), WIDTH * 1.0)
        tl.store(mean_ptr + row, mean)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range((WIDTH + BLOCK - 1) // BLOCK):
        first = tl.cast(block, tl.int64) * BLOCK
        here = first + column
        h = load_sum(x_ptr, residual_ptr, h_ptr, x_start + here, residual_start + here, here < WIDTH, "evict_last")
        h = tl.where(here < WIDTH, h - mean, 0.0)  # [BLOCK]
        total += h * h
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(total), DIVISOR * 1.0) + eps))
    tl.store(scale_ptr + row, scale)
    shared = (row % GROUPS) * WIDTH
    for block in range((WIDTH + BLOCK - 1) // BLOCK):
        first = tl.cast(block, tl.int64) * BLOCK
        here = first + column
        there = here < WIDTH
        h = load_sum(x_ptr, residual_ptr, h_ptr, x_start + here, residual_start + here, there, "evict_first")  # [BLOCK]
        if residual_ptr is not None and h_ptr is not None:
            tl.store(h_ptr + row * WIDTH + here, h.to(h_ptr.dtype.element_ty), mask=there)
        y = (h - mean) * scale
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + shared + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + shared + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + gate_start + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
            y *= activation(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
        tl.store(y_ptr + row * WIDTH + here, y.to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def load_normalised(h_ptr, place, there, scale, mean):
    h = tl.load(h_ptr + place, mask=there, other=0.0).to(tl.float32)
    return tl.where(there, (h - mean) * scale, 0.0)


@triton.jit(do_not_specialize=["count"])
def norm_backward_wide_kernel(
    h_ptr, weight_ptr, bias_ptr, gate_ptr, dy_ptr, extra_ptr, scale_ptr, mean_ptr, dh_ptr, dgate_ptr,
    count, sizes, h_at, gate_at, dy_at, extra_at,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, DIVISOR: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr,
    OUTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h_start = row_starts(row, count, sizes, h_at, WIDTH, OUTER)
    gate_start = row_starts(row, count, sizes, gate_at, WIDTH, OUTER)
    dy_start = row_starts(row, count, sizes, dy_at, WIDTH, OUTER)
    extra_start = row_starts(row, count, sizes, extra_at, WIDTH, OUTER)
    scale = tl.load(scale_ptr + row)
    mean = 0.0
    if CENTER:
        mean = tl.load(mean_ptr + row)
    shared = (row % GROUPS) * WIDTH
    column = tl.arange(0, BLOCK)
    along = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range((WIDTH + BLOCK - 1) // BLOCK):
        first = tl.cast(block, tl.int64) * BLOCK
        here = first + column
        there = here < WIDTH
        n = load_normalised(h_ptr, h_start + here, there, scale, mean)  # [BLOCK]
        dn = tl.load(dy_ptr + dy_start + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + gate_start + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
            if dgate_ptr is not None:
                affine = n
                if weight_ptr is not None:
                    affine *= tl.load(weight_ptr + shared + here, mask=there, other=0.0).to(tl.float32)
                if bias_ptr is not None:
                    affine += tl.load(bias_ptr + shared + here, mask=there, other=0.0).to(tl.float32)
                dgate = dn * affine * activation_slope(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
                tl.store(dgate_ptr + row * WIDTH + here, dgate.to(dgate_ptr.dtype.element_ty), mask=there)
            dn *= activation(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
        if weight_ptr is not None:
            dn *= tl.load(weight_ptr + shared + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
        along += dn * n
        total += dn
    if dh_ptr is not None:
        slope = tl.sum(along) / DIVISOR
        offset = 0.0
        if CENTER:  # the mean of dn - n slope; n has mean 0 but for rounding
            offset = tl.sum(total) / WIDTH
        for block in range((WIDTH + BLOCK - 1) // BLOCK):
            first = tl.cast(block, tl.int64) * BLOCK
            here = first + column
            there = here < WIDTH
            n = load_normalised(h_ptr, h_start + here, there, scale, mean)  # [BLOCK]
            dn = tl.load(dy_ptr + dy_start + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
            if gate_ptr is not None:
                gate = tl.load(gate_ptr + gate_start + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
                dn *= activation(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
            if weight_ptr is not None:
                dn *= tl.load(weight_ptr + shared + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
            dh = (dn - n * slope - offset) * scale
            if extra_ptr is not None:
                dh += tl.load(extra_ptr + extra_start + here, mask=there, other=0.0).to(tl.float32)  # [BLOCK]
            tl.store(dh_ptr + row * WIDTH + here, dh.to(dh_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count", "parts"])
def norm_weights_backward_kernel(
    h_ptr, gate_ptr, dy_ptr, scale_ptr, mean_ptr, dweight_ptr, dbias_ptr,
    count, parts, sizes, h_at, gate_at, dy_at,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, CENTER: tl.constexpr, ACTIVATION: tl.constexpr, OUTER: tl.constexpr,
    LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program p sums COLUMNS channels over every `parts`-th tile of tokens."""
    tokens = count // GROUPS
    part = tl.program_id(0) % parts
    channel = (tl.program_id(0) // parts).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    column = (channel % WIDTH)[None, :]
    group = (channel // WIDTH)[None, :]
    dweight = tl.zeros([LINES, COLUMNS], tl.float32)
    dbias = tl.zeros([LINES, COLUMNS], tl.float32)
    for tile in range(part, tl.cdiv(tokens, LINES), parts):
        token = tl.cast(tile, tl.int64) * LINES + tl.arange(0, LINES)[:, None]
        there = (token < tokens) & (channel < GROUPS * WIDTH)[None, :]
        row = token * GROUPS + group  # [LINES, COLUMNS]
        scale = tl.load(scale_ptr + row, mask=there, other=0.0)
        mean = tl.load(mean_ptr + row, mask=there, other=0.0) if CENTER else 0.0
        n = load_normalised(h_ptr, row_starts(row, count, sizes, h_at, WIDTH, OUTER) + column, there, scale, mean)
        start = row_starts(row, count, sizes, dy_at, WIDTH, OUTER)
        dy = tl.load(dy_ptr + start + column, mask=there, other=0.0).to(tl.float32)  # [LINES, COLUMNS]
        if gate_ptr is not None:
            start = row_starts(row, count, sizes, gate_at, WIDTH, OUTER)
            gate = tl.load(gate_ptr + start + column, mask=there, other=0.0).to(tl.float32)  # [LINES, COLUMNS]
            dy *= activation(gate, ACTIVATION, gate_ptr.dtype.element_ty == tl.float32)
        dweight += dy * n
        dbias += dy
    place = part.to(tl.int64) * GROUPS * WIDTH + channel
    if dweight_ptr is not None:
        tl.store(dweight_ptr + place, tl.sum(dweight, 0), mask=channel < GROUPS * WIDTH)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + place, tl.sum(dbias, 0), mask=channel < GROUPS * WIDTH)


def norm_forward(count: int, arguments: tuple[Any, ...], flags: dict[str, Any]) -> None:
    norm_forward_wide_kernel[(count,)](*arguments, **flags, BLOCK=BLOCK, num_warps=WARPS)


def norm_backward(
    count: int,
    read: tuple[Any, ...],
    gradients: tuple[Tensor | None, ...],
    where: tuple[Any, ...],
    flags: dict[str, Any],
) -> None:
    h, _, _, gate, dy, _, scale, mean = read
    dh, dgate, dweight, dbias = gradients
    if dh is not None or dgate is not None:
        norm_backward_wide_kernel[(count,)](*read, dh, dgate, count, *where, **flags, BLOCK=BLOCK, num_warps=WARPS)
    if dweight is None and dbias is None:
        return
    blocks = triton.cdiv(flags["WIDTH"] * flags["GROUPS"], COLUMNS)
    parts = min(
        triton.cdiv(count // flags["GROUPS"], LINES), triton.cdiv(programs_for(2**31 - 1, dy.device, EACH), blocks)
    )
    partials = [None if t is None else t.new_empty((parts, t.numel()), dtype=torch.float32) for t in (dweight, dbias)]
    sizes, h_at, gate_at, dy_at, _ = where
    rest = {name: value for name, value in flags.items() if name != "DIVISOR"}
    norm_weights_backward_kernel[(blocks * parts,)](
        h, gate, dy, scale, mean, *partials, count, parts, sizes, h_at, gate_at, dy_at,
        **rest, LINES=LINES, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    for partial, out in zip(partials, (dweight, dbias), strict=True):
        if partial is not None and out is not None:
            sum_columns(partial, out)
