"""Norm kernels, for rows that one program holds whole (wider ones: `wide.py`).

    h = x + residual;  n = (h - mean) scale,  scale = 1 / sqrt(sum((h - mean)^2) / DIVISOR + eps)
    y = (n weight + bias) act(gate)

Backward, with `dn = dy act(gate) weight`: `dh = scale (dn - n sum(n dn) / DIVISOR)`, less its own mean if the mean was
taken off. It reads `h`, `dy` and the gate once; a program sums `dweight` and `dbias` over its own rows.
A row is a group of `WIDTH` channels; row r has the weights of group `r % GROUPS`.
Tiles: `r` rows, `c` channels of a row.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.rows import activation, activation_slope, row_starts
from flashmix.ops.norm.triton_gpu.structs import load_sum


@triton.jit(do_not_specialize=["n"])
def norm_forward_kernel(inputs, results, n, S: tl.constexpr):
    ACTIVATION: tl.constexpr = S.ACTIVATION
    row = tl.program_id(0).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    column = tl.arange(0, S.BLOCK)[None, :]
    mask = (row < n.count)[:, None] & (column < S.WIDTH)
    packed = row[:, None] * S.WIDTH + column  # offsets in contiguous tensors
    x_at = row_starts(row, n.count, inputs.x.at, inputs.sizes, S)[:, None] + column
    residual_at = x_at
    if inputs.residual is not None:
        residual_at = row_starts(row, n.count, inputs.residual.at, inputs.sizes, S)[:, None] + column
    h = load_sum(inputs, results.h, x_at, residual_at, mask, "evict_last")  # [r, c]
    if inputs.gate is not None:
        gate_at = row_starts(row, n.count, inputs.gate.at, inputs.sizes, S)[:, None] + column
        gate = tl.load(inputs.gate.data + gate_at, mask=mask, other=0.0, eviction_policy="evict_last")  # [r, c]
        gate = gate.to(tl.float32)
    if results.h is not None:
        tl.store(results.h + packed, h.to(results.h.dtype.element_ty), mask=mask)
    if S.CENTER:  # mean = sum(h) / WIDTH
        mean = tl.div_rn(tl.sum(h, 1), S.WIDTH * 1.0)
        h = tl.where(column < S.WIDTH, h - mean[:, None], 0.0)
        tl.store(results.mean + row, mean, mask=row < n.count)
    # scale = 1 / sqrt(sum((h - mean)^2) / DIVISOR + eps)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(h * h, 1), S.DIVISOR * 1.0) + n.eps))
    tl.store(results.scale + row, scale, mask=row < n.count)
    # y = ((h - mean) scale weight + bias) act(gate)
    y = h * scale[:, None]
    shared = (row % S.GROUPS)[:, None] * S.WIDTH + column if S.GROUPS > 1 else column
    inside = column < S.WIDTH
    if inputs.weight is not None:
        weight = tl.load(inputs.weight + shared, mask=inside, other=0.0, eviction_policy="evict_last")  # [1 or r, c]
        y *= weight.to(tl.float32)
    if inputs.bias is not None:
        bias = tl.load(inputs.bias + shared, mask=inside, other=0.0, eviction_policy="evict_last")  # [1 or r, c]
        y += bias.to(tl.float32)
    if inputs.gate is not None:
        y *= activation(gate, ACTIVATION, inputs.gate.data.dtype.element_ty == tl.float32)
    tl.store(results.y + packed, y.to(results.y.dtype.element_ty), mask=mask)


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit(do_not_specialize=["count"])
def norm_backward_kernel(saved, gradients, count, S: tl.constexpr):
    """Program p takes the tiles p // GROUPS, p // GROUPS + programs / GROUPS, ... of group p % GROUPS."""
    ACTIVATION: tl.constexpr = S.ACTIVATION
    ROWS: tl.constexpr = S.ROWS
    BLOCK: tl.constexpr = S.BLOCK
    tokens = count // S.GROUPS
    group = tl.program_id(0) % S.GROUPS
    first = tl.program_id(0) // S.GROUPS
    column = tl.arange(0, S.BLOCK)[None, :]
    shared = group * S.WIDTH + column
    if saved.weight is not None:
        weight = tl.load(saved.weight + shared, mask=column < S.WIDTH, other=0.0).to(tl.float32)  # [1, c]
    if saved.bias is not None:
        bias = tl.load(saved.bias + shared, mask=column < S.WIDTH, other=0.0).to(tl.float32)  # [1, c]
    if gradients.weight is not None:
        dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    if gradients.bias is not None:
        dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(first, tl.cdiv(tokens, S.ROWS), tl.num_programs(0) // S.GROUPS, num_stages=S.STAGES):
        token = tl.cast(tile, tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
        row = token * S.GROUPS + group
        mask = (token < tokens)[:, None] & (column < S.WIDTH)
        packed = row[:, None] * S.WIDTH + column
        start = row_starts(row, count, saved.h.at, saved.sizes, S)
        n = tl.load(saved.h.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        start = row_starts(row, count, saved.dy.at, saved.sizes, S)
        dy = tl.load(saved.dy.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        if saved.gate is not None:
            start = row_starts(row, count, saved.gate.at, saved.sizes, S)
            gate = tl.load(saved.gate.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
        scale = tl.load(saved.scale + row, mask=token < tokens, other=0.0)[:, None]  # [r, 1]
        if S.CENTER:
            mean = tl.load(saved.mean + row, mask=token < tokens, other=0.0)[:, None]  # [r, 1]
            n = tl.where(mask, n - mean, 0.0)
        n *= scale
        if saved.gate is not None:
            if gradients.gate is not None:  # dgate = dy (n weight + bias) act'(gate)
                affine = n * weight if saved.weight is not None else n
                affine = affine + bias if saved.bias is not None else affine
                slope = activation_slope(gate, ACTIVATION, saved.gate.data.dtype.element_ty == tl.float32)
                dgate = dy * affine * slope
                tl.store(gradients.gate + packed, dgate.to(gradients.gate.dtype.element_ty), mask=mask)
            dy *= activation(gate, ACTIVATION, saved.gate.data.dtype.element_ty == tl.float32)
        if gradients.bias is not None:
            dbias += dy
        if gradients.weight is not None:
            dweight += dy * n
        if gradients.h is not None:  # dh = scale (dn - n sum(n dn) / DIVISOR - mean)
            dn = dy * weight if saved.weight is not None else dy
            if S.CENTER and S.WIDTH == 1:  # fused into one multiply-add, dn - dn would leave the rounding of dy weight
                dn *= 0.0
            elif S.CENTER:  # the mean of what is taken off is that of dn: n has mean 0 but for rounding
                along, total = tl.reduce((dn * n, dn), 1, add_pairs)
                dn -= n * (along / S.DIVISOR)[:, None] + (total / S.WIDTH)[:, None]
            else:
                dn -= n * (tl.sum(dn * n, 1) / S.DIVISOR)[:, None]
            dh = dn * scale
            if saved.dh is not None:
                start = row_starts(row, count, saved.dh.at, saved.sizes, S)
                dh += tl.load(saved.dh.data + start[:, None] + column, mask=mask, other=0.0).to(tl.float32)  # [r, c]
            tl.store(gradients.h + packed, dh.to(gradients.h.dtype.element_ty), mask=mask)
    partial = first.to(tl.int64) * S.GROUPS * S.WIDTH + group * S.WIDTH + tl.arange(0, S.BLOCK)
    if gradients.weight is not None:
        tl.store(gradients.weight + partial, tl.sum(dweight, 0), mask=tl.arange(0, S.BLOCK) < S.WIDTH)
    if gradients.bias is not None:
        tl.store(gradients.bias + partial, tl.sum(dbias, 0), mask=tl.arange(0, S.BLOCK) < S.WIDTH)
