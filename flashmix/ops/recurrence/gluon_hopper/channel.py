"""The phases of a per-channel decay that Triton's kernels run beside the state passes of Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients
from flashmix.ops.recurrence.gluon_hopper import descriptors
from flashmix.ops.recurrence.gluon_hopper.plan import HopperPlan
from flashmix.ops.recurrence.gluon_hopper.structs import ChannelMemory, ChannelOutputMemory, FarNumbers, HopperNumbers
from flashmix.ops.recurrence.triton_gpu.plan import column_keys, row_keys
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import ChunkInputs, ChunkScores, ChunkValues, KeyGradients

FAR_CHUNKS = 8  # chunks that a program of `channel_far_rows_kernel` looks at


class ChannelScores(NamedTuple):
    """What Triton's kernels read and write of a decay per channel."""

    inputs: ChunkInputs
    scores: ChunkScores
    far: Tensor


def decayed_keys(
    run: Run, plan: HopperPlan, numbers: HopperNumbers, memory: Sequence[Tensor], save: bool
) -> ChannelScores:
    """Makes the decayed keys `[3, B, T, HV, K]`, q, a and b (without corrections q and b), the tiles of pairs, and with `save` the sums of
    the decay.
    """
    keys, A, total, G, reach, far = memory
    call, where = run.call, run.where
    before = A.view(torch.float16) if call.rule.corrected else None
    assert call.k is not None
    x = ChannelMemory(where.spans, call.beta, call.log_decay, total, G, reach, far, A, before)
    read = [descriptors.tokens(t, 128, call.packed) for t in (call.q, call.k, keys.flatten(0, 1))]
    kernel = plan.channel_scores_save if save else plan.channel_scores
    kernel(run.chunk_programs, *read, descriptors.pairs(A, A.shape[2]), x._replace(A=None, before=None), numbers)
    inputs = ChunkInputs(row_keys(call), column_keys(call), call.beta, G, reach)
    n = FarNumbers(run.n.scale, run.n.tokens, run.n.chunks, run.chunk_programs)
    plan.channel_far_rows(cdiv(run.chunk_programs, FAR_CHUNKS), inputs, x._replace(spans=None), where, n)
    if before is not None:
        plan.channel_inverse(run.chunk_programs, before, descriptors.pairs(A, 1))
    *rows, b = keys.unbind(0)
    return ChannelScores(inputs, ChunkScores(tuple(rows), (b,), A, None, total), far)


def output_backward_of_channels(
    run: Run,
    plan: HopperPlan,
    numbers: HopperNumbers,
    made: ChannelScores,
    values: tuple[Tensor, ...],
    found: Gradients,
) -> None:
    """Makes the gradients of keys, by value head, of beta and of the decay."""
    do, dr, nu, states, dstates = values
    call, (inputs, scores, far) = run.call, made
    assert call.k is not None
    rows = len(inputs.rows)
    x = ChunkValues((do, dr)[:rows], (nu,), states, dstates)
    out = KeyGradients((found["q"], None)[:rows], (found["k"],), found.get("beta"), found["log_decay"], scores.A)
    tokens = partial(descriptors.tokens, packed=call.packed)
    tiles: list[Tiles | None] = [
        tokens(t, width) for t, width in ((call.q, 128), (call.k, 128), (inputs.decay, 64), (nu, 128), (do, 128))
    ]
    tiles.append(tokens(dr, 128) if call.rule.corrected else None)
    tiles += [descriptors.states(t, 128, 64) for t in (states, dstates)]
    tiles += [tokens(found[name], width) for name, width in (("q", 128), ("k", 128), ("log_decay", 64))]
    memory = ChannelOutputMemory(run.where.spans, call.beta, found.get("beta"), far, inputs.reach)
    programs = min(run.chunk_programs, gpu.target(call.device).multiprocessors)
    plan.channel_output(programs, *tiles, memory, numbers)
    run.plan.pairs(run.chunk_programs, inputs, x, out, run.where, run.n)
