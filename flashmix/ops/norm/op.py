"""Normalisation of each row by its own size, with an optional gate after it and an optional residual before it."""

from __future__ import annotations

from typing import Literal, overload

import torch.nn.functional as F
from torch import Tensor

from flashmix.op.checks import check_choice, check_floating, check_like, check_multiple, check_shape, check_tensor
from flashmix.op.choose import choose
from flashmix.op.rowwise import portable, triton
from flashmix.ops.gated_product.op import ACTIVATIONS
from flashmix.ops.norm.operator import norm
from flashmix.ops.norm.portable import NormOptions, normalise

IMPLEMENTATIONS = (triton("flashmix.ops.norm.triton_gpu.rows"), portable("flashmix.ops.norm.portable"))


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
        gate_activation: "silu", "sigmoid" or another of `gated`.
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
    _check(x, gate_activation, weight=weight, gate=gate, residual=residual)
    y, h = _norm("rms_norm", impl, (x, residual, weight, None, gate), eps, 1, False, True, gate_activation)
    return (y, h) if return_residual else y


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    gate_activation: str = "silu",
    residual: Tensor | None = None,
    return_residual: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
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
        return_residual: also return `h`, the next block's residual.
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
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0).tolist()
        [[-1.0, 1.0]]
    """
    _check(x, gate_activation, weight=weight, bias=bias, gate=gate, residual=residual)
    y, h = _norm("layer_norm", impl, (x, residual, weight, bias, gate), eps, 1, True, True, gate_activation)
    return (y, h) if return_residual else y


@overload
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
    return_residual: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...
@overload
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
    return_residual: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...
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
) -> Tensor | tuple[Tensor, Tensor]:
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
        return_residual: also return `h`, the next block's residual.
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
    y, h = _norm("group_norm", impl, (x, residual, weight, bias, gate), eps, groups, center, True, gate_activation)
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
    _check(x, "silu")
    return _norm("l2_norm", impl, (x, None, None, None, None), eps, 1, False, False, "silu")[0]


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


def _norm(
    op: str,
    impl: str,
    tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    eps: float,
    groups: int,
    center: bool,
    mean: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """`y` and `h` of `x, residual, weight, bias, gate`; `center`: the mean is taken off, `mean`: squares are averaged."""
    x, residual, weight, bias, gate = tensors
    if choose(op, IMPLEMENTATIONS, tensors, impl).name == "triton":
        return norm(*tensors, (eps, groups, center, mean, activation, x.dtype))
    h = x if residual is None else x + residual
    if op == "layer_norm" and gate is None and all(t is None or t.dtype == x.dtype for t in tensors):
        return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h  # as good in memory, and faster
    width = x.shape[-1] // groups
    options = NormOptions(eps, width if mean else 1, center, activation, x.dtype)
    if groups == 1:
        return normalise(h, weight, bias, gate, options), h
    weight, bias, gate = (None if t is None else t.unflatten(-1, (groups, width)) for t in (weight, bias, gate))
    return normalise(h.unflatten(-1, (groups, width)), weight, bias, gate, options).flatten(-2), h
