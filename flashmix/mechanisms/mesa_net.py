"""MesaNet: at each token the least squares solution over the whole past, by conjugate gradients of `linear_attention` calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from flashmix.mechanisms.common import check_per_head, check_states
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.modules.projection import repeat_heads
from flashmix.op.checks import check_range, dims
from flashmix.op.dtypes import autocast_dtype, state_dtype
from flashmix.op.packing import Packing, check_whole
from flashmix.op.public import public
from flashmix.ops.recurrence import linear_attention
from flashmix.ops.recurrence.call import check_operands

MesaStates = tuple[Tensor, Tensor]


@public
def mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    ridge: Tensor,
    *,
    steps: int = 30,
    scale: float = 1.0,
    initial_state: MesaStates | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MesaStates | None]:
    """MesaNet: the output is what the linear map that fits all values up to now best makes of the query.

        R_t = e^{g_t} R_{t-1} + beta_t k_t k_t^T;  S_t = e^{g_t} S_{t-1} + beta_t k_t v_t^T
        x_t = (R_t + diag(ridge))^{-1} q_t;  o_t = scale S_t^T x_t

    `x` comes from conjugate gradients, one call of `linear_attention` a step for all tokens at once, in float32 (float64 for float64
    inputs) whatever comes in. Its gradient is that of the exact solution: a solve of the same kind in the backward, which keeps `x` alone.
    Keys and queries have length 1 in the paper (`flashmix.l2_norm`).

    Args:
        beta: write strengths, at least 0, `[B, T, HV]`.
        log_decay: `g`, at most 0, `[B, T, HV]`.
        ridge: what is added to the diagonal, positive, `[HV, K]`, any floating dtype; the paper's is at least 0.25.
        steps: of conjugate gradients, at least 1; after `K` of them the solution is exact but for rounding.
        initial_state: `(R, S)`, `([N, HV, K, K], [N, HV, K, V])`, float32 (float64 for float64 inputs), `R` symmetric.

    Source: von Oswald et al. 2025 (arXiv 2506.05233), section 3.

    Example:
        >>> q, k, v = torch.randn(3, 1, 10, 4, 16)
        >>> beta, decay = torch.rand(1, 10, 4), -torch.rand(1, 10, 4)
        >>> mesa_net(q / 4, k / 4, v, beta, decay, torch.ones(4, 16))[0].shape
        torch.Size([1, 10, 4, 16])
    """
    check_whole(cu_seqlens, "mesa_net")
    check_range("steps", steps, 1, 1000)
    dims("log_decay", log_decay, "B T HV")
    packing = check_operands(q, v, {"k": k}, beta, log_decay, None, cu_seqlens)
    (B, _, _, K), (HV, V), wide = q.shape, v.shape[2:], state_dtype(q.dtype)
    check_per_head("ridge", ridge, "q", q, HV, K)
    N = B if packing is None else packing.count
    check_states(initial_state, q, (N, HV, K, K), (N, HV, K, V))
    R, S = (None, None) if initial_state is None else initial_state
    with nullcontext() if autocast_dtype(q) is None else torch.autocast(q.device.type, enabled=False):
        q, k = (repeat_heads(x.to(wide), HV) for x in (q, k))
        written, diagonal = beta.to(wide).unsqueeze(-1) * k, ridge.to(wide)
        operands = (written, k, log_decay, R, diagonal)
        with torch.no_grad():
            x = _solve(q, operands, packing, steps, impl)
        made, R = _product(x, operands, packing, impl, return_state)
        x = _Solution.apply(q - made, x, *operands, packing, steps, impl)
        options: dict[str, Any] = {"return_state": return_state, "cu_seqlens": packing, "impl": impl}
        o, S = linear_attention(x, written, v.to(wide), log_decay, scale=scale, initial_state=S, **options)
    return o.to(v.dtype), None if R is None or S is None else (R, S)


Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]


def _product(
    x: Tensor, operands: Operands, packing: Packing | None, impl: str, return_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`(R_t + diag(ridge)) x_t` for each token, and the last `R`."""
    written, k, log_decay, R, diagonal = operands
    o, R = linear_attention(
        x, written, k, log_decay, scale=1.0, initial_state=R, return_state=return_state, cu_seqlens=packing, impl=impl
    )
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

    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, *rest: Any) -> Tensor:
        *operands, ctx.packing, ctx.steps, ctx.impl = rest
        ctx.save_for_backward(*operands)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
        made = _AdjointSolution.apply(dx, *ctx.saved_tensors, ctx.packing, ctx.steps, ctx.impl)
        return made, *[None] * 9


class _AdjointSolution(torch.autograd.Function):
    """`A^{-1} dx`, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, dx: Tensor, *rest: Any) -> Tensor:
        *operands, packing, steps, impl = rest
        return _solve(dx, tuple(operands), packing, steps, impl)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("mesa_net has no second derivative")


register(
    Mechanism(
        title="MesaNet",
        paper="2506.05233",
        function=mesa_net,
        call="q:BTHK k:BTHK v:BTHK beta:BTH log_decay:BTH ridge:HK",
        options={"steps": 12},
        positive=("ridge",),
        wide=("ridge",),
    )
)
