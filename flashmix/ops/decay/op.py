"""The gates of recurrences from projections of the input: log decays `g <= 0` and write strengths, in float32."""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.checks import check_floating, check_like, check_range, check_shape, check_tensor, dims
from flashmix.op.public import public
from flashmix.ops.decay.call import GateCall
from flashmix.ops.decay.portable import formula, own_formula

IMPLEMENTATIONS = implementations("decay", formula=own_formula)
GATE = Op("gate", GateCall, IMPLEMENTATIONS, formula=formula)


@public
def softplus_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, impl: str = "auto") -> Tensor:
    """The decay of Mamba-2 and Gated DeltaNet (one a head) and of Kimi Delta Attention (one a channel).

        g = -exp(A_log) softplus(x + dt_bias),    softplus(z) = log(1 + e^z)

    The backward keeps the inputs and nothing else.

    Args:
        x: `[..., H]`, or `[..., H, K]` where `dt_bias` is `[H, K]`; floating.
        A_log: `[H]`, floating: the logarithm of the rate.
        dt_bias: `[H]` or `[H, K]`, floating.
        impl: "auto" or the name of an implementation.

    Returns:
        The log decay, the shape of `x`, at most 0; float32 (float64 if any input is).

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: shapes or devices differ, or `impl` is unknown.

    Source:
        Dao and Gu, arXiv:2405.21060, section 7; a channel: Kimi Linear, arXiv:2510.26692, section 4.

    Example:
        >>> import torch
        >>> softplus_decay(torch.zeros(1, 2), torch.zeros(2), torch.zeros(2)).tolist()
        [[-0.6931471824645996, -0.6931471824645996]]
    """
    return _gate("softplus_decay", x, A_log, dt_bias, 1.0, impl)


@public
def bounded_decay(x: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower: float = -5.0, impl: str = "auto") -> Tensor:
    """A decay with a floor.

        g = lower sigmoid(exp(A_log) (x + dt_bias))

    The backward keeps the inputs and nothing else.

    Args:
        x: `[..., H]`, or `[..., H, K]` where `dt_bias` is `[H, K]`; floating.
        A_log: `[H]`, floating: the logarithm of the sharpness.
        dt_bias: `[H]` or `[H, K]`, floating.
        lower: the strongest log decay, in [-5, 0).
        impl: "auto" or the name of an implementation.

    Returns:
        The log decay, the shape of `x`, between `lower` and 0; float32 (float64 if any input is).

    Raises:
        TypeError: an input is not a floating tensor.
        ValueError: shapes or devices differ, `lower` is out of its range, or `impl` is unknown.

    Source:
        Kimi Linear, arXiv:2510.26692 (the gate's bounded form in the released models).

    Example:
        >>> import torch
        >>> bounded_decay(torch.zeros(1, 2), torch.zeros(2), torch.zeros(2)).tolist()
        [[-2.5, -2.5]]
    """
    check_range("lower", lower, -5.0, -1e-6)
    return _gate("bounded_decay", x, A_log, dt_bias, lower, impl)


@public
def write_strength(x: Tensor, *, negative_eigenvalues: bool = False, impl: str = "auto") -> Tensor:
    """The `beta` of a delta rule.

        beta = sigmoid(x),    or 2 sigmoid(x) where transitions may have negative eigenvalues

    The backward keeps `x` and nothing else; in plain PyTorch the result, and not `x`.

    Args:
        x: any shape, floating.
        negative_eigenvalues: whether `beta` reaches to 2 (reflections: the state can count modulo two) instead of 1.
        impl: "auto" or the name of an implementation.

    Returns:
        The shape of `x`; float32 (float64 for float64).

    Raises:
        TypeError: `x` is not a floating tensor.
        ValueError: `impl` is unknown.

    Source:
        Grazzi et al., arXiv:2411.12537, section 4.

    Example:
        >>> import torch
        >>> write_strength(torch.zeros(1)).item(), write_strength(torch.zeros(1), negative_eigenvalues=True).item()
        (0.5, 1.0)
    """
    check_tensor("x", x)
    check_floating("x", x)
    factor = 2.0 if negative_eigenvalues else 1.0
    return GATE(GateCall(x, None, None, "write_strength", factor), impl, "write_strength")[0]


def _gate(op: str, x: Tensor, A_log: Tensor, dt_bias: Tensor, factor: float, impl: str) -> Tensor:
    check_tensor("x", x)
    check_floating("x", x)
    (heads,) = dims("A_log", A_log, "H")
    check_tensor("dt_bias", dt_bias)
    shape = (heads,) if dt_bias.dim() != 2 else (heads, dt_bias.shape[1])
    check_shape("dt_bias", dt_bias, *shape)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"x must have shape [..., {', '.join(map(str, shape))}], got {list(x.shape)}")
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_floating(name, value)
        check_like(name, value, "x", x, dtype=False)
    return GATE(GateCall(x, A_log, dt_bias, op, factor), impl, op)[0]
