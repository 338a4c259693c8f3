"""The plan of calls of one kind: the Hopper kernels with their specs, beside the Triton kernels of the phases that they leave."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from flashmix.gpu import device as gpu
from flashmix.gpu.launch import Kernel
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper.output import output_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.scores import scores_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.state import state_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.state_backward import state_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.structs import HopperSpec
from flashmix.ops.recurrence.triton_gpu.plan import Plan


class HopperPlan(NamedTuple):
    """Kernels, named as in `Plan`; `triton` has the tiles of segments and the kernels that join them. `warpgroups` of the state passes."""

    triton: Plan
    warpgroups: int
    scores: Kernel
    state_output: Kernel
    state_save: Kernel
    state_maps: Kernel
    state_backward: Kernel
    state_ends: Kernel
    output: Kernel


def hopper_plan(call: RecurrenceCall, own: Plan) -> HopperPlan:
    """The plan of a call, beside Triton's. With programs for half of the multiprocessors or fewer, those of the state passes take half of
    the values each; the bits are the same.
    """
    programs = call.sequences * call.value_heads * own.tiles.segments
    warpgroups = 1 if 2 * programs <= gpu.target(call.device).multiprocessors else 2
    return _cached(own, warpgroups, call.value_heads, call.heads, call.K, call.V, call.packed, call.decay)


@lru_cache(maxsize=1024)
def _cached(
    own: Plan, warpgroups: int, value_heads: int, heads: int, K: int, V: int, packed: bool, decay: Decay
) -> HopperPlan:
    basic = HopperSpec(value_heads, value_heads // heads, K, V, packed)
    state = basic._replace(WARPGROUPS=warpgroups)
    decayed = basic._replace(DECAY=decay is not Decay.NONE)
    return HopperPlan(
        own,
        warpgroups,
        Kernel(scores_forward_kernel, decayed._replace(PER_HEAD=decay is Decay.HEAD), num_warps=1),
        _state(state_forward_kernel, state._replace(OUTPUT=True)),
        _state(state_forward_kernel, state._replace(SAVE=True)),
        _state(state_forward_kernel, state),
        _state(state_backward_kernel, state._replace(SAVE=True)),
        _state(state_backward_kernel, state),
        Kernel(output_backward_kernel, decayed, num_warps=4, maxnreg=128),
    )


def _state(kernel: Any, spec: HopperSpec) -> Kernel:
    """A state pass: two warpgroups and a producer, of 168 registers a thread before they divide them anew."""
    return Kernel(kernel, spec, num_warps=4, maxnreg=168)
