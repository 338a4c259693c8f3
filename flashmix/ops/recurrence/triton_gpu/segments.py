"""Segments: a long sequence with few heads, cut so that it fills the card, and joined again.

    S_out = M S_in + N        dS_in = M^T dS_out + dN                                                   (7.1)

The `state` phase makes the maps of all segments at once; the pass here, one product per segment, gives each its own start.
Tiles: `BV` channels of values, `BK` all channels of keys, `BN` those of them that are computed at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.tiles import map_tile, saved_tile, state_tile


@triton.jit
def load_diagonal(maps, index, k, S: tl.constexpr):
    """M of a map that is DIAGONAL, [1, k]."""
    return tl.load(map_tile(maps, index, S.V + tl.arange(0, 1), k, S), mask=(k < S.K)[None, :], other=0.0)


@triton.jit
def load_state(x, index, v, k, S: tl.constexpr):
    """One state of `[..., V, K]`, [v, k], 0 outside."""
    return tl.load(saved_tile(x, index, v, k, S), mask=(v < S.V)[:, None] & (k < S.K)[None, :], other=0.0)


@triton.jit
def load_map(maps, index, rows, k, S: tl.constexpr):
    """M^T of a map, [rows, k] of its K rows and K columns, 0 outside."""
    mask = (rows < S.K)[:, None] & (k < S.K)[None, :]
    return tl.load(map_tile(maps, index, S.V + rows, k, S), mask=mask, other=0.0)


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def segments_forward_kernel(maps, initial_state, starts, n, S: tl.constexpr):
    """starts [rows, segments, V, K]: the state, transposed, that each segment begins with. One program per (row, BV values)."""
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    vs = (tl.program_id(0) % NV) * S.BV + tl.arange(0, S.BV)
    row = (tl.program_id(0) // NV).to(tl.int64)
    ks = tl.arange(0, S.BK)
    mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
    state = tl.full([S.BV, S.BK], 0.0, tl.float32)
    if initial_state is not None:
        state = tl.load(state_tile(initial_state, row, vs, ks, S), mask=mask, other=0.0)  # [BV, BK]
    first = row * n.segments
    tl.store(saved_tile(starts, first, vs, ks, S), state, mask=mask)
    for segment in tl.range(0, n.segments - 1, num_stages=2):
        index = first + segment
        if S.BN < S.BK:  # BN columns at a time, put together in memory
            for k0 in tl.range(0, S.K, S.BN, num_stages=1):
                cs = k0 + tl.arange(0, S.BN)
                part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
                N = tl.load(map_tile(maps, index, vs, cs, S), mask=part, other=0.0)  # [BV, BN]
                M = load_map(maps, index, ks, cs, S)  # M^T, [BK, BN]
                N = tl.dot(state, M, N, input_precision=S.PRECISION)
                tl.store(saved_tile(starts, index + 1, vs, cs, S), N, mask=part)
            tl.debug_barrier()
            state = load_state(starts, index + 1, vs, ks, S)  # [BV, BK]
        else:
            N = tl.load(map_tile(maps, index, vs, ks, S), mask=mask, other=0.0)  # [BV, BK]
            if S.DIAGONAL:
                state = state * load_diagonal(maps, index, ks, S) + N  # [BV, BK]
            else:
                M = load_map(maps, index, ks, ks, S)  # M^T, [BK, BK]
                state = tl.dot(state, M, N, input_precision=S.PRECISION)
            tl.store(saved_tile(starts, index + 1, vs, ks, S), state, mask=mask)


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def segments_backward_kernel(maps, ends, final_state, starts, n, S: tl.constexpr):
    """starts [rows, segments, V, K]: the gradient, transposed, that reaches the end of each segment; `ends` what each sends back."""
    NV: tl.constexpr = (S.V + S.BV - 1) // S.BV
    vs = (tl.program_id(0) % NV) * S.BV + tl.arange(0, S.BV)
    row = (tl.program_id(0) // NV).to(tl.int64)
    ks = tl.arange(0, S.BK)
    mask = (vs < S.V)[:, None] & (ks < S.K)[None, :]
    dstate = tl.full([S.BV, S.BK], 0.0, tl.float32)
    if final_state is not None:
        dstate = tl.load(state_tile(final_state, row, vs, ks, S), mask=mask, other=0.0)  # [BV, BK]
    last = row * n.segments + n.segments - 1
    tl.store(saved_tile(starts, last, vs, ks, S), dstate, mask=mask)
    for back in tl.range(0, n.segments - 1, num_stages=2):
        index = last - back
        if S.BN < S.BK:  # BN columns at a time, put together in memory
            for k0 in tl.range(0, S.K, S.BN, num_stages=1):
                cs = k0 + tl.arange(0, S.BN)
                own = load_state(ends, index, vs, cs, S)  # [BV, BN]
                M = load_map(maps, index, cs, ks, S)  # M^T, [BN, BK]
                own = tl.dot(dstate, tl.trans(M), own, input_precision=S.PRECISION)
                part = (vs < S.V)[:, None] & (cs < S.K)[None, :]
                tl.store(saved_tile(starts, index - 1, vs, cs, S), own, mask=part)
            tl.debug_barrier()
            dstate = load_state(starts, index - 1, vs, ks, S)  # [BV, BK]
        else:
            own = load_state(ends, index, vs, ks, S)  # [BV, BK]
            if S.DIAGONAL:
                dstate = dstate * load_diagonal(maps, index, ks, S) + own  # [BV, BK]
            else:
                M = load_map(maps, index, ks, ks, S)  # M^T, [BK, BK]
                dstate = tl.dot(dstate, tl.trans(M), own, input_precision=S.PRECISION)
            tl.store(saved_tile(starts, index - 1, vs, ks, S), dstate, mask=mask)
