"""RWKV-4's averages over a shard, as three scans, whose states the ranks exchange."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.scan import sharded
from flashmix.ops.scan.call import ScanCall
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.portable import formula
from flashmix.parallel.exchange import Moved


def run(call: WkvCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return formula(call, impl)


def exchange(call: WkvCall) -> Moved:
    """What the ranks exchange."""
    maximum = ScanCall(call.k, call.log_decay, call.m, call.packing, read_before=True, maximum=True)
    both = [sharded.exchange(maximum.but(maximum=False, log_decay=call.k))] * 2
    first = sharded.exchange(maximum)
    return Moved("states of three scans", first.forward + sum(m.forward for m in both), sum(m.backward for m in both))
