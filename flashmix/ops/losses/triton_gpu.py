"""Distillation and policy losses of a head on a GPU; for a sum or mean the gradients are ready with the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from flashmix.op.rowwise import Options, Tensors
from flashmix.ops.cross_entropy.triton_gpu import rows as kernels
from flashmix.ops.cross_entropy.triton_gpu.head import (
    Head,
    add_up,
    block,
    empty_gradients,
    hand_over,
    rows_at_once,
    rows_backward,
    rows_forward,
    shape,
)

PLAIN = (-100, 0.0, 0.0, 0.0)  # a cross entropy without options


class Pair:
    """The student's and the teacher's logits, chunk by chunk; scale, reverse and tokens a chunk (0: chosen)."""

    def __init__(self, inputs: Tensors, options: Options) -> None:
        hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias = inputs[:6]
        assert hidden is not None and weight is not None and teacher_hidden is not None and teacher_weight is not None
        self.scale, self.reverse, chunk = options[:3]
        rows = pair_rows(hidden, weight, chunk)
        self.student = Head(hidden, weight, bias, rows)
        self.teacher = Head(teacher_hidden, teacher_weight, teacher_bias, rows)
        self.stats = [torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device) for _ in range(4)]

    def _flags(self) -> dict[str, bool]:
        has = {"HAS_BIAS": self.student.bias is not None, "HAS_TEACHER_BIAS": self.teacher.bias is not None}
        return has | {"REVERSE": self.reverse}

    def divergences(self, part: slice, z: Tensor, teacher: Tensor, divergence: Tensor) -> None:
        """Fills the divergences of a chunk, and what its gradient needs."""
        bias, teacher_bias, (rows, vocabulary) = self.student.bias, self.teacher.bias, z.shape
        kernels.kl_forward_kernel[(rows,)](
            z, z if bias is None else bias, teacher, teacher if teacher_bias is None else teacher_bias, divergence[part],
            *(t[part] for t in self.stats), z.stride(0), teacher.stride(0), vocabulary, self.scale,
            **self._flags(), **shape(vocabulary),
        )  # fmt: skip

    def gradient(self, part: slice, z: Tensor, teacher: Tensor, flow: Tensor) -> None:
        """Overwrites a chunk's logits by their gradient for that of the divergences."""
        bias, teacher_bias, (rows, vocabulary) = self.student.bias, self.teacher.bias, z.shape
        size, warps = block(vocabulary)
        blocks = triton.cdiv(vocabulary, size)
        kernels.kl_backward_kernel[(rows * blocks,)](
            z, z if bias is None else bias, teacher, teacher if teacher_bias is None else teacher_bias, z,
            *(t[part] for t in self.stats), flow[part], z.stride(0), teacher.stride(0), z.stride(0),
            vocabulary, blocks, self.scale, **self._flags(), BLOCK=size, num_warps=warps,
        )  # fmt: skip

    def run(self, gradients: Sequence[Tensor], divergence: Tensor, flow: Tensor | None) -> None:
        """All chunks: divergences, and with `flow` the gradients of the student's head."""
        teacher = self.teacher.chunks()

        def row_gradient(part: slice, z: Tensor) -> None:
            _, other = next(teacher)
            self.divergences(part, z, other, divergence)
            if flow is not None:
                self.gradient(part, z, other, flow)

        add_up(self.student, gradients, row_gradient)


def pair_rows(hidden: Tensor, weight: Tensor, chunk: int) -> int:
    return rows_at_once(chunk or None, 2 * weight.shape[0], hidden.dtype, hidden.shape[0])


class LinearKL:
    """The six tensors of the heads; scale, reverse, tokens a chunk. Results: the divergence of each row."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        hidden = inputs[0]
        assert hidden is not None
        return [hidden.new_empty(hidden.shape[0], dtype=torch.float32)], []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        pair = Pair(inputs, options)
        pair.run((), results[0], None)
        results[0].mul_(1 / options[0] ** 2)

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        pair, grad = Pair(inputs, options), grads[0]
        assert grad is not None
        head = pair.student
        needs = [t is not None for t in gradients[:3]]
        found = empty_gradients(head.hidden, head.weight, head.bias, needs, head.rows)
        pair.run(found, torch.empty_like(pair.stats[0]), grad.to(torch.float32) / options[0] ** 2)
        for gradient, total in zip(gradients, found, strict=False):
            if gradient is not None:
                gradient.copy_(total)


class LinearKLSum:
    """The heads and `[N]` weights of rows; scale, reverse, tokens a chunk, needs. Result: the weighted sum."""

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        hidden, weight, bias = inputs[:3]
        assert hidden is not None and weight is not None
        found = empty_gradients(hidden, weight, bias, options[3:], pair_rows(hidden, weight, options[2]))
        return [hidden.new_empty((), dtype=torch.float32)], found if save else []

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        pair, weights = Pair(inputs, options), inputs[6]
        assert weights is not None
        flow = weights / options[0] ** 2
        divergence = torch.empty_like(pair.stats[0])
        pair.run(kept, divergence, flow if kept else None)
        torch.sum(weighted(divergence, flow), dim=0, out=results[0])

    @staticmethod
    def backward(
        gradients: list[Tensor | None], grads: Tensors, inputs: Tensors, kept: Sequence[Tensor], options: Options
    ) -> None:
        assert grads[0] is not None
        hand_over(gradients[:3], kept, grads[0])


class LinearGRPOSum:
    """hidden, weight, bias, target, advantages, old and reference log-probabilities, weights of rows (all `[N]`).

    Options: how far the ratio may fall and rise, weight of the divergence, scale, tokens a chunk, needs.
    Result: the weighted sum.
    """

    @staticmethod
    def allocate(inputs: Tensors, options: Options, save: bool) -> tuple[list[Tensor], list[Tensor]]:
        hidden, weight, bias = inputs[:3]
        assert hidden is not None and weight is not None
        rows = rows_at_once(options[4] or None, weight.shape[0], hidden.dtype, hidden.shape[0])
        found = empty_gradients(hidden, weight, bias, options[5:], rows) if save else []
        return [hidden.new_empty((), dtype=torch.float32)], found

    @staticmethod
    def forward(results: list[Tensor], kept: list[Tensor], inputs: Tensors, options: Options) -> None:
        hidden, weight, bias, target, *rest, weights = inputs
        assert hidden is not None and weight is not None and target is not None and weights is not None
        scale = options[3]
        rows = rows_at_once(options[4] or None, weight.shape[0], hidden.dtype, hidden.shape[0])
        head, policy = Head(hidden, weight, bias, rows), policy_loss(rest, options)
        losses, level, whole, chosen = (
            torch.empty(target.shape, dtype=torch.float32, device=target.device) for _ in range(4)
        )

        def row_gradient(part: slice, z: Tensor) -> None:
            stats = [level[part], whole[part]]
            rows_forward(z, head.bias, target[part], None, stats, chosen[part], PLAIN, scale=scale)
            log_prob = (chosen[part] - level[part]) - whole[part].log()
            losses[part], slope = policy(part, log_prob)
            if kept:
                flow = weighted(-slope, weights[part])
                rows_backward(z, head.bias, z, target[part], stats, flow, PLAIN, scale=scale)

        add_up(head, kept, row_gradient)
        torch.sum(weighted(losses, weights), dim=0, out=results[0])

    backward = LinearKLSum.backward


def policy_loss(rest: Tensors, options: Options) -> Callable[[slice, Tensor], tuple[Tensor, Tensor]]:
    """Losses of some rows, and their derivatives by the log-probabilities."""
    advantages, old, reference = rest
    assert advantages is not None
    low, high, kl_weight = options[:3]

    def rows(part: slice, log_prob: Tensor) -> tuple[Tensor, Tensor]:
        ratio = torch.ones_like(log_prob) if old is None else torch.exp(log_prob - old[part])
        free, bounded = ratio * advantages[part], ratio.clamp(1 - low, 1 + high) * advantages[part]
        loss, slope = -torch.minimum(free, bounded), torch.where(free <= bounded, -free, 0.0)
        if kl_weight and reference is not None:
            above = reference[part] - log_prob
            loss, slope = loss + kl_weight * (torch.expm1(above) - above), slope - kl_weight * torch.expm1(above)
        return loss, slope

    return rows


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Rows of weight 0 may hold anything."""
    return torch.where(weights == 0, 0.0, values * weights)
