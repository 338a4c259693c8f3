"""minLSTM: an LSTM whose gates see the input alone and sum to one, which makes it a scan."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from flashmix.mechanisms.common import (
    Result,
    StateOptions,
    check_elementwise,
    positive_candidate,
    scan_options,
    unrounded,
)
from flashmix.mechanisms.registry import Mechanism, register
from flashmix.op.dtypes import state_dtype
from flashmix.op.public import public
from flashmix.op.softplus import invariant_softplus
from flashmix.ops.scan.op import scan


@public
@scan_options
@unrounded("forget", "write", "candidate")
def minlstm(forget: Tensor, write: Tensor, candidate: Tensor, **options: Unpack[StateOptions]) -> Result:
    """minLSTM: an LSTM whose gates see the input alone and are divided by their sum.

        f_t = sigmoid(forget_t), i_t = sigmoid(write_t);  h_t = (f_t h_{t-1} + i_t c'_t) / (f_t + i_t)

    with `c' = c + 1/2` for `c >= 0`, else `sigmoid(c)`.

    Args:
        forget: logits of `f`, `[B, T, D]` or `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        write: logits of `i`, like `forget`.
        candidate: `c`, like `forget`.
        initial_state: `h` `[N, D]` or `[N, H, D]`, float32 (float64 for float64 inputs); default zeros.

    Source: Feng et al. 2024 (arXiv 2410.01201), section 3.2, and appendix B for the candidate.

    Example:
        >>> import torch
        >>> h, state = minlstm(*torch.randn(3, 1, 10, 32), return_state=True)
        >>> h.shape, state.shape
        (torch.Size([1, 10, 32]), torch.Size([1, 32]))
    """
    options["cu_seqlens"] = check_elementwise(options, forget=forget, write=write, candidate=candidate)
    wide = state_dtype(forget.dtype)
    ahead = invariant_softplus(-forget.to(wide)) - invariant_softplus(-write.to(wide))  # log(i / f)
    return scan(positive_candidate(candidate.to(wide)).to(forget.dtype), ahead, coupling="logit", **options)


register(Mechanism(title="minLSTM", paper="2410.01201", function=minlstm, call="forget:BTHK write:BTHK candidate:BTHK"))
