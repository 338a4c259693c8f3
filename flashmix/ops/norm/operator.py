"""The norm kernels as an operator: the sum `h = x + residual` is differentiated once for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.op.rowwise import Operator, Options, Tensors
from flashmix.ops.norm.portable import NormOptions, formula


class _Norm(Operator):
    """Keeps `h` in place of `x` and `residual`, whose gradients are one tensor where their dtypes agree."""

    def _setup_context(
        self, ctx: Any, inputs: Tensors, results: Sequence[Tensor], kept: Sequence[Tensor], options: Options
    ) -> None:
        x, residual, *rest = inputs
        h = x if residual is None else results[1]
        super()._setup_context(ctx, (h, None, *rest), results, kept, options)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual)]

    def _backward(self, ctx: Any, grads: Tensors, needs: Sequence[bool], traced: bool) -> Tensors:
        if grads[0] is None:
            found: Tensors = (grads[1] if len(grads) > 1 else None, *(None,) * (len(needs) - 1))
        else:
            found = super()._backward(ctx, grads, (needs[0] or needs[1], False, *needs[2:]), traced)
        d_h, _, *rest = found
        d_x, d_residual = (
            None if d_h is None or not needed else d_h.to(dtype)
            for dtype, needed in zip(ctx.dtypes, needs[:2], strict=True)
        )
        return d_x, d_residual, *rest

    def _differentiable(self, grads: Tensors, inputs: Tensors, options: Options) -> Tensors:
        return super()._differentiable((*grads, None)[:2], inputs, options)


def _formula(
    h: Tensor, residual: None, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """`y` and `h` itself, as they depend on the sum."""
    eps, groups, center, mean, activation, dtype = options
    split = NormOptions(eps, h.shape[-1] // groups if mean else 1, center, activation, dtype)
    weight, bias, gate = (None if t is None else t.unflatten(-1, (groups, -1)) for t in (weight, bias, gate))
    return formula(h.unflatten(-1, (groups, -1)), weight, bias, gate, split).flatten(-2), h


OPTIONS = "float eps, int groups, bool center, bool mean, str activation, ScalarType dtype"
KERNELS = "flashmix.ops.norm.triton_gpu.rows.Norm"
NORM = _Norm(
    "norm", KERNELS, "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? gate", OPTIONS, formula=_formula
)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    options: tuple[float, int, bool, bool, str, torch.dtype],
) -> tuple[Tensor, Tensor]:
    """`y` and `h`; options: eps, groups, whether the mean is taken off, whether squares are averaged, the gate's
    activation, the dtype of `y`."""
    y, *h = NORM(x, residual, weight, bias, gate, options=options)
    return y, h[0] if h else x
