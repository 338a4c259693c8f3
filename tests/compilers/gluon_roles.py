"""Roles of emulated Gluon kernels (`gluon_emulator.py`): threads, one of which runs at a time, barriers, what is asynchronous on a card."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compilers.gluon_memory import Described, Pointer, Shared, atomic_add, local, plain

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


class NamedBarriers:
    """A program's barriers of `bar.arrive` and `bar.sync`: a phase ends when so many threads have come."""

    def __init__(self) -> None:
        self.come: dict[int, int] = {}
        self.phases: dict[int, int] = {}

    def arrive(self, number: int, threads: int) -> int:
        """The phase that the threads of a role arrive in."""
        phase = self.phases.setdefault(number, 0)
        come = self.come.get(number, 0) + local.threads
        assert come <= threads, f"more threads at named barrier {number} than a phase has"
        self.come[number] = come % threads
        if come == threads:
            self.phases[number] = phase + 1
            local.baton.changed()
        return phase


def arrive_at_group(number: Any, threads: Any) -> None:
    local.named.arrive(int(plain(number)), plain(threads))
    local.baton.step()


def sync_group(number: Any, threads: Any) -> None:
    named, number = local.named, int(plain(number))
    phase = named.arrive(number, plain(threads))
    local.baton.wait(lambda: named.phases[number] > phase, f"{local.role} at named barrier {number}")
    local.baton.step()


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
    def invalidate(bar: Barrier) -> None:
        assert not bar.bytes, f"{bar} ends before its bytes have come"
        bar.count = 0

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


def cut(x: Tensor) -> Tensor:
    """What a tensor core sees of a number: of float32 the ten bits of TF32."""
    return (
        (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32) if x.dtype == torch.float32 else x.float()
    )


def operand(x: Any) -> Callable[[], Tensor]:
    """Reads an operand when the product is made, if it lies in shared memory."""
    return (lambda: cut(x.load())) if isinstance(x, Shared) else (lambda: cut(x))


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


def add_to_global(d: Described, at: Sequence[Any], tile: Shared) -> None:
    at = [int(plain(x)) for x in at]
    local.stores.append(lambda: d.write(at, d.read(at) + tile.load()))
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


def count_up(counter: Pointer, pending: Any) -> None:
    stores_done(pending)
    atomic_add(counter, 1)
    local.baton.changed()


def begin_count(counter: Pointer, pred: Any) -> Any:
    return atomic_add(counter, 1) if pred else torch.tensor(0)


def await_count(counter: Pointer, count: Any) -> None:
    """Where programs run one after another, one that waits for a later one waits for ever."""
    what = f"{local.role} for a count of {int(count)}"
    local.baton.wait(lambda: int(counter.memory[int(counter.offset)]) >= int(count), what)


def warp_specialize(roles: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    """Runs the roles side by side."""
    baton, program, named = local.baton, local.program, local.named
    running = [role for role, _ in roles]
    failures: list[BaseException] = []

    def run(role: Callable[..., Any], args: tuple[Any, ...], count: int) -> None:
        torch.set_grad_enabled(False)  # each thread has its own setting
        local.baton, local.program, local.named, local.pending, local.stores = baton, program, named, [], []
        local.role, local.threads = role.__name__, 32 * count
        with baton.condition:
            try:
                role(*args)
                stores_done(0)
                assert not local.pending, "products that nobody waited for"
            except BaseException as error:
                failures.append(error)
                baton.failed = True
            running.pop()
            baton.running -= bool(running)  # the last one's place is the program's again
            baton.changed()

    baton.running += len(roles) - 1
    baton.condition.release()
    counts = [local.threads // 32, *[plain(n) for n in warps]]
    threads = [threading.Thread(target=run, args=(*x, n)) for x, n in zip(roles, counts, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    baton.condition.acquire()
    if failures:
        raise next((x for x in failures if not isinstance(x, Deadlock)), failures[0])
