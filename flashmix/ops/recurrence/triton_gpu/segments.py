"""Segments: a long sequence with few heads, cut so that it fills the card, and joined again.

    S_out = M S_in + N        dS_in = M^T dS_out + dN                                                   (7.1)

The `state` phase makes the maps of all segments at once; the pass here, one product a segment, gives each its own start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.state import map_tile, saved_tile
from flashmix.ops.recurrence.triton_gpu.tiles import state_tile


@triton.jit
def load_diagonal(maps, index, k, K: tl.constexpr, V: tl.constexpr):
    """M of a map that is DIAGONAL, [1, len(k)]."""
    return tl.load(map_tile(maps, index, V + tl.arange(0, 1), k, K, V, True), mask=(k < K)[None, :], other=0.0)


@triton.jit
def whole_state(x, index, v, k, K: tl.constexpr, V: tl.constexpr):
    """One state of `[..., V, K]`, [len(v), len(k)], 0 outside."""
    inside = (v < V)[:, None] & (k < K)[None, :]
    return tl.load(saved_tile(x, index, 0, v, k, 1, K, V), mask=inside, other=0.0)


@with_sound_ptxas
@triton.jit(do_not_specialize=["SEGMENTS"])
def segments_forward_kernel(
    maps, S0, starts, SEGMENTS, K: tl.constexpr, V: tl.constexpr, DIAGONAL: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """starts [rows, SEGMENTS, V, K]: the state, transposed, that each segment begins with. One program a (row, BV values)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    vs = (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    row = (tl.program_id(0) // NV).to(tl.int64)
    ks = tl.arange(0, BK)
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    S = tl.zeros([BV, BK], tl.float32)
    if S0 is not None:
        S = tl.load(state_tile(S0, row, vs, ks, K, V), mask=inside, other=0.0)
    first = row * SEGMENTS
    tl.store(saved_tile(starts, first, 0, vs, ks, 1, K, V), S, mask=inside)
    for segment in tl.range(0, SEGMENTS - 1, num_stages=2):
        index = first + segment
        if BN < BK:  # so many columns at a time, put together in memory
            for k0 in tl.range(0, K, BN, num_stages=1):
                cs = k0 + tl.arange(0, BN)
                some = (vs < V)[:, None] & (cs < K)[None, :]
                N = tl.load(map_tile(maps, index, vs, cs, K, V, False), mask=some, other=0.0)
                M = tl.load(
                    map_tile(maps, index, V + ks, cs, K, V, False),
                    mask=(ks < K)[:, None] & (cs < K)[None, :],
                    other=0.0,
                )
                N = tl.dot(S, M, N, input_precision=PRECISION)  # M: M^T, [BK, BN]
                tl.store(saved_tile(starts, index + 1, 0, vs, cs, 1, K, V), N, mask=some)
            tl.debug_barrier()
            S = whole_state(starts, index + 1, vs, ks, K, V)
        else:
            N = tl.load(map_tile(maps, index, vs, ks, K, V, DIAGONAL), mask=inside, other=0.0)
            if DIAGONAL:
                S = S * load_diagonal(maps, index, ks, K, V) + N
            else:
                square = (ks < K)[:, None] & (ks < K)[None, :]
                M = tl.load(map_tile(maps, index, V + ks, ks, K, V, False), mask=square, other=0.0)
                S = tl.dot(S, M, N, input_precision=PRECISION)  # M: M^T, [BK, BK]
            tl.store(saved_tile(starts, index + 1, 0, vs, ks, 1, K, V), S, mask=inside)


@with_sound_ptxas
@triton.jit(do_not_specialize=["SEGMENTS"])
def segments_backward_kernel(
    maps, ends, dS_end, starts, SEGMENTS, K: tl.constexpr, V: tl.constexpr, DIAGONAL: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """starts [rows, SEGMENTS, V, K]: the gradient, transposed, that reaches the end of each segment; `ends` what each sends."""
    NV: tl.constexpr = (V + BV - 1) // BV
    vs = (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    row = (tl.program_id(0) // NV).to(tl.int64)
    ks = tl.arange(0, BK)
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    dS = tl.zeros([BV, BK], tl.float32)
    if dS_end is not None:
        dS = tl.load(state_tile(dS_end, row, vs, ks, K, V), mask=inside, other=0.0)
    last = row * SEGMENTS + SEGMENTS - 1
    tl.store(saved_tile(starts, last, 0, vs, ks, 1, K, V), dS, mask=inside)
    for back in tl.range(0, SEGMENTS - 1, num_stages=2):
        index = last - back
        if BN < BK:  # so many columns at a time, put together in memory
            for k0 in tl.range(0, K, BN, num_stages=1):
                cs = k0 + tl.arange(0, BN)
                some = (vs < V)[:, None] & (cs < K)[None, :]
                own = tl.load(saved_tile(ends, index, 0, vs, cs, 1, K, V), mask=some, other=0.0)
                M = tl.load(
                    map_tile(maps, index, V + cs, ks, K, V, False),
                    mask=(cs < K)[:, None] & (ks < K)[None, :],
                    other=0.0,
                )
                own = tl.dot(dS, tl.trans(M), own, input_precision=PRECISION)  # M: M^T, [BN, BK]
                tl.store(saved_tile(starts, index - 1, 0, vs, cs, 1, K, V), own, mask=some)
            tl.debug_barrier()
            dS = whole_state(starts, index - 1, vs, ks, K, V)
        else:
            own = whole_state(ends, index, vs, ks, K, V)
            if DIAGONAL:
                dS = dS * load_diagonal(maps, index, ks, K, V) + own
            else:
                square = (ks < K)[:, None] & (ks < K)[None, :]
                M = tl.load(map_tile(maps, index, V + ks, ks, K, V, False), mask=square, other=0.0)
                dS = tl.dot(dS, tl.trans(M), own, input_precision=PRECISION)  # M: M^T, [BK, BK]
            tl.store(saved_tile(starts, index - 1, 0, vs, ks, 1, K, V), dS, mask=inside)
