"""The meaning of the gated product and its activations: plain formulas, run in float64. Only tests, the self-test and docs import this."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


def relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def relu2(x: Tensor) -> Tensor:
    return relu(x) ** 2


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "sigmoid": torch.sigmoid,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}
