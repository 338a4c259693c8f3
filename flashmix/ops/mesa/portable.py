"""The solution and the output by calls of the recurrence, one a step of conjugate gradients, which autograd differentiates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.dtypes import state_dtype
from flashmix.op.heads import repeat_heads
from flashmix.op.packing import Packing
from flashmix.ops.mesa.call import MesaCall
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.op import RECURRENCE

Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]


def formula(call: MesaCall, impl: str) -> Outputs:
    """Everything in float32 (float64 for float64 inputs); `impl` is that of the recurrence."""
    wide, HV, packing, log_decay = state_dtype(call.dtype), call.value_heads, call.packing, call.log_decay
    q, k = (repeat_heads(t.to(wide), HV).contiguous() for t in (call.q, call.k))
    written, diagonal = call.beta.to(wide).unsqueeze(-1) * k, call.ridge.to(wide)
    operands = (written, k, log_decay, call.R, diagonal)
    # not in `no_grad`, which an error in compiled code would leave on
    at = tuple(None if t is None else t.detach() for t in operands)
    x = _solve(q.detach(), at, packing, call.steps, impl)  # type: ignore[arg-type]
    made, R = _product(x, operands, packing, impl)
    x = _Solution.apply(q - made, x, *operands, packing, call.steps, impl)
    read = RecurrenceCall(
        x, written, call.v.to(wide), log_decay=log_decay, initial_state=call.S, packing=packing, scale=call.scale
    )
    o, S = RECURRENCE(read, impl, "mesa_net")
    return o.to(call.v.dtype), R, S


def _product(x: Tensor, operands: Operands, packing: Packing | None, impl: str) -> tuple[Tensor, Tensor]:
    """`(R_t + diag(ridge)) x_t` for each token, and the last `R`."""
    written, k, log_decay, R, diagonal = operands
    call = RecurrenceCall(x, written, k, log_decay=log_decay, initial_state=R, packing=packing)
    o, R = RECURRENCE(call, impl, "mesa_net")
    return o + diagonal * x, R


def _solve(b: Tensor, operands: Operands, packing: Packing | None, steps: int, impl: str) -> Tensor:
    """`x` with `_product(x) = b`, by conjugate gradients from 0."""
    x, r, p = torch.zeros_like(b), b, b
    squares = (r * r).sum(-1, keepdim=True)
    for _ in range(steps):
        made, _ = _product(p, operands, packing, impl)
        step = _quotient(squares, (p * made).sum(-1, keepdim=True))
        x, r = x + step * p, r - step * made
        before, squares = squares, (r * r).sum(-1, keepdim=True)
        p = r + _quotient(squares, before) * p
    return x


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`, 0 where nothing is left to be solved."""
    return torch.where(b > 0, a / b, 0.0)


class _Solution(torch.autograd.Function):
    """`x` itself, with the gradient of `x + A^{-1} residual`: of the exact solution, where the residual depends on `A` and `b`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        residual: Tensor,
        x: Tensor,
        written: Tensor,
        k: Tensor,
        log_decay: Tensor,
        R: Tensor | None,
        diagonal: Tensor,
        packing: Packing | None,
        steps: int,
        impl: str,
    ) -> Tensor:  # torch.compile takes the wrong one of `*rest`
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, *operands, ctx.packing, ctx.steps, ctx.impl = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        made = _AdjointSolution.apply(dx, *ctx.saved_tensors, ctx.packing, ctx.steps, ctx.impl)
        return made, *[None] * 9


class _AdjointSolution(torch.autograd.Function):
    """`A^{-1} dx`, which has no derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        dx: Tensor,
        written: Tensor,
        k: Tensor,
        log_decay: Tensor,
        R: Tensor | None,
        diagonal: Tensor,
        packing: Packing | None,
        steps: int,
        impl: str,
    ) -> Tensor:
        return _solve(dx, (written, k, log_decay, R, diagonal), packing, steps, impl)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("mesa_net has no second derivative")
