"""minGRU: a GRU whose gates see the input alone, which makes it a scan."""

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
from flashmix.ops.scan.op import scan


@public
@scan_options
@unrounded("gate", "candidate")
def mingru(gate: Tensor, candidate: Tensor, **options: Unpack[StateOptions]) -> Result:
    """minGRU: a GRU whose gate and candidate see the input alone.

        z_t = sigmoid(gate_t);  h_t = (1 - z_t) h_{t-1} + z_t c'_t,  c' = c + 1/2 for c >= 0, else sigmoid(c)

    Args:
        gate: logits of `z`, `[B, T, D]` or `[B, T, H, D]`, float32, bfloat16, float16 or float64.
        candidate: `c`, like `gate`.
        initial_state: `h` `[N, D]` or `[N, H, D]`, float32 (float64 for float64 inputs); default zeros.

    Source: Feng et al. 2024 (arXiv 2410.01201), section 3.1, and appendix B for the candidate.

    Example:
        >>> import torch
        >>> h, state = mingru(*torch.randn(2, 1, 10, 32), return_state=True)
        >>> h.shape, state.shape
        (torch.Size([1, 10, 32]), torch.Size([1, 32]))
    """
    options["cu_seqlens"] = check_elementwise(options, gate=gate, candidate=candidate)
    written = positive_candidate(candidate.to(state_dtype(gate.dtype)))
    return scan(written.to(gate.dtype), gate, coupling="logit", **options)


register(Mechanism(title="minGRU", paper="2410.01201", function=mingru, call="gate:BTHK candidate:BTHK"))
