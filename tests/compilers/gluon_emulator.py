"""Gluon kernels on a CPU: an emulator of what ours use of the language, one thread a role of a `warp_specialize`.

A kernel's own Python source runs with tensors of torch in place of Gluon's values. Shared memory is bytes, so tiles that are reinterpreted
read what another view wrote. What is asynchronous on a card is late here, as late as it may be: the bytes of a copy to shared memory are
NaN until somebody waits for their barrier, a copy to global memory reads its tile when it is waited for, a product is made when it is
awaited. A wait that nobody can end raises `Deadlock`. Which role runs next is drawn with `seed`. Layouts in registers mean nothing here.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from compilers.gluon_memory import Described, Pointer, Shared, load, local, plain, store
from flashmix.gpu import hopper
from flashmix.gpu.tma import Tiles

LIMIT_S = 300.0


class Deadlock(RuntimeError):
    """Every role waits."""


class Baton:
    """Lets one role run at a time; a role that waits hands on."""

    def __init__(self, seed: int) -> None:
        self.condition, self.random = threading.Condition(), random.Random(seed)
        self.running, self.waiting, self.failed = 0, 0, False
        self.version = 0

    def step(self) -> None:
        """Lets another role run, sometimes."""
        if self.random.random() < 0.5:
            self.condition.release()
            self.condition.acquire()

    def changed(self) -> None:
        self.version += 1
        self.waiting = 0  # all look again
        self.condition.notify_all()

    def wait(self, done: Callable[[], bool], what: str) -> None:
        while not done():
            self.waiting += 1
            if self.waiting == self.running:
                self.failed = True
                self.condition.notify_all()
                raise Deadlock(what)
            version = self.version
            while self.version == version and not self.failed:
                if not self.condition.wait(LIMIT_S):
                    raise Deadlock(what)
            if self.failed:
                raise Deadlock(what)


class Barrier:
    """An `mbarrier`: a phase ends when all have arrived and all expected bytes have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], int]] = []

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int) -> None:
        assert self.pending >= count, "more arrivals than a phase has"
        self.pending -= count
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            local.baton.changed()

    def land(self) -> None:
        """The copies that were begun come to an end."""
        copies, self.copies = self.copies, []
        for copy in copies:
            self.bytes -= copy()
        if copies:
            self.settle()


class Barriers:
    def __init__(self, count: int) -> None:
        self.shape, self.all = (count, 1), [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(plain(i))]


class Mbarrier:
    """What stands for Gluon's `mbarrier`."""

    MBarrierLayout = staticmethod(lambda *args: "barrier")

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.init(plain(count))

    @staticmethod
    def expect(bar: Barrier, count: int, pred: Any = True) -> None:
        bar.bytes += int(plain(count))
        bar.arrive(1)
        local.baton.step()

    @staticmethod
    def arrive(bar: Barrier, count: int = 1, pred: Any = True) -> None:
        if pred:
            bar.arrive(plain(count))
        local.baton.step()

    @staticmethod
    def wait(bar: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if not pred:
            return
        local.baton.step()
        parity = int(phase)

        def done() -> bool:
            if (bar.phase & 1) != parity:
                return True
            bar.land()
            return (bar.phase & 1) != parity

        local.baton.wait(done, f"{local.role} at {getattr(bar, 'name', bar)} for parity {parity}")


class Sum:
    """A product that is not awaited yet."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make, self.value = make, None

    def finish(self) -> None:
        if self.value is None:
            self.value = self.make()


def operand(x: Any) -> Callable[[], Tensor]:
    """Reads an operand when the product is made, if it lies in shared memory."""
    return (lambda: x.load().float()) if isinstance(x, Shared) else (lambda: x.float())


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    assert isinstance(b, Shared)
    left, right = operand(a), operand(b)

    def make() -> Tensor:
        found = left() @ right()
        if not plain(use_acc):
            return found
        before = acc
        if isinstance(acc, Sum):
            assert acc.value is not None
            before = acc.value
        return before + found

    found = Sum(make)
    local.pending.append(found)
    return found if is_async else products_done(0, deps=[found])


def products_done(most: Any = 0, deps: Sequence[Any] = ()) -> Any:
    keep = plain(most)
    done, local.pending = local.pending[: len(local.pending) - keep], local.pending[len(local.pending) - keep :]
    for x in done:
        x.finish()
    local.baton.step()
    found = tuple(x.value if isinstance(x, Sum) and x.value is not None else x for x in deps)
    return found[0] if len(found) == 1 else found


def copy_to_shared(d: Described, at: Sequence[Any], bar: Barrier, tile: Shared, pred: Any = True) -> None:
    value, tile_bytes = d.read(at), tile.where.numel() * tile.dtype.itemsize
    assert tile.dtype == d.dtype and list(tile.shape) == d.block_type.shape
    poison = torch.full(tile.shape, float("nan") if tile.dtype.is_floating_point else 0, dtype=tile.dtype)
    tile.store(poison)

    def land() -> int:
        tile.memory.view(tile.dtype)[tile.where] = value
        return tile_bytes

    bar.copies.append(land)
    local.baton.changed()
    local.baton.step()


def copy_to_global(d: Described, at: Sequence[Any], tile: Shared) -> None:
    assert tile.dtype == d.dtype and list(tile.shape) == d.block_type.shape, (tile.dtype, d.dtype, tile.shape)
    at = [int(plain(x)) for x in at]
    local.stores.append(lambda: d.write(at, tile.load()))
    local.baton.step()


def stores_done(most: Any = 0) -> None:
    most = plain(most)
    done, local.stores = (
        local.stores[: max(0, len(local.stores) - most)],
        local.stores[max(0, len(local.stores) - most) :],
    )
    for read in done:
        read()
    local.baton.step()


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, bool):
        return x if condition else y
    kind = next((t.dtype for t in (x, y) if isinstance(t, Tensor)), torch.float32)
    x, y = (t if isinstance(t, Tensor) else torch.full([], plain(t), dtype=kind) for t in (x, y))
    return torch.where(condition, x, y)


def least(x: Any, y: Any) -> Any:
    return torch.minimum(torch.as_tensor(plain(x)), torch.as_tensor(plain(y)).to(getattr(x, "dtype", torch.int64)))


def most_of(x: Any, y: Any) -> Any:
    return torch.maximum(torch.as_tensor(plain(x)), torch.as_tensor(plain(y)).to(getattr(x, "dtype", torch.int64)))


def ex2(x: Tensor) -> Tensor:
    found = torch.exp2(x.float())
    return torch.where(found < 2.0**-126, 0.0, found)


def mma_v2(a: Tensor, b: Tensor, acc: Tensor, **_: Any) -> Tensor:
    return acc + a.float() @ b.float()


def scan(x: Tensor, axis: int, combine: Any, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def warp_specialize(roles: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    """Runs the roles side by side."""
    baton, program = local.baton, local.program
    failures: list[BaseException] = []

    def run(role: Callable[..., Any], args: tuple[Any, ...]) -> None:
        local.baton, local.program, local.pending, local.stores = baton, program, [], []
        local.role = role.__name__
        with baton.condition:
            try:
                role(*args)
                stores_done(0)
                assert not local.pending, "products that nobody waited for"
            except BaseException as error:
                failures.append(error)
                baton.failed = True
            baton.running -= 1
            baton.changed()

    baton.condition.release()
    baton.running = len(roles)
    threads = [threading.Thread(target=run, args=x) for x in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    baton.condition.acquire()
    baton.running = 1
    if failures:
        raise next((x for x in failures if not isinstance(x, Deadlock)), failures[0])


def allocate(dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> Any:
    return Barriers(plain(shape[0])) if layout == "barrier" else Shared.new(dtype, shape, layout)


def language() -> Any:
    """What stands for `gl`."""
    scalar = lambda n: torch.tensor(n)  # noqa: E731
    return SimpleNamespace(
        constexpr=lambda x: x,
        static_range=lambda *a: range(*[plain(x) for x in a]),
        static_assert=lambda ok, *a: None,
        float32=torch.float32,
        float16=torch.float16,
        bfloat16=torch.bfloat16,
        int64=torch.int64,
        int32=torch.int32,
        int8=torch.int8,
        program_id=lambda axis: scalar(local.program[0]),
        num_programs=lambda axis=0: scalar(local.program[1]),
        arange=lambda a, b, layout=None: torch.arange(a, b),
        zeros=lambda shape, dtype, layout=None: torch.zeros([plain(n) for n in shape], dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full([plain(n) for n in shape], plain(value), dtype=dtype),
        where=where,
        minimum=least,
        maximum=most_of,
        load=load,
        store=store,
        join=lambda x, y: torch.stack([x, y], -1),
        sum=lambda x, axis: x.sum(axis),
        min=lambda x, axis: x.amin(axis),
        max=lambda x, axis: x.amax(axis),
        associative_scan=scan,
        convert_layout=lambda x, layout: x,
        thread_barrier=lambda: None,
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
        SliceLayout=lambda *a: None,
        BlockedLayout=lambda *a: None,
    )


REPLACED: dict[str, Any] = {
    "copy_to_shared": copy_to_shared,
    "copy_to_global": copy_to_global,
    "stores_done": stores_done,
    "products_done": products_done,
    "warpgroup_mma": warpgroup_mma,
    "fence_async_shared": lambda: None,
    "mma_v2": mma_v2,
    "mbarrier": Mbarrier,
    "expect": Mbarrier.expect,
    "ex2": ex2,
    "opaque_zero": lambda: 0,
}


@contextmanager
def emulated(*modules: ModuleType) -> Iterator[None]:
    """Within it the Gluon functions of these modules are Python functions over tensors."""
    with mock.patch.object(hopper, "gl", hopper.gl):
        changed: list[tuple[ModuleType, str, Any]] = []
        stand_ins = {id(getattr(hopper, name)): value for name, value in REPLACED.items()}
        stand_ins[id(hopper.gl)] = language()
        for module in (hopper, *modules):
            for name, x in list(vars(module).items()):
                new = stand_ins.get(id(x), x)
                if new is x and type(x).__name__ == "GluonJITFunction":
                    new = stand_ins.setdefault(id(x), x.fn)
                if new is x and type(x).__name__ == "constexpr":
                    new = x.value
                if new is not x:
                    changed.append((module, name, x))
                    setattr(module, name, new)
        try:
            yield
        finally:
            for module, name, x in changed:
                setattr(module, name, x)


def given(x: Any) -> Any:
    """An argument as a kernel sees it."""
    if isinstance(x, Tiles):
        return Described(x)
    if isinstance(x, Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        parts = [given(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def run(kernel: Any, grid: int, structs: Sequence[Any], spec: Any, seed: int = 0) -> None:
    """Runs a Gluon kernel, program after program."""
    arguments = [given(x) for x in structs]
    with ExitStack() as stack:
        for name in ("add", "sub", "mul"):  # `x += y` leaves what x was to whoever else has it
            stack.enter_context(mock.patch.object(Tensor, f"__i{name}__", getattr(Tensor, f"__{name}__")))
        for program in range(grid):
            local.baton, local.program = Baton(seed + program), (program, grid)
            local.pending, local.stores, local.role = [], [], "program"
            local.baton.running = 1
            with local.baton.condition:
                kernel.fn(*arguments, spec)
                stores_done(0)
