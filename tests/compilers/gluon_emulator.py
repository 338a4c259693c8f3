"""Gluon kernels on a CPU: an emulator of what ours use of the language, one thread a role of a `warp_specialize`.

A kernel's own Python source runs with tensors of torch in place of Gluon's values. Shared memory is bytes, so tiles that are reinterpreted
read what another view wrote. What is asynchronous on a card is late here, as late as it may be: the bytes of a copy to shared memory are
NaN until somebody waits for their barrier, a copy to global memory reads its tile when it is waited for, a product is made when it is
awaited. A wait that nobody can end raises `Deadlock`. Which role runs next is drawn with `seed`. Layouts in registers mean nothing here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from kernels import forgotten_kinds
from torch import Tensor

from compilers.gluon_memory import (
    Described,
    Pointer,
    Shared,
    atomic_add,
    await_copies,
    close_copies,
    copy_later,
    load,
    local,
    plain,
    storage,
    store,
)
from compilers.gluon_roles import (
    Barriers,
    Baton,
    Deadlock,
    Mbarrier,
    NamedBarriers,
    add_to_global,
    arrive_at_group,
    await_count,
    begin_count,
    copy_to_global,
    copy_to_shared,
    count_up,
    cut,
    products_done,
    stores_done,
    sync_group,
    warp_specialize,
    warpgroup_mma,
)
from flashmix.gpu import device as gpu
from flashmix.gpu import hopper
from flashmix.gpu.launch import Kernel
from flashmix.gpu.series import LaunchSeries
from flashmix.gpu.tma import Tiles


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, bool):
        return x if condition else y
    plain_kind = torch.int32 if type(plain(x)) is int and type(plain(y)) is int else torch.float32
    kind = next((t.dtype for t in (x, y) if isinstance(t, Tensor)), plain_kind)
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
    return acc + cut(a) @ cut(b)


def dot(a: Tensor, b: Tensor, acc: Any = None, **_: Any) -> Tensor:
    kind = torch.float64 if a.dtype == torch.float64 else torch.float32
    found = a.to(kind) @ b.to(kind)
    return found if acc is None else acc + found


def scan(x: Tensor, axis: int = 0, combine: Any = None, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def allocate(dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> Any:
    return Barriers(plain(shape[0])) if layout == "barrier" else Shared.new(dtype, shape, layout)


def sizes(shape: Sequence[Any]) -> list[int]:
    """A shape, given as one list or as numbers."""
    return [plain(n) for n in (shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)]


INSTRUCTIONS = {
    "tanh.approx.f32": torch.tanh,
    "ex2.approx.ftz.f32": ex2,
    "mul.rn.f32": torch.mul,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "mul.ftz.f32": lambda x: torch.exp(-x),  # `flashmix.gpu.rows.exp_of_minus`
}


def assembler(text: str, constraints: str, given: Sequence[Any], **_: Any) -> Any:
    words = plain(text).replace("{ .reg .f32 e; ", "").split()
    return INSTRUCTIONS[words[0]](*given)


def language() -> Any:
    """What stands for `gl`, and for `tl` where Triton's kernels run beside."""
    layouts = (
        "NVMMASharedLayout",
        "SwizzledSharedLayout",
        "NVMMADistributedLayout",
        "DotOperandLayout",
        "DistributedLinearLayout",
    )
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
        program_id=lambda axis: torch.tensor(local.program[0]),
        num_programs=lambda axis=0: torch.tensor(local.program[1]),
        arange=lambda a, b, layout=None: torch.arange(a, b),
        zeros=lambda shape, dtype, layout=None: torch.zeros([plain(n) for n in shape], dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full([plain(n) for n in shape], plain(value), dtype=dtype),
        where=where,
        minimum=least,
        maximum=most_of,
        load=load,
        store=store,
        join=lambda x, y: torch.stack([x, y], -1),
        split=lambda x: x.unbind(-1),
        sum=lambda x, axis: x.sum(axis),
        min=lambda x, axis: x.amin(axis),
        max=lambda x, axis: x.amax(axis),
        associative_scan=scan,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        allocate_shared_memory=allocate,
        warp_specialize=warp_specialize,
        SliceLayout=lambda *a: None,
        BlockedLayout=lambda *a: None,
        **{name: getattr(hopper.gl, name) for name in layouts},
        range=lambda *a, **_: map(torch.tensor, range(*[int(x) for x in a])),
        float64=torch.float64,
        int1=torch.bool,
        to_tensor=torch.as_tensor,
        zeros_like=torch.zeros_like,
        expand_dims=torch.unsqueeze,
        broadcast_to=lambda x, *shape: x.broadcast_to(sizes(shape)),
        reshape=lambda x, *shape: x.reshape(sizes(shape)),
        trans=lambda x: x.mT,
        dot=dot,
        cumsum=lambda x, axis=0, reverse=False: scan(x, axis, reverse=reverse),
        cdiv=lambda a, b: -(-a // b),
        log=torch.log,
        log2=torch.log2,
        exp=torch.exp,
        exp2=torch.exp2,
        sqrt=torch.sqrt,
        abs=torch.abs,
        div_rn=lambda x, y: torch.as_tensor(x) / y,
        atomic_add=atomic_add,
        inline_asm_elementwise=assembler,
        debug_barrier=lambda: None,
    )


def word_of(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], -1).view(torch.int32).squeeze(-1)


def halves_of(word: Tensor) -> tuple[Tensor, Tensor]:
    a, b = word.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
    return a, b


REPLACED: dict[str, Any] = {
    "copy_to_shared": copy_to_shared,
    "copy_to_global": copy_to_global,
    "copy_later": copy_later,
    "close_copies": close_copies,
    "await_copies": await_copies,
    "stores_done": stores_done,
    "products_done": products_done,
    "warpgroup_mma": warpgroup_mma,
    "fence_async_shared": lambda: None,
    "mma_v2": mma_v2,
    "mbarrier": Mbarrier,
    "expect": Mbarrier.expect,
    "reinterpret": Shared.reinterpret,
    "ex2": ex2,
    "word_of": word_of,
    "halves_of": halves_of,
    "in_float32": lambda x: x.float(),
    "opaque_zero": lambda: 0,
    "begin_next": lambda: None,
    "await_kernels": lambda: None,
    "pin": lambda x: x,
    "thread_barrier": lambda: None,
    "add_to_global": add_to_global,
    "count_up": count_up,
    "await_count": await_count,
    "begin_count": begin_count,
    "counted": lambda begun: begun,
    "sync_group": sync_group,
    "arrive_at_group": arrive_at_group,
}


JITTED = ("GluonJITFunction", "JITFunction")


def modules() -> list[ModuleType]:
    """Those of the package with kernels or parts of them, as far as they are imported."""
    imported = [module for name, module in list(sys.modules.items()) if name.startswith("flashmix.")]
    return [m for m in imported if any(type(x).__name__ in JITTED for x in list(vars(m).values()))]


CONVERTED = Tensor.to


def converted(x: Tensor, *dtype: Any, bitcast: bool = False, **options: Any) -> Tensor:
    """A number of another dtype, or its bits as one."""
    return x.view(*dtype) if bitcast else CONVERTED(x, *dtype, **options)


@contextmanager
def emulated() -> Iterator[None]:
    """Within it the functions of kernels, Gluon's and Triton's, are Python functions over tensors."""
    changed: list[tuple[ModuleType, str, Any]] = []
    spoken = language()
    stand_ins = {id(getattr(hopper, name)): value for name, value in REPLACED.items()} | {id(hopper.gl): spoken}
    for module in modules():
        for name, x in list(vars(module).items()):
            new = spoken if name == "tl" else stand_ins.get(id(x), x)
            if new is x and type(x).__name__ in JITTED:
                new = stand_ins.setdefault(id(x), x.fn)
            if new is x and type(x).__name__ == "constexpr":
                new = x.value
            if new is not x:
                changed.append((module, name, x))
                setattr(module, name, new)
    # `x += y` names a new value, as in a kernel, where torch writes into x
    rebound = {f"__i{name}__": getattr(Tensor, f"__{name}__") for name in ("add", "sub", "mul", "truediv", "and", "or")}
    rebound["to"] = converted
    try:
        with mock.patch.multiple(Tensor, **rebound):
            yield
    finally:
        for module, name, x in changed:
            setattr(module, name, x)


def given(x: Any) -> Any:
    """An argument as a kernel sees it."""
    if isinstance(x, Tiles):
        return Described(x)
    if isinstance(x, Tensor):
        return Pointer(storage(x), x.storage_offset())
    if isinstance(x, tuple):
        parts = [given(part) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return torch.tensor(x) if type(x) is int else x


def run(
    kernel: Any, grid: int, structs: Sequence[Any], spec: Any, seed: int = 0, warps: int = 4, beside: bool = False
) -> None:
    """Runs a kernel, program after program or all beside each other; the first of its roles has so many warps."""
    arguments, failures = [given(x) for x in structs], []

    def one(program: int, baton: Baton) -> None:
        torch.set_grad_enabled(False)  # each thread has its own setting
        local.baton, local.program, local.named = baton, (program, grid), NamedBarriers()
        local.pending, local.stores, local.copies = [], [], [[]]
        local.role, local.threads = "program", 32 * warps
        with baton.condition:
            try:
                kernel.fn(*arguments, spec)
                stores_done(0)
            except BaseException as error:
                failures.append(error)
                baton.failed = True
            baton.running -= 1
            baton.changed()

    with emulated(), torch.no_grad():
        size = grid if beside else 1
        for first in range(0, grid, size):
            baton = Baton(seed + first)
            baton.running = size
            threads = [threading.Thread(target=one, args=(first + i, baton)) for i in range(1, size)]
            for thread in threads:
                thread.start()
            one(first, baton)
            for thread in threads:
                thread.join()
            if failures:
                raise next((x for x in failures if not isinstance(x, Deadlock)), failures[0])


@contextmanager
def hopper_card(multiprocessors: int = 1, seed: int = 0, beside: Sequence[str] = ()) -> Iterator[list[str]]:
    """Within it Hopper's implementations take tensors of a CPU, and what they launch is emulated; the names of what they launched.

    With few multiprocessors a program that stays has several blocks of work. `beside`: kernels whose programs run side by side.
    """
    launched: list[str] = []

    def launch(self: Kernel, grid: int, *structs: Any) -> None:
        name = self.kernel.fn.__name__
        launched.append(name)
        run(self.kernel, grid, structs, self.spec, seed, self.options.get("num_warps", 4), name in beside)

    target = gpu.Target((9, 0), 227 * 1024, multiprocessors)
    with (
        mock.patch.object(Kernel, "__call__", launch),
        mock.patch.object(LaunchSeries, "__call__", lambda self, device, tensors, make: make()),
        mock.patch.object(gpu, "target", lambda device: target),
        mock.patch.object(gpu, "refuses", lambda device, dtype: None),
        mock.patch.object(gpu, "hopper_refuses", lambda device, dtype, dtypes: None),
        forgotten_kinds(),
    ):
        yield launched
