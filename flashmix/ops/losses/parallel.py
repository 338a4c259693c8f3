"""The vocabulary-parallel cross entropy: what the processes of a group tell each other, whichever implementation runs a part.

Each process holds V / P rows of the head and sees the targets from its first row; a target of another process adds nothing.

    lse = ln sum_r e^lse_r,    expected = sum_r expected_r            r = 0 .. P - 1, gathered and added in the same order everywhere
    d hidden = sum_r d hidden_r,    weight and bias get the gradients of their own rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.losses.call import ParallelCrossEntropyCall, row_results

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GROUPS: WeakValueDictionary[str, Any] = WeakValueDictionary()  # the groups that calls name


class ShardGradient(NamedTuple):
    """What one process's backward needs, `[N]` each, and the size of the whole vocabulary."""

    target: Tensor  # as seen from the process's first row
    lse: Tensor  # over the whole vocabulary
    grad: Tensor  # of the losses, 0 for ignored targets
    total: int


# `[2, N]` for a target as seen from the process's first row and the size of the whole vocabulary: `lse_r` and `expected_r`.
Statistics = Callable[[ParallelCrossEntropyCall, Tensor, int], Tensor]
# The gradients of the wanted tensors of the head: of `hidden` this process's part.
PartGradients = Callable[[ParallelCrossEntropyCall, ShardGradient, frozenset[str]], dict[str, Tensor]]


def name_of(group: ProcessGroup) -> str:
    """The name by which a call finds the group again."""
    name = group.group_name
    GROUPS[name] = group
    return name


def seen_from_here(call: ParallelCrossEntropyCall) -> tuple[ProcessGroup, Tensor, int]:
    """The group, the target as seen from this process's first row (-1: ignored), and the size of the whole vocabulary."""
    group, rows = GROUPS[call.group], call.weight.shape[0]
    local = torch.where(call.target == call.ignore_index, -1, call.target - group.rank() * rows)
    return group, local, group.size() * rows


def keeps(call: ParallelCrossEntropyCall) -> Outputs:
    """The log-sum-exp of each row over the whole vocabulary."""
    return (row_results(call.hidden, call.wide),)


def forward(call: ParallelCrossEntropyCall, save: bool, *, statistics: Statistics) -> tuple[Outputs, Outputs]:
    import torch.distributed as dist

    group, local, total = seen_from_here(call)
    own = statistics(call, local, total)
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    both = torch.stack(parts)  # [P, 2, N]
    lse, expected = torch.logsumexp(both[:, 0], 0), both[:, 1].sum(0)
    losses = lse - expected + call.z_loss * lse.square()
    return (losses.masked_fill_(call.target == call.ignore_index, 0.0),), (lse,)


def backward(
    call: ParallelCrossEntropyCall,
    kept: Outputs,
    grads: Sequence[Tensor | None],
    wanted: frozenset[str],
    *,
    gradients: PartGradients,
) -> Gradients:
    import torch.distributed as dist

    (lse,), (grad,) = kept, grads
    assert grad is not None
    group, local, total = seen_from_here(call)
    grad = grad.masked_fill(call.target == call.ignore_index, 0.0)
    found = gradients(call, ShardGradient(local, lse, grad, total), wanted)
    if "hidden" in found:
        whole = found["hidden"].to(lse.dtype)
        dist.all_reduce(whole, group=group)
        found["hidden"] = whole.to(call.hidden.dtype)
    return found
