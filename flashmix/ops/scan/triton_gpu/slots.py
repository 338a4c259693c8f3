"""Where the slots of a scan's kernels lie: sequences, or segments of packed ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashmix.op.packing import Packing
from flashmix.ops.scan.triton_gpu.kernels import Slots


def slots_of(packing: Packing | None, plan: Any) -> Slots:
    """The slots of a plan, which has a `spec` with PACKED and SEGMENTS, and the tokens of a `segment`."""
    if packing is None:
        return Slots(None, None, None)
    sequence = place = None
    if plan.spec.SEGMENTS:
        segment = plan.segment
        sequence, place = packing.table((_segments, segment), lambda: _segments(packing, segment))
    return Slots(packing.cu_seqlens.contiguous(), sequence, place)


def _segments(packing: Packing, segment: int) -> tuple[Tensor, ...]:
    """Of each segment its sequence and its place there, -1 of idle ones."""
    count = (packing.cu_seqlens.to(torch.int64).diff() + (segment - 1)) // segment
    ends = count.cumsum(0)
    at = torch.arange(packing.total // segment + packing.count, device=ends.device)
    sequence = torch.searchsorted(ends, at, right=True)
    idle = sequence >= packing.count
    sequence = sequence.clamp(max=max(packing.count - 1, 0))
    return sequence, (at - (ends - count)[sequence]).masked_fill(idle, -1)
