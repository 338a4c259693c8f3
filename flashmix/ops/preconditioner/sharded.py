"""The preconditioner of keys over a shard: its scan, whose state the ranks exchange."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.preconditioner.call import PreconditionerCall
from flashmix.ops.preconditioner.portable import formula
from flashmix.ops.scan import sharded
from flashmix.ops.scan.call import ScanCall
from flashmix.parallel.exchange import Moved


def run(call: PreconditionerCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return formula(call, impl)


def exchange(call: PreconditionerCall) -> Moved:
    """What the ranks exchange."""
    return sharded.exchange(ScanCall(call.k, call.log_decay, call.curvature, call.packing, False, False))
