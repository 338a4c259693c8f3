"""The backward of the sLSTM with recurrent weights on a GPU, from the last token to the first.

    dy_t = dout_t + R^T da_{t+1};  dc_t += dy_t o / n_t,  dn_t -= dy_t o c_t / n_t^2
    da = ((dc z + dn) i', (dc c_{t-1} + dn n_{t-1}) f' (1 - sigmoid(f)), dc i' (1 - z^2), dy c_t / n_t o (1 - o))
    dc_{t-1} = f' dc_t,  dn_{t-1} = f' dn_t

Here R has a row for each gate of each channel. Tiles as in the forward.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.rows import sigmoid, sigmoid_slope
from flashmix.ops.slstm.triton_gpu.kernels import (
    cell_place,
    channels_at,
    factors_of,
    logits_at,
    matrix_rows,
    put_channels,
    put_logits,
    times_matrix,
)


@triton.jit
def states_before(kept, start, token, span, column, inside, S: tl.constexpr):
    """`c, n, m` before a token, [d] each: those after the one before it, of the first the ones that came in."""
    row, mask = token - 1, inside & (token > span.first)
    first = inside & (token == span.first)
    old = span.sequence
    return (
        channels_at(kept.c, row, column, mask, 0.0, S) + channels_at(start.c, old, column, first, 0.0, S),
        channels_at(kept.n, row, column, mask, 0.0, S) + channels_at(start.n, old, column, first, 0.0, S),
        channels_at(kept.m, row, column, mask, 0.0, S) + channels_at(start.m, old, column, first, 0.0, S),
    )


@triton.jit
def joined_gates(i, f, z, o, S: tl.constexpr):
    """Four vectors [d] by channel, [4d]."""
    COLUMNS: tl.constexpr = 4 * S.TILE
    return tl.reshape(tl.join(tl.join(i, z), tl.join(f, o)), [COLUMNS])


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["matrices"])
def cell_backward_kernel(kept, matrices, start, d_out, d_last, d_logits, d_start, slots, n, S: tl.constexpr):
    """The gradients of the logits of a sequence and head, and of its state; matrices `[H, 4D, D]`: a row for each gate of a channel."""
    TILE: tl.constexpr = S.TILE
    RESIDENT: tl.constexpr = S.RESIDENT
    D: tl.constexpr = S.CHANNELS
    head, span, column, inside = cell_place(slots, n, S)
    matrix = matrices + head * (4 * D * D)
    resident = matrix_rows(matrix, 0, RESIDENT, TILE, 4 * D, D)  # [r, d]
    dc = channels_at(d_last.c, span.sequence, column, inside, 0.0, S)
    dn = channels_at(d_last.n, span.sequence, column, inside, 0.0, S)
    dy = channels_at(d_last.y, span.sequence, column, inside, 0.0, S)
    token = span.last - 1
    some = inside & (token >= span.first)
    c = channels_at(kept.c, token, column, some, 0.0, S)
    N = channels_at(kept.n, token, column, some, 1.0, S)
    logits = logits_at(kept, token, column, some, S)
    before = states_before(kept, start, token, span, column, inside, S)
    d_y = channels_at(d_out, token, column, some, 0.0, S)
    for _ in range(span.first, span.last):
        i, f, z, o = logits
        c_before, N_before, m_before = before
        d_now = d_y
        some = inside & (token > span.first)
        logits = logits_at(kept, token - 1, column, some, S)
        before = states_before(kept, start, token - 1, span, column, inside, S)
        d_y = channels_at(d_out, token - 1, column, some, 0.0, S)
        keep, write, candidate, share, _m = factors_of(i, f, z, o, m_before)
        closed = sigmoid(-f, True)
        dy += d_now
        mean = tl.div_rn(c, N)
        through = tl.div_rn(dy * share, N)
        dc += through
        dn -= through * mean
        d_i = (dc * candidate + dn) * write
        d_f = (dc * c_before + dn * N_before) * keep * closed
        d_z = dc * write * (1.0 - candidate * candidate)
        d_o = dy * mean * sigmoid_slope(o, True)
        put_logits(d_logits, token, column, inside, d_i, d_f, d_z, d_o, S)
        dc *= keep
        dn *= keep
        dy = times_matrix(joined_gates(d_i, d_f, d_z, d_o, S), resident, matrix, n.rows, TILE, 4 * D, D, S)
        c, N = c_before, tl.where(inside, N_before, 1.0)
        token -= 1
    put_channels(d_start.c, span.sequence, column, inside, dc, S)
    put_channels(d_start.n, span.sequence, column, inside, dn, S)
    put_channels(d_start.y, span.sequence, column, inside, dy, S)
