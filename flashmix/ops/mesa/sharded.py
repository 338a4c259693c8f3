"""MesaNet's solution over a shard, as passes of the recurrence, whose states the ranks exchange."""

from __future__ import annotations

from flashmix.op.call import Outputs
from flashmix.ops.mesa.call import MesaCall
from flashmix.ops.mesa.portable import formula
from flashmix.ops.recurrence import sharded
from flashmix.parallel.exchange import Moved


def run(call: MesaCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    return formula(call, impl)


def exchange(call: MesaCall) -> Moved:
    """What the ranks exchange: a state a pass, and each pass of the backward's solution is one of the forward's kind."""
    product, read = (sharded.exchange(each) for each in (call.product, call.read))
    forward = (call.steps + 1) * product.forward + read.forward
    backward = call.steps * product.forward + product.backward + read.backward
    return Moved(f"states of {call.steps + 2} passes", forward, backward)
