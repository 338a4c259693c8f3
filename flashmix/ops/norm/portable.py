"""The norms in plain PyTorch; the backward keeps two numbers a row beside the call."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import autocast_dtype, compute_dtype
from flashmix.ops.gated_product.portable import ACTIVATIONS
from flashmix.ops.norm.call import NormCall


def forward(call: NormCall, save: bool) -> tuple[Outputs, Outputs]:
    h = call.x if call.residual is None else call.x + call.residual
    if _is_plain_layer_norm(call, h):
        y, mean, scale = torch.native_layer_norm(h, h.shape[-1:], call.weight, call.bias, call.eps)
        kept: Outputs = (scale, mean)
    else:
        y, kept = _normalise(call, h)
    return ((y, h.contiguous()) if call.sums else (y,)), kept


def keeps(call: NormCall) -> Outputs:
    """Of each row (group) its scale, and its mean if that is taken off."""
    h = call.results()[-1] if call.sums else call.x
    dtype = compute_dtype(h, call.weight, call.bias, call.gate)
    if _is_plain_layer_norm(call, h) and h.device.type == "cpu":
        dtype = h.dtype
    shape = h.shape[:-1] if call.groups == 1 else (*h.shape[:-1], call.groups)
    return tuple([h.new_empty((*shape, 1), dtype=dtype) for _ in range(2 if call.center else 1)])


def backward(call: NormCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    dy, dh = (*grads, None)[:2]
    if dy is None:
        return call.gradients_of_sum(dh, wanted)
    if _is_plain_layer_norm(call, call.x):
        scale, mean = kept
        h, mask = call.x, ["x" in wanted, "weight" in wanted, "bias" in wanted]
        d_h, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
            dy, h, h.shape[-1:], mean, scale, call.weight, call.bias, mask
        )
        found = {"x": d_h, "weight": d_weight, "bias": d_bias}
    else:
        found = _normalise_backward(call, kept, dy, wanted)
    if dh is not None and "x" in wanted:
        found["x"] = found["x"] + dh
    return {name: found[name].contiguous() for name in wanted}


def formula(call: NormCall) -> Outputs:
    h = call.x if call.residual is None else call.x + call.residual
    # torch has no second derivative of its layer norm with a bias and no weight.
    if _is_plain_layer_norm(call, h) and (call.weight is not None or call.bias is None):
        y = F.layer_norm(h, h.shape[-1:], call.weight, call.bias, call.eps)
    else:
        n, weight, bias, gate = _grouped(call, h)
        dtype = compute_dtype(n, weight, bias, gate)
        n = n.to(dtype)
        if call.center:
            n = n - n.mean(-1, keepdim=True)
        y = n * torch.rsqrt(n.square().sum(-1, keepdim=True) / call.divisor + call.eps)
        y = y if weight is None else y * weight.to(dtype)
        y = y if bias is None else y + bias.to(dtype)
        y = y if gate is None else y * ACTIVATIONS[call.activation].formula(gate.to(dtype))
        y = _flat(call, y.to(call.y_dtype))
    return (y, h) if call.sums else (y,)


def own_formula(call: NormCall) -> Outputs | None:
    """torch's layer norm, which keeps no more than ours; None of other norms, and under autocast, which would change dtypes."""
    if not call.center or autocast_dtype(call.x) is not None:
        return None
    h = call.x if call.residual is None else call.x + call.residual
    if not _is_plain_layer_norm(call, h) or (call.weight is None and call.bias is not None):
        return None
    y = F.layer_norm(h, h.shape[-1:], call.weight, call.bias, call.eps)
    return (y, h.contiguous()) if call.sums else (y,)


def _is_plain_layer_norm(call: NormCall, h: Tensor) -> bool:
    """Whether torch's own layer norm computes it, which is as good in memory and faster.

    Not of one or two channels, where its zeros are no zeros; not with 16-bit weights on a CPU: it adds their gradients up in 16 bits.
    """
    if not call.center or not call.mean or call.groups > 1 or call.gate is not None or h.shape[-1] <= 2:
        return False
    weighted = call.weight is not None or call.bias is not None
    if weighted and h.device.type == "cpu" and h.element_size() == 2:
        return False
    return all(t is None or t.dtype == call.y_dtype for t in (h, call.weight, call.bias))


def _grouped(call: NormCall, h: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`h`, weight, bias and gate, with an axis of the groups."""
    if call.groups == 1:
        return h, call.weight, call.bias, call.gate
    split = (call.groups, call.width)
    weight, bias, gate = (None if t is None else t.unflatten(-1, split) for t in (call.weight, call.bias, call.gate))
    return h.unflatten(-1, split), weight, bias, gate


def _over_divisor(call: NormCall, sums: Tensor) -> Tensor:
    return sums if call.divisor == 1 else sums.div_(call.divisor)


def _flat(call: NormCall, t: Tensor) -> Tensor:
    return t if call.groups == 1 else t.flatten(-2)


def _normalise(call: NormCall, h: Tensor) -> tuple[Tensor, Outputs]:
    """`y`, and what is kept: of each row `1 / sqrt(sum((h - mean)^2) / divisor + eps)`, and the mean if that is taken off."""
    h, weight, bias, gate = _grouped(call, h)
    dtype = compute_dtype(h, weight, bias, gate)
    mean = h.mean(-1, keepdim=True, dtype=dtype) if call.center else None
    centered = h if mean is None else h - mean
    length = torch.linalg.vector_norm(centered, dim=-1, keepdim=True, dtype=dtype)
    scale = _over_divisor(call, length.mul_(length)).add_(call.eps).rsqrt_()
    y = centered * scale
    if weight is not None:
        y.mul_(weight)
    if bias is not None:
        y.add_(bias)
    if gate is not None:
        y.mul_(ACTIVATIONS[call.activation].value(gate.to(dtype)))
    y = _flat(call, y.to(call.y_dtype)).contiguous()
    return y, (scale.contiguous(),) if mean is None else (scale.contiguous(), mean.contiguous())


def _normalise_backward(call: NormCall, kept: Outputs, grad: Tensor, wanted: Collection[str]) -> Gradients:
    """With `n = (h - mean) * scale` and `dn = dy * act(gate) * weight`:

    dh = scale * (dn - n * sum(n * dn) / divisor), less its own mean if the mean was taken off.
    """
    found: Gradients = {}
    scale, mean = (*kept, None)[:2]
    assert scale is not None
    h, weight, bias, gate = _grouped(call, call.x)
    grad = (grad if call.groups == 1 else grad.unflatten(-1, (call.groups, call.width))).to(scale.dtype)
    n = h * scale if mean is None else (h - mean).mul_(scale)
    room: Tensor | None = None
    if gate is not None:
        value, slope = ACTIVATIONS[call.activation].value_and_slope(gate.to(scale.dtype))
        if "gate" in wanted:
            affine = n if weight is None else (room := torch.mul(n, weight))
            affine = affine if bias is None else (room := torch.add(affine, bias, out=room))
            found["gate"] = _flat(call, slope.mul_(affine).mul_(grad).to(gate.dtype))
        grad = value.mul_(grad)
    if "bias" in wanted:
        found["bias"] = _over_rows(grad, bias)
    room = torch.mul(grad, n, out=room)
    if "weight" in wanted:
        found["weight"] = _over_rows(room, weight)
    if "x" in wanted:
        along = _over_divisor(call, (room if weight is None else room.mul_(weight)).sum(-1, keepdim=True))
        d_n = grad if weight is None else torch.mul(grad, weight, out=room)
        d_n = torch.addcmul(d_n, n, along, value=-1, out=room)
        found["x"] = _flat(
            call, (d_n if mean is None else d_n.sub_(d_n.mean(-1, keepdim=True))).mul_(scale).to(h.dtype)
        )
    return found


def _over_rows(values: Tensor, parameter: Tensor | None) -> Tensor:
    """The gradient of `parameter`: `values` summed over all rows, never a view of them."""
    assert parameter is not None
    rows = tuple(range(values.dim() - parameter.dim()))
    return (values.sum(rows) if rows else values.clone()).to(parameter.dtype).flatten()
