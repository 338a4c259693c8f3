"""The gates in plain PyTorch; the backward of a decay computes it again and keeps nothing but the inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import at_least_float32
from flashmix.op.softplus import softplus, softplus_backward
from flashmix.ops.decay.call import GateCall
from flashmix.ops.gated_product.portable import in_whole_vectors


def forward(call: GateCall, save: bool) -> tuple[Outputs, Outputs]:
    (g,) = formula(call)
    return (g.contiguous(),), ()


def formula(call: GateCall) -> Outputs:
    x = at_least_float32(call.x)
    if call.A_log is None or call.dt_bias is None:
        s = _even(torch.sigmoid, x)
        return (s if call.factor == 1 else call.factor * s,)
    rate, z = _rate(call.A_log, call.dt_bias), x + call.dt_bias
    if call.kind == "softplus_decay":
        return (_even(softplus, z) * -rate,)
    return (call.factor * _even(torch.sigmoid, rate * z),)


def own_formula(call: GateCall) -> Outputs | None:
    """The formula of a write strength, of which torch keeps the result; None of the decays, of which it would keep every step."""
    return formula(call) if call.A_log is None else None


def backward(call: GateCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """With `s(z)` the sigmoid and `f` the factor:

    softplus_decay:  dz = -a s(z) dg,                  da = -sum log(1 + e^z) dg
    bounded_decay:   dz = a f s(a z) (1 - s(a z)) dg,  da = sum f s(a z) (1 - s(a z)) z dg
    write_strength:  dx = f s(x) (1 - s(x)) dg
    """
    (grad,) = grads
    assert grad is not None
    x = at_least_float32(call.x)
    if call.A_log is None or call.dt_bias is None:
        d_x = _even(torch.ops.aten.sigmoid_backward, grad * call.factor, _even(torch.sigmoid, x))
        return {"x": d_x.to(call.x.dtype).contiguous()}
    rate, z = _rate(call.A_log, call.dt_bias), x + call.dt_bias
    if call.kind == "softplus_decay":
        along, times_rate = grad * _even(softplus, z), grad * -rate
        d_z = _even(softplus_backward, times_rate, z)
        d_rate = -along.sum_to_size(rate.shape)
    else:
        s = _even(torch.sigmoid, rate * z)
        inner = _even(torch.ops.aten.sigmoid_backward, grad * call.factor, s)
        d_z = inner * rate
        d_rate = (inner * z).sum_to_size(rate.shape)
    d_A = (d_rate.to(rate.dtype) * rate).reshape(call.A_log.shape)
    found = {"x": d_z, "A_log": d_A, "dt_bias": d_z.sum_to_size(call.dt_bias.shape) if "dt_bias" in wanted else d_z}
    return {name: found[name].to(getattr(call, name).dtype).contiguous() for name in wanted}


def _rate(A_log: Tensor, dt_bias: Tensor) -> Tensor:
    rate = at_least_float32(A_log).exp()
    return rate if dt_bias.dim() == 1 else rate[:, None]


def _even(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The same bits for an element wherever it lies, its gradient too."""
    return function(*tensors) if torch.compiler.is_compiling() else in_whole_vectors(function, *tensors)
