"""The blocks and segments of a selective scan, from its sizes alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.ops.selective_scan.call import CHUNK, LANES, PROGRAMS, SEGMENT, SelectiveScanCall
from flashmix.ops.selective_scan.triton_gpu.forward import SelectiveSpec

GROUP, GROUP_BACKWARD, GROUP_PRECISE = 8, 4, 2  # tokens that are loaded at a time; backwards in float32
RESIDENT = 2048  # programs of the backward, at most: each has memory of its own


class SelectivePlan(NamedTuple):
    """The spec of a call, and how its slots lie: `[slots]` of them, `each` of a dense sequence, of `segment` tokens."""

    spec: SelectiveSpec
    slots: int
    each: int
    segment: int

    @property
    def blocks(self) -> int:
        return self.spec.SHARES * self.spec.BLOCKS


def plan_of(call: SelectiveScanCall, backward: bool = False) -> SelectivePlan:
    (_, T, width), states = call.u.shape, call.A.shape[1]
    packed, N = call.packing is not None, call.sequences
    blocks = cdiv(width // call.groups, LANES)
    tokens = T if not packed else cdiv(T, max(N, 1))  # of a sequence, on average
    each = max(min(PROGRAMS // max(N * blocks * call.groups, 1), tokens // SEGMENT), 1)
    segments = each > 1
    segment = cdiv(cdiv(tokens, each), CHUNK) * CHUNK
    each = cdiv(tokens, segment) if segments else 1
    slots = N * each if not (packed and segments) else T // segment + N
    precise = call.dtype == torch.float32
    group = GROUP // 2 if precise else GROUP
    if backward:
        group = GROUP_PRECISE if precise else GROUP_BACKWARD
    spec = SelectiveSpec(
        WIDTH=width,
        STATES=states,
        TILE=power_of_two(states),
        SHARES=call.groups,
        BLOCKS=blocks,
        GROUP=group,
        PACKED=packed,
        SEGMENTS=segments,
        SOFTPLUS=call.softplus,
        PRECISE=precise,
    )
    return SelectivePlan(spec, slots, each, segment)
