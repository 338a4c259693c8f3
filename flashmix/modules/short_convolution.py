"""The causal depthwise convolution over the last few tokens, with its parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.op.checks import check_choice, check_range
from flashmix.op.packing import Packing
from flashmix.op.public import Public
from flashmix.op.recompute import recomputed
from flashmix.ops.norm.op import l2_norm
from flashmix.ops.short_conv.joined import joined_convolutions, joins, takes_unit
from flashmix.ops.short_conv.op import short_conv, short_conv_qkv


def maybe_convolution(dim: int, width: int, **options: Any) -> ShortConvolution | None:
    """A `ShortConvolution`, or None where its width is 0."""
    return ShortConvolution(dim, width, **options) if width else None


class ShortConvolution(Public, nn.Module):
    """A causal depthwise convolution over `width` tokens: `y_t = act(sum_i weight[:, width-1-i] x_{t-i} + bias)`.

    Args:
        dim: channels.
        width: tokens that an output sees, its own included.
        activation: "silu" or None.
        bias: whether there is a learned bias.

    Source: Gu and Dao, arXiv:2312.00752, section 3.4.

    Example:
        >>> import torch
        >>> y, state = ShortConvolution(16, 4)(torch.randn(2, 5, 16), return_state=True)
        >>> y.shape, state.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 3, 16]))
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        width: int = 4,
        *,
        activation: str | None = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_range("width", width, 2, 64)
        check_choice("activation", activation, "silu", None)
        self.dim = dim
        self.width = width
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(dim, width, device=device, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(dim, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.width**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor,
        *,
        initial_state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolves `x` `[B, T, dim]`; the state `[N, width - 1, dim]` holds the last inputs, oldest first."""
        return short_conv(
            x,
            self.weight,
            self.bias,
            activation=self.activation,
            initial_state=initial_state,
            return_state=return_state,
            cu_seqlens=cu_seqlens,
        )

    def of_qkv(
        self,
        qkv: Tensor,
        sizes: tuple[int, int, int],
        *,
        unit: int = 0,
        initial_state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Convolves queries, keys and values, which are the channels of `qkv` `[B, T, dim]`; returns each as a tensor of its own.

        Queries and keys are then divided by their length (`l2_norm`) per head of `unit` channels, unless that is 0.
        """
        weight, bias, activation = self.weight, self.bias, self.activation
        states = return_state or initial_state is not None
        if joins(qkv, weight, bias, sizes, activation, cu_seqlens, states):
            fused = unit if takes_unit(sizes, unit) else 0
            options: tuple[Any, ...] = sizes, activation, cu_seqlens, fused
            q, k, v, *state = recomputed("convolutions", joined_convolutions, qkv, weight, bias, *options)
            unit = 0 if fused else unit
        else:
            given: dict[str, Any] = {
                "initial_state": initial_state,
                "return_state": return_state,
                "cu_seqlens": cu_seqlens,
            }
            make: Any = partial(_of_qkv, sizes=sizes, activation=activation, **given)
            q, k, v, *state = (
                make(qkv, weight, bias) if return_state else recomputed("convolutions", make, qkv, weight, bias)
            )
        if unit:
            q, k = (recomputed("convolutions", l2_norm, t.unflatten(-1, (-1, unit))).flatten(-2) for t in (q, k))
        return q, k, v, state[0] if state else None

    def extra_repr(self) -> str:
        return f"{self.dim}, width={self.width}, activation={self.activation!r}, bias={self.bias is not None}"


def _of_qkv(
    qkv: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[int, int, int], **options: Any
) -> tuple[Tensor, ...]:
    """The convolved queries, keys and values, and the last inputs if they are asked for."""
    biases = (None, None, None) if bias is None else bias.split(sizes)
    found = short_conv_qkv(*qkv.split(sizes, dim=-1), *weight.split(sizes), *biases, **options)
    return tuple([t for t in found if t is not None])
