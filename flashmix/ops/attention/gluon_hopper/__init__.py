"""Softmax attention for Hopper GPUs, in Gluon: forward; `triton_gpu` takes what `supports` refuses, and the backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention import triton_gpu
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.forward import attention_forward
from flashmix.ops.attention.triton_gpu.spec import laid_out


def keeps(call: AttentionCall) -> Outputs:
    return call.row_statistics()


def forward(call: AttentionCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o`, with `return_lse` lse, and for backward m and l."""
    o, lse, kept = attention_forward(laid_out(call))
    return (o, lse) if call.return_lse else (o,), kept if save else ()


def backward(call: AttentionCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of q, k, v and of each of sink, slopes and decay that is given."""
    return triton_gpu.backward(call, kept, grads, wanted)
