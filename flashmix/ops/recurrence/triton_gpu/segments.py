"""Segments: a long sequence with few heads, cut so that it fills the card, and joined again.

    S_out = M S_in + N        dS_in = M^T dS_out + dN                                                   (7.1)

The `state` phase makes the maps of all segments at once; the pass here, one product a segment, gives each its own start.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix._ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.state import map_tile, saved_tile
from flashmix.ops.recurrence.triton_gpu.tiles import state_tile


@triton.jit
def load_diagonal(maps, index, k, K: tl.constexpr, V: tl.constexpr):
    """M of a map that is DIAGONAL, [1, len(k)]."""
    return tl.load(map_tile(maps, index, V + tl.arange(0, 1), k, K, V, True), mask=(k < K)[None, :], other=0.0)


@with_sound_ptxas
@triton.jit(do_not_specialize=["SEGMENTS"])
def segments_forward_kernel(
    maps, S0, starts, SEGMENTS, K: tl.constexpr, V: tl.constexpr, DIAGONAL: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """starts [rows, SEGMENTS, V, K]: the state, transposed, that each segment begins with. One program a (row, BV values)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    vs = (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    row = (tl.program_id(0) // NV).to(tl.int64)
    ks = tl.arange(0, BK)
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    square = (ks < K)[:, None] & (ks < K)[None, :]
    S = tl.zeros([BV, BK], tl.float32)
    if S0 is not None:
        S = tl.load(state_tile(S0, row, vs, ks, K, V), mask=inside, other=0.0)
    for segment in tl.range(0, SEGMENTS, num_stages=2):
        tl.store(saved_tile(starts, row * SEGMENTS, segment, vs, ks, 1, K, V), S, mask=inside)
        N = tl.load(map_tile(maps, row * SEGMENTS + segment, vs, ks, K, V, DIAGONAL), mask=inside, other=0.0)
        if DIAGONAL:
            S = S * load_diagonal(maps, row * SEGMENTS + segment, ks, K, V) + N
        else:
            M = tl.load(map_tile(maps, row * SEGMENTS + segment, V + ks, ks, K, V, False), mask=square, other=0.0)
            S = tl.dot(S, M, N, input_precision=PRECISION)  # M: M^T, [BK, BK]


@with_sound_ptxas
@triton.jit(do_not_specialize=["SEGMENTS"])
def segments_backward_kernel(
    maps, ends, dS_end, starts, SEGMENTS, K: tl.constexpr, V: tl.constexpr, DIAGONAL: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """starts [rows, SEGMENTS, V, K]: the gradient, transposed, that reaches the end of each segment; `ends` what each sends."""
    NV: tl.constexpr = (V + BV - 1) // BV
    vs = (tl.program_id(0) % NV) * BV + tl.arange(0, BV)
    row = (tl.program_id(0) // NV).to(tl.int64)
    ks = tl.arange(0, BK)
    inside = (vs < V)[:, None] & (ks < K)[None, :]
    square = (ks < K)[:, None] & (ks < K)[None, :]
    dS = tl.zeros([BV, BK], tl.float32)
    if dS_end is not None:
        dS = tl.load(state_tile(dS_end, row, vs, ks, K, V), mask=inside, other=0.0)
    for back in tl.range(0, SEGMENTS, num_stages=2):
        segment = SEGMENTS - 1 - back
        tl.store(saved_tile(starts, row * SEGMENTS, segment, vs, ks, 1, K, V), dS, mask=inside)
        own = tl.load(saved_tile(ends, row * SEGMENTS, segment, vs, ks, 1, K, V), mask=inside, other=0.0)
        if DIAGONAL:
            dS = dS * load_diagonal(maps, row * SEGMENTS + segment, ks, K, V) + own
        else:
            M = tl.load(map_tile(maps, row * SEGMENTS + segment, V + ks, ks, K, V, False), mask=square, other=0.0)
            dS = tl.dot(dS, tl.trans(M), own, input_precision=PRECISION)  # M: M^T, [BK, BK]
