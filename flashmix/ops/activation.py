"""Activations and the gated product of a feed-forward block, with a backward that keeps nothing but the inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix._checks import check_floating, check_like, check_shape, check_tensor
from flashmix._dispatch import choose
from flashmix.ops._rowwise import compute_dtype, differentiable_gradients, portable, wants_gradient

IMPLEMENTATIONS = (portable(__name__),)


@dataclass(frozen=True)
class Activation:
    """A scalar function in three forms.

    `formula` is what autograd and the compiler see. `value` and `slope` (the derivative) run without autograd and give
    the same bits for an element wherever it lies in the tensor. torch's own sigmoid and silu do not: on the CPU the odd
    end of each thread's share goes one by one, with an exp that rounds differently from the vectors' exp.
    """

    formula: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


# Elements that torch gives a thread at least, and a multiple of those that any CPU's vector loop takes at a time.
THREAD_SHARE, VECTORS = 32768, 64


def _sigmoid(x: Tensor) -> Tensor:
    """A fresh `torch.sigmoid(x)`; on the CPU padded until every thread's share is whole vectors, without an odd end."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    size = padded = x.numel()
    shares = 0
    while shares != (shares := max(1, min(torch.get_num_threads(), -(-padded // THREAD_SHARE)))):
        padded = -(-size // (shares * VECTORS)) * shares * VECTORS
    if padded == size:
        return torch.sigmoid(x.contiguous())
    return F.pad(x.flatten(), (0, padded - size)).sigmoid_()[:size].view(x.shape)


def _sigmoid_slope(x: Tensor) -> Tensor:
    sigmoid = _sigmoid(x)
    return torch.addcmul(sigmoid, sigmoid, sigmoid, value=-1)


def _silu(x: Tensor) -> Tensor:
    return _sigmoid(x).mul_(x)


def _silu_slope(x: Tensor) -> Tensor:
    sigmoid = _sigmoid(x)
    return torch.rsub(sigmoid, 1).mul_(x).add_(1).mul_(sigmoid)


ACTIVATIONS = {
    "silu": Activation(F.silu, _silu, _silu_slope),
    "sigmoid": Activation(torch.sigmoid, _sigmoid, _sigmoid_slope),
}


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
    choose(op, IMPLEMENTATIONS, gate, impl)
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
        act, wide = ACTIVATIONS[ctx.activation], gate.to(compute_dtype(gate))
        d_gate = d_up = None
        if ctx.needs_input_grad[0]:
            d_gate = act.slope(wide).mul_(up).mul_(grad).to(gate.dtype)
        if ctx.needs_input_grad[1]:
            d_up = act.value(wide).mul_(grad).to(up.dtype)
        return d_gate, d_up, None
