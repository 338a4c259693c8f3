"""Gated MLPs, RWKV's channel mixing, and the low-rank projection of decays and gates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from flashmix.modules.input_linear import InputLinear
from flashmix.op.checks import check_choice
from flashmix.op.packing import Packing
from flashmix.op.public import Public
from flashmix.op.recompute import recomputed
from flashmix.ops.gated_product.linear import swiglu_linear
from flashmix.ops.gated_product.op import ACTIVATIONS, gated, swiglu
from flashmix.ops.token_shift.op import token_shift


class GatedMLP(Public, nn.Module):
    """A gated MLP `y = W_down (act(W_gate x) * W_up x)`, with or without biases; gate and up are one matrix.

    Args:
        dim: channels in and out.
        hidden: channels between; default `8/3 dim` rounded up to a multiple of 32.
        activation: of the gate, as in `flashmix.gated`.
        bias: whether the three maps have learned biases, 0 at first.

    Source: Shazeer, arXiv:2002.05202, equations 4 to 6.

    Example:
        >>> import torch
        >>> GatedMLP(16, activation="gelu_tanh", bias=True)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("activation", activation, *ACTIVATIONS)
        hidden = -(-8 * dim // (3 * 32)) * 32 if hidden is None else hidden
        self.activation = activation
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.down = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)
        if bias:
            nn.init.zeros_(self.gate_up.bias)
            nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        product = partial(gated, activation=self.activation)
        return self.down(recomputed("products", product, *self.gate_up(x).chunk(2, dim=-1)))

    def writers(self) -> Iterator[Tensor]:
        """The matrix that makes the output."""
        yield self.down.weight


class SwiGLU(GatedMLP):
    """The gated MLP with a silu, `y = W_down (silu(W_gate x) * W_up x)`, without biases.

    Args:
        dim: channels in and out.
        hidden: channels between; default `8/3 dim` rounded up to a multiple of 32.

    Source: Shazeer, arXiv:2002.05202, equation 6.

    Example:
        >>> import torch
        >>> SwiGLU(16)(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, hidden, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self.gate_up(x), self.down
        plain = type(down) is nn.Linear and not down._forward_hooks and not down._forward_pre_hooks
        y = swiglu_linear(gate_up, down.weight) if plain else None  # an adapter in its place is called
        return self.down(recomputed("products", swiglu, *gate_up.chunk(2, dim=-1))) if y is None else y


class ChannelMixing(Public, nn.Module):
    """RWKV's MLP: `y = W_v relu(W_k x_k)^2`, with `receptance` times `sigmoid(W_r x_r)`; `x_k` and `x_r` mix a token with the one before.

    Args:
        dim: channels in and out.
        hidden: channels between.
        receptance: whether there is the gate of RWKV-4 and RWKV-6; RWKV-7 has none.
        factor_of: the token that the factors `mu` of a mix belong to: "previous", `x_t + mu (x_{t-1} - x_t)` (RWKV-6, RWKV-7), or
            "current", `x_{t-1} + mu (x_t - x_{t-1})` (RWKV-4).

    Source: Peng et al., arXiv:2404.05892, section 4 (with the gate); arXiv:2503.14456, section 4.2 (without); arXiv:2305.13048,
        section 3.1.2 ("current").

    Example:
        >>> import torch
        >>> ChannelMixing(16, 32)(torch.randn(2, 5, 16))[0].shape
        torch.Size([2, 5, 16])
    """

    receptance_mix: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        receptance: bool = False,
        factor_of: str = "previous",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("factor_of", factor_of, "previous", "current")
        self.factor_of = factor_of
        self.key_mix = nn.Parameter(torch.rand(dim, device=device, dtype=dtype))
        self.key = nn.Linear(dim, hidden, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(hidden, dim, bias=False, device=device, dtype=dtype)
        self.receptance = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype) if receptance else None
        mix = nn.Parameter(torch.rand(dim, device=device, dtype=dtype)) if receptance else None
        self.register_parameter("receptance_mix", mix)

    def forward(
        self,
        x: Tensor,
        *,
        initial_state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`x` `[B, T, dim]` mixed; the state `[N, 1, dim]` holds the last input of each sequence."""
        before, state = token_shift(x, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens)
        one, other = (x, before) if self.factor_of == "previous" else (before, x)
        step = other - one
        y = self.value(torch.relu(self.key(torch.addcmul(one, step, self.key_mix))).square())
        if self.receptance is not None and self.receptance_mix is not None:
            y = y * torch.sigmoid(self.receptance(torch.addcmul(one, step, self.receptance_mix)))
        return y, state

    def writers(self) -> Iterator[Tensor]:
        """The matrix that makes the output."""
        yield self.value.weight


class LowRank(Public, nn.Module):
    """A projection through few channels: `y = W_up act(W_down x) + bias`.

    Args:
        dim: channels of the input.
        rank: channels between the two matrices.
        out: channels of the output.
        activation: "tanh", "sigmoid" or None, between the two.
        bias: whether the output has a learned bias, 0 at first.

    Example:
        >>> import torch
        >>> LowRank(16, 4, 32, activation="tanh")(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        out: int,
        *,
        activation: str | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.down = InputLinear(dim, rank, device=device, dtype=dtype)
        check_choice("activation", activation, "tanh", "sigmoid", None)
        self.activation = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, None: None}[activation]
        self.up = nn.Linear(rank, out, bias=bias, device=device, dtype=dtype)
        if bias:
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.up(x if self.activation is None else self.activation(x))
