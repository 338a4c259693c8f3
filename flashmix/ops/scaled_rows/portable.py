"""Rows with a factor each in plain PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import compute_dtype
from flashmix.ops.scaled_rows.call import ScaledCall


def formula(call: ScaledCall) -> Outputs:
    x, factor = call.x, call.factor
    dtype = compute_dtype(x, factor)
    return ((x.to(dtype) * factor.to(dtype).unsqueeze(-1)).to(x.dtype),)


def forward(call: ScaledCall, save: bool) -> tuple[Outputs, Outputs]:
    return formula(call), ()


def backward(call: ScaledCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    (dy,), x, factor = grads, call.x, call.factor
    assert dy is not None  # autograd asks for no gradient of an unused output
    dtype = compute_dtype(x, factor)
    dy, found = dy.to(dtype), {}
    if "x" in wanted:
        found["x"] = (dy * factor.to(dtype).unsqueeze(-1)).to(x.dtype)
    if "factor" in wanted:
        products = (x.to(dtype) * dy).contiguous()  # so that sums have one order however x lies in memory
        found["factor"] = products.sum(-1).to(factor.dtype)
    return found
