"""The tiles and segments of a scan, from its sizes alone: its spec and how its work is laid out."""

from __future__ import annotations

from typing import NamedTuple

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.ops.scan.call import ScanCall

BY_CHANNEL, BY_HEAD, CONSTANT = range(3)
TILE, CHANNELS, WIDEST_HEAD = 2048, 64, 256
PROGRAMS, SEGMENT = 512, 512  # segments for fewer programs than that, of at least so many tokens


class ScanSpec(NamedTuple):
    WIDTH: int  # channels of a sequence
    HEAD: int  # of a head
    DECAY: int
    BLOCK: int  # c
    TIME: int  # t
    READ_BEFORE: bool
    PACKED: bool
    SEGMENTS: bool
    MAXIMUM: bool
    REVERSE: bool = False  # segments are joined from the last one


class ScanPlan(NamedTuple):
    """The spec of a call, and how its slots lie: `[slots]` of them, `each` of a dense sequence, of `segment` tokens."""

    spec: ScanSpec
    slots: int
    each: int
    segment: int

    @property
    def blocks(self) -> int:
        S = self.spec
        return S.WIDTH // S.HEAD if S.DECAY == BY_HEAD else cdiv(S.WIDTH, S.BLOCK)


BACKWARD_SEGMENTS = False  # right in the interpreter and not yet seen right on a card


def plan_of(call: ScanCall, backward: bool = False) -> ScanPlan:
    sizes = call.x.shape[2:]
    width, head = sizes.numel(), sizes[-1]
    decay = CONSTANT if call.constant else BY_CHANNEL
    block = min(power_of_two(width), CHANNELS)
    if call.by_head and not call.constant and head <= WIDEST_HEAD:
        decay, block = BY_HEAD, power_of_two(head)
    time = TILE // max(block, 32)
    packed, N, T = call.packing is not None, call.sequences, call.tokens
    blocks = width // head if decay == BY_HEAD else cdiv(width, block)
    tokens = T if not packed else cdiv(T, max(N, 1))  # of a sequence, on average
    each = min(cdiv(PROGRAMS, max(N * blocks, 1)), tokens // SEGMENT) if BACKWARD_SEGMENTS or not backward else 1
    segments = each > 1
    segment = cdiv(cdiv(tokens, max(each, 1)), time) * time
    each = cdiv(tokens, max(segment, 1)) if segments else 1
    slots = N * each if not (packed and segments) else T // segment + N
    spec = ScanSpec(width, head, decay, block, time, call.read_before, packed, segments, call.maximum)
    return ScanPlan(spec, slots, each, segment)
