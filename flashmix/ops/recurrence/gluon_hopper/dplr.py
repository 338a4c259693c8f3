"""DPLR (RWKV-7) with a per-channel decay: `decay`, `scores` and `transform` in Gluon, every other phase by Triton's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import Kernel
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence import triton_gpu
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import descriptors
from flashmix.ops.recurrence.gluon_hopper.channel import FAR_CHUNKS
from flashmix.ops.recurrence.gluon_hopper.channel_far_rows import channel_far_rows_kernel
from flashmix.ops.recurrence.gluon_hopper.channel_inverse import channel_inverse_kernel
from flashmix.ops.recurrence.gluon_hopper.dplr_scores import dplr_scores_kernel
from flashmix.ops.recurrence.gluon_hopper.memory import aligned
from flashmix.ops.recurrence.gluon_hopper.structs import ChannelMemory, FarNumbers, HopperNumbers, HopperSpec
from flashmix.ops.recurrence.triton_gpu.plan import Plan, column_keys, row_keys
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import ChunkInputs, ChunkScores


class DplrPlan(NamedTuple):
    """The kernels of the phases before the state pass; `scores_save` writes the sums of the decay too."""

    scores: Kernel
    scores_save: Kernel
    far_rows: Kernel
    inverse: Kernel


@lru_cache(maxsize=1024)
def dplr_plan(own: Plan, basic: HopperSpec) -> DplrPlan:
    pairs = own.scores.spec._replace(BK=own.tiles.decay.BK)
    return DplrPlan(
        scores=Kernel(dplr_scores_kernel, basic, num_warps=4),
        scores_save=Kernel(dplr_scores_kernel, basic._replace(SAVE=True), num_warps=4),
        far_rows=Kernel(channel_far_rows_kernel, pairs, num_warps=8),
        inverse=Kernel(channel_inverse_kernel, HopperSpec(0, 0, 0, 0, TILES=4), num_warps=1),
    )


def in_chunks(call: RecurrenceCall) -> bool:
    """Whether a call has chunks, whose pairs are made here."""
    return not triton_gpu.is_step(call) and call.tokens > 0 and call.batch > 0


def made_scores(run: Run, save: bool) -> tuple[ChunkInputs, ChunkScores]:
    """What `triton_gpu.scores_of` makes; the sums of the decay with `save` alone, or as far as a row is out of range."""
    call = run.call
    rows, columns = row_keys(call), column_keys(call)
    tensors = [aligned(t) for t in (*rows, *columns)]
    BK = 64 if call.K <= 64 else 128
    heads = tuple([t.shape[2] for t in tensors])
    basic = HopperSpec(call.value_heads, 1, call.K, call.V, BK=BK, PACKED=call.packed, HEADS=heads)
    plan = dplr_plan(run.plan, basic)
    keys = torch.empty(4, call.batch, call.tokens, call.value_heads, call.K, dtype=call.dtype, device=call.device)
    A = run.per_chunk(4, 64, 64, dtype=call.dtype)
    total, far = run.per_chunk(call.K), run.per_chunk(dtype=torch.int32)
    assert call.log_decay is not None
    G = torch.empty(call.log_decay.shape, dtype=torch.float32, device=call.device)
    reach = run.per_chunk(cdiv(call.K, run.plan.tiles.decay.BK), 64, dtype=torch.int8)
    before = A.view(torch.float16)
    x = ChannelMemory(run.where.spans, None, call.log_decay, total, G, reach, far, None, None)
    read = [descriptors.tokens(t, BK, call.packed) for t in (*tensors, keys.flatten(0, 1))]
    n = HopperNumbers(run.n.scale, run.n.tokens, run.n.chunks, 1, run.chunk_programs, call.batch)
    kernel = plan.scores_save if save else plan.scores
    kernel(run.chunk_programs, *read, descriptors.pairs(A, 4), x, n)
    inputs = ChunkInputs(rows, columns, None, G, reach)
    numbers = FarNumbers(run.n.scale, run.n.tokens, run.n.chunks, run.chunk_programs)
    out = x._replace(spans=None, A=A, before=before)
    plan.far_rows(cdiv(run.chunk_programs, FAR_CHUNKS), inputs, out, run.where, numbers)
    plan.inverse(run.chunk_programs, before, descriptors.pairs(A, 1))
    q, a, k, b = keys.unbind(0)
    return inputs, ChunkScores((q, a), (k, b), A, None, total)


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state; keeps the segments' maps and starts."""
    if not in_chunks(call):
        return triton_gpu.forward(call, save)
    run = Run.of(call)
    _, scores = made_scores(run, False)
    return triton_gpu.outputs(run, scores, triton_gpu.join_forward(run, triton_gpu.segment_maps(run, scores)), save)


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all given operands; that of the decay only if it is wanted."""
    if not in_chunks(call):
        return triton_gpu.backward(call, kept, grads, wanted)
    do, dstate = triton_gpu.given_gradients(call, grads)
    run = Run.of(call)
    return triton_gpu.gradients(run, made_scores(run, True), kept, do, dstate, "log_decay" in wanted)
