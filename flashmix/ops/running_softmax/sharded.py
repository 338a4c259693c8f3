"""The running softmax over a shard, as two scans, whose states the ranks exchange."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.running_softmax.call import RunningSoftmaxCall
from flashmix.ops.running_softmax.portable import formula
from flashmix.ops.scan import sharded
from flashmix.ops.scan.call import ScanCall
from flashmix.parallel.exchange import Moved


def run(call: RunningSoftmaxCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return formula(call, impl)


def exchange(call: RunningSoftmaxCall) -> Moved:
    """What the ranks exchange."""
    wide = call.s.to(call.z.dtype)
    maximum = ScanCall(wide, wide, call.z, call.packing, read_before=True, maximum=True)
    both = [sharded.exchange(maximum), sharded.exchange(maximum.but(maximum=False))]
    return Moved("states of two scans", sum(m.forward for m in both), both[1].backward)
