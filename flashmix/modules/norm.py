"""Normalisation as modules: by root mean square, also gated, and to mean 0; fused with a residual sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.op.checks import check_choice
from flashmix.op.dtypes import at_least_float32
from flashmix.op.public import Public
from flashmix.op.recompute import recompute, recomputed
from flashmix.ops.norm.op import group_norm, layer_norm, rms_norm


class RMSNorm(Public, nn.Module):
    """Divides by the root mean square of the last axis and scales: `y = x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        dim: channels of the last axis.
        eps: added to the mean square.
        affine: whether there is a learned `weight`.
        unit_offset: whether `1 + weight` scales, with `weight` 0 at first, as in Gemma and Qwen3-Next.
        groups: equal blocks of the axis, each divided by its own root mean square.

    Source: Zhang and Sennrich, arXiv:1910.07467, equation 4.

    Example:
        >>> import torch
        >>> RMSNorm(16)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        affine: bool = True,
        unit_offset: bool = False,
        groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.unit_offset = unit_offset
        self.groups = groups
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if affine else None
        )
        if affine:
            self.set_scale(1.0)

    @torch.no_grad()
    def set_scale(self, scale: float) -> None:
        """Sets the factor of every channel."""
        assert self.weight is not None
        self.weight.fill_(scale - 1.0 if self.unit_offset else scale)

    @property
    def scale(self) -> Tensor | None:
        """The factor of each channel; in float32 at least where it is `1 + weight`."""
        if self.weight is None or not self.unit_offset:
            return self.weight
        return 1.0 + at_least_float32(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return recomputed("norms", self._scaled, x, self.scale)

    def _scaled(self, x: Tensor, scale: Tensor | None) -> Tensor:
        if self.groups == 1:
            return rms_norm(x, scale, eps=self.eps)
        y: Tensor = group_norm(x, self.groups, scale, eps=self.eps, center=False)
        return y

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)` in one pass over memory, both ways; None adds nothing."""
        options: dict[str, Any] = {"eps": self.eps, "residual": residual, "return_residual": True}
        scale = self.scale
        if self.groups == 1:
            y, total = rms_norm(x, scale, **options)
        else:
            y, total = group_norm(x, self.groups, scale, center=False, **options)
        recompute("norms", y, self._scaled, total, scale)
        return y, total

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, affine={self.weight is not None}"


class LayerNorm(Public, nn.Module):
    """Brings the last axis to mean 0 and variance 1, then scales and shifts it: `y = (x - mean) / sqrt(var + eps) * weight + bias`.

    Args:
        dim: channels of the last axis.
        eps: added to the variance.

    Source: Ba, Kiros, Hinton, arXiv:1607.06450, equation 4.

    Example:
        >>> import torch
        >>> LayerNorm(16)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self, dim: int, eps: float = 1e-5, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    @torch.no_grad()
    def set_scale(self, scale: float) -> None:
        """Sets the factor of every channel."""
        self.weight.fill_(scale)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = recomputed("norms", partial(layer_norm, eps=self.eps), x, self.weight, self.bias)
        return y

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)` in one pass over memory, both ways; None adds nothing."""
        y, total = layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual, return_residual=True)
        recompute("norms", y, partial(layer_norm, eps=self.eps), total, self.weight, self.bias)
        return y, total

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


def output_norm(dim: int, eps: float, gate: str, **placement: Any) -> RMSNorm | GatedRMSNorm:
    """The norm of a layer's output, with a gate of this activation or with "none"."""
    check_choice("output_gate", gate, "silu", "sigmoid", "none")
    if gate == "none":
        return RMSNorm(dim, eps, **placement)
    return GatedRMSNorm(dim, eps, activation=gate, **placement)


class GatedRMSNorm(Public, nn.Module):
    """An RMS norm whose result is gated: `y = x / sqrt(mean(x^2) + eps) * weight * act(gate)`.

    Args:
        dim: channels of the last axis.
        eps: added to the mean square.
        activation: "silu" or "sigmoid", applied to the gate.

    Source: Yang et al., arXiv:2412.06464, section 3.4 (silu); Kimi Linear, arXiv:2510.26692, section 4 (sigmoid).

    Example:
        >>> import torch
        >>> GatedRMSNorm(16)(torch.randn(2, 5, 4, 16), torch.randn(2, 5, 4, 16)).shape
        torch.Size([2, 5, 4, 16])
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        activation: str = "silu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, "silu", "sigmoid")
        self.dim = dim
        self.eps = eps
        self.activation = activation
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return recomputed("gated_norms", self._gated, x, self.weight, gate)

    def _gated(self, x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return rms_norm(x, weight, eps=self.eps, gate=gate, gate_activation=self.activation)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, activation={self.activation!r}"
