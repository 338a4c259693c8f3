"""The running softmax, an op of the mechanisms `abc` and `lightnet`, which check their arguments.

    z_t = log(e^{z_{t-1}} + e^{s_t});  weights e^{s_t - z_t},  log decays z_{t-1} - z_t

A decay is 1 less the weight: -inf at a first token without a past. Where no logit was above -inf yet, the weight and the log decay are 0.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flashmix.op.call import Op, always, native_refuses, triton_refuses_first
from flashmix.op.choose import Implementation, preparing
from flashmix.op.packing import Packing
from flashmix.ops.running_softmax.call import RunningSoftmaxCall
from flashmix.ops.running_softmax.portable import formula
from flashmix.ops.scan.native.binding import missing


def _native_supports(call: RunningSoftmaxCall) -> str | None:
    return native_refuses(call, call.z.dtype) or missing()


_PORTABLE = "flashmix.ops.running_softmax.portable"
IMPLEMENTATIONS: tuple[Implementation[RunningSoftmaxCall], ...] = (
    Implementation("triton", "flashmix.ops.running_softmax.triton_gpu", triton_refuses_first),
    Implementation("native", _PORTABLE, _native_supports, partial(formula, impl="native")),
    Implementation("portable", _PORTABLE, always, partial(formula, impl="portable")),
)
RUNNING_SOFTMAX = Op(
    "running_softmax",
    RunningSoftmaxCall,
    IMPLEMENTATIONS,
    keeps_outputs=(1,),
    sharded="flashmix.ops.running_softmax.sharded",
)


def running_softmax(
    s: Tensor, start: Tensor, packing: Packing | None, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and log decays of logits `[B, T, ...]`, and the last `z`, from the first ones `[N, ...]`; beside a call of the recurrence,
    whose `impl` and explanations are its own.
    """
    with preparing():
        call = RunningSoftmaxCall(s, start, packing)
        impl = impl if impl in [one.name for one in IMPLEMENTATIONS] else "auto"
        weight, decay, z = RUNNING_SOFTMAX(call, impl)
    return weight, decay, z
