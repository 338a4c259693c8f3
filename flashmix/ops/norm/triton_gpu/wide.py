"""Norm kernels for rows too wide for one program's registers: it goes over a row block by block, again from the cache.

The equations are those of `rows.py`. Gradients of weights are another pass over memory, by columns.
Tiles: `c` channels of a row, or of all groups; `t` tokens.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.rows import activation, activation_slope, row_starts
from flashmix.ops.norm.triton_gpu.structs import load_sum


@triton.jit(do_not_specialize=["n"])
def norm_forward_wide_kernel(inputs, results, n, S: tl.constexpr):
    ACTIVATION: tl.constexpr = S.ACTIVATION
    BLOCK: tl.constexpr = S.BLOCK
    row = tl.program_id(0).to(tl.int64)
    x_start = row_starts(row, n.count, inputs.x.at, inputs.sizes, S)
    residual_start = x_start
    if inputs.residual is not None:
        residual_start = row_starts(row, n.count, inputs.residual.at, inputs.sizes, S)
    column = tl.arange(0, S.BLOCK)
    mean = 0.0
    if S.CENTER:  # mean = sum(h) / WIDTH
        total = tl.zeros([BLOCK], tl.float32)  # [c]
        for block in range((S.WIDTH + S.BLOCK - 1) // S.BLOCK):
            here = tl.cast(block, tl.int64) * S.BLOCK + column
            mask = here < S.WIDTH
            total += load_sum(inputs, results.h, x_start + here, residual_start + here, mask, "evict_last")  # [c]
        mean = tl.div_rn(tl.sum(total), S.WIDTH * 1.0)
        tl.store(results.mean + row, mean)
    total = tl.zeros([BLOCK], tl.float32)  # [c]
    for block in range((S.WIDTH + S.BLOCK - 1) // S.BLOCK):
        here = tl.cast(block, tl.int64) * S.BLOCK + column
        mask = here < S.WIDTH
        h = load_sum(inputs, results.h, x_start + here, residual_start + here, mask, "evict_last")  # [c]
        h = tl.where(mask, h - mean, 0.0)
        total += h * h
    # scale = 1 / sqrt(sum((h - mean)^2) / DIVISOR + eps)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(total), S.DIVISOR * 1.0) + n.eps))
    tl.store(results.scale + row, scale)
    shared = (row % S.GROUPS) * S.WIDTH
    for block in range((S.WIDTH + S.BLOCK - 1) // S.BLOCK):
        here = tl.cast(block, tl.int64) * S.BLOCK + column
        mask = here < S.WIDTH
        h = load_sum(inputs, results.h, x_start + here, residual_start + here, mask, "evict_first")  # [c]
        if results.h is not None:
            tl.store(results.h + row * S.WIDTH + here, h.to(results.h.dtype.element_ty), mask=mask)
        # y = ((h - mean) scale weight + bias) act(gate)
        y = (h - mean) * scale
        if inputs.weight is not None:
            y *= tl.load(inputs.weight + shared + here, mask=mask, other=0.0).to(tl.float32)  # [c]
        if inputs.bias is not None:
            y += tl.load(inputs.bias + shared + here, mask=mask, other=0.0).to(tl.float32)  # [c]
        if inputs.gate is not None:
            start = row_starts(row, n.count, inputs.gate.at, inputs.sizes, S)
            gate = tl.load(inputs.gate.data + start + here, mask=mask, other=0.0).to(tl.float32)  # [c]
            y *= activation(gate, ACTIVATION, inputs.gate.data.dtype.element_ty == tl.float32)
        tl.store(results.y + row * S.WIDTH + here, y.to(results.y.dtype.element_ty), mask=mask)


@triton.jit
def load_normalised(h_ptr, place, mask, scale, mean):
    h = tl.load(h_ptr + place, mask=mask, other=0.0).to(tl.float32)  # [t or r, c]
    return tl.where(mask, (h - mean) * scale, 0.0)


@triton.jit(do_not_specialize=["count"])
def norm_backward_wide_kernel(saved, gradients, count, S: tl.constexpr):
    ACTIVATION: tl.constexpr = S.ACTIVATION
    BLOCK: tl.constexpr = S.BLOCK
    row = tl.program_id(0).to(tl.int64)
    h_start = row_starts(row, count, saved.h.at, saved.sizes, S)
    dy_start = row_starts(row, count, saved.dy.at, saved.sizes, S)
    gate_start = h_start
    if saved.gate is not None:
        gate_start = row_starts(row, count, saved.gate.at, saved.sizes, S)
    scale = tl.load(saved.scale + row)
    mean = 0.0
    if S.CENTER:
        mean = tl.load(saved.mean + row)
    shared = (row % S.GROUPS) * S.WIDTH
    column = tl.arange(0, S.BLOCK)
    along = tl.zeros([BLOCK], tl.float32)  # [c]
    total = tl.zeros([BLOCK], tl.float32)  # [c]
    for block in range((S.WIDTH + S.BLOCK - 1) // S.BLOCK):
        here = tl.cast(block, tl.int64) * S.BLOCK + column
        mask = here < S.WIDTH
        n = load_normalised(saved.h.data, h_start + here, mask, scale, mean)  # [c]
        dn = tl.load(saved.dy.data + dy_start + here, mask=mask, other=0.0).to(tl.float32)  # [c]
        if saved.gate is not None:
            gate = tl.load(saved.gate.data + gate_start + here, mask=mask, other=0.0).to(tl.float32)  # [c]
            if gradients.gate is not None:  # dgate = dy (n weight + bias) act'(gate)
                affine = n
                if saved.weight is not None:
                    affine *= tl.load(saved.weight + shared + here, mask=mask, other=0.0).to(tl.float32)  # [c]
                if saved.bias is not None:
                    affine += tl.load(saved.bias + shared + here, mask=mask, other=0.0).to(tl.float32)  # [c]
                slope = activation_slope(gate, ACTIVATION, saved.gate.data.dtype.element_ty == tl.float32)
                dgate = dn * affine * slope
                tl.store(gradients.gate + row * S.WIDTH + here, dgate.to(gradients.gate.dtype.element_ty), mask=mask)
            dn *= activation(gate, ACTIVATION, saved.gate.data.dtype.element_ty == tl.float32)
        if saved.weight is not None:
            dn *= tl.load(saved.weight + shared + here, mask=mask, other=0.0).to(tl.float32)  # [c]
        along += dn * n
        total += dn
    if gradients.h is not None:  # dh = scale (dn - n sum(n dn) / DIVISOR - mean)
        slope_of_row = tl.sum(along) / S.DIVISOR
        offset = 0.0
        if S.CENTER:  # the mean of dn - n slope_of_row; n has mean 0 but for rounding
            offset = tl.sum(total) / S.WIDTH
        for block in range((S.WIDTH + S.BLOCK - 1) // S.BLOCK):
            here = tl.cast(block, tl.int64) * S.BLOCK + column
            mask = here < S.WIDTH
            n = load_normalised(saved.h.data, h_start + here, mask, scale, mean)  # [c]
            dn = tl.load(saved.dy.data + dy_start + here, mask=mask, other=0.0).to(tl.float32)  # [c]
            if saved.gate is not None:
                gate = tl.load(saved.gate.data + gate_start + here, mask=mask, other=0.0).to(tl.float32)  # [c]
                dn *= activation(gate, ACTIVATION, saved.gate.data.dtype.element_ty == tl.float32)
            if saved.weight is not None:
                dn *= tl.load(saved.weight + shared + here, mask=mask, other=0.0).to(tl.float32)  # [c]
            dh = (dn - n * slope_of_row - offset) * scale
            if saved.dh is not None:
                start = row_starts(row, count, saved.dh.at, saved.sizes, S)
                dh += tl.load(saved.dh.data + start + here, mask=mask, other=0.0).to(tl.float32)  # [c]
            tl.store(gradients.h + row * S.WIDTH + here, dh.to(gradients.h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "parts"])
def norm_weights_backward_kernel(saved, gradients, count, parts, S: tl.constexpr):
    """Program p sums BLOCK channels of all groups over every `parts`-th tile of ROWS tokens."""
    ACTIVATION: tl.constexpr = S.ACTIVATION
    ROWS: tl.constexpr = S.ROWS
    BLOCK: tl.constexpr = S.BLOCK
    tokens = count // S.GROUPS
    part = tl.program_id(0) % parts
    channel = (tl.program_id(0) // parts).to(tl.int64) * S.BLOCK + tl.arange(0, S.BLOCK)
    column = (channel % S.WIDTH)[None, :]
    group = (channel // S.WIDTH)[None, :]
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)  # [t, c]
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)  # [t, c]
    for tile in range(part, tl.cdiv(tokens, S.ROWS), parts):
        token = tl.cast(tile, tl.int64) * S.ROWS + tl.arange(0, S.ROWS)[:, None]
        mask = (token < tokens) & (channel < S.GROUPS * S.WIDTH)[None, :]
        row = token * S.GROUPS + group  # [t, c]
        scale = tl.load(saved.scale + row, mask=mask, other=0.0)  # [t, c]
        mean = tl.load(saved.mean + row, mask=mask, other=0.0) if S.CENTER else 0.0  # [t, c]
        start = row_starts(row, count, saved.h.at, saved.sizes, S)
        n = load_normalised(saved.h.data, start + column, mask, scale, mean)  # [t, c]
        start = row_starts(row, count, saved.dy.at, saved.sizes, S)
        dy = tl.load(saved.dy.data + start + column, mask=mask, other=0.0).to(tl.float32)  # [t, c]
        if saved.gate is not None:
            start = row_starts(row, count, saved.gate.at, saved.sizes, S)
            gate = tl.load(saved.gate.data + start + column, mask=mask, other=0.0).to(tl.float32)  # [t, c]
            dy *= activation(gate, ACTIVATION, saved.gate.data.dtype.element_ty == tl.float32)
        dweight += dy * n
        dbias += dy
    place = part.to(tl.int64) * S.GROUPS * S.WIDTH + channel
    if gradients.weight is not None:
        tl.store(gradients.weight + place, tl.sum(dweight, 0), mask=channel < S.GROUPS * S.WIDTH)
    if gradients.bias is not None:
        tl.store(gradients.bias + place, tl.sum(dbias, 0), mask=channel < S.GROUPS * S.WIDTH)
