"""Forward kernel of the short convolution: each thread walks down time with the last W - 1 inputs of its channels in registers.

    u_t = sum_k weight[:, k] x_{t-W+1+k} + bias,    y_t = act(u_t)
    du_t = dy_t act'(u_t),    dx_t = sum_i weight[:, W-1-i] du_{t+i},    dweight[:, k] = sum_t du_t x_{t-W+1+k}

A program takes a block of channels of one part (the q, k, v convolutions of a layer are three parts of one launch) and a
span of rows; it reads a row once, and W - 1 rows of its neighbours. Rows are those of one sequence (LONG), or of all, one
sequence after the other: of equal lengths (FOLDED) or packed (PACKED). Weight gradients are summed over a program's rows,
then over programs in a fixed order.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005 (kernels join tuples; they cannot unpack them)
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.rows import activation

LONG, FOLDED, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LENGTHS = ["tokens", "rows", "count", "span", "blocks", "jobs", "total"]
STRIDES = ["channels", "x_batch", "x_row", "r_batch", "r_row", "dy_batch", "dy_row"]


@triton.jit
def _part_of(column, channels, BLOCK: tl.constexpr, PARTS: tl.constexpr, ALIGN: tl.constexpr):
    """Of a block of channels: its part, its first channel there, and the channels of the parts before (like `channels`)."""
    part, first, before = 0, column * BLOCK, 0
    for i in tl.static_range(PARTS - 1):
        blocks = tl.cdiv(channels[i] * ALIGN, BLOCK)
        if part == i and first >= blocks * BLOCK:
            part, first, before = i + 1, first - blocks * BLOCK, before + channels[i]
    return part, first, before


@triton.jit
def _pick(values, part, PARTS: tl.constexpr):
    """The entry of a part."""
    value = values[0]
    for i in tl.static_range(1, PARTS):
        if part == i:
            value = values[i]
    return value


@triton.jit
def _place(row, n, limit, tokens, sequence, starts, MODE: tl.constexpr):
    """The sequence of a row and its position there; -1 and anything for rows past the last."""
    position = row
    if MODE == FOLDED:
        n = tl.where(row < limit, row // tokens, -1)
        position = row - n * tokens
    elif MODE == PACKED:
        n = tl.load(sequence + row, mask=(row >= 0) & (row < limit), other=-1).to(tl.int64)
        position = row - tl.load(starts + n, mask=n >= 0, other=0).to(tl.int64)
    return n, position


@triton.jit
def _offset(row, n, position, batch, stride, MODE: tl.constexpr, ALIGN: tl.constexpr):
    """Where a row begins; strides are in units of ALIGN, so that the compiler sees what vectors it may load."""
    where = row * stride
    if MODE != PACKED:
        where = n * batch + position * stride
    return where * ALIGN


@triton.jit
def _step(
    here, i: tl.constexpr, row, n, position, batch, stride, MODE: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Where the row i after the one at `here` begins."""
    where = here + i * (stride * ALIGN)
    if MODE != LONG:
        where = _offset(row, n, position, batch, stride, MODE, ALIGN)
    return where


@triton.jit
def _load(
    x, start, end, n, limit, tokens, sequence, starts, batch, stride, d, inside,
    ROWS: tl.constexpr, MODE: tl.constexpr, ALIGN: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `start` on, 0 from `end` on, and their sequences and positions; EVICT as in `load_sum` of the norms."""
    loaded, ids, positions = (), (), ()
    here = _offset(start, n, start, batch, stride, MODE, ALIGN)
    m, position = _place(start, n, limit, tokens, sequence, starts, MODE)
    for i in tl.static_range(ROWS):
        row = start + i
        if i > 0:
            if MODE == FOLDED:  # a division a row would take longer than its channels
                last = position + 1 == tokens
                m, position = tl.where(last, m + 1, m), tl.where(last, 0, position + 1)
                m = tl.where(row < limit, m, -1)
            else:
                m, position = _place(row, n, limit, tokens, sequence, starts, MODE)
        where = _step(here, i, row, m, position, batch, stride, MODE, ALIGN)
        value = tl.load(x + where + d, mask=inside & (row < end), other=0.0, eviction_policy=EVICT)  # [BLOCK]
        loaded, ids, positions = loaded + (value,), ids + (m,), positions + (position,)
    return loaded, ids, positions


@triton.jit
def _taps(weight, d, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The columns of `weight [D, W]` for channels `d`, oldest first, float32."""
    k = tl.arange(0, PADDED)
    tile = tl.load(weight + d[:, None] * WIDTH + k[None, :], mask=inside[:, None] & (k < WIDTH)[None, :], other=0.0)
    taps = ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.sum(tl.where((k == i)[None, :], tile.to(tl.float32), 0.0), axis=1),)
    return taps


@triton.jit
def _state_row(state, n, index, count, before, total, d, inside, asked, WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Row `index` of the state of sequence n, 0 where it is not `asked` for or there is none."""
    there = asked & (index >= 0) & (index < WIDTH - 1) & (n >= 0) & (n < count)
    where = ((n * (WIDTH - 1) + index) * total + before) * ALIGN
    return tl.load(state + where + d, mask=inside & there, other=0.0)


@triton.jit
def _before(
    x, state, row, n, position, batch, stride, count, before, total, d, inside,
    WIDTH: tl.constexpr, MODE: tl.constexpr, ALIGN: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The W - 1 inputs before a row, oldest first, float32."""
    past = ()
    for k in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - k
        seen = (position >= back) & (row >= back)
        where = _offset(row - back, n, position - back, batch, stride, MODE, ALIGN)
        value = tl.load(x + where + d, mask=inside & seen, other=0.0)
        if HAS_STATE:
            old = _state_row(state, n, position + k, count, before, total, d, inside, position < back, WIDTH, ALIGN)
            value = tl.where(seen, value, old)
        past = past + (value.to(tl.float32),)
    return past


@triton.jit
def _begin(
    past, state, n, position, count, before, total, d, inside,
    WIDTH: tl.constexpr, MODE: tl.constexpr, ALIGN: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The inputs before a row that follows `past`: at the first of a sequence they are its state."""
    fresh = past
    if MODE != LONG:
        fresh = ()
        for k in tl.static_range(WIDTH - 1):
            old = tl.zeros_like(past[k])
            if HAS_STATE:
                row = _state_row(state, n, k, count, before, total, d, inside, position == 0, WIDTH, ALIGN)
                old = row.to(tl.float32)
            fresh = fresh + (tl.where(position == 0, old, past[k]),)
    return fresh


@triton.jit
def _convolved(past, x, taps, bias, WIDTH: tl.constexpr):
    """The row before its activation. Of `a b + c d` a compiler fuses either product; named, every kernel has the same bits."""
    u = x * taps[WIDTH - 1]
    if bias is not None:
        u = tl.fma(x, taps[WIDTH - 1], bias)
    for k in tl.static_range(WIDTH - 1):
        u = tl.fma(past[k], taps[k], u)
    return u


@triton.jit
def _last_inputs(
    x, state, final, n, tokens, rows, starts, batch, stride, count, before, total, d, inside,
    WIDTH: tl.constexpr, MODE: tl.constexpr, ALIGN: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Writes the state after sequence n."""
    start, end = n * tokens, (n + 1) * tokens
    if MODE == PACKED:
        start = tl.minimum(tl.maximum(tl.load(starts + n).to(tl.int64), 0), rows)
        end = tl.minimum(tl.maximum(tl.load(starts + n + 1).to(tl.int64), start), rows)
    past = _before(
        x, state, end, n, end - start, batch, stride, count, before, total, d, inside, WIDTH, MODE, ALIGN, HAS_STATE
    )
    for k in tl.static_range(WIDTH - 1):
        where = ((n * (WIDTH - 1) + k) * total + before) * ALIGN
        tl.store(final + where + d, past[k].to(final.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=LENGTHS + STRIDES)
def short_conv_forward_kernel(
    x, weight, bias, residual, y, state, final, sequence, starts, x_batch, x_row, r_batch, r_row, channels,
    tokens, rows, count, span, blocks, jobs, total,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr, MODE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_STATE: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    job = (pid // blocks).to(tl.int64)
    part, first, before = _part_of(pid % blocks, channels, BLOCK, PARTS, ALIGN)
    size = _pick(channels, part, PARTS)
    batch, stride = _pick(x_batch, part, PARTS).to(tl.int64), _pick(x_row, part, PARTS).to(tl.int64)
    x = _pick(x, part, PARTS)
    d = first + tl.arange(0, BLOCK)
    inside = d < size * ALIGN
    if job < jobs:
        EVICT: tl.constexpr = "evict_last" if MODE == LONG else ""
        out = _pick(y, part, PARTS)
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
            x, state, start, n, position, batch, stride, count, before, total, d, inside, WIDTH, MODE, ALIGN, HAS_STATE
        )
        end = tl.minimum(span, limit - start).to(tl.int32)
        coming, coming_ids, coming_positions = _load(
            x, start, start + end, n, limit, tokens, sequence, starts, batch, stride, d, inside,
            GROUP, MODE, ALIGN, EVICT,
        )  # fmt: skip
        for done in range(0, end, GROUP):
            loaded, ids, positions = coming, coming_ids, coming_positions
            coming, coming_ids, coming_positions = _load(  # while this group is at work
                x, start + done + GROUP, start + end, n, limit, tokens, sequence, starts, batch, stride, d, inside,
                GROUP, MODE, ALIGN, EVICT,
            )  # fmt: skip
            there = (n * tokens + start + done) * size * ALIGN
            for i in tl.static_range(GROUP):
                row, m, position = start + done + i, ids[i], positions[i]
                past = _begin(past, state, m, position, count, before, total, d, inside, WIDTH, MODE, ALIGN, HAS_STATE)
                value = loaded[i].to(tl.float32)
                u = _convolved(past, value, taps, shift, WIDTH)
                if ACTIVATION != "":
                    u = activation(u, ACTIVATION, PRECISE)
                if HAS_RESIDUAL:
                    where = _offset(row, m, position, r_batch[0].to(tl.int64), r_row[0].to(tl.int64), MODE, ALIGN)
                    u += tl.load(residual[0] + where + d, mask=inside & (row < limit), other=0.0).to(tl.float32)
                where = row * size * ALIGN
                if MODE == LONG:
                    where = there + i * (size * ALIGN)
                tl.store(out + where + d, u.to(out.dtype.element_ty), mask=inside & (row < limit))
                if WIDTH > 1:
                    past = past[1:] + (value,)
    else:
        _last_inputs(
            x, state, final, job - jobs, tokens, rows, starts, batch, stride, count, before, total, d, inside,
            WIDTH, MODE, ALIGN, HAS_STATE,
        )  # fmt: skip
