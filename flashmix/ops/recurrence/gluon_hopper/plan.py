"""The plan of calls of one kind: the Hopper kernels with their specs, beside the Triton kernels of the phases that they leave."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from flashmix.gpu import device as gpu
from flashmix.gpu.launch import Kernel
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper.channel_far_rows import channel_far_rows_kernel
from flashmix.ops.recurrence.gluon_hopper.channel_inverse import channel_inverse_kernel
from flashmix.ops.recurrence.gluon_hopper.channel_output import channel_output_kernel
from flashmix.ops.recurrence.gluon_hopper.channel_scores import channel_scores_kernel
from flashmix.ops.recurrence.gluon_hopper.join import join_kernel
from flashmix.ops.recurrence.gluon_hopper.output import output_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.scores import scores_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.state import state_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.state_backward import state_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.structs import HopperSpec, JoinSpec
from flashmix.ops.recurrence.gluon_hopper.walk import walk_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.wide_linear import wide_linear_backward_kernel, wide_linear_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.wide_output import wide_output_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.wide_state import wide_state_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.wide_state_backward import wide_state_backward_kernel
from flashmix.ops.recurrence.triton_gpu.plan import Plan


class HopperPlan(NamedTuple):
    """Kernels, named as in `Plan`; `triton` has the tiles of segments, and the kernels that join them where `join_forward` and
    `join_backward` do not. Their tiles are BK channels of keys and BV of values wide.
    """

    triton: Plan
    BK: int
    BV: int
    scores: Kernel
    state_output: Kernel
    state_output_keep: Kernel
    state_output_save: Kernel
    state_save: Kernel
    state_save_given: Kernel
    state_maps: Kernel
    state_backward: Kernel
    state_ends: Kernel
    output: Kernel
    join_forward: Kernel
    join_backward: Kernel
    walk: Kernel
    walk_given: Kernel
    channel_scores: Kernel
    channel_scores_save: Kernel
    channel_far_rows: Kernel
    channel_inverse: Kernel
    channel_output: Kernel


def width_of(channels: int) -> int:
    """Channels of the tiles of heads."""
    return 64 if channels <= 64 else 128 if channels <= 128 else 256


def hopper_plan(call: RecurrenceCall, own: Plan) -> HopperPlan:
    """The plan of a call, beside Triton's. With programs for half of the multiprocessors or fewer, those of the state passes take half of
    the values each; the bits are the same.
    """
    programs = call.sequences * call.value_heads * own.tiles.segments
    BV = width_of(call.V)
    split = (
        BV if BV == 128 or (BV == 256 and not call.rule.corrected) else 0
    )  # channels of values that may be divided anew
    few = split and split // 64 * programs <= gpu.target(call.device).multiprocessors
    warpgroups = 1 if BV == 64 or few else 2
    basic = HopperSpec(
        HV=call.value_heads,
        GROUP=call.value_heads // call.heads,
        K=call.K,
        V=call.V,
        BK=width_of(call.K),
        BV=BV,
        PACKED=call.packed,
        CORRECTED=call.rule.corrected,
    )
    early = own.tiles.segments > 1 and max(basic.BK, BV) <= 128
    return _cached(own, warpgroups, basic, call.decay, early)


@lru_cache(maxsize=1024)
def _cached(own: Plan, warpgroups: int, basic: HopperSpec, decay: Decay, early: bool) -> HopperPlan:
    channel = decay is Decay.CHANNEL
    state = basic._replace(WARPGROUPS=warpgroups, CHANNEL=channel, EARLY=early)
    output = state._replace(
        OUTPUT=True, KEYS=2 if channel else 3
    )  # keys come a chunk earlier where A_qb is made of them
    saved = output._replace(SAVE=True, VALUES=2, PAIRS=2)
    if basic.CORRECTED:
        saved = saved._replace(KEYS=2)  # beside states, nu and o there is room for no more
    ends = state._replace(KEYS=2 if channel else 3)
    back = (
        ends._replace(VALUES=2, PAIRS=2) if basic.CORRECTED else ends
    )  # room for that beside the states, or for queries, a and b
    maps = state._replace(WARPGROUPS=1) if basic.BK != basic.BV else state  # N and M differ in their channels
    if warpgroups == 2 and basic.BK == basic.BV == 128:  # one program on a multiprocessor, with room for more stages
        maps = maps._replace(KEYS=3, VALUES=3) if channel else maps._replace(KEYS=4, VALUES=4, PAIRS=4)
        maps = maps._replace(STAYS=True)
    decayed = basic._replace(DECAY=decay is not Decay.NONE, EARLY=early)
    stages = 1 if basic.CORRECTED else 2  # of dO and nu: without corrections there is room
    join = JoinSpec(basic.K, basic.V, BACK=False)
    pairs = own.scores.spec._replace(BK=own.tiles.decay.BK, ONE_PASS=2 * own.scores.spec.LIMIT)
    return HopperPlan(
        triton=own,
        BK=basic.BK,
        BV=basic.BV,
        scores=Kernel(scores_forward_kernel, decayed._replace(PER_HEAD=decay is Decay.HEAD), num_warps=1, maxnreg=144),
        state_output=_state(state_forward_kernel, output, True),
        state_output_keep=_state(state_forward_kernel, output._replace(KEEP=basic.CORRECTED), True),
        state_output_save=_state(state_forward_kernel, saved, True),
        state_save=_state(state_forward_kernel, state._replace(SAVE=True), False),
        state_save_given=_state(state_forward_kernel, state._replace(SAVE=True, GIVEN=True, CORRECTED=False), False),
        state_maps=_state(state_forward_kernel, maps, False),
        state_backward=_state(state_backward_kernel, back._replace(SAVE=True), True),
        state_ends=_first(_state(state_backward_kernel, back if channel else ends, basic.CORRECTED)),
        output=_output(decayed),
        join_forward=Kernel(join_kernel, join, num_warps=8, maxnreg=168, launch_pdl=True),
        join_backward=Kernel(join_kernel, join._replace(BACK=True), num_warps=8, maxnreg=168, launch_pdl=True),
        walk=_later(walk_backward_kernel, decayed._replace(STAGES=stages, NUS=stages), 128),
        walk_given=_later(walk_backward_kernel, decayed._replace(GIVEN=True, NUS=2), 128),
        channel_scores=Kernel(channel_scores_kernel, basic, num_warps=4),
        channel_scores_save=Kernel(channel_scores_kernel, basic._replace(SAVE=True), num_warps=4),
        channel_far_rows=Kernel(channel_far_rows_kernel, pairs, num_warps=4),
        channel_inverse=Kernel(channel_inverse_kernel, HopperSpec(0, 0, 0, 0), num_warps=1),
        channel_output=Kernel(channel_output_kernel, basic, num_warps=4, maxnreg=128),
    )


def _later(kernel: Any, spec: HopperSpec, registers: int) -> Kernel:
    """A kernel of four warps beside others that is not the first of a call: with EARLY it is launched while the one before it runs."""
    early = {"launch_pdl": True} if spec.EARLY else {}
    return Kernel(kernel, spec, num_warps=4, maxnreg=registers, **early)


def _first(kernel: Kernel) -> Kernel:
    """The same kernel as the first of a call, behind kernels that may not wait for those before them as ours do."""
    options = {name: value for name, value in kernel.options.items() if name != "launch_pdl"}
    return Kernel(kernel.kernel, kernel.spec, llvm_passes=kernel.llvm_passes, **options)


def _state(kernel: Any, spec: HopperSpec, queries: bool) -> Kernel:
    """A state pass, which may multiply by the queries' pairs A_qb: up to three warpgroups and a producer, with as many registers a
    thread as they have before they divide them anew. Tiles of 64 channels leave room for more stages, and where no A_qb is made for two
    programs a multiprocessor, of a warpgroup each.
    """
    made = queries and not spec.CHANNEL
    if spec.BK == 256:
        return (_wide_state if spec.CORRECTED else _wide_linear)(kernel, spec, made)
    registers = 128 if spec.WARPGROUPS + made in (1, 3) else 168
    if spec.BK == 64:
        stages, registers = (4, registers) if made else (3, 128)
        values = 3 if spec.WARPGROUPS == 2 else stages
        spec = spec._replace(KEYS=stages, VALUES=values, PAIRS=stages, WARPGROUPS=spec.WARPGROUPS if made else 1)
    elif spec.BV == 64:
        stages, registers = (4, registers) if made else (3, 128)
        spec = spec._replace(KEYS=3 if made else 2, VALUES=stages, PAIRS=stages)
    spec = spec._replace(READS=spec.CORRECTED + (queries and spec.CHANNEL), MAKES=made)
    return _later(kernel, spec, registers)


def _wide_state(kernel: Any, spec: HopperSpec, made: bool) -> Kernel:
    """A state pass with 256 channels: what A_qb is made of takes the room of a stage of keys, of values and of T."""
    wide = wide_state_forward_kernel if kernel is state_forward_kernel else wide_state_backward_kernel
    keys, pairs = (2, 1) if made else (3, 2)
    spec = spec._replace(MAKES=made, KEYS=keys, VALUES=2, PAIRS=pairs)
    return Kernel(wide, spec, num_warps=4, maxnreg=128 if made else 168)


def _wide_linear(kernel: Any, spec: HopperSpec, made: bool) -> Kernel:
    """The same without corrections: no T and no nu, so that there is room for two stages of queries, and for A_qb of two chunks."""
    wide = wide_linear_forward_kernel if kernel is state_forward_kernel else wide_linear_backward_kernel
    keys, values = (2, 2) if made else (3, 3)
    spec = spec._replace(MAKES=made, KEYS=keys, VALUES=values, PAIRS=2)
    return Kernel(wide, spec, num_warps=4, maxnreg=128 if spec.WARPGROUPS + made == 3 else 168)


def _output(spec: HopperSpec) -> Kernel:
    """The backward of `output`: with tiles of 64 channels there is a warpgroup less, and shared memory for rings of more stages."""
    if spec.BK == 256:
        spec = spec._replace(GROUP=1, SHARED=spec.GROUP, KEYS=1, NUS=1)
        return Kernel(wide_output_backward_kernel, spec, num_warps=4, maxnreg=128)
    if spec.BK == 128:
        stages = 2 if spec.BV == 64 else 1
        return _later(output_backward_kernel, spec._replace(STAGES=stages), 128)
    keys = 4 if spec.BV == 64 else 2
    return _later(output_backward_kernel, spec._replace(KEYS=keys, STAGES=2, NUS=keys), 168)
