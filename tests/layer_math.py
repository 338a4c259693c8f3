"""The arithmetic of layers written out, with nothing of flashmix but a layer's own weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from flashmix.layers import DeltaNet


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal, depthwise, with silu; `x` is `[T, D]`."""
    width = weight.shape[1]
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    y = sum(weight[:, i] * padded[i : i + len(x)] for i in range(width))
    return silu(y if bias is None else y + bias)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1))


def delta_inputs(layer: DeltaNet, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = convolve(x @ layer.qkv.weight.T, layer.convolution.weight).split(
        [layer.keys, layer.keys, layer.values], -1
    )
    group = layer.value_heads // layer.heads
    q, k = (heads(part, layer.heads).repeat_interleave(group, 1) for part in (q, k))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    return q * layer.head_dim**-0.5, k, heads(v, layer.value_heads)


def linear(x: Tensor, module: Any) -> Tensor:
    return x @ module.weight.T


def low_rank(x: Tensor, module: Any) -> Tensor:
    hidden = x @ module.down.weight.T
    hidden = hidden if module.activation is None else torch.tanh(hidden)
    return hidden @ module.up.weight.T + (0 if module.up.bias is None else module.up.bias)


def mamba_decay(x: Tensor, decay: Any) -> Tensor:
    rate = decay.A_log.exp()
    return -(rate if decay.dt_bias.dim() == 1 else rate[:, None]) * softplus(x + decay.dt_bias)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def finish_gated_deltanet(layer: Any, x: Tensor, o: Tensor) -> Tensor:
    gate = heads(linear(x, layer.gate), layer.value_heads)
    return linear((rms(o) * layer.norm.weight * silu(gate)).flatten(1), layer.output)


def finish_kda(layer: Any, x: Tensor, o: Tensor) -> Tensor:
    gate = heads(low_rank(x, layer.gate), layer.value_heads)
    return linear((rms(o) * layer.norm.weight * torch.sigmoid(gate)).flatten(1), layer.output)


def kda_decay(layer: Any, x: Tensor) -> Tensor:
    return mamba_decay(heads(low_rank(x, layer.decay_projection), layer.value_heads), layer.decay)
