"""Softmax attention in Triton, for any GPU from compute capability 8.0: forward and backward, every feature with every other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.backward import attention_backward
from flashmix.ops.attention.triton_gpu.decay import running_sums
from flashmix.ops.attention.triton_gpu.forward import attention_forward
from flashmix.ops.attention.triton_gpu.spec import laid_out, spec_of


def keeps(call: AttentionCall) -> Outputs:
    return call.row_statistics()


def forward(call: AttentionCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o`, with `return_lse` lse, and for backward m and l."""
    call = laid_out(call)
    spec, options = spec_of(call, "forward")
    o, lse, kept = attention_forward(call, spec, options, running_sums(call, spec))
    return (o, lse) if call.return_lse else (o,), kept if save else ()


def backward(call: AttentionCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of q, k, v and of each of sink, slopes and decay that is given."""
    d_o, d_lse = grads if call.return_lse else (*grads, None)
    return attention_backward(laid_out(call), kept, d_o, d_lse)
