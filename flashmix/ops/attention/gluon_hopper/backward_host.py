"""The host's side of the backward on Hopper: launches for each kind of call, in one pass over the keys or in a pass each."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.backward import (
    PIECE,
    GroupNumbers,
    GroupSpec,
    QuerySums,
    group_sums_kernel,
    hopper_backward_kernel,
    query_gradient_kernel,
)
from flashmix.ops.attention.gluon_hopper.backward_queries import QueryWork, hopper_backward_queries_kernel
from flashmix.ops.attention.gluon_hopper.backward_walk import BackwardWork
from flashmix.ops.attention.gluon_hopper.backward_wide import hopper_backward_wide_kernel
from flashmix.ops.attention.gluon_hopper.plan import Plans
from flashmix.ops.attention.gluon_hopper.spec import hopper_spec, tiles
from flashmix.ops.attention.gluon_hopper.table import ROWS
from flashmix.ops.attention.triton_gpu.backward import RowInputs, RowResults, empty_rows, row_launch, summed_over_rows
from flashmix.ops.attention.triton_gpu.decay import running_sums, sums_of_gradients
from flashmix.ops.attention.triton_gpu.packed import blocks_of
from flashmix.ops.attention.triton_gpu.spec import AttentionSpec, numbers_of

MOST_CHANNELS_TOGETHER = 128  # of the larger head dim: above, dK, dV and a half of dQ do not fit into registers
HALF = 4096  # elements of half a block of dQ
SUMMED = 1024  # elements that a program adds up over a group of heads


def _both_sides(call: AttentionCall, d_o: Tensor, S: AttentionSpec, rows: int, keys: int) -> tuple[Tiles | None, ...]:
    """Both parts of q, dO, k and v in tiles of `rows` and `keys`."""
    return (
        *tiles(call.q, S, rows, S.QK),
        *tiles(d_o, S, rows, S.V),
        *tiles(call.k, S, keys, S.QK),
        *tiles(call.v, S, keys, S.V),
    )


def _by_query_head(call: AttentionCall, x: Tensor) -> Tensor:
    return torch.empty(*x.shape[:2], call.heads_q, x.shape[3], dtype=torch.float32, device=x.device)


class Together:
    """dQ, dK and dV by one pass over the keys."""

    def __init__(self, call: AttentionCall, d_o: Tensor) -> None:
        self.spec, options = hopper_spec(call, "backward")
        spec = self.spec
        count = 0 if call.packing is None else call.packing.count + 1
        blocks_q, _ = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
        self.blocks = (call.tokens_q // spec.BM + count if call.packed else blocks_q) * call.batch * call.heads_q
        blocks_k, _ = blocks_of(call.packing_k, call.tokens_k, spec.BN, call.packing)
        of_rows = [tiles(x, spec, spec.BM, width)[0] for x, width in ((call.q, spec.QK), (d_o, spec.V))]
        of_keys = [tiles(x, spec, ROWS, width)[0] for x, width in ((call.k, spec.QK), (call.v, spec.V))]
        sums, _ = self.scratch(call)
        n = numbers_of(call, spec, blocks_k)  # heads in turns share the cache with their dQ, those of a group too
        self.keys = bound(hopper_backward_kernel, spec, **options).prepare(
            blocks_k * call.batch * call.heads_q,
            (partial(BackwardWork, n=n._replace(at_once=max(1, n.at_once // call.group))),),
            tiles=(*of_rows, *of_keys, Tiles(sums, (sums.numel() // PIECE, PIECE), (PIECE, 1), (16, PIECE), swizzle=0)),
        )
        self.queries = bound(query_gradient_kernel, spec, num_warps=4).prepare(
            blocks_q * call.batch * call.heads_q, (QuerySums,), numbers_of(call, spec, blocks_q)
        )

    def scratch(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Sums of dQ's blocks, and counters: 0."""
        device = call.q.device
        sums = torch.empty(self.blocks * 2 * HALF, dtype=torch.float32, device=device)
        return sums, torch.zeros(self.blocks + 1, dtype=torch.int32, device=device)

    def __call__(self, call: AttentionCall, d_o: Tensor, rows: RowResults, found: Gradients) -> None:
        sums, counters = self.scratch(call)
        device, table_q, table_k = call.q.device, None, None
        if call.packing is not None:
            _, table_k = blocks_of(call.packing_k, call.tokens_k, self.spec.BN, call.packing)
            _, table_q = blocks_of(call.packing, call.tokens_q, self.spec.BM, call.packing_k)
        d_k, d_v = found["k"], found["v"]
        if self.spec.BY_HEAD:
            d_k, d_v = (_by_query_head(call, x) for x in (d_k, d_v))
        work = (table_k, rows.level, rows.delta, d_k, d_v, counters, None, None, None)
        self.keys(device, work, moved=(call.q, d_o, call.k, call.v, sums))
        self.queries(device, (found["q"], sums, counters, table_q))
        if self.spec.BY_HEAD:
            for parts, result in ((d_k, found["k"]), (d_v, found["v"])):
                n = GroupNumbers(result.numel(), call.group)
                kernel = bound(group_sums_kernel, GroupSpec(result.shape[3], SUMMED), num_warps=4)
                kernel(cdiv(n.size, SUMMED), parts, result, n)


class Apart:
    """dK and dV by a pass over the keys, dQ by one over the queries, and with them the gradients of slopes and gates."""

    def __init__(self, call: AttentionCall, d_o: Tensor) -> None:
        self.spec, options = hopper_spec(call, "queries")
        spec = self.spec
        blocks, _ = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
        self.queries = bound(hopper_backward_queries_kernel, spec, **options).prepare(
            blocks * call.batch * call.heads_q,
            (partial(QueryWork, n=numbers_of(call, spec, blocks)),),
            tiles=_both_sides(call, d_o, spec, ROWS, spec.BN),
        )
        self.spec_k, options = hopper_spec(call, "wide")
        spec = self.spec_k
        blocks, _ = blocks_of(call.packing_k, call.tokens_k, spec.BN, call.packing)
        self.keys = bound(hopper_backward_wide_kernel, spec, **options).prepare(
            blocks * call.batch * call.heads,
            (partial(BackwardWork, n=numbers_of(call, spec, blocks)),),
            tiles=_both_sides(call, d_o, spec, spec.BM, ROWS),
        )

    def __call__(self, call: AttentionCall, d_o: Tensor, rows: RowResults, found: Gradients) -> None:
        q, k, v, device = call.q, call.k, call.v, call.q.device
        d_slopes, at_rows, at_keys, decay, decay_tiles, table, table_k = (None,) * 7
        if call.alibi_slopes is not None:
            d_slopes = torch.empty(size=call.rows, dtype=torch.float32, device=device)
        if call.log_decay is not None:
            decay, decay_tiles = running_sums(call, self.spec._replace(SCALED=False))
            at_rows = torch.empty(size=call.rows, dtype=torch.float32, device=device)
            at_keys = torch.zeros(call.batch, call.heads_q, call.tokens_k, dtype=torch.float32, device=device)
        if call.packing is not None:
            _, table = blocks_of(call.packing, call.tokens_q, self.spec.BM, call.packing_k)
            _, table_k = blocks_of(call.packing_k, call.tokens_k, self.spec_k.BN, call.packing)
        moved = (q, q, d_o, d_o, k, k, v, v)
        biases = call.alibi_slopes, decay, decay_tiles
        self.queries(device, (table, *biases, rows.level, rows.delta, found["q"], d_slopes, at_rows), moved=moved)
        work = (table_k, rows.level, rows.delta, found["k"], found["v"], None, call.alibi_slopes, decay, at_keys)
        self.keys(device, work, moved=moved)
        if d_slopes is not None and call.alibi_slopes is not None:
            found["alibi_slopes"] = summed_over_rows(d_slopes, call.alibi_slopes)
        if at_rows is not None and at_keys is not None:
            found["log_decay"] = sums_of_gradients(call, at_rows, at_keys)


def one_pass(call: AttentionCall) -> bool:
    """Whether one pass over the keys makes dQ too: dims fit, and no gate or slope takes registers."""
    dims = max(call.q.shape[3], call.v.shape[3])
    return dims <= MOST_CHANNELS_TOGETHER and call.log_decay is None and call.alibi_slopes is None


class BackwardPlan:
    """The launches for calls of one kind."""

    def __init__(self, call: AttentionCall, d_o: Tensor) -> None:
        kernel, programs, n = row_launch(call, False)
        self.rows = kernel.prepare(programs, (RowInputs, RowResults), n)
        self.gradients = (Together if one_pass(call) else Apart)(call, d_o)


PLANS = Plans(BackwardPlan)


def attention_backward(call: AttentionCall, kept: Outputs, d_o: Tensor | None, d_lse: Tensor | None) -> Gradients:
    """The gradients of q, k, v, and of sink, slopes and decay where given."""
    o, top, total = kept
    d_o = torch.zeros_like(o) if d_o is None else d_o.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    plan, call, flow = PLANS.of(call, d_o, d_lse, *kept)
    rows, device = empty_rows(call, False), call.q.device
    plan.rows(device, (o, d_o, d_lse, top, total, call.sink), rows)
    found = {
        name: torch.empty(x.shape, dtype=x.dtype, device=device)
        for name, x in (("q", call.q), ("k", call.k), ("v", call.v))
    }
    plan.gradients(call, flow, rows, found)
    if call.sink is not None and rows.d_sink is not None:
        found["sink"] = summed_over_rows(rows.d_sink, call.sink)
    return found
