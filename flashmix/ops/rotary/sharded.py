"""Rotations over a shard: its positions are those in the whole sequences, so nothing is exchanged."""

from __future__ import annotations

from typing import Any

from flashmix.op.call import Outputs
from flashmix.ops.rotary import op
from flashmix.ops.rotary.call import RotaryCall
from flashmix.parallel.exchange import Moved


def exchange(call: RotaryCall) -> Moved:
    """What the ranks exchange."""
    return Moved("nothing, as positions are global", 0, 0)


def run(call: RotaryCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    shard: Any = call.packing
    local = call.but(packing=None, positions=shard.positions.unsqueeze(0))
    return (op.ROTARY_IN_PLACE if call.in_place else op.ROTARY)(local, impl, asked)
