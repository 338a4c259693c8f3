"""Rows with a factor each in plain PyTorch, which torch differentiates."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.op.dtypes import compute_dtype
from flashmix.ops.scaled_rows.call import ScaledCall


def formula(call: ScaledCall) -> Outputs:
    x, factor = call.x, call.factor
    dtype = compute_dtype(x, factor)
    return ((x.to(dtype) * factor.to(dtype).unsqueeze(-1)).to(x.dtype),)
