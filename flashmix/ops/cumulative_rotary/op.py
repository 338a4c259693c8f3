"""Rotations by angles that add up over tokens, an op of the mechanism `mamba3`, which checks its arguments."""

from __future__ import annotations

from flashmix.op.call import Op, Outputs, implementations
from flashmix.op.choose import preparing
from flashmix.ops.cumulative_rotary.call import CumulativeRotaryCall
from flashmix.ops.cumulative_rotary.portable import formula

IMPLEMENTATIONS = implementations("cumulative_rotary", formula=formula)
CUMULATIVE_ROTARY = Op("cumulative_rotary", CumulativeRotaryCall, IMPLEMENTATIONS)


def cumulative_rotary(call: CumulativeRotaryCall, impl: str) -> Outputs:
    """The outputs of a checked call beside a call of the recurrence, whose `impl` and explanations are its own."""
    with preparing():
        if call.packing is not None and call.packing.sharded:
            return formula(call)  # its parts exchange with the other ranks
        return CUMULATIVE_ROTARY(call, "portable" if impl == "portable" else "auto", "mamba3")
