"""Softmax attention in Triton, for any GPU from compute capability 8.0: forward and backward, every feature with every other."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.triton_gpu.backward import attention_backward
from flashmix.ops.attention.triton_gpu.decay import running_sums, sums_of_gradients
from flashmix.ops.attention.triton_gpu.forward import attention_forward
from flashmix.ops.attention.triton_gpu.launch import Call


def keeps(call: AttentionCall) -> Outputs:
    return call.row_statistics()


def forward(call: AttentionCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o`, with `return_lse` lse, and for backward m and l."""
    x = Call.of(call)
    o, lse, kept = attention_forward(x, running_sums(x, call.log_decay, x.form("forward", True)[0]))
    return (o, lse) if call.return_lse else (o,), tuple(kept) if save else ()


def backward(call: AttentionCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of q, k, v and of each of sink, slopes and decay that is given."""
    x, log_decay = Call.of(call), call.log_decay
    o, *statistics = kept
    d_o, d_lse = grads if call.return_lse else (*grads, None)
    decay = running_sums(x, log_decay)[0]
    gradients, at_rows, at_keys = attention_backward(x, d_o, d_lse, o, statistics, decay)
    names = ["q", "k", "v"] + [name for name in ("sink", "alibi_slopes") if getattr(call, name) is not None]
    found = dict(zip(names, gradients, strict=True))
    if log_decay is not None and at_rows is not None and at_keys is not None:
        found["log_decay"] = sums_of_gradients(x, log_decay, at_rows, at_keys)
    return found
