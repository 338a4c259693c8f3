"""The meaning of the short convolution: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops.gated_product.definition import ACTIVATIONS


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`y_t = act(sum_i weight[:, W-1-i] x_{t-i} + bias) + residual_t` for `x [B, T, D]`, and the last W - 1 inputs."""
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    past = x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state
    past = torch.cat([past, x], dim=1)
    rows = [(past[:, t : t + width] * weight.T).sum(1) for t in range(tokens)]
    y = torch.stack(rows, dim=1) if rows else x
    y = y if bias is None else y + bias
    y = y if activation is None else ACTIVATIONS[activation](y)
    return (y if residual is None else y + residual), past[:, tokens:]


def short_conv_qkv(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, ...]:
    """`short_conv` of q, k and v, each with its own weight; the state is that of their channels side by side."""
    sizes = [x.shape[2] for x in inputs]
    states = (None, None, None) if initial_state is None else initial_state.split(sizes, dim=2)
    parts = zip(inputs, weights, biases or (None, None, None), states, strict=True)
    found = [short_conv(*part, activation) for part in parts]
    return *(y for y, _ in found), torch.cat([state for _, state in found], dim=2)
