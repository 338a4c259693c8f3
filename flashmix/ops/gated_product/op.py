"""Activations and the gated product of a feed-forward block, with a backward that keeps nothing but the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix.op.checks import check_choice, check_floating, check_like, check_shape, check_tensor
from flashmix.op.choose import choose
from flashmix.op.dtypes import compute_dtype
from flashmix.op.rowwise import Operator, differentiable_gradients, portable, triton, wants_gradient

IMPLEMENTATIONS = (triton("flashmix.ops.gated_product.triton_gpu"), portable(__name__))


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


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, element by element; on the CPU padded until every thread's share is whole vectors, without an odd end."""
    if x.device.type != "cpu":
        return function(x)
    size = padded = x.numel()
    shares = 0
    while shares != (shares := max(1, min(torch.get_num_threads(), -(-padded // THREAD_SHARE)))):
        padded = -(-size // (shares * VECTORS)) * shares * VECTORS
    if padded == size:
        return function(x.contiguous())
    return function(F.pad(x.flatten(), (0, padded - size)))[:size].view(x.shape)


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


def gated(gate: Tensor, up: Tensor, activation: str = "silu", impl: str = "auto") -> Tensor:
    """The gated product of a feed-forward block.

        y = act(gate) * up

        sigmoid(x)   = 1 / (1 + e^-x)                                       (GLU)
        silu(x)      = x sigmoid(x)                                         (SwiGLU)
        gelu(x)      = x P(a standard normal < x)                           (GEGLU)
        gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2    (GEGLU, approximated)
        relu(x)      = max(x, 0)                                            (ReGLU)
        relu2(x)     = max(x, 0)^2

    The backward keeps `gate` and `up` and nothing else.

    Args:
        gate: any shape, floating dtype.
        up: the shape and dtype of `gate`.
        activation: "silu", "sigmoid", "gelu", "gelu_tanh", "relu" or "relu2".
        impl: "auto" or the name of an implementation.

    Returns:
        A tensor like `gate`; float16 and bfloat16 are computed in float32.

    Raises:
        TypeError: an input is not a floating tensor, or the dtypes differ.
        ValueError: the shapes or devices differ, `activation` or `impl` is unknown.

    Source:
        Shazeer, "GLU variants improve transformer" (2002.05202), equations 4 to 6; the squared ReLU: So et al.,
        "Primer" (2109.08668), section 4.1.

    Example:
        >>> import torch
        >>> gated(torch.tensor([-1.0, 2.0]), torch.tensor([5.0, 5.0]), "relu").tolist()
        [0.0, 10.0]
    """
    check_choice("activation", activation, *ACTIVATIONS)
    return _gated_product("gated", gate, up, activation, impl)


def swiglu(gate: Tensor, up: Tensor, impl: str = "auto") -> Tensor:
    """The gated product of a feed-forward block.

        y = silu(gate) * up,    silu(x) = x / (1 + e^-x)

    The backward keeps `gate` and `up` and nothing else.

    Args:
        gate: any shape, floating dtype.
        up: the shape and dtype of `gate`.
        impl: "auto" or the name of an implementation.

    Returns:
        A tensor like `gate`; float16 and bfloat16 are computed in float32.

    Raises:
        TypeError: an input is not a floating tensor, or the dtypes differ.
        ValueError: the shapes or devices differ, or `impl` is unknown.

    Source:
        Shazeer, "GLU variants improve transformer" (2002.05202), equation 6.

    Example:
        >>> import torch
        >>> swiglu(torch.zeros(2, 3), torch.ones(2, 3)).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    return _gated_product("swiglu", gate, up, "silu", impl)


def _gated_product(op: str, gate: Tensor, up: Tensor, activation: str, impl: str) -> Tensor:
    check_tensor("gate", gate)
    check_floating("gate", gate)
    check_shape("up", up, *gate.shape)
    check_like("up", up, "gate", gate)
    if choose(op, IMPLEMENTATIONS, (gate, up), impl).name == "triton":
        return _GATED(gate, up, options=(activation,))[0]
    if torch.compiler.is_compiling():
        return _formula(gate, up, activation)
    if wants_gradient(gate, up):
        return _GatedProduct.apply(gate, up, activation)
    return _forward(gate, up, activation)


def _formula(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    dtype = compute_dtype(gate)
    return (ACTIVATIONS[activation].formula(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def _forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation].value(gate.to(compute_dtype(gate))).mul_(up).to(gate.dtype)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: str) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _forward(gate, up, activation)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable_gradients(lambda g, u: _formula(g, u, ctx.activation), (gate, up), grad), None
        value, slope = ACTIVATIONS[ctx.activation].value_and_slope(gate.to(compute_dtype(gate)))
        return slope.mul_(up).mul_(grad).to(gate.dtype), value.mul_(grad).to(up.dtype), None


_GATED = Operator(
    "gated", "flashmix.ops.gated_product.triton_gpu.Gated", "Tensor gate, Tensor up", "str activation", formula=_formula
)
