"""The pairs of a per-channel decay that one pass leaves (`channel_scores.py`): rows that have decayed too far, in Triton's own language.

They are made in the passes of `triton_gpu/scores.py`. Whether a row is one of them follows from its own and earlier decays alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.decay import NEAR, channel_sums, load_reach, reach_of, to_base_2
from flashmix.ops.recurrence.triton_gpu.keys import load_float_keys
from flashmix.ops.recurrence.triton_gpu.scores import channel_products
from flashmix.ops.recurrence.triton_gpu.tiles import chunk_place, load_rows, pair_tile, replaced, zero_vectors, zeros

OUT_OF_RANGE: tl.constexpr = tl.constexpr(2)  # the mark of a chunk with such a row
PROGRAM_CHUNKS: tl.constexpr = tl.constexpr(8)  # chunks and value heads that a program looks at


@triton.jit
def store_reach(out, at, S: tl.constexpr):
    """Writes how far back the rows of a chunk reach; returns LEVELS for each row that one pass has whole, else 0, [C].

    A row that is out of range for that in some channels is taken not to reach the chunk's start in any: its pairs are left whole to the
    other passes.
    """
    BLOCKS: tl.constexpr = (S.K + S.REACH - 1) // S.REACH
    to = out.reach + (at.chunk.to(tl.int64) * S.HV + at.head) * (BLOCKS * S.C) + tl.arange(0, S.C)
    least = tl.full([S.C], S.LEVELS, tl.int32)
    for block in tl.range(0, BLOCKS, num_stages=1):
        d = block * S.REACH + tl.arange(0, S.REACH)
        own = to_base_2(load_rows(out.decay, at, S.HV, S.K, d, S), S)  # [C, REACH]
        G = load_rows(out.sums, at, S.HV, S.K, d, S)  # [C, REACH]
        tl.store(to + block * S.C, reach_of(own, G, S))
        least = tl.minimum(least, tl.where(tl.max(-G, 1) <= S.ONE_PASS, S.LEVELS, 0))
    for block in tl.range(0, BLOCKS, num_stages=1):
        reach = tl.load(to + block * S.C).to(tl.int32)  # [C]
        tl.store(to + block * S.C, tl.where(least < S.LEVELS, tl.minimum(reach, NEAR), S.LEVELS))
    return least


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def channel_far_rows_kernel(x, out, where, n, S: tl.constexpr):
    """Writes the rows of pairs that are out of range for one pass, those of A_ab as float16, and of their chunks the reaches."""
    tl.static_assert(S.BK == S.REACH, "a tile's channels have one reach, which is decided for them")
    first = tl.program_id(0) * PROGRAM_CHUNKS
    which = first + tl.arange(0, PROGRAM_CHUNKS)
    flags = tl.load(out.far + which, mask=which < n.programs, other=0)  # [PROGRAM_CHUNKS]
    if tl.max(flags, 0) < OUT_OF_RANGE:
        return
    PAIRS: tl.constexpr = len(S.ROW)
    COLUMNS: tl.constexpr = len(S.COLUMN_HEADS)
    DT: tl.constexpr = out.A.dtype.element_ty
    own = tl.arange(0, S.C)[:, None] == tl.arange(0, S.C)[None, :]  # no pass has the pairs (i, i)
    for index in tl.range(first, tl.minimum(first + PROGRAM_CHUNKS, n.programs), num_stages=1):
        at = chunk_place(index // S.HV, index % S.HV, where, n, S)
        if (at.count > 0) & (tl.load(out.far + index) >= OUT_OF_RANGE):
            least = store_reach(out, at, S)  # [C]
            tl.debug_barrier()
            A = zeros(PAIRS, S.C, S.C)
            diagonals = zero_vectors(COLUMNS, S.C)  # q_i . y_i of each column
            for k0 in tl.range(0, S.K, S.BK, num_stages=1):
                d = k0 + tl.arange(0, S.BK)
                X, Y = load_float_keys(x, n.scale, at, d, S)  # [C, BK] each
                sums = channel_sums(out.sums, at, d, S)
                for c in tl.static_range(COLUMNS):
                    diagonals = replaced(diagonals, c, diagonals[c] + tl.sum(X[0] * Y[c], 1))
                reach = load_reach(out.reach, at, k0 // S.REACH, S)  # [C]
                A = channel_products(x, A, (X, Y), sums, reach, d, at, S)  # [C, C] each
            far = ((least < S.LEVELS) | (tl.arange(0, S.C) >= at.count))[
                :, None
            ]  # past the count: NaN from the one pass
            for p in tl.static_range(PAIRS):
                if p < COLUMNS:  # the pairs of q come first
                    pairs = A[p] + tl.where(own, diagonals[p][:, None], 0.0)
                    tl.store(pair_tile(out.A, at, p, S), pairs.to(DT), mask=far)
                elif p == COLUMNS:
                    tl.store(pair_tile(out.before, at, p, S), A[p].to(tl.float16), mask=far)
                else:
                    tl.store(pair_tile(out.A, at, p, S), A[p].to(DT), mask=far)
