"""Activations, and the gated product in plain PyTorch; its backward keeps nothing but the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import compute_dtype
from flashmix.ops.gated_product.call import GatedCall


@dataclass(frozen=True)
class Activation:
    """A scalar function in three forms.

    `formula` is what autograd and the compiler see. `value` and `value_and_slope` (with the derivative) run without
    autograd, return fresh tensors, and give the same bits for an element wherever it lies in the tensor. torch's own
    sigmoid and silu do not: on the CPU the odd end of each thread's share goes one by one, with an exp that rounds
    differently from the vectors' exp.
    """

    formula: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]]


# Elements that torch gives a thread at least, and a multiple of those that any CPU's vector loop takes at a time.
THREAD_SHARE, VECTORS = 32768, 64


def in_whole_vectors(function: Callable[..., Tensor], x: Tensor, *more: Tensor) -> Tensor:
    """`function(x, *more)` of tensors of one shape, element by element.

    On the CPU padded until every thread's share is whole vectors, without an odd end.
    """
    if not x.is_cpu:
        return function(x, *more)
    size = x.numel()
    padded = _padded(size, torch.get_num_threads())
    if padded == size:
        return function(x.contiguous(), *[t.contiguous() for t in more])
    return function(*[F.pad(t.flatten(), (0, padded - size)) for t in (x, *more)])[:size].view(x.shape)


@lru_cache(maxsize=1024)
def _padded(size: int, threads: int) -> int:
    """The least number of elements from `size` on of which the share of every thread is whole vectors."""
    padded, shares = size, 0
    while shares != (shares := max(1, min(threads, -(-padded // THREAD_SHARE)))):
        padded = -(-size // (shares * VECTORS)) * shares * VECTORS
    return padded


def _sigmoid(x: Tensor) -> Tensor:
    return in_whole_vectors(torch.sigmoid, x)


def _sigmoid_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    value = _sigmoid(x)
    return value, torch.addcmul(value, value, value, value=-1)


def _silu(x: Tensor) -> Tensor:
    return _sigmoid(x).mul_(x)


def _silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = _sigmoid(x)
    value = sigmoid * x
    return value, torch.rsub(sigmoid, 1).mul_(value).add_(sigmoid)


def _gelu(x: Tensor) -> Tensor:
    return torch.mul(x, math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)


def _gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.mul(x, math.sqrt(0.5)).erf_().add_(1).mul_(0.5)  # of a normal distribution below x
    density = torch.square(x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return share * x, density.mul_(x).add_(share)


def _tanh_gelu(x: Tensor) -> Tensor:
    return _tanh_of_cubic(x).add_(1).mul_(x).mul_(0.5)


def _tanh_gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    tanh = _tanh_of_cubic(x)
    inner = torch.square(x).mul_(3 * 0.044715).add_(1).mul_(math.sqrt(2 / math.pi))
    slope = inner.mul_(torch.square(tanh).neg_().add_(1)).mul_(x)  # x times the derivative of tanh
    tanh.add_(1)
    return (tanh * x).mul_(0.5), slope.add_(tanh).mul_(0.5)


def _tanh_of_cubic(x: Tensor) -> Tensor:
    return torch.square(x).mul_(0.044715).add_(1).mul_(x).mul_(math.sqrt(2 / math.pi)).tanh_()


def _relu(x: Tensor) -> Tensor:
    return torch.clamp(x, min=0)


def _relu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.clamp(x, min=0), (x > 0).to(x.dtype)


def _squared_relu(x: Tensor) -> Tensor:
    return torch.clamp(x, min=0).square_()


def _squared_relu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    relu = torch.clamp(x, min=0)
    return torch.square(relu), relu.mul_(2)


ACTIVATIONS = {
    "silu": Activation(F.silu, _silu, _silu_and_slope),
    "sigmoid": Activation(torch.sigmoid, _sigmoid, _sigmoid_and_slope),
    "gelu": Activation(F.gelu, _gelu, _gelu_and_slope),
    "gelu_tanh": Activation(lambda x: F.gelu(x, approximate="tanh"), _tanh_gelu, _tanh_gelu_and_slope),
    "relu": Activation(F.relu, _relu, _relu_and_slope),
    "relu2": Activation(lambda x: F.relu(x).square(), _squared_relu, _squared_relu_and_slope),
}


def forward(call: GatedCall, save: bool) -> tuple[Outputs, Outputs]:
    gate = call.gate
    y = ACTIVATIONS[call.activation].value(gate.to(compute_dtype(gate))).mul_(call.up).to(gate.dtype)
    return (y.contiguous(),), ()


def backward(call: GatedCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    gate, up, (grad,) = call.gate, call.up, grads
    assert grad is not None
    value, slope = ACTIVATIONS[call.activation].value_and_slope(gate.to(compute_dtype(gate)))
    d_gate, d_up = slope.mul_(up).mul_(grad).to(gate.dtype), value.mul_(grad).to(up.dtype)
    return {"gate": d_gate.contiguous(), "up": d_up.contiguous()}


def formula(call: GatedCall) -> Outputs:
    gate, up, dtype = call.gate, call.up, compute_dtype(call.gate)
    return ((ACTIVATIONS[call.activation].formula(gate.to(dtype)) * up.to(dtype)).to(gate.dtype),)
