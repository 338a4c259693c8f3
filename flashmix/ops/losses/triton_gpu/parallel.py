"""One process's part of a vocabulary-parallel cross entropy, on a GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashmix.ops.losses import parallel
from flashmix.ops.losses.call import ParallelCrossEntropyCall
from flashmix.ops.losses.triton_gpu.head import HeadSums, empty_sums, head_of, in_their_dtypes, statistics_of
from flashmix.ops.losses.triton_gpu.rows import RowGradient, RowStatistics, logit_rows, rows_backward, rows_forward


def statistics(call: ParallelCrossEntropyCall, target: Tensor, total: int) -> Tensor:
    level, whole, expected = statistics_of(call.hidden, 3)
    head = head_of(call)
    for part, z in head.chunks():
        found = RowStatistics(None, level, whole, expected).rows(part)
        rows_forward(logit_rows(z, head.bias, softcap=call.softcap), target[part], found, call, total)
    return torch.stack([level + whole.log(), expected])


def gradients(
    call: ParallelCrossEntropyCall, shard: parallel.ShardGradient, wanted: frozenset[str]
) -> dict[str, Tensor]:
    head = head_of(call)
    found = HeadSums(head, empty_sums(call, wanted, head.rows))
    known = RowStatistics(None, shard.lse, torch.ones_like(shard.lse), None)
    for part, z in head.chunks():
        out = RowGradient(shard.grad[part], z, z.stride(0))
        rows = logit_rows(z, head.bias, softcap=call.softcap)
        rows_backward(rows, shard.target[part], known.rows(part), out, call, shard.total)
        found.add(part, z)
    return in_their_dtypes(call, found.sums)


keeps = parallel.keeps
forward = partial(parallel.forward, statistics=statistics)
backward = partial(parallel.backward, gradients=gradients)
