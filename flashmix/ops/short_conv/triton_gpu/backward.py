"""Backward kernels of the short convolution; equations and layout in `forward.py`."""

# mypy: allow-untyped-defs, disable-error-code="assignment,misc,var-annotated"
# ruff: noqa: B007, RUF005 (kernels join tuples, and fold a constant condition only alone)
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.rows import activation_slope
from flashmix.ops.short_conv.triton_gpu.forward import (
    FOLDED,
    LENGTHS,
    LONG,
    PACKED,
    STRIDES,
    _before,
    _begin,
    _convolved,
    _load,
    _offset,
    _part_of,
    _pick,
    _place,
    _state_row,
    _taps,
)


@triton.jit
def _du(past, x, dy, taps, bias, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, PRECISE: tl.constexpr):
    """The gradient of a row before its activation, float32."""
    du = dy.to(tl.float32)
    if ACTIVATION != "":
        du *= activation_slope(_convolved(past, x, taps, bias, WIDTH), ACTIVATION, PRECISE)
    return du


@triton.jit
def _input_gradient(du, later, ids, m, taps, WIDTH: tl.constexpr, MODE: tl.constexpr):
    """`dx` of the row W - 1 before: from `later`, the du of that row and those after it, and from the newest, `du`."""
    dx = later[0] * taps[WIDTH - 1]
    for i in tl.static_range(1, WIDTH):
        if i == WIDTH - 1:
            value, own = du, m
        else:
            value, own = later[i], ids[i]
        if MODE != LONG:
            value = tl.where(own == ids[0], value, 0.0)
        dx = tl.fma(value, taps[WIDTH - 1 - i], dx)
    return dx


@triton.jit
def _store_gradient(
    dx, value, dfinal, out_here, i: tl.constexpr, row, n, start, stop, limit, tokens, starts, count, size, before, total,
    d, inside, WIDTH: tl.constexpr, MODE: tl.constexpr, ALIGN: tl.constexpr, HAS_DFINAL: tl.constexpr,
):  # fmt: skip
    """Adds what comes back through the final state, if the row is one of its sequence's last, and writes `dx`."""
    there = (row >= start) & (row < stop)
    if HAS_DFINAL:
        end = limit
        if MODE == FOLDED:
            end = (n + 1) * tokens
        elif MODE == PACKED:
            end = tl.load(starts + n + 1, mask=there & (n >= 0) & (n < count), other=0).to(tl.int64)
        index = WIDTH - 1 - (end - row)
        value += _state_row(dfinal, n, index, count, before, total, d, inside, there, WIDTH, ALIGN).to(tl.float32)
    where = row * size * ALIGN
    if MODE == LONG:
        where = out_here + i * (size * ALIGN)
    tl.store(dx + where + d, value.to(dx.dtype.element_ty), mask=inside & there)


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def short_conv_backward_kernel(
    x, weight, bias, dy, dx, state, dfinal, partial, sequence, starts, x_batch, x_row, dy_batch, dy_row, channels,
    tokens, rows, count, span, blocks, jobs, total,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DFINAL: tl.constexpr, HAS_PARTIAL: tl.constexpr,
    HAS_DBIAS: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    job = (pid // blocks).to(tl.int64)
    part, first, before = _part_of(pid % blocks, channels, BLOCK, PARTS, ALIGN)
    size = _pick(channels, part, PARTS)
    x_batch, x_row = _pick(x_batch, part, PARTS).to(tl.int64), _pick(x_row, part, PARTS).to(tl.int64)
    dy_batch, dy_row = _pick(dy_batch, part, PARTS).to(tl.int64), _pick(dy_row, part, PARTS).to(tl.int64)
    x, dy, dx = _pick(x, part, PARTS), _pick(dy, part, PARTS), _pick(dx, part, PARTS)
    d = first + tl.arange(0, BLOCK)
    inside = d < size * ALIGN
    taps = _taps(_pick(weight, part, PARTS), d, inside, WIDTH, PADDED)
    shift = None
    if HAS_BIAS:
        shift = tl.load(_pick(bias, part, PARTS) + d, mask=inside, other=0.0).to(tl.float32)
    n, start, limit = job * 0, job * span, rows.to(tl.int64)
    if MODE == LONG:
        spans = tl.cdiv(tokens, span)
        n, start, limit = job // spans, ((job % spans) * span).to(tl.int32), tokens
    n, position = _place(start, n, limit, tokens, sequence, starts, MODE)
    past = _before(
        x, state, start, n, position, x_batch, x_row, count, before, total, d, inside, WIDTH, MODE, ALIGN, HAS_STATE
    )
    dweight, later, ids = (tl.zeros([BLOCK], tl.float32),), (), ()  # dbias first
    for k in tl.static_range(WIDTH):
        dweight = dweight + (tl.zeros([BLOCK], tl.float32),)
    for k in tl.static_range(WIDTH - 1):
        later, ids = later + (tl.zeros([BLOCK], tl.float32),), ids + (n * 0 - 2,)
    # The rows of its own, and the W - 1 after them, which say what the last of them are to get.
    end = tl.minimum(span, limit - start).to(tl.int32)
    stop, seen = start + end, tl.minimum(start + end + WIDTH - 1, limit)
    xs_coming, ids_coming, at_coming = _load(
        x, start, seen, n, limit, tokens, sequence, starts, x_batch, x_row, d, inside, GROUP, MODE, ALIGN, "evict_last"
    )
    dys_coming, _, _ = _load(
        dy, start, seen, n, limit, tokens, sequence, starts, dy_batch, dy_row, d, inside, GROUP, MODE, ALIGN, "evict_last"
    )  # fmt: skip
    for done in range(0, end + WIDTH - 1, GROUP):
        xs, dys, own, at = xs_coming, dys_coming, ids_coming, at_coming
        coming = start + done + GROUP  # loaded while this group is at work
        xs_coming, ids_coming, at_coming = _load(
            x, coming, seen, n, limit, tokens, sequence, starts, x_batch, x_row, d, inside, GROUP, MODE, ALIGN, "evict_last"
        )  # fmt: skip
        dys_coming, _, _ = _load(
            dy, coming, seen, n, limit, tokens, sequence, starts, dy_batch, dy_row, d, inside, GROUP, MODE, ALIGN, "evict_last"
        )  # fmt: skip
        out_here = (n * tokens + start + done - (WIDTH - 1)) * size * ALIGN
        for i in tl.static_range(GROUP):
            m = own[i]
            past = _begin(past, state, m, at[i], count, before, total, d, inside, WIDTH, MODE, ALIGN, HAS_STATE)
            value = xs[i].to(tl.float32)
            du = _du(past, value, dys[i], taps, shift, WIDTH, ACTIVATION, PRECISE)
            own_du = tl.where(done < end, du, 0.0)  # `end` is a multiple of GROUP, or there are no rows after it
            sums = (dweight[0],)
            if HAS_DBIAS:
                sums = (dweight[0] + own_du,)
            for k in tl.static_range(WIDTH - 1):
                sums = sums + (dweight[k + 1] + own_du * past[k],)
            dweight = sums + (dweight[WIDTH] + own_du * value,)
            row = start + done + i - (WIDTH - 1)
            if WIDTH > 1:
                gradient, owner = _input_gradient(du, later, ids, m, taps, WIDTH, MODE), ids[0]
                past, later, ids = past[1:] + (value,), later[1:] + (du,), ids[1:] + (m,)
            else:
                gradient, owner = du * taps[0], m
            _store_gradient(
                dx, gradient, dfinal, out_here, i, row, owner, start, stop, limit, tokens, starts, count, size, before,
                total, d, inside, WIDTH, MODE, ALIGN, HAS_DFINAL,
            )  # fmt: skip
    if HAS_PARTIAL:
        for k in tl.static_range(WIDTH + 1):
            if k > 0 or HAS_DBIAS:
                where = ((job * (WIDTH + 1) + k) * total + before) * ALIGN
                tl.store(partial + where + d, dweight[k], mask=inside)


@triton.jit(do_not_specialize=["jobs", "total", "channels", "blocks"])
def short_conv_weight_backward_kernel(
    partial, dweight, dbias, channels, jobs, blocks, total,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sums what the programs of the backward have of a tap (or, of column 0, the bias) for a block of channels."""
    pid = tl.program_id(0)
    column = pid // blocks + (0 if HAS_BIAS else 1)
    part, first, before = _part_of(pid % blocks, channels, BLOCK, PARTS, ALIGN)
    d = first + tl.arange(0, BLOCK)
    inside = d < _pick(channels, part, PARTS) * ALIGN
    lane = tl.arange(0, GROUP)
    total = total.to(tl.int64) * ALIGN
    found = tl.zeros([GROUP, BLOCK], tl.float32)
    base = partial + column * total + before * ALIGN + d[None, :]
    for done in range(0, jobs, GROUP):
        job = done + lane
        mask = (job < jobs)[:, None] & inside[None, :]
        found += tl.load(base + job[:, None] * ((WIDTH + 1) * total), mask=mask, other=0.0)  # [GROUP, BLOCK]
    value = tl.sum(found, axis=0)
    if HAS_WEIGHT:
        if column > 0:
            out = _pick(dweight, part, PARTS)
            tl.store(out + d * WIDTH + column - 1, value.to(out.dtype.element_ty), mask=inside)
    if HAS_BIAS:
        if column == 0:
            out_bias = _pick(dbias, part, PARTS)
            tl.store(out_bias + d, value.to(out_bias.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def short_conv_state_backward_kernel(
    x, weight, bias, dy, state, dstate, dfinal, starts, x_batch, x_row, dy_batch, dy_row, channels,
    tokens, rows, count, blocks, total,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_DFINAL: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The gradient of a sequence's initial state, from its first W - 1 rows: `dstate_j = sum_p weight[:, j-p] du_p`."""
    pid = tl.program_id(0)
    n = (pid // blocks).to(tl.int64)
    part, first, before = _part_of(pid % blocks, channels, BLOCK, PARTS, ALIGN)
    x_batch, x_row = _pick(x_batch, part, PARTS).to(tl.int64), _pick(x_row, part, PARTS).to(tl.int64)
    x = _pick(x, part, PARTS)
    d = first + tl.arange(0, BLOCK)
    inside = d < _pick(channels, part, PARTS) * ALIGN
    taps = _taps(_pick(weight, part, PARTS), d, inside, WIDTH, PADDED)
    shift = None
    if HAS_BIAS:
        shift = tl.load(_pick(bias, part, PARTS) + d, mask=inside, other=0.0).to(tl.float32)
    start, end = n * tokens, (n + 1) * tokens
    if MODE == PACKED:
        start = tl.minimum(tl.maximum(tl.load(starts + n).to(tl.int64), 0), rows)
        end = tl.minimum(tl.maximum(tl.load(starts + n + 1).to(tl.int64), start), rows)
    past, gradients = (), ()
    for k in tl.static_range(WIDTH - 1):
        old = _state_row(state, n, k, count, before, total, d, inside, True, WIDTH, ALIGN)
        past, gradients = past + (old.to(tl.float32),), gradients + (tl.zeros([BLOCK], tl.float32),)
    dy_batch, dy_row = _pick(dy_batch, part, PARTS).to(tl.int64), _pick(dy_row, part, PARTS).to(tl.int64)
    dy = _pick(dy, part, PARTS)
    for p in tl.static_range(WIDTH - 1):
        there = inside & (start + p < end)
        value = tl.load(x + _offset(start + p, n, p, x_batch, x_row, MODE, ALIGN) + d, mask=there, other=0.0)
        value = value.to(tl.float32)
        flow = tl.load(dy + _offset(start + p, n, p, dy_batch, dy_row, MODE, ALIGN) + d, mask=there, other=0.0)
        du = _du(past, value, flow, taps, shift, WIDTH, ACTIVATION, PRECISE)
        du = tl.where(there, du, 0.0)
        sums = ()
        for j in tl.static_range(WIDTH - 1):
            if j >= p:
                sums = sums + (gradients[j] + du * taps[j - p],)
            else:
                sums = sums + (gradients[j],)
        past, gradients = past[1:] + (value,), sums
    for j in tl.static_range(WIDTH - 1):
        found = gradients[j]
        if HAS_DFINAL:
            index = j - (end - start)
            found += _state_row(dfinal, n, index, count, before, total, d, inside, True, WIDTH, ALIGN).to(tl.float32)
        where = ((n * (WIDTH - 1) + j) * total + before) * ALIGN
        tl.store(dstate + where + d, found.to(dstate.dtype.element_ty), mask=inside)
