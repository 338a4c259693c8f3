"""Softmax attention for Hopper GPUs, in Gluon; `triton_gpu` takes what `supports` refuses, and some backward passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.ops.attention import triton_gpu
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention.gluon_hopper.backward import attention_backward
from flashmix.ops.attention.gluon_hopper.forward import attention_forward
from flashmix.ops.attention.triton_gpu.spec import laid_out

CHANNELS_BACKWARD = (
    81,
    128,
)  # of the larger head dim: below, Triton's backward is as fast; above, dK and dV do not fit into registers


def backward_supports(call: AttentionCall) -> str | None:
    """Why the backward goes to `triton_gpu`, which reads what the forward keeps; None if it does not."""
    least, most = CHANNELS_BACKWARD
    if call.log_decay is not None or call.alibi_slopes is not None:
        return "it has no gradients of gates and slopes"
    if not least <= max(call.q.shape[3], call.v.shape[3]) <= most:
        return f"its tiles take head dims from {least} to {most}"
    return None


def keeps(call: AttentionCall) -> Outputs:
    return call.row_statistics()


def forward(call: AttentionCall, save: bool) -> tuple[Outputs, Outputs]:
    """`o`, with `return_lse` lse, and for backward m and l."""
    o, lse, kept = attention_forward(laid_out(call))
    return (o, lse) if call.return_lse else (o,), kept if save else ()


def backward(call: AttentionCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: Collection[str]) -> Gradients:
    """The gradients of q, k, v and of each of sink, slopes and decay that is given."""
    if backward_supports(call) is not None:
        return triton_gpu.backward(call, kept, grads, wanted)
    d_o, d_lse = grads if call.return_lse else (*grads, None)
    return attention_backward(laid_out(call), kept, d_o, d_lse)
