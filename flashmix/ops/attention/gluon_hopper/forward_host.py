"""The host's side of the forward on Hopper: the launch for each kind of call, and the tensors that it writes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.gpu.memory import is_plain
from flashmix.gpu.series import LaunchSeries
from flashmix.op.call import Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.forward import HopperResults, hopper_forward_kernel
from flashmix.ops.attention.gluon_hopper.plan import Plans
from flashmix.ops.attention.gluon_hopper.spec import hopper_spec, tiles
from flashmix.ops.attention.gluon_hopper.table import ROWS
from flashmix.ops.attention.triton_gpu.decay import running_sums
from flashmix.ops.attention.triton_gpu.forward import ForwardInputs
from flashmix.ops.attention.triton_gpu.packed import blocks_of
from flashmix.ops.attention.triton_gpu.spec import numbers_of

STATISTICS = 3  # numbers that a row of scores leaves: m, l, and lse where it is not asked for
COUNTER = 4  # numbers behind them, of which the first counts blocks


def memory_of(call: AttentionCall) -> int:
    """How many float32 numbers a forward keeps."""
    return STATISTICS * padded(math.prod(call.rows)) + COUNTER


def row_statistics(call: AttentionCall, kept: Tensor) -> list[Tensor]:
    """m, l and the third number of each row, `[B, HQ, Tq]`, of what a forward kept."""
    rows = math.prod(call.rows)
    return [part[:rows].view(call.rows) for part in kept[:-COUNTER].view(STATISTICS, padded(rows))]


def padded(numbers: int) -> int:
    """As many numbers in float32 as whole pieces of 16 bytes have: code is compiled for what lies at such."""
    return cdiv(numbers, 4) * 4


class ForwardPlan:
    """The launch for calls of one kind."""

    def __init__(self, call: AttentionCall) -> None:
        self.spec, options = hopper_spec(call, "forward")
        spec = self.spec
        blocks, _ = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
        programs, at_once = blocks * call.batch * call.heads_q, gpu.target(call.device).multiprocessors
        self.allocate = torch.zeros if programs > at_once else torch.empty  # for the counter
        self.grid = min(programs, at_once)
        self.n, self.kernel = numbers_of(call, spec, blocks), bound(hopper_forward_kernel, spec, **options)
        self.o = (*call.q.shape[:3], call.v.shape[3])
        self.like_q = self.o == call.q.shape and is_plain(call.q)
        self.lse = call.rows[1:] if call.packed else call.rows
        self.memory, self.series = memory_of(call), LaunchSeries()

    def launch(
        self,
        call: AttentionCall,
        results: tuple[Tensor, Tensor | None, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        table: Tensor | None,
    ) -> None:
        spec, (o, lse, kept) = self.spec, results
        top, total, spare = row_statistics(call, kept)
        self.kernel(
            self.grid,
            ForwardInputs(call.q, call.k, call.v, call.sink, call.alibi_slopes, *biases, None, table),
            HopperResults(o, spare if lse is None else lse, top, total, kept[-COUNTER:].view(torch.int32)),
            *tiles(call.q, spec, ROWS, spec.QK),
            *tiles(call.k, spec, spec.BN, spec.QK),
            *tiles(call.v, spec, spec.BN, spec.V),
            self.n,
        )


PLANS = Plans(ForwardPlan)


def attention_forward(call: AttentionCall) -> tuple[Outputs, Outputs]:
    """`o [B,Tq,HQ,V]`, with `return_lse` `lse [B,HQ,Tq]` (packed `[HQ,Tq]`); and the memory of `row_statistics`."""
    plan, call, _ = PLANS.of(call)
    device, table, decay, decay_tiles, lse = call.q.device, None, None, None, None
    if call.packing is not None:
        _, table = blocks_of(call.packing, call.tokens_q, plan.spec.BM, call.packing_k)
    if call.log_decay is not None:
        decay, decay_tiles = running_sums(call, plan.spec._replace(SCALED=False))
    o = torch.empty_like(call.q) if plan.like_q else torch.empty(plan.o, dtype=call.q.dtype, device=device)
    kept = plan.allocate(plan.memory, dtype=torch.float32, device=device)
    if call.return_lse:
        lse = torch.empty(plan.lse, dtype=torch.float32, device=device)
    results, biases = (o, lse, kept), (decay, decay_tiles)
    given = call.q, call.k, call.v, call.sink, call.alibi_slopes, *biases, table, *results
    plan.series(device, given, lambda: plan.launch(call, results, biases, table))
    return (o,) if lse is None else (o, lse), (kept,)
