"""Normalisation of each row by its own size, with an optional gate after it and an optional residual before it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.checks import check_choice, check_floating, check_like, check_multiple, check_shape, check_tensor
from flashmix.op.public import public
from flashmix.ops.gated_product.portable import ACTIVATIONS
from flashmix.ops.norm.call import NormCall, norm_call
from flashmix.ops.norm.portable import formula, own_formula

IMPLEMENTATIONS = implementations("norm", formula=own_formula)
NORM = Op("norm", NormCall, IMPLEMENTATIONS, formula=formula, shares={"residual": "x"})


@public
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
) -> Any:
    """Divides each row by its root mean square, then scales and gates it.

        h = x + residual
        y = h / sqrt(mean(h^2) + eps) * weight * act(gate)

    The backward keeps `h`, `gate` and one number a row.

    Args:
        x: `[..., D]`, floating.
        weight: `[D]`, floating, or None for ones.
        eps: added to the mean square.
        gate: the shape of `x`, floating; multiplies after the norm.
        gate_activation: "silu", "sigmoid" or another of `gated`.
        residual: the shape of `x`, floating; added before the norm in the wider of the two dtypes.
        return_residual: also return `h`, the next block's residual, whose gradient is added in the norm's own backward: the memory of `x`
            where `residual` is None.
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
    _check(x, gate_activation, weight=weight, gate=gate, residual=residual)
    call = norm_call(x, residual, weight, None, gate, eps=eps, groups=1, center=False, activation=gate_activation)
    return _results("rms_norm", call, return_residual, impl)


@public
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: bool = False,
    impl: str = "auto",
) -> Any:
    """Brings each row to mean 0 and variance 1, then scales, shifts and gates it.

        h = x + residual
        y = ((h - mean(h)) / sqrt(var(h) + eps) * weight + bias) * act(gate)

    The backward keeps `h`, `gate` and two numbers a row.

    Args:
        x: `[..., D]`, floating.
        weight: `[D]`, floating, or None for ones.
        bias: `[D]`, floating, or None.
        eps: added to the variance.
        gate: the shape of `x`, floating; multiplies after the norm.
        gate_activation: "silu", "sigmoid" or another of `gated`.
        residual: the shape of `x`, floating; added before the norm in the wider of the two dtypes.
        return_residual: also return `h`, the next block's residual, whose gradient is added in the norm's own backward: the memory of `x`
            where `residual` is None.
        impl: "auto" or the name of an implementation.

    Returns:
        `y` in the dtype of `x`; with `return_residual` the pair `(y, h)`. Computed in float32, or float64 if any input
        is.

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: a shape or device differs, `gate_activation` or `impl` is unknown.

    Source:
        Ba, Kiros and Hinton, "Layer normalization" (1607.06450), equation 4.

    Example:
        >>> import torch
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0).round(decimals=5).tolist()
        [[-1.0, 1.0]]
    """
    _check(x, gate_activation, weight=weight, bias=bias, gate=gate, residual=residual)
    call = norm_call(x, residual, weight, bias, gate, eps=eps, groups=1, center=True, activation=gate_activation)
    return _results("layer_norm", call, return_residual, impl)


@public
def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    center: bool = True,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: bool = False,
    impl: str = "auto",
) -> Any:
    """Normalises each of `groups` equal blocks of a row's channels by itself, then scales, shifts and gates the row.

        h = x + residual
        n = (h - mean(h)) / sqrt(var(h) + eps)            in each block; without `center`: h / sqrt(mean(h^2) + eps)
        y = (n * weight + bias) * act(gate)

    Other tokens play no part, unlike in `torch.nn.GroupNorm` over an image.

    The backward keeps `h`, `gate` and two numbers a block.

    Args:
        x: `[..., D]`, floating.
        groups: number of blocks, a divisor of D.
        weight: `[D]`, floating, or None for ones.
        bias: `[D]`, floating, or None.
        eps: added to the variance (mean square without `center`).
        center: whether the mean is taken off.
        gate: the shape of `x`, floating; multiplies after the norm.
        gate_activation: "silu", "sigmoid" or another of `gated`.
        residual: the shape of `x`, floating; added before the norm in the wider of the two dtypes.
        return_residual: also return `h`, the next block's residual, whose gradient is added in the norm's own backward: the memory of `x`
            where `residual` is None.
        impl: "auto" or the name of an implementation.

    Returns:
        `y` in the dtype of `x`; with `return_residual` the pair `(y, h)`. Computed in float32, or float64 if any input
        is.

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: a shape or device differs, `gate_activation` or `impl` is unknown, or `groups` does not divide D.

    Source:
        Wu and He, "Group normalization" (1803.08494), equations 1 and 7; after the heads of a mixer: RetNet
        (2307.08621), section 2.2.

    Example:
        >>> import torch
        >>> y = group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2)
        >>> [round(value, 4) for value in y.flatten().tolist()]
        [-1.0, 1.0, -1.0, 1.0]
    """
    _check(x, gate_activation, weight=weight, bias=bias, gate=gate, residual=residual)
    check_multiple("D", x.shape[-1], "groups", groups)
    call = norm_call(x, residual, weight, bias, gate, eps=eps, groups=groups, center=center, activation=gate_activation)
    return _results("group_norm", call, return_residual, impl)


@public
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
    _check(x, "silu")
    call = norm_call(x, None, None, None, None, eps=eps, groups=1, center=False, mean=False, activation="silu")
    return NORM(call, impl, "l2_norm")[0]


def _check(x: Tensor, gate_activation: str, **optional: Tensor | None) -> None:
    """Checks `x` and what may come with it: `weight` and `bias` of its last axis, the rest of its shape."""
    check_tensor("x", x)
    check_floating("x", x)
    if x.dim() < 1:
        raise ValueError("x must have shape [..., D], got []")
    for name, value in optional.items():
        if value is not None:
            check_shape(name, value, *(x.shape[-1:] if name in ("weight", "bias") else x.shape))
            check_floating(name, value)
            check_like(name, value, "x", x, dtype=False)
    check_choice("gate_activation", gate_activation, *ACTIVATIONS)


def _results(name: str, call: NormCall, return_residual: bool, impl: str) -> Any:
    """`y`, or `(y, h)`."""
    if return_residual and call.x.requires_grad and not call.sums:
        call = call.but(sums=True)  # the gradients of x meet in the backward, with the bits of a sum's
    outputs = NORM(call, impl, name)
    if not return_residual:
        return outputs[0]
    return outputs if call.sums else (outputs[0], call.x)
