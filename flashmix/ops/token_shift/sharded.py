"""The token shift over a shard: the token before each piece comes from the rank that has it."""

from __future__ import annotations

from typing import Any

from flashmix.op.call import Outputs
from flashmix.ops.token_shift import op
from flashmix.ops.token_shift.call import ShiftCall
from flashmix.parallel.exchange import Moved, halo, halo_moved


def exchange(call: ShiftCall) -> Moved:
    """What the ranks exchange."""
    shard: Any = call.packing
    return halo_moved(shard, (call.x,), 1, call.initial_state)


def run(call: ShiftCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    shard: Any = call.packing
    state, (x,) = halo(shard, (call.x,), 1, call.initial_state)
    return op.SHIFT(call.but(x=x, packing=shard.local, initial_state=state), impl, asked)
