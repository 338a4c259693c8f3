"""The `gate` phase of a decay a channel: sums of log decays from the start of each chunk, which all other phases read.

    G_i = g_1 + ... + g_i        to base 2                                                              (2.1)

The other gates have one number a token: the phases that need its sums make them. The gate's gradient is part of `output`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashmix.ops.recurrence.triton_gpu.layout import chunk_span
from flashmix.ops.recurrence.triton_gpu.tiles import load_rows, store_rows, to_base_2


@triton.jit(do_not_specialize=["T", "NT"])
def gate_forward_kernel(
    g, table, G, T, NT, HV: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One program a (chunk, value head, BK channels)."""
    NK: tl.constexpr = (K + BK - 1) // BK
    chunk = tl.program_id(0) // (HV * NK)
    head = (tl.program_id(0) // NK) % HV
    d = (tl.program_id(0) % NK) * BK + tl.arange(0, BK)
    first, count = chunk_span(table, chunk, T, NT, C, PACKED)
    if count > 0:
        sums = tl.cumsum(to_base_2(load_rows(g, first, count, head, HV, K, d, C), EXACT), 0)  # [C, BK]
        store_rows(G, sums, first, count, head, HV, K, d, C)
