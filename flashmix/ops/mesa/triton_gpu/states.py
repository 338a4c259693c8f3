"""The states before each chunk, and the last ones: the one serial pass over the chunks of a sequence.

W <- e^{G_C} W + w^T (beta e^{G_C - G} k)        with w = k for R, w = v for S^T
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.gpu.ptxas import with_sound_ptxas
from flashmix.ops.recurrence.triton_gpu.decay import factor, load_sums
from flashmix.ops.recurrence.triton_gpu.structs import Place
from flashmix.ops.recurrence.triton_gpu.tiles import load_numbers, load_rows, sequence_chunks


@triton.jit
def last_state(R, S_, row, of_keys, w, k, S: tl.constexpr):
    """Pointers to the tile `[w, k]` of a caller's state: of the symmetric `R` `[K, K]`, or of `S` `[K, V]`."""
    if of_keys:
        ptr = R + row.to(tl.int64) * (S.K * S.K) + k[None, :] * S.K + w[:, None]
    else:
        ptr = S_ + row.to(tl.int64) * (S.K * S.V) + k[None, :] * S.V + w[:, None]
    return ptr


@with_sound_ptxas
@triton.jit(do_not_specialize=["n"])
def mesa_states_kernel(x, out, where, n, S: tl.constexpr):
    """One program per (sequence, value head, BV rows of R or of S^T)."""
    NK: tl.constexpr = (S.K + S.BV - 1) // S.BV
    NB: tl.constexpr = NK + (S.V + S.BV - 1) // S.BV
    block = tl.program_id(0) % NB
    row = tl.program_id(0) // NB  # of sequences x heads
    head = row % S.HV
    of_keys = block < NK
    w = tl.where(of_keys, block, block - NK) * S.BV + tl.arange(0, S.BV)
    width = tl.where(of_keys, S.K, S.V)
    ks = tl.arange(0, S.BK)
    mask = (w < width)[:, None] & (ks < S.K)[None, :]
    saved = tl.where(of_keys, w, S.K + w)[:, None] * S.K + ks[None, :]
    start, length, chunk0, chunks = sequence_chunks(where, row // S.HV, n, S)
    state = tl.full([S.BV, S.BK], 0.0, tl.float32)
    if x.R is not None:
        state = tl.load(last_state(x.R, x.S, row, of_keys, w, ks, S), mask=mask, other=0.0)  # [BV, BK]
    for i in tl.range(0, chunks, num_stages=1):
        at = Place(chunk0 + i, head, start + i * S.C, tl.minimum(length - i * S.C, S.C))
        if out.states is not None:
            base = (at.chunk * S.HV + head) * ((S.K + S.V) * S.K)
            tl.store(out.states + base + saved, state, mask=mask)
        G, _, last = load_sums(x.decay, at, S)  # [C], [C], []
        weight = load_numbers(x.beta, at, S) * factor(last - G)  # [C]
        k = load_rows(x.k, at, S.H, S.K, ks, S).to(tl.float32) * weight[:, None]  # [C, BK]
        if of_keys:
            written = load_rows(x.k, at, S.H, S.K, w, S)  # [C, BV]
        else:
            written = load_rows(x.v, at, S.HV, S.V, w, S)  # [C, BV]
        high = k.to(tl.bfloat16)
        low = (k - high.to(tl.float32)).to(tl.bfloat16)
        written = tl.trans(written)  # [BV, C]
        state = tl.dot(written, high, tl.dot(written, low, state * factor(last)))
    tl.store(last_state(out.R, out.S, row, of_keys, w, ks, S), state, mask=mask)
