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

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import Kernel, bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.backward_keys import attention_backward_keys
from flashmix.ops.attention.triton_gpu.backward_queries import QueryResults, launch_queries
from flashmix.ops.attention.triton_gpu.decay import running_sums, sums_of_gradients
from flashmix.ops.attention.triton_gpu.scores import LOG2_E
from flashmix.ops.attention.triton_gpu.spec import BackwardInputs, Channels, aligned, channels
from flashmix.ops.attention.triton_gpu.tiles import HeadRows, load_head, padded_tokens


class RowInputs(NamedTuple):
    o: Any  # [B, Tq, HQ, V]
    d_o: Any
    d_lse: Any  # [B, HQ, Tq], as m and l
    top: Any
    total: Any
    sink: Any


class RowResults(NamedTuple):
    """`[B, HQ, Tq]` each, rows padded to 16 bytes but for `d_sink`."""

    level: Any  # taken off a row's scores: m + log2 l, in float32 m
    share: Any  # float32: 1 / l and dlse
    delta: Any
    d_sink: Any
    counters: Any  # of the kernels that follow, set to 0; or None


class RowNumbers(NamedTuple):
    tokens: Any
    heads: Any
    rows: Any  # B Tq HQ
    counters: Any
    programs: Any


class RowSpec(NamedTuple):
    V: Channels
    ROWS: int
    EXACT: bool


@triton.jit(do_not_specialize=["n"])
def attention_backward_rows_kernel(x, out, n, S: tl.constexpr):
    """delta, what is taken off a row's scores, 1 / l and the sink's gradient of ROWS rows."""
    V: tl.constexpr = S.V
    if out.counters is not None:
        for some in range(tl.program_id(0) * S.ROWS, n.counters, n.programs * S.ROWS):
            counter = some + tl.arange(0, S.ROWS)
            tl.store(out.counters + counter, tl.full([S.ROWS], 0, tl.int32), mask=counter < n.counters)
    row = tl.program_id(0).to(tl.int64) * S.ROWS + tl.arange(0, S.ROWS)
    head, token = row % n.heads, row // n.heads
    batch, token = token // n.tokens, token % n.tokens
    inside = row < n.rows
    # found_i = do_i . o_i
    found = tl.full([S.ROWS], 0.0, tl.float32)
    if x.d_o is not None and not S.EXACT:
        first = tl.program_id(0).to(tl.int64) * S.ROWS
        o = HeadRows((x.o, V.ALL), n.rows, (None, None), None)
        d_o = HeadRows((x.d_o, V.ALL), n.rows, (None, None), None)
        o_1, o_2 = load_head(o, first, V, S.ROWS, True, S)  # [ROWS, V]
        d_1, d_2 = load_head(d_o, first, V, S.ROWS, True, S)  # [ROWS, V]
        found = tl.sum(o_1.to(tl.float32) * d_1.to(tl.float32), 1)
        if V.SECOND > 0:
            found += tl.sum(o_2.to(tl.float32) * d_2.to(tl.float32), 1)
    at = (batch * n.heads + head) * n.tokens + token
    flow = tl.full([S.ROWS], 0.0, tl.float32)
    if x.d_lse is not None:
        flow = tl.load(x.d_lse + at, mask=inside, other=0.0)  # [ROWS]
    m = tl.load(x.top + at, mask=inside, other=0.0)  # [ROWS]
    l = tl.load(x.total + at, mask=inside, other=1.0)  # [ROWS]
    found = tl.where(l == 0, 0.0, found)
    flow = tl.where(l == 0, 0.0, flow)
    padded = (batch * n.heads + head) * padded_tokens(n.tokens) + token
    if S.EXACT:
        tl.store(out.level + padded, m, mask=inside)
        tl.store(out.share + padded, tl.where(l == 0, 0.0, tl.div_rn(1.0, tl.where(l == 0, 1.0, l))), mask=inside)
        tl.store(out.share + n.rows // n.tokens * padded_tokens(n.tokens) + padded, flow, mask=inside)
    else:
        # level = m + log2 l;  delta = do . o - dlse;  dsink_i = -2^(sink - m) / l delta_i
        tl.store(out.level + padded, tl.where(l == 0, float("inf"), m + tl.log2(l)), mask=inside)
        tl.store(out.delta + padded, found - flow, mask=inside)
        if x.sink is not None:
            at_sink = tl.load(x.sink + head).to(tl.float32) * LOG2_E
            d_sink = tl.where(l == 0, 0.0, -tl.exp2(at_sink - m) / l * (found - flow))
            tl.store(out.d_sink + at, d_sink, mask=inside)


def attention_backward(call: AttentionCall, kept: Outputs, d_o: Tensor | None, d_lse: Tensor | None) -> Gradients:
    """The gradients of q, k, v, and of sink, slopes and decay where given, of a call as `spec.laid_out` makes it."""
    o, top, total = kept
    exact, decay = call.dtype == torch.float32, call.log_decay is not None
    rows = row_statistics(call, RowInputs(o, d_o, d_lse, top, total, call.sink), exact)
    d_o = aligned(torch.zeros_like(o) if d_o is None else d_o)
    decay_sums, _ = running_sums(call)
    x = BackwardInputs(
        call.q,
        call.k,
        call.v,
        d_o,
        rows.level,
        rows.share,
        rows.delta,
        call.alibi_slopes,
        decay=decay_sums,
        seed=call.seed,
        table=None,
    )
    d_sink = rows.d_sink
    if exact:
        launch_queries("delta", call, x, QueryResults(None, None, None))
        if call.sink is not None:
            share, flow = rows.share
            d_sink = -(call.sink.float()[:, None] - rows.level).exp() * share * (rows.delta - flow)
            d_sink = d_sink[..., : call.tokens_q]
    found = {"q": call.q.new_empty(call.q.shape)}
    found["k"], found["v"], at_keys = attention_backward_keys(call, x)
    d_slopes = _float32(call, call.rows) if call.alibi_slopes is not None else None
    at_rows = _float32(call, call.rows) if decay else None
    launch_queries("queries", call, x, QueryResults(found["q"], d_slopes, at_rows))
    for name, feature, gradient in (("sink", call.sink, d_sink), ("alibi_slopes", call.alibi_slopes, d_slopes)):
        if feature is not None and gradient is not None:
            found[name] = summed_over_rows(gradient, feature)
    if at_rows is not None and at_keys is not None:
        found["log_decay"] = sums_of_gradients(call, at_rows, at_keys)
    return found


def summed_over_rows(gradient: Tensor, feature: Tensor) -> Tensor:
    """The gradient of a `feature` `[HQ]` or `[B, HQ]`, from that of each row `[B, HQ, Tq]`."""
    return gradient.sum((0, 2) if feature.dim() == 1 else 2, dtype=torch.float64).to(feature.dtype)


def row_statistics(call: AttentionCall, x: RowInputs, exact: bool) -> RowResults:
    """What each row of scores needs; delta is empty in float32 (`exact`)."""
    out, (kernel, programs, n) = empty_rows(call, exact), row_launch(call, exact)
    x = x._replace(
        d_o=None if x.d_o is None else x.d_o.contiguous(), d_lse=None if x.d_lse is None else x.d_lse.contiguous()
    )
    kernel(programs, x, out, n)
    return out


def empty_rows(call: AttentionCall, exact: bool) -> RowResults:
    padded = (*call.rows[:2], cdiv(call.tokens_q, 4) * 4)
    level, delta = (_float32(call, padded) for _ in range(2))
    share = _float32(call, (2, *padded)) if exact else None
    d_sink = _float32(call, call.rows) if call.sink is not None and not exact else None
    return RowResults(level, share, delta, d_sink, None)


def row_launch(call: AttentionCall, exact: bool, counters: int = 0) -> tuple[Kernel, int, RowNumbers]:
    """The kernel behind `row_statistics`, its programs and numbers."""
    rows, dim_v = call.batch * call.heads_q * call.tokens_q, call.v.shape[3]
    spec = RowSpec(channels(dim_v), max(1, 4096 // power_of_two(dim_v)), exact)
    programs = cdiv(rows, spec.ROWS)
    n = RowNumbers(call.tokens_q, call.heads_q, rows, counters, programs)
    return bound(attention_backward_rows_kernel, spec, num_warps=4), programs, n


def _float32(call: AttentionCall, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(size=shape, dtype=torch.float32, device=call.device)
