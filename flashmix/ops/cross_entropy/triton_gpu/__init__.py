"""The cross entropy on a GPU: of given logits, and of a head's, whose gradients are ready when the loss is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.op.rowwise import Options, Tensors
from flashmix.ops.cross_entropy.triton_gpu.head import (
    Head,
    add_up,
    empty_gradients,
    hand_over,
    rows_at_once,
    rows_backward,
    rows_forward,
    rows_of,
)


def flow_of(grad: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The gradient of the rows' losses, float32; 0 for rows that are ignored."""
    return grad.to(torch.float32).masked_fill(target == ignore_index, 0.0)


class CrossEntropy:
    """logits `[N, V]`, target `[N]`; ignore_index, label_smoothing, z_loss, softcap. Results: losses."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        logits = inputs[0]
        assert logits is not None
        losses, *kept = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
        return [losses], kept if save else []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        logits, target = inputs
        assert logits is not None and target is not None
        kept = kept or [torch.empty_like(results[0]) for _ in range(2)]
        rows_forward(rows_of(logits), None, target.contiguous(), results[0], kept, None, options)

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        (logits, target), grad, gradient = inputs, grads[0], gradients[0]
        assert logits is not None and target is not None and grad is not None and gradient is not None
        flow = flow_of(grad, target, options[0])
        rows_backward(rows_of(logits), None, gradient, target.contiguous(), kept, flow, options)


class LinearCrossEntropy:
    """hidden, weight, bias, target; the four of CrossEntropy, tokens a chunk (0: chosen), needs. Results: losses."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        hidden = inputs[0]
        assert hidden is not None
        losses, *kept = (hidden.new_empty(hidden.shape[0], dtype=torch.float32) for _ in range(3))
        return [losses], kept if save else []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        head, target = head_of(inputs, options)
        kept = kept or [torch.empty_like(results[0]) for _ in range(2)]

        def row_losses(part: slice, z: Tensor) -> None:
            rows_forward(z, head.bias, target[part], results[0][part], [t[part] for t in kept], None, options[:4])

        add_up(head, (), row_losses)

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        head, target = head_of(inputs, options)
        grad = grads[0]
        assert grad is not None
        flow = flow_of(grad, target, options[0])

        def row_gradient(part: slice, z: Tensor) -> None:
            rows_backward(z, head.bias, z, target[part], [t[part] for t in kept], flow[part], options[:4])

        needs = [t is not None for t in gradients[:3]]
        found = empty_gradients(head.hidden, head.weight, head.bias, needs, head.rows)
        add_up(head, found, row_gradient)
        for gradient, total in zip(gradients, found, strict=False):
            if gradient is not None:
                gradient.copy_(total)


class LinearCrossEntropySum:
    """The same with the sum of the losses as result: its gradient is that of every row up to a factor, and is ready.

    `needs` says of hidden, weight and bias whether a gradient is wanted.
    """

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        hidden, weight, bias, _ = inputs
        assert hidden is not None and weight is not None
        rows = rows_at_once(options[4] or None, weight.shape[0], hidden.dtype, hidden.shape[0])
        found = empty_gradients(hidden, weight, bias, options[5:], rows) if save else []
        return [hidden.new_empty((), dtype=torch.float32)], found

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        head, target = head_of(inputs, options)
        losses, *stats = (torch.empty(target.shape, dtype=torch.float32, device=target.device) for _ in range(3))
        flow = (target != options[0]).to(torch.float32)

        def row_gradient(part: slice, z: Tensor) -> None:
            own = [t[part] for t in stats]
            rows_forward(z, head.bias, target[part], losses[part], own, None, options[:4])
            if kept:
                rows_backward(z, head.bias, z, target[part], own, flow[part], options[:4])

        add_up(head, kept, row_gradient)
        torch.sum(losses, dim=0, out=results[0])

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        grad = grads[0]
        assert grad is not None
        hand_over(gradients[:3], kept, grad)


def head_of(inputs: Tensors, options: Options) -> tuple[Head, Tensor]:
    hidden, weight, bias, target = inputs
    assert hidden is not None and weight is not None and target is not None
    rows = rows_at_once(options[4] or None, weight.shape[0], hidden.dtype, hidden.shape[0])
    return Head(hidden, weight, bias, rows), target.contiguous()


class Shard:
    """`flashmix.ops.cross_entropy.parallel.Shard`: one process's rows of a head."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk: int | None) -> None:
        self.head = Head(hidden, weight, bias, rows_at_once(chunk, weight.shape[0], hidden.dtype, hidden.shape[0]))

    def statistics(self, target: Tensor, options: Sequence[float], total: int) -> Tensor:
        level, whole, expected = self.head.hidden.new_empty(3, target.shape[0], dtype=torch.float32)

        def row_statistics(part: slice, z: Tensor) -> None:
            rows_forward(
                z, self.head.bias, target[part], None, [level[part], whole[part]], expected[part], options, total
            )

        with gpu.on(target.device):
            add_up(self.head, (), row_statistics)
        return torch.stack([level + whole.log(), expected])

    def gradients(
        self, target: Tensor, lse: Tensor, flow: Tensor, options: Sequence[float], total: int, needs: list[bool]
    ) -> list[Tensor]:
        head, whole = self.head, torch.ones_like(lse)

        def row_gradient(part: slice, z: Tensor) -> None:
            rows_backward(z, head.bias, z, target[part], [lse[part], whole[part]], flow[part], options, total)

        found = empty_gradients(head.hidden, head.weight, head.bias, needs, head.rows)
        with gpu.on(flow.device):
            add_up(head, found, row_gradient)
        given = (head.hidden, head.weight, head.bias)
        return [total_ if t is None else total_.to(t.dtype) for total_, t in zip(found, given, strict=True)]
