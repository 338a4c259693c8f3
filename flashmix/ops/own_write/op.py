"""The read of a token's own write by its queries, added to the outputs: an op of mechanisms, which check its arguments.

    z_t = y_t + (scale own_t (B_t . C_t) + D) x_t

Keys and queries of a group are shared by its heads, and a product in PyTorch is a tensor of float32 in memory for each.
"""

from __future__ import annotations

from torch import Tensor

from flashmix.op.call import Op, implementations
from flashmix.op.choose import preparing
from flashmix.ops.own_write.call import OwnWriteCall
from flashmix.ops.own_write.portable import formula

IMPLEMENTATIONS = implementations("own_write", formula=formula)
OWN_WRITE = Op("own_write", OwnWriteCall, IMPLEMENTATIONS, passes={"y": 0})


def with_own_write(
    y: Tensor, x: Tensor, B: Tensor, C: Tensor, own: Tensor, D: Tensor | None, scale: float, impl: str
) -> Tensor:
    """`y` with what queries read of their own tokens, beside a call of the recurrence, whose `impl` and explanations are its own."""
    with preparing():
        call = OwnWriteCall(y, x, B, C, own, D, scale)
        return OWN_WRITE(call, "portable" if impl == "portable" else "auto", "mamba3")[0]
