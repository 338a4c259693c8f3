"""Norms with the options that the libraries share: a residual before the norm, its sum returned, a gate after it, groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flashmix.compat.surface import refuse
from flashmix.op.dtypes import state_dtype
from flashmix.ops.norm.op import group_norm, layer_norm, rms_norm

ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    center: bool,
    groups: int = 1,
    gate: Tensor | None = None,
    activation: str = "silu",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """`norm(x + residual) act(gate)` in the dtype of `x`; with `prenorm` the pair of it and the sum, in float32 if asked for."""
    dtype = x.dtype
    if residual_in_fp32:
        x = x.to(state_dtype(dtype))
        residual = None if residual is None else residual.to(x.dtype)
    options: dict[str, Any] = {"eps": eps, "gate": gate, "gate_activation": ACTIVATIONS.get(activation, activation)}
    if residual is not None:
        options |= {"residual": residual, "return_residual": prenorm}
    if groups > 1 or (bias is not None and not center):
        result = group_norm(x, groups, weight, bias, center=center, **options)
    elif center:
        result = layer_norm(x, weight, bias, **options)
    else:
        result = rms_norm(x, weight, **options)
    y, total = result if prenorm and residual is not None else (result, x)
    return (y.to(dtype), total) if prenorm else y.to(dtype)


class ResidualNorm(nn.Module):
    """A norm as `fla.modules` and `flash_attn` have it: `forward(x, residual=None, prenorm=False, residual_in_fp32=False)`.

    Args:
        hidden_size: channels of the last axis.
        elementwise_affine: whether there is a learned `weight`.
        bias: whether there is a learned `bias`.
        eps: added to the variance or mean square.

    Class attributes: `center`, whether the mean is taken off.
    """

    center = False
    groups = 1
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        bias: bool = False,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        ones, zeros = (make(hidden_size, device=device, dtype=dtype) for make in (torch.ones, torch.zeros))
        self.register_parameter("weight", nn.Parameter(ones) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(zeros) if elementwise_affine and bias else None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        return self.normalise(x, residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32)

    def normalise(self, x: Tensor, **options: Any) -> Any:
        """`normalise` with the module's parameters."""
        return normalise(x, self.weight, self.bias, eps=self.eps, center=self.center, groups=self.groups, **options)


class ZGatedRMSNorm(nn.Module):
    """The norm of Mamba-2: `norm(x) silu(z)`, or `norm(x silu(z))`, in groups of channels with one weight each.

    Args:
        hidden_size: channels of the last axis.
        eps: added to the mean square.
        group_size: channels that are normalised together; None for all.
        norm_before_gate: whether the gate multiplies after the norm.
    """

    center = False
    gate_last = True

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.norm_before_gate = self.gate_last if norm_before_gate is None else norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        bias = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype)) if self.center else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return z_gated_norm(
            x,
            self.weight,
            self.bias,  # type: ignore[arg-type]
            z=z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
            center=self.center,
        )


def z_gated_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    center: bool,
) -> Tensor:
    """The function of `ZGatedRMSNorm`, computed in float32."""
    groups = 1 if group_size is None else x.shape[-1] // group_size
    refuse("group_size", "groups that do not divide the channels", groups * (group_size or x.shape[-1]) == x.shape[-1])
    dtype = x.dtype
    if z is not None and not norm_before_gate:
        wide = state_dtype(dtype)
        x, z = x.to(wide) * nn.functional.silu(z.to(wide)), None
    return normalise(x, weight, bias, eps=eps, center=center, groups=groups, gate=z).to(dtype)
