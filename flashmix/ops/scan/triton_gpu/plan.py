"""The blocks and segments of a scan, from its sizes alone: its spec and how its work is laid out."""

from __future__ import annotations

from typing import NamedTuple

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.ops.scan.call import COUPLINGS, ScanCall

BY_CHANNEL, BY_HEAD, CONSTANT = range(3)
THREADS, WIDEST_HEAD = 32, 256  # a program is a warp
GROUP, GROUP_SEGMENTED, GROUP_BACKWARD = 24, 16, 16  # numbers of a tensor that a thread loads at a time
JOINED = 16
FEW, PROGRAMS, SEGMENT = 512, 4096, 256  # at most FEW programs become PROGRAMS by segments of at least SEGMENT tokens


class ScanSpec(NamedTuple):
    WIDTH: int  # channels of a sequence
    HEAD: int  # of a head
    DECAY: int
    BLOCK: int  # c
    GROUP: int  # tokens that are loaded at a time
    JOINED: int  # segments that are read at a time
    READ_BEFORE: bool
    PACKED: bool
    SEGMENTS: bool
    MAXIMUM: bool
    COMPLEX: bool
    TURNING: bool  # complex factors
    COUPLING: int  # as in COUPLINGS, from 1; 0: none
    PRECISE: bool  # factors to float32's rounding; else they err by two steps of it, far below those of 16 bits


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


class Segments(NamedTuple):
    """`[slots]` parts of sequences, `each` of a dense one (1: whole ones), of `segment` tokens; `tokens` of a sequence, on average."""

    slots: int
    each: int
    segment: int
    tokens: int


def segments_of(packed: bool, sequences: int, tokens: int, blocks: int, multiple: int = 1) -> Segments:
    """How `sequences` of `tokens` tokens (packed: all together) are cut where they have few `blocks`, into a multiple of tokens."""
    length = tokens if not packed else cdiv(tokens, max(sequences, 1))
    programs = sequences * blocks
    each = min(PROGRAMS // max(programs, 1), length // SEGMENT) if programs <= FEW else 1
    segment = cdiv(length, max(each, 1))
    if each <= 1:
        return Segments(sequences, 1, segment, length)
    segment = cdiv(segment, multiple) * multiple
    each = cdiv(length, max(segment, 1))
    return Segments(tokens // segment + sequences if packed and each > 1 else sequences * each, each, segment, length)


def plan_of(call: ScanCall, backward: bool = False) -> ScanPlan:
    sizes = call.x.shape[2:]
    width, head = sizes.numel(), sizes[-1]
    packed, N, T = call.packing is not None, call.sequences, call.tokens
    pairs = call.dtype.is_complex
    decay, block = CONSTANT if call.constant else BY_CHANNEL, THREADS
    if call.by_head and not call.constant and head <= WIDEST_HEAD and not pairs:
        decay, block = BY_HEAD, power_of_two(head)
    blocks = width // head if decay == BY_HEAD else cdiv(width, block)
    slots, each, segment, tokens = segments_of(packed, N, T, blocks)
    segments = each > 1
    group = GROUP_BACKWARD if backward else GROUP_SEGMENTED if segments else GROUP
    group //= 2 if pairs else cdiv(block, 2 * THREADS)
    group = min(max(group, 1), power_of_two(tokens))
    spec = ScanSpec(
        WIDTH=width,
        HEAD=head,
        DECAY=decay,
        BLOCK=block,
        GROUP=group,
        JOINED=min(power_of_two(each), JOINED),
        READ_BEFORE=call.read_before,
        PACKED=packed,
        SEGMENTS=segments,
        MAXIMUM=call.maximum,
        COMPLEX=pairs,
        TURNING=pairs and (decay == CONSTANT or call.log_decay.is_complex()),
        COUPLING=COUPLINGS.index(call.coupling) + 1 if call.coupling else 0,
        PRECISE=pairs or call.dtype.itemsize == 4,
    )
    return ScanPlan(spec, slots, each, segment)
