"""Forward kernel of the short convolution: each thread walks down time with the last W - 1 inputs of its channels in registers.

    u_t = sum_k weight[:, k] x_{t-W+1+k} + bias,    y_t = act(u_t)
    du_t = dy_t act'(u_t),    dx_t = sum_i weight[:, W-1-i] du_{t+i},    dweight[:, k] = sum_t du_t x_{t-W+1+k}

A program takes a block of channels of one part (the q, k, v convolutions of a layer are three parts of one launch) and a
span of rows; it reads a row once, and W - 1 rows of its neighbours. Rows are those of one sequence (LONG), or of all, one
sequence after the other: of equal lengths (FOLDED) or packed (PACKED). Weight gradients are summed over a program's rows,
then over programs in a fixed order. With UNIT the outputs of q and k are divided by their length per head of UNIT channels:

    a_t = act(u_t),    r_t = 1 / sqrt(sum(a_t^2) + EPS),    y_t = r_t a_t,    da_t = r_t (dy_t - a_t r_t^2 sum(dy_t a_t))

Every tile is `[d]`, the channels of the block, unless a comment says otherwise. Strides and counts of channels are in units of ALIGN
numbers, so that the compiler sees what vectors it may load.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment,var-annotated"
# ruff: noqa: RUF005 (kernels join tuples; they cannot unpack them)
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashmix.gpu.rows import activation, inverse_root

LONG, FOLDED, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class ConvSpec(NamedTuple):
    WIDTH: int  # W
    PADDED: int  # W as a power of two
    PARTS: int
    MODE: int  # LONG, FOLDED or PACKED
    ACTIVATION: str  # "" for none
    PRECISE: bool  # the rows are float32
    HAS_BIAS: bool
    HAS_DBIAS: bool  # the backward sums a gradient of the bias
    BLOCK: int  # channels of a program
    GROUP: int  # rows that it loads at once
    ALIGN: int
    JOINED: bool = False  # the gradients of all parts are one tensor, their channels side by side
    UNIT: int = 0  # channels of a head of the first two parts, whose outputs have length 1; 0: as they are
    EPS: float = 1e-6  # added to the square of a length, as `l2_norm` does


class ConvNumbers(NamedTuple):
    tokens: Any  # T
    rows: Any  # B T
    count: Any  # N, the sequences
    span: Any  # rows of a program
    blocks: Any  # of channels, of all parts
    jobs: Any  # spans of all sequences
    channels: Any  # D_i of each part
    total: Any  # their sum


class ConvRows(NamedTuple):
    """A tensor `[B, T, D_i]` of each part, and its strides of batch and row."""

    tensors: Any
    batch: Any
    row: Any


class ConvOperands(NamedTuple):
    """What the convolutions need beside their rows; absent ones are None."""

    weight: Any  # [D_i, W] of each part
    bias: Any  # [D_i] of each part
    state: Any  # [N, W - 1, D]
    sequence: Any  # [B T], packed: the sequence of each row
    starts: Any  # [N + 1], packed
    skips: Any  # [N] uint8: sequences whose first W - 1 outputs are not written


class ConvBlock(NamedTuple):
    """The channels of a program."""

    part: Any
    size: Any  # channels of the part
    before: Any  # channels of the parts before
    d: Any  # [d]: the channels in the part
    inside: Any  # [d]: whether there is such a channel


class ConvTape(NamedTuple):
    """The rows of one part."""

    x: Any
    batch: Any
    row: Any


class ConvSpan(NamedTuple):
    """The rows of a program."""

    seq: Any  # the sequence of the first row
    position: Any  # of the first row in it
    start: Any
    end: Any  # rows
    limit: Any  # no row is there from `limit` on


class ConvGroup(NamedTuple):
    """Rows that were loaded together, and the sequence and the position of each."""

    rows: Any
    ids: Any
    positions: Any


@triton.jit
def pick(values, part, S: tl.constexpr):
    """The entry of a part."""
    PARTS: tl.constexpr = S.PARTS
    value = values[0]
    for i in tl.static_range(1, PARTS):
        if part == i:
            value = values[i]
    return value


@triton.jit
def block_of(column, n, S: tl.constexpr):
    """The block of channels with the number `column`, counted through all parts."""
    PARTS: tl.constexpr = S.PARTS
    part, first, before = 0, column * S.BLOCK, 0
    for i in tl.static_range(PARTS - 1):
        blocks = tl.cdiv(n.channels[i] * S.ALIGN, S.BLOCK)
        if part == i and first >= blocks * S.BLOCK:
            part, first, before = i + 1, first - blocks * S.BLOCK, before + n.channels[i]
    size = pick(n.channels, part, S)
    d = first + tl.arange(0, S.BLOCK)
    return ConvBlock(part, size, before, d, d < size * S.ALIGN)


@triton.jit
def tape_of(rows, part, S: tl.constexpr):
    batch, row = pick(rows.batch, part, S).to(tl.int64), pick(rows.row, part, S).to(tl.int64)
    return ConvTape(pick(rows.tensors, part, S), batch, row)


@triton.jit
def place_of(row, seq, limit, c, n, S: tl.constexpr):
    """The sequence of a row and its position there; -1 and anything for rows past the last."""
    position = row
    if S.MODE == FOLDED:
        seq = tl.where(row < limit, row // n.tokens, -1)
        position = row - seq * n.tokens
    elif S.MODE == PACKED:
        seq = tl.load(c.sequence + row, mask=(row >= 0) & (row < limit), other=-1).to(tl.int64)  # []
        position = row - tl.load(c.starts + seq, mask=seq >= 0, other=0).to(tl.int64)  # []
    return seq, position


@triton.jit
def span_of(job, c, n, S: tl.constexpr):
    seq, start, limit = job * 0, job * n.span, n.rows.to(tl.int64)
    if S.MODE == LONG:
        spans = tl.cdiv(n.tokens, n.span)
        seq, start, limit = job // spans, ((job % spans) * n.span).to(tl.int32), n.tokens
    seq, position = place_of(start, seq, limit, c, n, S)
    return ConvSpan(seq, position, start, tl.minimum(n.span, limit - start).to(tl.int32), limit)


@triton.jit
def bounds_of(seq, c, n, S: tl.constexpr):
    """The first row of a sequence and the one after its last."""
    start, end = seq * n.tokens, (seq + 1) * n.tokens
    if S.MODE == PACKED:
        start = tl.minimum(tl.maximum(tl.load(c.starts + seq).to(tl.int64), 0), n.rows)
        end = tl.minimum(tl.maximum(tl.load(c.starts + seq + 1).to(tl.int64), start), n.rows)
    return start, end


@triton.jit
def offset_of(tape, row, seq, position, S: tl.constexpr):
    """Where a row begins."""
    where = row * tape.row
    if S.MODE != PACKED:
        where = seq * tape.batch + position * tape.row
    return where * S.ALIGN


@triton.jit
def contiguous_offset_of(row, here, i: tl.constexpr, pitch, S: tl.constexpr):
    """Where a row begins in a contiguous tensor of rows of `pitch`; LONG: the row i after the one at `here`."""
    where = row * pitch * S.ALIGN
    if S.MODE == LONG:
        where = here + i * (pitch * S.ALIGN)
    return where


@triton.jit
def load_group(tape, start, end, span, block, c, n, S: tl.constexpr, EVICT: tl.constexpr):
    """GROUP rows from `start` on, 0 from `end` on, and their places; EVICT as in `load_sum` of the norms."""
    GROUP: tl.constexpr = S.GROUP
    loaded, ids, positions = (), (), ()
    here = offset_of(tape, start, span.seq, start, S)
    seq, position = place_of(start, span.seq, span.limit, c, n, S)
    for i in tl.static_range(GROUP):
        row = start + i
        if i > 0:
            if S.MODE == FOLDED:  # a division a row would take longer than its channels
                last = position + 1 == n.tokens
                seq, position = tl.where(last, seq + 1, seq), tl.where(last, 0, position + 1)
                seq = tl.where(row < span.limit, seq, -1)
            else:
                seq, position = place_of(row, span.seq, span.limit, c, n, S)
        where = here + i * (tape.row * S.ALIGN)
        if S.MODE != LONG:
            where = offset_of(tape, row, seq, position, S)
        mask = block.inside & (row < end)
        value = tl.load(tape.x + where + block.d, mask=mask, other=0.0, eviction_policy=EVICT)  # [d]
        loaded, ids, positions = loaded + (value,), ids + (seq,), positions + (position,)
    return ConvGroup(loaded, ids, positions)


@triton.jit
def taps_of(c, block, S: tl.constexpr):
    """The columns of `weight [D, W]` of a block of channels, oldest first, and, if given, their bias: float32."""
    WIDTH: tl.constexpr = S.WIDTH
    weight, k = pick(c.weight, block.part, S), tl.arange(0, S.PADDED)
    mask = block.inside[:, None] & (k < WIDTH)[None, :]
    tile = tl.load(weight + block.d[:, None] * WIDTH + k[None, :], mask=mask, other=0.0)  # [d, k]
    taps = ()
    for i in tl.static_range(WIDTH):
        taps = taps + (tl.sum(tl.where((k == i)[None, :], tile.to(tl.float32), 0.0), axis=1),)
    if S.HAS_BIAS:
        bias = tl.load(pick(c.bias, block.part, S) + block.d, mask=block.inside, other=0.0)  # [d]
        taps = taps + (bias.to(tl.float32),)
    return taps


@triton.jit
def load_state(state, seq, index, asked, block, n, S: tl.constexpr):
    """Row `index` of the state of a sequence, 0 where it is not `asked` for or there is none."""
    there = asked & (index >= 0) & (index < S.WIDTH - 1) & (seq >= 0) & (seq < n.count)
    where = ((seq * (S.WIDTH - 1) + index) * n.total + block.before) * S.ALIGN
    return tl.load(state + where + block.d, mask=block.inside & there, other=0.0)  # [d]


@triton.jit
def store_state(state, value, seq, index, block, n, S: tl.constexpr):
    where = ((seq * (S.WIDTH - 1) + index) * n.total + block.before) * S.ALIGN
    tl.store(state + where + block.d, value.to(state.dtype.element_ty), mask=block.inside)


@triton.jit
def inputs_before(tape, row, seq, position, block, c, n, S: tl.constexpr):
    """The W - 1 inputs before a row, oldest first, float32."""
    WIDTH: tl.constexpr = S.WIDTH
    past = ()
    for k in tl.static_range(WIDTH - 1):
        back = WIDTH - 1 - k
        seen = (position >= back) & (row >= back)
        where = offset_of(tape, row - back, seq, position - back, S)
        value = tl.load(tape.x + where + block.d, mask=block.inside & seen, other=0.0)  # [d]
        if c.state is not None:
            old = load_state(c.state, seq, position + k, position < back, block, n, S)  # [d]
            value = tl.where(seen, value, old)
        past = past + (value.to(tl.float32),)
    return past


@triton.jit
def begin(past, seq, position, block, c, n, S: tl.constexpr):
    """The inputs before a row that follows `past`: at the first of a sequence they are its state."""
    WIDTH: tl.constexpr = S.WIDTH
    fresh = past
    if S.MODE != LONG:
        fresh = ()
        for k in tl.static_range(WIDTH - 1):
            old = tl.zeros_like(past[k])
            if c.state is not None:
                old = load_state(c.state, seq, k, position == 0, block, n, S).to(tl.float32)  # [d]
            fresh = fresh + (tl.where(position == 0, old, past[k]),)
    return fresh


@triton.jit
def convolved(past, x, taps, S: tl.constexpr):
    """`u` of a row. Of `a b + c d` a compiler fuses either product; named, every kernel has the same bits."""
    WIDTH: tl.constexpr = S.WIDTH
    u = x * taps[WIDTH - 1]
    if S.HAS_BIAS:
        u = tl.fma(x, taps[WIDTH - 1], taps[WIDTH])
    for k in tl.static_range(WIDTH - 1):
        u = tl.fma(past[k], taps[k], u)
    return u


@triton.jit
def unskipped(mask, seq, position, c, S: tl.constexpr):
    """`mask` without a row whose output another launch writes."""
    if c.skips is not None:
        first = (position < S.WIDTH - 1) & (seq >= 0)
        mask = mask & (tl.load(c.skips + seq, mask=first, other=0) == 0)  # []
    return mask


@triton.jit
def head_sums(x, S: tl.constexpr):
    """`[d]`: the sum over a channel's head of UNIT channels."""
    HEADS: tl.constexpr = S.BLOCK // S.UNIT
    sums = tl.sum(tl.reshape(x, [HEADS, S.UNIT]), axis=1)  # [h]
    return tl.reshape(tl.broadcast_to(sums[:, None], [HEADS, S.UNIT]), [S.BLOCK])


@triton.jit
def per_length(a, S: tl.constexpr):
    """`[d]`: `1 / sqrt(sum(a^2) + EPS)` of a channel's head."""
    length = head_sums(a * a, S) + S.EPS
    if S.PRECISE:
        r = tl.div_rn(1.0, tl.sqrt_rn(length))
    else:
        r = inverse_root(length)
    return r


@triton.jit
def of_unit_length(a, block, S: tl.constexpr):
    """`a / sqrt(sum(a^2) + EPS)` per head; the last part, v, stays as it is."""
    r = per_length(a, S)
    return tl.where(block.part < S.PARTS - 1, a * r, a)


@triton.jit
def store_last_inputs(tape, final, seq, block, c, n, S: tl.constexpr):
    """Writes the state after a sequence."""
    WIDTH: tl.constexpr = S.WIDTH
    start, end = bounds_of(seq, c, n, S)
    past = inputs_before(tape, end, seq, end - start, block, c, n, S)
    for k in tl.static_range(WIDTH - 1):
        store_state(final, past[k], seq, k, block, n, S)


@triton.jit(do_not_specialize=["x", "residual", "n"])
def short_conv_forward_kernel(x, residual, c, y, final, n, S: tl.constexpr):
    """One program per (span of rows, block of channels), then, for the state after it, per (sequence, block of channels)."""
    ACTIVATION: tl.constexpr = S.ACTIVATION
    PRECISE: tl.constexpr = S.PRECISE
    GROUP: tl.constexpr = S.GROUP
    EVICT: tl.constexpr = "evict_last" if S.MODE == LONG else ""
    pid = tl.program_id(0)
    job = (pid // n.blocks).to(tl.int64)
    block = block_of(pid % n.blocks, n, S)
    tape = tape_of(x, block.part, S)
    if job < n.jobs:
        out = pick(y, block.part, S)
        taps = taps_of(c, block, S)
        span = span_of(job, c, n, S)
        past = inputs_before(tape, span.start, span.seq, span.position, block, c, n, S)
        stop = span.start + span.end
        coming = load_group(tape, span.start, stop, span, block, c, n, S, EVICT)  # GROUP times [d]
        for done in range(0, span.end, GROUP):
            group = coming
            after = span.start + done + GROUP  # loaded while this group is at work
            coming = load_group(tape, after, stop, span, block, c, n, S, EVICT)  # GROUP times [d]
            here = (span.seq * n.tokens + span.start + done) * block.size * S.ALIGN
            for i in tl.static_range(GROUP):
                row, seq, position = span.start + done + i, group.ids[i], group.positions[i]
                past = begin(past, seq, position, block, c, n, S)
                value = group.rows[i].to(tl.float32)
                # y_t = act(sum_k weight[:, k] x_{t-W+1+k} + bias) + residual_t
                u = convolved(past, value, taps, S)
                if ACTIVATION != "":
                    u = activation(u, ACTIVATION, PRECISE)
                if S.UNIT > 0:
                    u = of_unit_length(u, block, S)
                mask = unskipped(block.inside & (row < span.limit), seq, position, c, S)
                if residual is not None:
                    added = tape_of(residual, 0, S)
                    where = offset_of(added, row, seq, position, S)
                    u += tl.load(added.x + where + block.d, mask=mask, other=0.0).to(tl.float32)  # [d]
                where = contiguous_offset_of(row, here, i, block.size, S)
                tl.store(out + where + block.d, u.to(out.dtype.element_ty), mask=mask)
                if S.WIDTH > 1:
                    past = past[1:] + (value,)
    elif final is not None:
        store_last_inputs(tape, final, job - n.jobs, block, c, n, S)
