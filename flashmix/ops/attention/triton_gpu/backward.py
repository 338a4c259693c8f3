"""Backward of softmax attention: every probability is computed again from its row's m and l, never kept.

    P = 2^(S - m) / l;  delta_i = do_i . o_i - dlse_i;  dV = P^T dO;  dS = P (dO V^T - delta);  dQ = scale dS K;  dK = scale dS^T Q

`rows` computes delta once (float32: a walk over the keys does, `delta_i = sum_j P_ij (dO V^T)_ij`, so that the errors of P and
`dO V^T` cancel in dS as they do in the plain formula, and a row that sees one key has dS = 0 exactly). `keys` gives a program
BN keys and walks over the queries that see them, in a fixed order through the query heads that share them: dK, dV. `queries`
gives a program BM queries and walks over their keys: dQ. The products `q k^T` and `dO V^T` are made twice; in exchange
nothing is added by two programs, and the same call gives the same bits. Half precision takes `m + log2 l` as one number; in
float32, whose units are natural, that would cost digits where scores are large.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.ops.attention.triton_gpu.backward_keys import attention_backward_keys
from flashmix.ops.attention.triton_gpu.backward_queries import attention_backward_queries, attention_delta
from flashmix.ops.attention.triton_gpu.launch import Call, aligned
from flashmix.ops.attention.triton_gpu.table import parts
from flashmix.ops.attention.triton_gpu.tiles import LOG2_E, load_head, padded_tokens


@triton.jit(do_not_specialize=["tokens", "heads", "rows"])
def attention_backward_rows_kernel(
    o, d_o, d_lse, top, total, sink, level, share, delta, d_sink, tokens, heads, rows, DV: tl.constexpr, V1: tl.constexpr,
    V2: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """delta, what is taken off a row's scores, 1 / l (rows padded to 16 bytes) and the sink's gradient, `[B, HQ, Tq]` each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, token = row % heads, row // heads
    batch, token = token // tokens, token % tokens
    inside = row < rows
    found = tl.zeros([ROWS], tl.float32)
    if d_o is not None and not EXACT:
        first = tl.program_id(0).to(tl.int64) * ROWS
        # o, dO: [ROWS, V], in two parts
        o_1, o_2 = load_head(o, None, None, None, first, rows, DV, DV, 0, V1, V2, ROWS, True, None)
        d_1, d_2 = load_head(d_o, None, None, None, first, rows, DV, DV, 0, V1, V2, ROWS, True, None)
        found = tl.sum(o_1.to(tl.float32) * d_1.to(tl.float32), 1)
        if V2 > 0:
            found += tl.sum(o_2.to(tl.float32) * d_2.to(tl.float32), 1)
    at = (batch * heads + head) * tokens + token
    flow = tl.zeros([ROWS], tl.float32)
    if d_lse is not None:
        flow = tl.load(d_lse + at, mask=inside, other=0.0)
    m = tl.load(top + at, mask=inside, other=0.0)
    l = tl.load(total + at, mask=inside, other=1.0)
    found = tl.where(l == 0, 0.0, found)
    flow = tl.where(l == 0, 0.0, flow)
    padded = (batch * heads + head) * padded_tokens(tokens) + token
    if EXACT:
        tl.store(level + padded, m, mask=inside)
        tl.store(share + padded, tl.where(l == 0, 0.0, tl.div_rn(1.0, tl.where(l == 0, 1.0, l))), mask=inside)
        tl.store(share + rows // tokens * padded_tokens(tokens) + padded, flow, mask=inside)
    else:
        tl.store(level + padded, tl.where(l == 0, float("inf"), m + tl.log2(l)), mask=inside)
        tl.store(delta + padded, found - flow, mask=inside)
        if sink is not None:
            at_sink = tl.load(sink + head).to(tl.float32) * LOG2_E
            tl.store(d_sink + at, tl.where(l == 0, 0.0, -tl.exp2(at_sink - m) / l * (found - flow)), mask=inside)


def attention_backward(
    x: Call, d_o: Tensor | None, d_lse: Tensor | None, o: Tensor, kept: list[Tensor], decay: Tensor | None
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of sink and slopes where given; with `decay` the sums of dS by row and by key."""
    q, v = x.q, x.v
    padded = (*x.rows[:2], triton.cdiv(x.tokens_q, 4) * 4)
    level, delta = (q.new_empty(padded, dtype=torch.float32) for _ in range(2))
    share = q.new_empty(2, *padded, dtype=torch.float32) if q.dtype == torch.float32 else None
    d_sink, d_slopes, at_rows = (
        q.new_empty(x.rows, dtype=torch.float32) if wanted else None
        for wanted in (x.sink is not None and q.dtype != torch.float32, x.slopes is not None, decay is not None)
    )
    d_lse = None if d_lse is None else d_lse.contiguous()
    rows = x.batch * x.heads_q * x.tokens_q
    if rows > 0:
        first, second = parts(v.shape[3])
        many = max(1, 4096 // triton.next_power_of_2(v.shape[3]))
        attention_backward_rows_kernel[(triton.cdiv(rows, many),)](
            o, None if d_o is None else d_o.contiguous(), d_lse, *kept, x.sink, level, share, delta, d_sink,
            x.tokens_q, x.heads_q, rows, v.shape[3], first, second, many, share is not None, num_warps=4,
        )  # fmt: skip
    d_o = torch.zeros_like(o) if d_o is None else d_o
    d_o = aligned(d_o)
    at_keys = None if decay is None else q.new_empty(x.batch, x.heads_q, x.tokens_k, dtype=torch.float32)
    stats = (level, share, delta)
    if share is not None:
        attention_delta(x, d_o, stats, decay)
        if x.sink is not None:
            d_sink = -(x.sink.float()[:, None] - level).exp() * share[0] * (delta - share[1])
            d_sink = d_sink[..., : x.tokens_q]
    d_k, d_v = attention_backward_keys(x, d_o, stats, at_keys, decay)
    d_q = attention_backward_queries(x, d_o, stats, (d_slopes, at_rows), decay)
    gradients = [d_q, d_k, d_v]
    for feature, found in ((x.sink, d_sink), (x.slopes, d_slopes)):
        if feature is not None and found is not None:
            gradients.append(found.sum((0, 2), dtype=torch.float64).to(feature.dtype))
    return gradients, at_rows, at_keys
