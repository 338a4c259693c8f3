"""Memory for the tiles that a portable implementation works on, kept from one to the next and from call to call.

On the CPU a fresh tile costs a page fault every 4 KiB and finds nothing in cache; that was a third to half of the time of a call.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

# What a thread keeps at most; what does not fit is allocated as usual. Implementations share it: one op runs at a time in a thread.
LIMIT = 64 << 20


class Scratch(threading.local):
    """One thread's memory, handed out from the front and taken back all at once."""

    def __init__(self) -> None:
        self._size = 0
        self._memory = {
            torch.uint8: torch.empty(0, dtype=torch.uint8, device="cpu")
        }  # the same bytes as numbers of each dtype
        self._wanted = 0

    def restart(self) -> None:
        """Takes everything back: tiles handed out before this will be overwritten."""
        if self._size < min(self._wanted, LIMIT):
            self._size = min(self._wanted, LIMIT)
            with torch.inference_mode(False):  # or calls outside of it could not write to it
                self._memory = {torch.uint8: torch.empty(self._size, dtype=torch.uint8, device="cpu")}
        self._wanted = 0

    def tile(self, like: Tensor, *shape: int) -> Tensor:
        """An uninitialised tile of this shape, with the dtype and device of `like`."""
        if like.device.type != "cpu":
            return like.new_empty(shape)
        start, dtype = self._wanted, like.dtype
        count, width = math.prod(shape), dtype.itemsize
        self._wanted += -(-count * width // 64) * 64
        if start + count * width > self._size:
            return like.new_empty(shape)
        if dtype not in self._memory:
            with torch.inference_mode(False):
                self._memory[dtype] = self._memory[torch.uint8].view(dtype)
        tile = self._memory[dtype].narrow(0, start // width, count).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            tile.fill_(torch.nan)  # as torch.empty does then
        return tile


scratch = Scratch()
