"""Launches that calls of one kind make one after the other, noted once and made again at little cost to the host.

Structs, the look-up of compiled code and TMA's maps take Python several times as long as the driver takes to launch. All of it follows from
the kind of a call and from addresses: a series keeps the finished arguments by the addresses of the call's tensors. An allocator hands
out the same addresses again and again where calls repeat; at new ones the noted arguments are moved there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.launch import Launched, all_arguments, compile_ahead, hooked, noting
from flashmix.gpu.tma import Tiles

MOST = 256  # sets of addresses that a series keeps; some kilobytes each
Ready = list[tuple[Any, int, tuple[Any, ...]]]  # the driver's launch function, grid and arguments of each launch


class LaunchSeries:
    """The launches of calls of one kind: all their grids, numbers and tensors follow from the kind, but for addresses."""

    def __init__(self) -> None:
        self._new = True
        self._known: dict[tuple[int, ...], Ready] = {}
        self._movable: dict[tuple[int, ...], list[Movable]] = {}  # by `pattern`

    def __call__(self, device: torch.device, tensors: Sequence[Tensor | None], make: Callable[[], object]) -> None:
        """Does what `make()` does, which launches kernels and nothing else.

        `tensors` are all that the kernels are given, or that those are parts of; an absent one is None.
        """
        addresses = tuple([0 if t is None else t.data_ptr() for t in tensors])
        known = self._known.get(addresses)
        if known is None or noting.launches is not None or hooked() or device.index != torch._C._cuda_getDevice():
            self._otherwise(device, tensors, addresses, make)
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for launch, grid, arguments in known:
            launch(grid, 1, 1, stream, *arguments)

    def _otherwise(
        self,
        device: torch.device,
        tensors: Sequence[Tensor | None],
        addresses: tuple[int, ...],
        make: Callable[[], object],
    ) -> None:
        """The same where addresses are new, another device is the current one, or launches must be seen one by one."""
        with gpu.on(device):
            if noting.launches is not None or hooked():  # the series around this one, or a profiler, wants to see them
                make()
                return
            known = self._known.get(addresses)
            if known is None:
                movable = self._movable.get(pattern(addresses))
                if movable is None:
                    self._first(tensors, addresses, make)
                    return
                known = [launch.to(addresses) for launch in movable]
                self._keep(addresses, known)
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            for launch, grid, arguments in known:
                launch(grid, 1, 1, stream, *arguments)

    def _first(self, tensors: Sequence[Tensor | None], addresses: tuple[int, ...], make: Callable[[], object]) -> None:
        """Makes the launches and notes them; at the very first time their code is compiled side by side."""
        if self._new:
            compile_ahead(make)
            self._new = False
        found: list[Launched | None] = []
        noting.launches = found
        try:
            make()
        finally:
            noting.launches = None
        launches = [x for x in found if x is not None]
        places = Locations(tensors)
        movable = [Movable(x, places) for x in launches]
        if len(launches) < len(found) or places.foreign:
            return
        if not places.shared:
            self._movable[pattern(addresses)] = movable
        self._keep(addresses, [(x.launch, x.grid, noted.arguments) for x, noted in zip(movable, launches, strict=True)])

    def _keep(self, addresses: tuple[int, ...], known: Ready) -> None:
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[addresses] = known


def pattern(addresses: Sequence[int]) -> tuple[int, ...]:
    """What code depends on besides the kind of a call: which tensors are None, and how the others are aligned."""
    return tuple([-1 if address == 0 else address & 15 for address in addresses])


class Location:
    """Where an argument lies: bytes behind the beginning of a tensor of the call."""

    __slots__ = ("number", "offset")

    def __init__(self, number: int, offset: int) -> None:
        self.number, self.offset = number, offset


class Locations:
    """The tensors of a call, which tell the `Location` of an address.

    `foreign`: an address was of none of them. `shared`: it might have been of several, so the next call's need not be at the same place.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = [(i, t) for i, t in enumerate(tensors) if t is not None and t.numel()]
        self.foreign = self.shared = False

    def of(self, t: Tensor) -> Location:
        address = t.data_ptr()
        found = [i for i, x in self._tensors if x.data_ptr() == address]
        if not found:
            found = [
                i
                for i, x in self._tensors
                if x.is_contiguous() and x.data_ptr() < address < x.data_ptr() + x.numel() * x.element_size()
            ]
        self.shared |= len(found) > 1
        if not found:
            self.foreign |= t.numel() > 0
            return Location(0, 0)
        start = next(x.data_ptr() for i, x in self._tensors if i == found[0])
        return Location(found[0], address - start)


class Movable:
    """A noted launch, whose arguments can be made for other addresses."""

    def __init__(self, noted: Launched, places: Locations) -> None:
        assert noted.code.direct is not None
        self.launch, self.first = noted.code.direct
        self.grid, self.maps = noted.grid, noted.code.maps
        self.structs = [placed(x, places) for x in noted.structs]

    def to(self, addresses: Sequence[int]) -> tuple[Any, int, tuple[Any, ...]]:
        """The launch with tensors at these addresses."""
        values: list[Any] = []
        number = 0
        for x in self.structs:
            if type(x) is MovedTiles and self.maps is not None:
                at = addresses[x.place.number] + x.place.offset
                values.extend(self.maps.at(number, at, x.shape, x.strides))
                number += 1
            else:
                values.append(moved(x, addresses))
        return self.launch, self.grid, all_arguments(self.first, values)


class MovedTiles:
    """`Tiles` whose tensor is a place."""

    def __init__(self, x: Tiles, places: Locations) -> None:
        self.place, self.shape, self.strides = places.of(x.tensor), x.shape, x.strides


def placed(x: Any, places: Locations) -> Any:
    """A struct with a `Location` for each tensor; its tuples are lists."""
    if isinstance(x, Tensor):
        return places.of(x)
    if type(x) is Tiles:
        return MovedTiles(x, places)
    return [placed(part, places) for part in x] if isinstance(x, tuple) else x


def moved(x: Any, addresses: Sequence[int]) -> Any:
    """What the driver takes for a struct of `placed`, with tensors at these addresses."""
    if type(x) is Location:
        return addresses[x.number] + x.offset
    if type(x) is list:
        return tuple([moved(part, addresses) for part in x])
    return x
