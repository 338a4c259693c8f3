"""Memory of emulated Gluon kernels (`gluon_emulator.py`): tiles in shared memory, addresses, what TMA describes."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu.tma import Tiles

# Of a role: `baton`, `program`, `pending` products, `stores` not read yet, `copies` on their way, its name `role`, its `threads`
local = threading.local()


def plain(x: Any) -> Any:
    """The value of a compile-time constant."""
    return plain(x.value) if type(x).__name__ == "constexpr" else x


def elements(shape: Sequence[int], dtype: torch.dtype, lines: bool) -> Tensor:
    """Where each element of a tile lies, in elements: in blocks of 128 bytes a row, or row by row."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    width = min(128 // dtype.itemsize, columns) if lines else columns
    return ((c // width) * (rows * width) + r * width + c % width).reshape(list(shape))


class Shared:
    """A tile in shared memory, or a row of them."""

    def __init__(self, memory: Tensor, dtype: torch.dtype, where: Tensor, lines: bool) -> None:
        self.memory, self.dtype, self.where, self.lines = memory, dtype, where, lines

    @staticmethod
    def new(dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> Any:
        shape = [plain(n) for n in shape]
        memory = torch.full([math.prod(shape) * dtype.itemsize], 255, dtype=torch.uint8)
        return Shared.over(memory, dtype, shape, layout)

    @staticmethod
    def over(memory: Tensor, dtype: torch.dtype, shape: Sequence[int], layout: Any, first: int = 0) -> Shared:
        layout = plain(layout)
        lines = type(layout).__name__ == "NVMMASharedLayout" and layout.swizzle_byte_width == 128
        rank = getattr(layout, "rank", None) or len(getattr(layout, "order", shape))
        tile = list(shape)[max(0, len(shape) - rank) :]
        one = elements(tile, dtype, lines)
        size = one.numel()
        for n in reversed(list(shape)[: len(shape) - len(tile)]):
            one = torch.stack([one + i * size for i in range(n)])
            size *= n
        return Shared(memory, dtype, one + first, lines)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.where.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.memory, self.dtype, self.where[int(plain(i))], self.lines)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        return Shared(self.memory, self.dtype, self.where.narrow(dim, int(plain(start)), plain(length)), self.lines)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.memory, self.dtype, self.where.permute(*order), self.lines)

    def reshape(self, shape: Sequence[Any]) -> Shared:
        return Shared(self.memory, self.dtype, self.where.reshape([plain(n) for n in shape]), self.lines)

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> Shared:
        shape = [plain(n) for n in shape]
        assert math.prod(shape) * dtype.itemsize <= self.where.numel() * self.dtype.itemsize, (
            "a view is larger than its tile"
        )
        first = int(self.where.min()) * self.dtype.itemsize
        assert first % dtype.itemsize == 0
        return Shared.over(self.memory, dtype, shape, layout, first // dtype.itemsize)

    def load(self, layout: Any = None) -> Tensor:
        return self.memory.view(self.dtype)[self.where]

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype and tuple(value.shape) == self.shape, (value.dtype, self.dtype, self.shape)
        self.memory.view(self.dtype)[self.where] = value
        local.baton.step()


def storage(t: Tensor) -> Tensor:
    """All of the memory that a tensor lies in."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


class Described:
    """A tensor that TMA moves."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.dtype = tiles, tiles.tensor.dtype
        size = math.prod(tiles.block) * self.dtype.itemsize
        self.block_type = SimpleNamespace(shape=list(tiles.block), nbytes=size)
        self.layout = tiles.described(True).layout

    def places(self, at: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Where the elements of a block lie in the tensor's memory, in elements, and which there are."""
        t = self.tiles
        start, inside = 0, torch.ones([], dtype=torch.bool)
        offset = torch.zeros([], dtype=torch.int64)
        for i, (first, size, stride, length) in enumerate(zip(at, t.block, t.strides, t.shape, strict=True)):
            view = [1] * len(t.block)
            view[i] = size
            first = int(plain(first))
            assert first >= 0, "TMA takes no negative coordinate"
            steps = torch.arange(size).view(view)
            start += first * stride
            offset = offset + steps * stride
            inside = inside & (first + steps < length)
        start = (start * self.dtype.itemsize) % 2**64
        start = (start - 2**64 if start >= 2**63 else start) // self.dtype.itemsize
        return offset + start + t.tensor.storage_offset(), inside

    def read(self, at: Sequence[Any]) -> Tensor:
        where, inside = self.places(at)
        inside = inside.expand(where.shape)
        found = torch.zeros(where.shape, dtype=self.dtype)
        found[inside] = storage(self.tiles.tensor)[where[inside]]
        return found

    load = read  # a descriptor of Triton's

    def write(self, at: Sequence[Any], value: Tensor) -> None:
        where, inside = self.places(at)
        inside = inside.expand(where.shape)
        storage(self.tiles.tensor)[where[inside]] = value[inside]


class Pointer:
    """An address in memory of one dtype, or a tile of them."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    __radd__ = __add__

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        where = torch.as_tensor(self.offset).long()
        mask = torch.as_tensor(True if mask is None else mask)
        where, mask = torch.broadcast_tensors(where, mask)
        size = self.memory.numel()
        assert not bool((mask & ((where < 0) | (where >= size))).any()), "an access outside of a tensor"
        return where, mask


def load(pointer: Pointer, mask: Any = None, other: Any = 0, volatile: bool = False) -> Tensor:
    where, mask = pointer.places(mask)
    found = torch.full(where.shape, other, dtype=pointer.memory.dtype)
    found[mask] = pointer.memory[where[mask]]
    return found


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    where, mask = pointer.places(mask)
    where, mask, value = torch.broadcast_tensors(where, mask, torch.as_tensor(value))
    pointer.memory[where[mask]] = value[mask].to(pointer.memory.dtype)
    local.baton.step()


def atomic_add(pointer: Pointer, value: Any) -> Tensor:
    at = int(pointer.offset)
    before = pointer.memory[at].clone()
    pointer.memory[at] = before + int(value)
    return before


def copy_later(tile: Shared, pointer: Pointer, mask: Any = None) -> None:
    """`cp.async`: NaN until its group is awaited."""
    tile.memory.view(tile.dtype)[tile.where] = torch.full([], torch.nan, dtype=tile.dtype)
    local.copies[-1].append((tile, pointer, mask))


def close_copies() -> None:
    local.copies.append([])


def await_copies(left: Any) -> None:
    """Makes the copies of all closed groups but the last `left` ones."""
    while len(local.copies) - 1 > plain(left):
        for tile, pointer, mask in local.copies.pop(0):
            tile.store(load(pointer, mask))
