"""Rows that have a factor each: what a mechanism multiplies keys or outputs by, in one pass each way.

    y_r = factor_r x_r,    dx_r = factor_r dy_r,    dfactor_r = x_r . dy_r

In PyTorch a float32 factor of 16-bit rows makes the product, and five steps of its gradient, tensors of float32 in memory.
"""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.ops.scaled_rows.call import ScaledCall
from flashmix.ops.scaled_rows.portable import formula

IMPLEMENTATIONS = implementations("scaled_rows")
SCALED = Op("scaled_rows", ScaledCall, IMPLEMENTATIONS, formula=formula)


def scaled_rows(x: Tensor, factor: Tensor, impl: str = "auto") -> Tensor:
    """`x [..., D]` times a `factor [...]` of any floating dtype, in the dtype of `x`; 16-bit rows are multiplied in float32."""
    return SCALED(ScaledCall(x, factor), impl, "scaled_rows")[0]
