"""Backward kernels of the short convolution; equations, layout and tiles as in `forward.py`."""

# mypy: allow-untyped-defs, disable-error-code="assignment,misc,var-annotated"
# ruff: noqa: B007, RUF005 (kernels join tuples, and fold a constant condition only alone)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.rows import activation, activation_slope
from flashmix.ops.short_conv.triton_gpu.forward import (
    FOLDED,
    LONG,
    PACKED,
    begin,
    block_of,
    bounds_of,
    contiguous_offset_of,
    convolved,
    head_sums,
    inputs_before,
    load_group,
    load_state,
    offset_of,
    per_length,
    pick,
    span_of,
    store_state,
    tape_of,
    taps_of,
)


class ConvSumSpec(NamedTuple):
    WIDTH: int
    PARTS: int
    BLOCK: int  # channels of a program
    GROUP: int  # partial sums that it loads at once
    ALIGN: int


@triton.jit
def gradient_before(past, x, dy, taps, block, S: tl.constexpr):
    """`du_t = da_t act'(u_t)`, float32; `da_t = dy_t` where the outputs are not divided by their length."""
    ACTIVATION: tl.constexpr = S.ACTIVATION
    PRECISE: tl.constexpr = S.PRECISE
    du = dy.to(tl.float32)
    if S.UNIT > 0:
        a = convolved(past, x, taps, S)
        if ACTIVATION != "":
            a = activation(a, ACTIVATION, PRECISE)
        # da = r (dy - a r^2 sum(dy a))
        r = per_length(a, S)
        da = r * (du - a * (r * r * head_sums(du * a, S)))
        du = tl.where(block.part < S.PARTS - 1, da, du)
    if ACTIVATION != "":
        du *= activation_slope(convolved(past, x, taps, S), ACTIVATION, PRECISE)
    return du


@triton.jit
def input_gradient(du, later, ids, seq, taps, S: tl.constexpr):
    """`dx` of the row W - 1 before: from `later`, the du of that row and those after it, and from the newest, `du`."""
    WIDTH: tl.constexpr = S.WIDTH
    dx = later[0] * taps[WIDTH - 1]
    for i in tl.static_range(1, WIDTH):
        if i == WIDTH - 1:
            value, own = du, seq
        else:
            value, own = later[i], ids[i]
        if S.MODE != LONG:
            value = tl.where(own == ids[0], value, 0.0)
        dx = tl.fma(value, taps[WIDTH - 1 - i], dx)
    return dx


@triton.jit
def final_gradient(dfinal, row, seq, asked, limit, block, c, n, S: tl.constexpr):
    """What comes back to a row through the final state, 0 unless the row is one of its sequence's last W - 1."""
    end = limit
    if S.MODE == FOLDED:
        end = (seq + 1) * n.tokens
    elif S.MODE == PACKED:
        mask = asked & (seq >= 0) & (seq < n.count)
        end = tl.load(c.starts + seq + 1, mask=mask, other=0).to(tl.int64)  # []
    return load_state(dfinal, seq, S.WIDTH - 1 - (end - row), asked, block, n, S).to(tl.float32)  # [d]


@triton.jit(do_not_specialize=["x", "dy", "n"])
def short_conv_backward_kernel(x, dy, c, dx, dfinal, partial, n, S: tl.constexpr):
    """One program per (span of rows, block of channels): `dx` of its rows, and its share of the gradients of weight and bias.

    JOINED: `dx` is one tensor, of which the parts have the channels side by side.
    """
    BLOCK: tl.constexpr = S.BLOCK
    GROUP: tl.constexpr = S.GROUP
    WIDTH: tl.constexpr = S.WIDTH
    pid = tl.program_id(0)
    job = (pid // n.blocks).to(tl.int64)
    block = block_of(pid % n.blocks, n, S)
    tape, flow = tape_of(x, block.part, S), tape_of(dy, block.part, S)
    if S.JOINED:
        out, pitch = dx[0] + block.before * S.ALIGN, n.total
    else:
        out, pitch = pick(dx, block.part, S), block.size
    taps = taps_of(c, block, S)
    span = span_of(job, c, n, S)
    past = inputs_before(tape, span.start, span.seq, span.position, block, c, n, S)
    dweight, later, ids = (tl.zeros([BLOCK], tl.float32),), (), ()  # dbias first
    for k in tl.static_range(WIDTH):
        dweight = dweight + (tl.zeros([BLOCK], tl.float32),)
    for k in tl.static_range(WIDTH - 1):
        later, ids = later + (tl.zeros([BLOCK], tl.float32),), ids + (span.seq * 0 - 2,)
    # The rows of its own, and the W - 1 after them, which say what the last of them are to get.
    stop, seen = span.start + span.end, tl.minimum(span.start + span.end + WIDTH - 1, span.limit)
    xs_coming = load_group(tape, span.start, seen, span, block, c, n, S, "evict_last")  # GROUP times [d]
    dys_coming = load_group(flow, span.start, seen, span, block, c, n, S, "evict_last").rows  # GROUP times [d]
    for done in range(0, span.end + WIDTH - 1, GROUP):
        xs, dys = xs_coming, dys_coming
        coming = span.start + done + GROUP  # loaded while this group is at work
        xs_coming = load_group(tape, coming, seen, span, block, c, n, S, "evict_last")  # GROUP times [d]
        dys_coming = load_group(flow, coming, seen, span, block, c, n, S, "evict_last").rows  # GROUP times [d]
        here = (span.seq * n.tokens + span.start + done - (WIDTH - 1)) * pitch * S.ALIGN
        for i in tl.static_range(GROUP):
            seq = xs.ids[i]
            past = begin(past, seq, xs.positions[i], block, c, n, S)
            value = xs.rows[i].to(tl.float32)
            du = gradient_before(past, value, dys[i], taps, block, S)
            # dweight[:, k] += du_t x_{t-W+1+k}
            own_du = tl.where(
                done < span.end, du, 0.0
            )  # `span.end` is a multiple of GROUP, or there are no rows after it
            sums = (dweight[0],)
            if S.HAS_DBIAS:
                sums = (dweight[0] + own_du,)
            for k in tl.static_range(WIDTH - 1):
                sums = sums + (dweight[k + 1] + own_du * past[k],)
            dweight = sums + (dweight[WIDTH] + own_du * value,)
            # dx_t = sum_i weight[:, W-1-i] du_{t+i}
            row = span.start + done + i - (WIDTH - 1)
            if WIDTH > 1:
                gradient, owner = input_gradient(du, later, ids, seq, taps, S), ids[0]
                past, later, ids = past[1:] + (value,), later[1:] + (du,), ids[1:] + (seq,)
            else:
                gradient, owner = du * taps[0], seq
            own = (row >= span.start) & (row < stop)
            if dfinal is not None:
                gradient += final_gradient(dfinal, row, owner, own, span.limit, block, c, n, S)
            where = contiguous_offset_of(row, here, i, pitch, S)
            tl.store(out + where + block.d, gradient.to(out.dtype.element_ty), mask=block.inside & own)
    if partial is not None:
        for k in tl.static_range(WIDTH + 1):
            if k > 0 or S.HAS_DBIAS:
                where = ((job * (WIDTH + 1) + k) * n.total + block.before) * S.ALIGN
                tl.store(partial + where + block.d, dweight[k], mask=block.inside)


@triton.jit(do_not_specialize=["n"])
def short_conv_weight_backward_kernel(partial, dweight, dbias, n, S: tl.constexpr):
    """Sums what the programs of the backward have of a tap (or, of column 0, the bias) for a block of channels."""
    BLOCK: tl.constexpr = S.BLOCK
    GROUP: tl.constexpr = S.GROUP
    pid = tl.program_id(0)
    column = pid // n.blocks + (1 if dbias is None else 0)
    block = block_of(pid % n.blocks, n, S)
    total = n.total.to(tl.int64) * S.ALIGN
    found = tl.zeros([GROUP, BLOCK], tl.float32)
    base = partial + column * total + block.before * S.ALIGN + block.d[None, :]
    for done in range(0, n.jobs, GROUP):
        job = done + tl.arange(0, GROUP)
        mask = (job < n.jobs)[:, None] & block.inside[None, :]
        found += tl.load(base + job[:, None] * ((S.WIDTH + 1) * total), mask=mask, other=0.0)  # [GROUP, d]
    value = tl.sum(found, axis=0)
    if dweight is not None:
        if column > 0:
            out = pick(dweight, block.part, S)
            tl.store(out + block.d * S.WIDTH + column - 1, value.to(out.dtype.element_ty), mask=block.inside)
    if dbias is not None:
        if column == 0:
            out_bias = pick(dbias, block.part, S)
            tl.store(out_bias + block.d, value.to(out_bias.dtype.element_ty), mask=block.inside)


@triton.jit(do_not_specialize=["x", "dy", "n"])
def short_conv_state_backward_kernel(x, dy, c, dstate, dfinal, n, S: tl.constexpr):
    """The gradient of a sequence's initial state, from its first W - 1 rows: `dstate_j = sum_p weight[:, j-p] du_p`."""
    BLOCK: tl.constexpr = S.BLOCK
    WIDTH: tl.constexpr = S.WIDTH
    pid = tl.program_id(0)
    seq = (pid // n.blocks).to(tl.int64)
    block = block_of(pid % n.blocks, n, S)
    tape, flow = tape_of(x, block.part, S), tape_of(dy, block.part, S)
    taps = taps_of(c, block, S)
    start, end = bounds_of(seq, c, n, S)
    past, gradients = (), ()
    for k in tl.static_range(WIDTH - 1):
        old = load_state(c.state, seq, k, True, block, n, S)  # [d]
        past, gradients = past + (old.to(tl.float32),), gradients + (tl.zeros([BLOCK], tl.float32),)
    for p in tl.static_range(WIDTH - 1):
        mask = block.inside & (start + p < end)
        value = tl.load(tape.x + offset_of(tape, start + p, seq, p, S) + block.d, mask=mask, other=0.0)  # [d]
        value = value.to(tl.float32)
        dy_p = tl.load(flow.x + offset_of(flow, start + p, seq, p, S) + block.d, mask=mask, other=0.0)  # [d]
        du = tl.where(mask, gradient_before(past, value, dy_p, taps, block, S), 0.0)
        sums = ()
        for j in tl.static_range(WIDTH - 1):
            if j >= p:
                sums = sums + (gradients[j] + du * taps[j - p],)
            else:
                sums = sums + (gradients[j],)
        past, gradients = past[1:] + (value,), sums
    for j in tl.static_range(WIDTH - 1):
        found = gradients[j]
        if dfinal is not None:
            found += load_state(dfinal, seq, j - (end - start), True, block, n, S).to(tl.float32)  # [d]
        store_state(dstate, found, seq, j, block, n, S)
