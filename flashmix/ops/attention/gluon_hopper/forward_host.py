"""The host's side of the forward on Hopper: a launch for each kind of call, and the tensors that it writes."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.launch import bound
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


class ForwardPlan:
    """The launch for calls of one kind."""

    def __init__(self, call: AttentionCall) -> None:
        self.spec, options = hopper_spec(call, "forward")
        spec = self.spec
        self.blocks, _ = blocks_of(call.packing, call.tokens_q, spec.BM, call.packing_k)
        programs, at_once = self.blocks * call.batch * call.heads_q, gpu.target(call.device).multiprocessors
        self.counts = spec.OWN_RESULTS and programs > at_once
        self.launch = bound(hopper_forward_kernel, spec, **options).prepare(
            min(programs, at_once) if spec.OWN_RESULTS else programs,
            (ForwardInputs, HopperResults),
            numbers_of(call, spec, self.blocks),
            tiles=(
                *tiles(call.q, spec, ROWS, spec.QK),
                *tiles(call.k, spec, spec.BN, spec.QK),
                *tiles(call.v, spec, spec.BN, spec.V),
            ),
        )


PLANS = Plans(ForwardPlan)


def attention_forward(call: AttentionCall) -> tuple[Tensor, Tensor, Outputs]:
    """`o [B,Tq,HQ,V]`, `lse [B,HQ,Tq]` (packed `[HQ,Tq]`), and m and l, `[B,HQ,Tq]` each."""
    plan, call, _ = PLANS.of(call)
    q, k, v, device = call.q, call.k, call.v, call.q.device
    table, decay, decay_tiles = None, None, None
    if call.packing is not None:
        _, table = blocks_of(call.packing, call.tokens_q, plan.spec.BM, call.packing_k)
    if call.log_decay is not None:
        decay, decay_tiles = running_sums(call, plan.spec._replace(SCALED=False))
    rows = q.shape[0], q.shape[2], q.shape[1]
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=device)
    lse = torch.empty(rows[1:] if call.packed else rows, dtype=torch.float32, device=device)
    top = torch.empty(rows, dtype=torch.float32, device=device)
    total = torch.empty(rows, dtype=torch.float32, device=device)
    counter = (torch.zeros if plan.counts else torch.empty)(1, dtype=torch.int32, device=device)
    inputs = (q, k, v, call.sink, call.alibi_slopes, decay, decay_tiles, None, table)
    plan.launch(device, inputs, (o, lse, top, total, counter), moved=(q, q, k, k, v, v))
    return o, lse, (top, total)
