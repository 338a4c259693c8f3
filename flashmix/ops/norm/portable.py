"""The computation behind every norm, in plain PyTorch; its backward keeps two numbers a row beside the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashmix.op.dtypes import compute_dtype
from flashmix.op.rowwise import differentiable_gradients, wants_gradient
from flashmix.ops.gated_product.op import ACTIVATIONS


@dataclass(frozen=True)
class NormOptions:
    """What a norm does besides its tensors: `sum(h^2)` is divided by `divisor`, the result has `dtype`."""

    eps: float
    divisor: int
    center: bool
    activation: str
    dtype: torch.dtype


def normalise(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, options: NormOptions
) -> Tensor:
    """`(h - mean) / sqrt(sum((h - mean)^2) / divisor + eps) * weight + bias`, gated."""
    if torch.compiler.is_compiling():
        return formula(h, weight, bias, gate, options)
    if wants_gradient(h, weight, bias, gate):
        return _Normalise.apply(h, weight, bias, gate, options)
    return _forward(h, weight, bias, gate, options)[0]


def formula(h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, options: NormOptions) -> Tensor:
    wide = compute_dtype(h, weight, bias, gate)
    h = h.to(wide)
    if options.center:
        h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().sum(-1, keepdim=True) / options.divisor + options.eps)
    y = y if weight is None else y * weight.to(wide)
    y = y if bias is None else y + bias.to(wide)
    y = y if gate is None else y * ACTIVATIONS[options.activation].formula(gate.to(wide))
    return y.to(options.dtype)


def _forward(
    h: Tensor, weight: Tensor | None, bias: Tensor | None, gate: Tensor | None, options: NormOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The result, and of each row `1 / sqrt(sum((h - mean)^2) / divisor + eps)` and the mean (None if it stays)."""
    wide = compute_dtype(h, weight, bias, gate)
    mean = h.mean(-1, keepdim=True, dtype=wide) if options.center else None
    centered = h if mean is None else h - mean
    length = torch.linalg.vector_norm(centered, dim=-1, keepdim=True, dtype=wide)
    scale = length.mul_(length).div_(options.divisor).add_(options.eps).rsqrt_()
    y = centered * scale
    if weight is not None:
        y.mul_(weight)
    if bias is not None:
        y.add_(bias)
    if gate is not None:
        y.mul_(ACTIVATIONS[options.activation].value(gate.to(wide)))
    return y.to(options.dtype), scale, mean


class _Normalise(torch.autograd.Function):
    """With `n = (h - mean) * scale` and `dn = dy * act(gate) * weight`:

    dh = scale * (dn - n * sum(n * dn) / divisor), less its own mean if the mean was taken off.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Any, bias: Any, gate: Any, options: NormOptions) -> Tensor:
        y, scale, mean = _forward(h, weight, bias, gate, options)
        ctx.save_for_backward(h, weight, bias, gate, scale, mean)
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, gate, scale, mean = ctx.saved_tensors
        options = ctx.options
        if torch.is_grad_enabled():
            inputs = (h, weight, bias, gate)
            return *differentiable_gradients(lambda h, w, b, g: formula(h, w, b, g, options), inputs, grad), None
        needs_h, needs_weight, needs_bias, needs_gate, _ = ctx.needs_input_grad
        d_h = d_weight = d_bias = d_gate = None
        grad = grad.to(scale.dtype)
        n = h * scale if mean is None else (h - mean).mul_(scale)
        room = torch.empty_like(n)
        if gate is not None:
            value, slope = ACTIVATIONS[options.activation].value_and_slope(gate.to(scale.dtype))
            if needs_gate:
                affine = n if weight is None else torch.mul(n, weight, out=room)
                affine = affine if bias is None else torch.add(affine, bias, out=room)
                d_gate = slope.mul_(affine).mul_(grad).to(gate.dtype)
            grad = value.mul_(grad)
        if needs_bias:
            d_bias = _over_rows(grad, bias)
        torch.mul(grad, n, out=room)
        if needs_weight:
            d_weight = _over_rows(room, weight)
        if needs_h:
            along = (room if weight is None else room.mul_(weight)).sum(-1, keepdim=True).div_(options.divisor)
            d_n = room.copy_(grad) if weight is None else torch.mul(grad, weight, out=room)
            d_n.addcmul_(n, along, value=-1)
            d_h = (d_n if mean is None else d_n.sub_(d_n.mean(-1, keepdim=True))).mul_(scale).to(h.dtype)
        return d_h, d_weight, d_bias, d_gate, None


def _over_rows(values: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of `parameter`: `values` summed over all rows, never a view of them."""
    rows = tuple(range(values.dim() - parameter.dim()))
    return (values.sum(rows) if rows else values.clone()).to(parameter.dtype)
