"""Normalisation of each row by its own size, with an optional gate after it and an optional residual before it."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from flashmix._checks import check_choice, check_floating, check_like, check_shape, check_tensor
from flashmix._dispatch import choose
from flashmix.ops._rowwise import compute_dtype, differentiable_gradients, portable, wants_gradient
from flashmix.ops.activation import ACTIVATIONS

IMPLEMENTATIONS = (portable(__name__),)


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Divides each row by its root mean square, then scales and gates it.

        h = x + residual
        y = h / sqrt(mean(h^2) + eps) * weight * act(gate)

    The backward keeps `h`, `gate` and one number a row.

    Args:
        x: `[..., D]`, floating.
        weight: `[D]`, floating, or None for ones.
        eps: added to the mean square.
        gate: the shape of `x`, floating; multiplies after the norm.
        gate_activation: "silu" or "sigmoid".
        residual: the shape of `x`, floating; added before the norm in the wider of the two dtypes.
        return_residual: also return `h`, the next block's residual.
        impl: "auto" or the name of an implementation.

    Returns:
        `y` in the dtype of `x`; with `return_residual` the pair `(y, h)`. Computed in float32, or float64 if any input
        is.

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: a shape or device differs, `gate_activation` or `impl` is unknown.

    Source:
        Zhang and Sennrich, "Root mean square layer normalization" (1910.07467), equation 4; the gate after the norm as
        in Gated DeltaNet (2412.06464), section 3.4.

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 0.0])).shape
        torch.Size([1, 2])
        >>> y, h = rms_norm(torch.ones(2, 8), residual=torch.ones(2, 8), return_residual=True)
        >>> h[0, 0].item()
        2.0
    """
    check_tensor("x", x)
    check_floating("x", x)
    if x.dim() < 1:
        raise ValueError("x must have shape [..., D], got []")
    for name, value, shape in (
        ("weight", weight, x.shape[-1:]),
        ("gate", gate, x.shape),
        ("residual", residual, x.shape),
    ):
        if value is not None:
            check_shape(name, value, *shape)
            check_floating(name, value)
            check_like(name, value, "x", x, dtype=False)
    check_choice("gate_activation", gate_activation, *ACTIVATIONS)
    choose("rms_norm", IMPLEMENTATIONS, x, impl)
    h = x if residual is None else x + residual
    y = _normalise(h, weight, gate, gate_activation, eps, max(x.shape[-1], 1), x.dtype)
    return (y, h) if return_residual else y


def l2_norm(x: Tensor, *, eps: float = 1e-6, impl: str = "auto") -> Tensor:
    """Divides each row by its length.

        y = x / sqrt(sum(x^2) + eps)

    The backward keeps `x` and one number a row.

    Args:
        x: `[..., D]`, floating.
        eps: added to the sum of squares.
        impl: "auto" or the name of an implementation.

    Returns:
        A tensor like `x`; float16 and bfloat16 are computed in float32.

    Raises:
        TypeError: `x` is not a floating tensor.
        ValueError: `x` has no axis, or `impl` is unknown.

    Source:
        The normalisation of queries and keys in DeltaNet (2406.06484), section 3.3.

    Example:
        >>> import torch
        >>> y = l2_norm(torch.tensor([3.0, 4.0]))
        >>> [round(value, 3) for value in y.tolist()]
        [0.6, 0.8]
    """
    check_tensor("x", x)
    check_floating("x", x)
    if x.dim() < 1:
        raise ValueError("x must have shape [..., D], got []")
    choose("l2_norm", IMPLEMENTATIONS, x, impl)
    return _normalise(x, None, None, "silu", eps, 1, x.dtype)


def _normalise(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str, eps: float, divisor: int, dtype: torch.dtype
) -> Tensor:
    """`x / sqrt(sum(x^2) / divisor + eps) * weight * act(gate)`, returned as `dtype`."""
    if torch.compiler.is_compiling():
        return _formula(x, weight, gate, activation, eps, divisor, dtype)
    if wants_gradient(x, weight, gate):
        return _Normalise.apply(x, weight, gate, activation, eps, divisor, dtype)
    return _forward(x, weight, gate, activation, eps, divisor, dtype)[0]


def _formula(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str, eps: float, divisor: int, dtype: torch.dtype
) -> Tensor:
    wide = compute_dtype(x, weight, gate)
    x = x.to(wide)
    y = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / divisor + eps)
    if weight is not None:
        y = y * weight.to(wide)
    if gate is not None:
        y = y * ACTIVATIONS[activation].formula(gate.to(wide))
    return y.to(dtype)


def _forward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, activation: str, eps: float, divisor: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result and `1 / sqrt(sum(x^2) / divisor + eps)` of each row."""
    wide = compute_dtype(x, weight, gate)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = length.mul_(length).div_(divisor).add_(eps).rsqrt_()
    y = x * scale
    if weight is not None:
        y.mul_(weight)
    if gate is not None:
        y.mul_(ACTIVATIONS[activation].value(gate.to(wide)))
    return y.to(dtype), scale


class _Normalise(torch.autograd.Function):
    """With `n = x * scale`: `dx = scale * (dn - n * (n . dn) / divisor)`, `dn = dy * weight * act(gate)`."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: Tensor,
        weight: Tensor | None,
        gate: Tensor | None,
        activation: str,
        eps: float,
        divisor: int,
        dtype: torch.dtype,
    ) -> Tensor:
        y, scale = _forward(x, weight, gate, activation, eps, divisor, dtype)
        ctx.save_for_backward(x, weight, gate, scale)
        ctx.options = activation, eps, divisor, dtype
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        x, weight, gate, scale = ctx.saved_tensors
        activation, _, divisor, _ = ctx.options
        if torch.is_grad_enabled():
            gradients = differentiable_gradients(lambda *args: _formula(*args, *ctx.options), (x, weight, gate), grad)
            return *gradients, None, None, None, None
        needs_x, needs_weight, needs_gate, *_ = ctx.needs_input_grad
        d_x = d_weight = d_gate = None
        grad = grad.to(scale.dtype)
        if gate is not None:
            wide_gate = gate.to(scale.dtype)
            if needs_gate:
                slope = ACTIVATIONS[activation].slope(wide_gate).mul_(x).mul_(scale).mul_(grad)
                d_gate = (slope if weight is None else slope.mul_(weight)).to(gate.dtype)
            grad = ACTIVATIONS[activation].value(wide_gate).mul_(grad)
        if needs_weight:
            d_weight = (grad * x).mul_(scale).sum_to_size(weight.shape).to(weight.dtype)
        if needs_x:
            d_n = grad if weight is None else grad * weight
            along = torch.linalg.vecdot(d_n, x.to(scale.dtype)).unsqueeze(-1).mul_(scale).mul_(scale).div_(divisor)
            d_x = torch.addcmul(d_n, along, x, value=-1).mul_(scale).to(x.dtype)
        return d_x, d_weight, d_gate, None, None, None, None
