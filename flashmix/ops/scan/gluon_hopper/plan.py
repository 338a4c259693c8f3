"""How the scan's work lies on Hopper, from its sizes alone."""

from __future__ import annotations

from typing import NamedTuple

from flashmix.gpu.blocks import cdiv
from flashmix.ops.scan.call import COUPLINGS, ScanCall

BLOCK = 64  # channels of a program, which is a warp
GROUP = 16  # tokens that are copied at a time
STAGES, STAGES_OF_FEW = 4, 8  # such copies on their way, with many programs and with less than MANY
MANY = 512
FEW = 192  # fewer programs than these become segments of STAGES_OF_FEW groups
WINDOW, JOINED = (
    (64, 16),
    (8, 16),
)  # segments of a window, and how many of them are read at a time, forward and backward


class HopperScanSpec(NamedTuple):
    WIDTH: int  # channels of a sequence
    BLOCK: int  # c
    GROUP: int
    STAGES: int  # with SEGMENTS: those of a segment
    WINDOW: int
    JOINED: int
    READ_BEFORE: bool
    PACKED: bool
    SEGMENTS: bool
    COUPLING: int  # as in COUPLINGS, from 1; 0: none
    BITS_X: int
    BITS_G: int


class HopperScanPlan(NamedTuple):
    """The spec of a call; its slots are sequences, or segments, `each` of a dense sequence, of `segment` tokens."""

    spec: HopperScanSpec
    slots: int
    each: int
    segment: int

    @property
    def programs(self) -> int:
        return self.slots * cdiv(self.spec.WIDTH, self.spec.BLOCK)


def plan_of(call: ScanCall, backward: bool = False) -> HopperScanPlan:
    width, T, N = call.x.shape[2:].numel(), call.tokens, call.sequences
    packed = call.packing is not None
    programs = N * cdiv(width, BLOCK)
    stages = STAGES if programs >= MANY else STAGES_OF_FEW
    segment = stages * GROUP
    each = cdiv(T, segment)
    segments = programs < FEW and (cdiv(T, max(N, 1)) if packed else T) > segment
    slots = N if not segments else T // segment + N if packed else N * each
    spec = HopperScanSpec(
        WIDTH=width,
        BLOCK=BLOCK,
        GROUP=GROUP,
        STAGES=stages,
        WINDOW=WINDOW[backward],
        JOINED=JOINED[backward],
        READ_BEFORE=call.read_before,
        PACKED=packed,
        SEGMENTS=segments,
        COUPLING=COUPLINGS.index(call.coupling) + 1 if call.coupling else 0,
        BITS_X=8 * call.x.dtype.itemsize,
        BITS_G=8 * call.log_decay.dtype.itemsize,
    )
    return HopperScanPlan(spec, slots, each, segment)
