"""Helpers of both kinds of decay in the backward of `output`: products with saved states, the decay's sums, storing gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.tiles import load_numbers, load_rows, saved_tile, store_rows


@triton.jit
def load_beta(x, at, S: tl.constexpr):
    """beta of a TIED rule, else ones: [C]."""
    if S.TIED:
        return load_numbers(x.beta, at, S)
    else:
        return tl.full([S.C], 1.0, tl.float32)


@triton.jit
def load_state(states, at, v, k, S: tl.constexpr):
    """Channels `v` and `k` of a chunk's saved state, [v, k]."""
    mask = (v < S.V)[:, None] & (k < S.K)[None, :]
    return tl.load(saved_tile(states, at.chunk.to(tl.int64) * S.HV + at.head, v, k, S), mask=mask, other=0.0)


@triton.jit
def state_product(x, x_tile, states, state, at, k, S: tl.constexpr):
    """x S^T of the channels `k`, [C, BK] (6.2); `x_tile` and `state` are the whole of it where BV holds all values."""
    if S.BV >= S.V:
        return tl.dot(x_tile, state, input_precision=S.PRECISION)
    else:
        found = tl.full([S.C, S.BK], 0.0, tl.float32)
        for v0 in tl.range(0, S.V, S.BV):
            v = v0 + tl.arange(0, S.BV)
            part = load_state(states, at, v, k, S)  # [BV, BK]
            rows = load_rows(x, at, S.HV, S.V, v, S)  # [C, BV]
            found = tl.dot(rows, part, found, input_precision=S.PRECISION)
        return found


@triton.jit
def carried_product(x, state, dstate, at, k, S: tl.constexpr):
    """sum_v S dS' of the channels `k`, [BK]: what the decay of the whole chunk multiplies."""
    if S.BV >= S.V:
        return tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
    else:
        total = tl.full([S.BK], 0.0, tl.float32)
        for v0 in tl.range(0, S.V, S.BV):
            v = v0 + tl.arange(0, S.BV)
            state_part = load_state(x.states, at, v, k, S)  # [BV, BK]
            dstate_part = load_state(x.dstates, at, v, k, S)  # [BV, BK]
            total += tl.sum(state_part.to(tl.float32) * dstate_part.to(tl.float32), 0)
        return total


@triton.jit
def decay_gradient(inclusive, exclusive, written, count, S: tl.constexpr):
    """The gradient of the decay along the first axis (2.7): of x dX of rows that read after (inclusive) or before (exclusive) their
    decay, less y dY of pairs, the sums over i >= t and i > t; of y dY by way of the state (written) the sum over j < t.
    """
    t = tl.arange(0, S.C)
    first = t > 0
    last = t < count - 1
    if len(written.shape) == 2:
        first = first[:, None]
        last = last[:, None]
    exclusive = tl.where(first, exclusive, 0.0)  # no decay precedes the first token's read
    written = tl.where(last, written, 0.0)  # nor follows the last token's write
    after = tl.cumsum(inclusive + exclusive, 0, reverse=True) - exclusive
    return after + tl.cumsum(written, 0) - written


@triton.jit
def store_key_gradients(out, gradients, k, beta, at, d, S: tl.constexpr, ADD: tl.constexpr = False):
    """Writes dX and dY, or ADDs them to what is there; returns the gradient of beta, [C].

    A TIED rule has a = -k and b = beta k (6.5).
    """
    ROWS: tl.constexpr = len(S.ROWS)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    dX, dY = gradients
    dbeta = tl.full([S.C], 0.0, tl.float32)
    store_rows(out.rows[0], dX[0], at, S.K, d, S, ADD)
    if S.TIED:
        dbeta = tl.sum(k * dY[0], 1)
        store_rows(out.columns[0], beta[:, None] * dY[0] - dX[1], at, S.K, d, S, ADD)
    else:
        for r in tl.static_range(1, ROWS):
            store_rows(out.rows[r], dX[r], at, S.K, d, S, ADD)
        for c in tl.static_range(COLUMNS):
            store_rows(out.columns[c], dY[c], at, S.K, d, S, ADD)
    return dbeta
