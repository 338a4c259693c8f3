"""The running softmax over a shard, as two scans, whose states the ranks exchange; `explain` hears of the mechanism's recurrence alone."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.running_softmax.call import RunningSoftmaxCall
from flashmix.ops.running_softmax.portable import formula


def run(call: RunningSoftmaxCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return formula(call, impl)
