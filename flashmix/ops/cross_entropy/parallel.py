"""The cross entropy of a head whose rows, the vocabulary, are spread over the processes of a group."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flashmix.op.dtypes import compute_dtype
from flashmix.ops.cross_entropy.head import (
    HeadGradients,
    Options,
    chunks,
    head_logits,
    room_for_logits,
    rows_at_once,
    rows_backward,
    rows_losses,
    rows_statistics,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Shard(Protocol):
    """One process's rows of the head: `total` is the whole vocabulary, targets are seen from its first row."""

    def statistics(self, target: Tensor, options: Options, total: int) -> Tensor:
        """`[2, N]`: the log-sum-exp over this shard, and its part of what the loss subtracts."""

    def gradients(
        self, target: Tensor, lse: Tensor, flow: Tensor, options: Options, total: int, needs: list[bool]
    ) -> list[Tensor]:
        """Gradients of hidden (this shard's part), weight and bias for that of the losses; empty unless in `needs`."""


class PortableShard:
    """`Shard` in plain PyTorch."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.rows, self.dtype = rows_at_once(chunk, weight.shape[0]), compute_dtype(hidden, weight, bias)

    def statistics(self, target: Tensor, options: Options, total: int) -> Tensor:
        found = self.hidden.new_empty(2, self.hidden.shape[0], dtype=self.dtype)
        weight = self.weight.to(self.dtype)
        room = room_for_logits(self.hidden.shape[0], self.rows, weight)
        for rows in chunks(self.hidden.shape[0], self.rows):
            z = head_logits(self.hidden[rows], weight, self.bias, room)
            found[0, rows], found[1, rows] = rows_statistics(z, target[rows], options, total)
        return found

    def gradients(
        self, target: Tensor, lse: Tensor, flow: Tensor, options: Options, total: int, needs: list[bool]
    ) -> list[Tensor]:
        gradients, weight = HeadGradients(self.hidden, self.weight, self.bias, needs), self.weight.to(self.dtype)
        room = room_for_logits(self.hidden.shape[0], self.rows, weight)
        nothing = options._replace(ignore_index=-1)  # the flow of ignored rows is 0 already
        for rows in chunks(self.hidden.shape[0], self.rows):
            z = head_logits(self.hidden[rows], weight, self.bias, room)
            local = target[rows]
            dz = rows_backward(z, local.clamp(min=0), lse[rows], flow[rows], nothing, local, total)
            gradients.add(rows, dz, weight)
        return gradients.results()


def parallel_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Options, chunk: int | None,
    group: ProcessGroup, impl: str,
) -> Tensor:  # fmt: skip
    """The losses of the rows of `hidden [N, D]`, the same on every process of `group`."""
    if torch.compiler.is_compiling():
        raise NotImplementedError("linear_cross_entropy with a group is not for torch.compile")
    make = (
        PortableShard if impl == "portable" else importlib.import_module("flashmix.ops.cross_entropy.triton_gpu").Shard
    )
    return _Parallel.apply(hidden, weight, bias, target, options, make, chunk, group)


class _Parallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Options, make: Any,
        chunk: int | None, group: ProcessGroup,
    ) -> Tensor:  # fmt: skip
        import torch.distributed as dist

        vocabulary, ranks = weight.shape[0], group.size()
        local = torch.where(target == options.ignore_index, -1, target - group.rank() * vocabulary)
        shard: Shard = make(hidden, weight, bias, chunk)
        with torch.autocast(hidden.device.type, enabled=False):
            own = shard.statistics(local, options, ranks * vocabulary)
        parts = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(parts, own, group=group)
        both = torch.stack(parts)  # [ranks, 2, N], summed in the same order everywhere
        lse, expected = torch.logsumexp(both[:, 0], 0), both[:, 1].sum(0)
        ctx.save_for_backward(hidden, weight, bias, target, local, lse)
        ctx.options = options, make, chunk, group
        return rows_losses(lse, expected, target, options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        import torch.distributed as dist

        hidden, weight, bias, target, local, lse = ctx.saved_tensors
        options, make, chunk, group = ctx.options
        needs = list(ctx.needs_input_grad[:3])
        flow = grad.masked_fill(target == options.ignore_index, 0.0)
        shard: Shard = make(hidden, weight, bias, chunk)
        with torch.autocast(hidden.device.type, enabled=False):
            found = shard.gradients(local, lse, flow, options, group.size() * weight.shape[0], needs)
        if needs[0]:
            whole = found[0].to(lse.dtype)
            dist.all_reduce(whole, group=group)
            found[0] = whole.to(hidden.dtype)
        kept = (gradient if need else None for gradient, need in zip(found, needs, strict=True))
        return *kept, None, None, None, None, None
