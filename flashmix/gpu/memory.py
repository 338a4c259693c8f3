"""Memory that a call works on: one allocation, whose parts are tensors; an allocation costs the host as much as a launch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class MemoryPart(NamedTuple):
    """A tensor within an allocation."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What it takes of the allocation, in which every tensor begins at a multiple of 16 bytes."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // 16) * 16

    def of(self, parts: int) -> MemoryPart:
        """The same for the largest of so many parts of its first axis."""
        first, *rest = self.shape
        return self if parts == 1 else MemoryPart(self.dtype, (-(-first // parts), *rest))


def is_plain(t: Tensor) -> bool:
    """Whether `torch.empty_like` is `torch.empty` of the same sizes, at half of its cost to the host."""
    return t.stride() == torch.empty(t.shape, device="meta").stride()


def allocate(size: int, device: torch.device) -> Tensor | None:
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


def views(memory: Tensor | None, parts: Iterable[MemoryPart]) -> list[Tensor]:
    """The tensors of an allocation, one after the other."""
    found, begin = [], 0
    for piece in parts:
        assert memory is not None
        end = begin + math.prod(piece.shape) * piece.dtype.itemsize
        found.append(memory[begin:end].view(piece.dtype).view(piece.shape))
        begin += piece.bytes
    return found
