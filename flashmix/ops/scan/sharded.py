"""The scan over a shard: the recurrence with one key channel, whose states the ranks exchange."""

from __future__ import annotations

from math import gcd

from flashmix.op.call import Outputs
from flashmix.op.packing import check_whole
from flashmix.ops.recurrence import sharded
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.scan.call import COMPLEX, ScanCall
from flashmix.parallel.exchange import Moved

LARGEST_HEAD = 64  # value channels of the recurrence, whose kernels keep a head's state in one tile


def run(call: ScanCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    h, state = sharded.run(as_recurrence(call), impl, asked)
    return h.reshape(call.x.shape), state.reshape(call.sequences, *call.x.shape[2:])


def exchange(call: ScanCall) -> Moved:
    """What the ranks exchange."""
    return sharded.exchange(as_recurrence(call))


def as_recurrence(call: ScanCall) -> RecurrenceCall:
    """The scan as a call of the recurrence."""
    if call.maximum or call.x.dtype in COMPLEX:
        check_whole(call.packing, "scan_max" if call.maximum else "a complex scan")
    heads = (-1, gcd(call.x.shape[-1], LARGEST_HEAD))
    decay = call.decay.expand_as(call.x).unflatten(-1, heads).flatten(2, -2)  # [1, T, HV, V]
    v = call.x.unflatten(-1, heads).flatten(2, -2)
    one = v.new_ones(1, 1, 1, 1).expand(*v.shape[:3], 1)
    start = call.initial_state
    if start is not None:
        start = start.unflatten(-1, heads).flatten(1, -2).unsqueeze(2)  # [N, HV, 1, V]
    return RecurrenceCall(
        one,
        one,
        v,
        log_decay=decay,
        initial_state=start,
        packing=call.packing,
        scale=1.0,
        read_before=call.read_before,
        value_decay=True,
    )
