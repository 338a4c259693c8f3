"""The plan of calls of one kind: the Hopper kernels with their specs, beside the Triton kernels of the phases that they leave."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from flashmix.gpu.launch import Kernel
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper.output import output_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.state import state_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.state_backward import state_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.structs import HopperSpec
from flashmix.ops.recurrence.triton_gpu.plan import Plan, plan


class HopperPlan(NamedTuple):
    """Kernels, named as in `Plan`; `triton` has the tiles of segments and the kernels that join them."""

    triton: Plan
    scores: Kernel
    state_output: Kernel
    state_save: Kernel
    state_maps: Kernel
    state_backward: Kernel
    state_ends: Kernel
    output: Kernel


def hopper_plan(call: RecurrenceCall) -> HopperPlan:
    """The plan of a call."""
    return _cached(plan(call), call.value_heads, call.heads, call.K, call.V, call.packed, call.decay is not Decay.NONE)


@lru_cache(maxsize=1024)
def _cached(own: Plan, value_heads: int, heads: int, K: int, V: int, packed: bool, decay: bool) -> HopperPlan:
    basic = HopperSpec(value_heads, value_heads // heads, K, V, packed)
    scores = Kernel(own.scores.kernel, own.scores.spec._replace(VECTORS=True), **own.scores.options)
    return HopperPlan(
        own,
        scores,
        _state(state_forward_kernel, basic._replace(OUTPUT=True)),
        _state(state_forward_kernel, basic._replace(SAVE=True)),
        _state(state_forward_kernel, basic),
        _state(state_backward_kernel, basic._replace(SAVE=True)),
        _state(state_backward_kernel, basic),
        Kernel(output_backward_kernel, basic._replace(DECAY=decay), num_warps=4, maxnreg=128),
    )


def _state(kernel: Any, spec: HopperSpec) -> Kernel:
    """A state pass: two warpgroups and a producer, of 168 registers a thread before they divide them anew."""
    return Kernel(kernel, spec, num_warps=4, maxnreg=168)
