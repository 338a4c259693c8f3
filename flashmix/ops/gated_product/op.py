"""Activations and the gated product of a feed-forward block, with a backward that keeps nothing but the inputs."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.checks import check_choice, check_floating, check_like, check_shape, check_tensor
from flashmix.op.public import public
from flashmix.ops.gated_product.call import GatedCall
from flashmix.ops.gated_product.portable import ACTIVATIONS, formula

IMPLEMENTATIONS = implementations("gated_product")
GATED = Op("gated", GatedCall, IMPLEMENTATIONS, formula=formula)


@public
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


@public
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
    return GATED(GatedCall(gate, up, activation), impl, op)[0]
