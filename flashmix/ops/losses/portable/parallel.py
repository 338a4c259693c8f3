"""One process's part of a vocabulary-parallel cross entropy, in plain PyTorch."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flashmix.ops.losses import parallel
from flashmix.ops.losses.call import ParallelCrossEntropyCall
from flashmix.ops.losses.portable.head import HeadGradients
from flashmix.ops.losses.portable.linear_cross_entropy import head_of
from flashmix.ops.losses.portable.rows import rows_backward, rows_statistics


def statistics(call: ParallelCrossEntropyCall, target: Tensor, total: int) -> Tensor:
    found = call.hidden.new_empty(2, call.hidden.shape[0], dtype=call.wide)
    for part, z in head_of(call).chunks():
        found[0, part], found[1, part] = rows_statistics(z, target[part], call, total)
    return found


def gradients(
    call: ParallelCrossEntropyCall, shard: parallel.ShardGradient, wanted: frozenset[str]
) -> dict[str, Tensor]:
    head = head_of(call)
    found = HeadGradients(head, wanted)
    for part, z in head.chunks():
        dz = rows_backward(z, shard.target[part], shard.lse[part], shard.grad[part], call, shard.total)
        found.add(part, dz)
    return found.results()


keeps = parallel.keeps
forward = partial(parallel.forward, statistics=statistics)
backward = partial(parallel.backward, gradients=gradients)
