"""The output of a decay of the value axis, of all chunks at once: what in the backward of a per-channel decay is the gradient of q.

    o_i = scale (e^{G_e(i)} (S^T q_i) + sum_j (q_i . k_j) e^{G_e(i) - G_j} v_j)                          (12.2)

The call runs on the transposed state, whose keys are v and whose values are k (12.8). So `S.K` counts the channels of v and o here, with
the decay, and `S.V` those of q and k; pairs go in the passes of every per-channel decay (`pairs_of_pass`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.decay import (
    channel_sums,
    column_factor,
    factor,
    load_anchor,
    load_reach,
    needed_passes,
    pairs_of_pass,
    row_sums,
)
from flashmix.ops.recurrence.triton_gpu.gradients import load_state, state_product
from flashmix.ops.recurrence.triton_gpu.pairs import load_values, near, pair_gradients
from flashmix.ops.recurrence.triton_gpu.tiles import chunk_place, load_rows, store_rows


@triton.jit
def value_passes(out, A, v, sums, reach, x, at, d, S: tl.constexpr):
    """out += sum_j A_ij e^{G_e(i) - G_j} v_j over the channels `d`, [C, d], in passes over pairs; without the pairs (i, i)."""
    DT: tl.constexpr = A.dtype
    row, G = sums
    needed = needed_passes(reach, S)
    for index in tl.range(0, S.LEVELS + 2, num_stages=1):
        if (needed >> index) & 1 == 1:
            seen, middle = pairs_of_pass(reach, index, S)
            anchor = load_anchor(x.decay, middle, at, d, S)  # [C, d]
            written = (v * column_factor(anchor - G, S)).to(DT)
            read = tl.dot(tl.where(seen, A, 0.0), written, input_precision=S.PRECISION)
            out += read * factor(row - anchor)
    return out


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def value_output_kernel(x, values, o, where, n, S: tl.constexpr):
    """One program per (chunk, value head). The column of `x` is v; `values` has q in the place of dO, and k in that of v."""
    at = chunk_place(tl.program_id(0) // S.HV, tl.program_id(0) % S.HV, where, n, S)
    if at.count == 0:
        return
    tl.static_assert(S.REACH % S.BK == 0, "a tile's channels must have one reach")
    DT: tl.constexpr = o.dtype.element_ty
    vs = tl.arange(0, S.BV)
    whole = load_values(values, at, vs, S)  # [C, BV]
    q, _ = whole  # [C, BV]
    A = pair_gradients(values, whole, at, S)[0] * n.scale  # [C, C]
    own = near(A, False, S)[0]  # [C, 1]
    A = A.to(DT)
    for k0 in tl.range(0, S.K, S.BK, num_stages=S.STAGES):
        d = k0 + tl.arange(0, S.BK)
        G, before, _last = channel_sums(x.decay, at, d, S)  # [C, BK]
        row = row_sums(G, before, 0, S)
        state = load_state(values.states, at, vs, d, S)  # [BV, BK]
        out = state_product(values.dz[0], q[0], values.states, state, at, d, S) * (n.scale * factor(row))  # [C, BK]
        v = load_rows(x.columns[0], at, S.HV, S.K, d, S).to(tl.float32)  # [C, BK]
        if S.ROWS[0].DIAGONAL:
            out += own * v
        reach = load_reach(x.reach, at, k0 // S.REACH, S)  # [C]
        out = value_passes(out, A, v, (row, G), reach, x, at, d, S)
        store_rows(o, out, at, S.K, d, S)
