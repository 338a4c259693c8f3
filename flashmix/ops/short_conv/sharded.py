"""Convolutions over a shard: the inputs before each piece come from the ranks that have them."""

from __future__ import annotations

from typing import Any

from flashmix.op.call import Outputs
from flashmix.ops.short_conv import op
from flashmix.ops.short_conv.call import Convolutions, ShortConvCall
from flashmix.parallel.exchange import Moved, halo, halo_moved


def exchange(call: Convolutions) -> Moved:
    """What the ranks exchange."""
    shard: Any = call.packing
    return halo_moved(shard, call.inputs, call.width - 1, call.initial_state)


def run(call: Convolutions, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    shard: Any = call.packing
    state, inputs = halo(shard, call.inputs, call.width - 1, call.initial_state)
    own = {name: x for (name, *_), x in zip(call.NAMES, inputs, strict=True)}
    packing = None if shard.count == 1 and shard.total else shard.local
    local = call.but(packing=packing, initial_state=state, **own)
    return (op.SHORT_CONV if isinstance(call, ShortConvCall) else op.SHORT_CONV_QKV)(local, impl, asked)
