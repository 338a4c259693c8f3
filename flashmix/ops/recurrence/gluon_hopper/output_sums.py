"""Sums of a value head that the backward of `output` leaves to one warp, the `finisher`: dg and dbeta (13.2)."""

from __future__ import annotations

from flashmix.gpu.hopper import gl, gluon, pin, plus, release, stores_done, wait_full
from flashmix.ops.recurrence.gluon_hopper.output_slots import parts_of
from flashmix.ops.recurrence.gluon_hopper.place import item_chunk, item_count, store_tokens, vector
from flashmix.ops.recurrence.gluon_hopper.state_parts import BETA, ROW_FACTOR

VSTAGES = gl.constexpr(3)  # stages of the vectors
# Sums that a value head leaves to the finisher, rows of 64 numbers, in one of two stages of 12.
SUM_STAGE = gl.constexpr(12)
COLUMN_SUMS = gl.constexpr(0)  # of W, of each of four warps
DIAGONAL = gl.constexpr(4)  # of W of the queries, left out of the sums where there is a decay
PAIR_ROWS = gl.constexpr(5)  # of beta W; behind it what is added to them
STATE_ROWS = gl.constexpr(6)  # of rows by way of the state, of each consumer
WRITTEN = gl.constexpr(8)  # wr, of each consumer
CARRIED = gl.constexpr(10)  # <S, dS'> in 64 parts, of each consumer, or of the walk in one row
LANES_2 = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))


@gluon.jit
def head_sums(sums, it, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The sum of COUNT rows of the sums of a value head."""
    first = (it % 2) * SUM_STAGE + FIRST
    total = vector(sums, first, LANES_2)
    for n in gl.static_range(1, COUNT):
        total += vector(sums, first + n, LANES_2)
    return total


@gluon.jit
def gate_gradients(x, tiles, bars, it, first, count, head, TRACES: gl.constexpr, S: gl.constexpr):
    """dg and dbeta of `count` tokens from `first` on of a value head, from the sums that the others leave as those of `it`, <S, dS'> in
    TRACES rows.
    """
    t = gl.arange(0, 64, LANES_2)
    PARTS: gl.constexpr = parts_of(S.BK)
    wait_full(bars.v.full, it)
    stage = (it % VSTAGES) * 4
    beta = pin(vector(tiles.vectors, stage + BETA, LANES_2))
    row = pin(vector(tiles.vectors, stage + ROW_FACTOR, LANES_2))
    wait_full(bars.sums.full, it)
    columns = head_sums(tiles.sums, it, COLUMN_SUMS, 4)
    rows = head_sums(tiles.sums, it, PAIR_ROWS, 1 + PARTS)
    written = head_sums(tiles.sums, it, WRITTEN, PARTS)
    carried = 0.0
    own = written
    if S.DECAY:
        own += vector(tiles.sums, (it % 2) * SUM_STAGE + DIAGONAL, LANES_2)
        carried = gl.sum(head_sums(tiles.sums, it, CARRIED, TRACES), 0) * gl.sum(gl.where(t == 63, row, 0.0), 0)
    release(bars.sums.empty, it)
    release(bars.v.empty, it)
    to = (first + t) * S.HV + head
    inside = t < count
    if S.CORRECTED:
        gl.store(x.beta + to, (columns + own).to(x.beta.dtype.element_ty), mask=inside)
    if S.DECAY:
        inclusive = rows - beta * columns
        d = inclusive - gl.where(t < count - 1, beta * written, 0.0)  # no decay follows the last token's write
        # sum_{i >= t} in_i + sum_{j < t} beta_j wr_j = sum of all in - sum_{i < t} (in_i - beta_i wr_i)
        dg = gl.sum(inclusive, 0) + carried - (gl.associative_scan(d, 0, plus) - d)
        gl.store(x.decay + to, dg.to(x.decay.dtype.element_ty), mask=inside)


@gluon.jit
def finisher(dq_d, dk_d, x, numbers, tiles, bars, S: gl.constexpr):
    """dg and dbeta of each (chunk, value head); sends the gradients of keys of each item."""
    for i in range(item_count(numbers)):
        at = item_chunk(x, numbers, i, S)
        for r in range(S.GROUP):
            head = at.key_head * S.GROUP + r
            gate_gradients(x, tiles, bars, i * S.GROUP + r, at.row, at.span.length, head, parts_of(S.BK), S)
        wait_full(bars.gradients, i)
        store_tokens(dq_d, at.span, at.t, at.key_head, 0, tiles.q.index(i % S.KEYS), S)
        store_tokens(dk_d, at.span, at.t, at.key_head, 0, tiles.k.index(i % S.KEYS), S)
        stores_done(0)
        release(bars.keys.empty, i, True, 2)
