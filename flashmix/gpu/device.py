"""The GPU that Triton kernels run on: its facts, and the reasons for refusing it. Importing this module touches no GPU and no triton."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

from flashmix.gpu.arch import SHARED_MEMORY_KIB, triton_version

Answer = TypeVar("Answer", bound=Callable[..., object])
LEAST_CAPABILITY = (8, 0)
LEAST_TRITON = (3, 6)
TRITON_OF_GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))  # releases whose experimental language `gpu/hopper.py` knows
TRITON_ON_CARDS = ((3, 6),)  # those of them that its kernels have run with
TRY_GLUON = os.environ.get("FLASHMIX_GLUON") == "1"  # takes the others too
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Target:
    """What a table of tiles is chosen by: compute capability, shared memory a block may take (bytes), multiprocessors."""

    capability: tuple[int, int]
    shared_memory: int
    multiprocessors: int


def constant_when_compiled(function: Answer) -> Answer:
    """`torch.compiler.assume_constant_result`, which would import the compiler to set this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (the tests do, with TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@constant_when_compiled
def refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton kernels cannot run tensors of `dtype` on `device`; None if they can."""
    return _refusal(device, dtype)


@lru_cache(maxsize=256)
def _refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype not in KERNEL_DTYPES:
        return f"its kernels take float32, bfloat16 and float16, got {dtype}"
    if device.type != "cuda" and not interpreted():
        return f"it needs tensors on a CUDA device, got {device}"
    version = _triton()
    if version < LEAST_TRITON:
        return f"it needs triton {LEAST_TRITON[0]}.{LEAST_TRITON[1]} or newer, got {version or 'none'}"
    if device.type == "cuda" and target(device).capability < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, got {target(device).capability}"
    return None


@constant_when_compiled
def hopper_refuses(device: torch.device, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """Why kernels in Gluon for Hopper (`gpu/hopper.py`) that take `dtypes` cannot run tensors of `dtype` on `device`; None if they can."""
    return _hopper_refusal(device, dtype, dtypes)


@lru_cache(maxsize=256)
def _hopper_refusal(device: torch.device, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if dtype not in dtypes:
        names = " and ".join(str(known).removeprefix("torch.") for known in dtypes)
        return f"its kernels take {names}, got {dtype}"
    if interpreted() or device.type != "cuda":
        return f"it needs tensors on a CUDA device, got {device}"
    if target(device).capability != (9, 0):
        return f"it needs a Hopper GPU (compute capability 9.0), got {target(device).capability}"
    version = _triton()
    if version not in TRITON_OF_GLUON:
        return f"it needs triton {_spoken(TRITON_OF_GLUON)}, whose Gluon it is written for, got {version or 'none'}"
    if version not in TRITON_ON_CARDS and not TRY_GLUON:
        run = f"it has run on a card with triton {_spoken(TRITON_ON_CARDS)} alone, got {_spoken([version])}"
        return f"{run}, for which it compiles: FLASHMIX_GLUON=1 in the environment takes it"
    return None


def _spoken(releases: Iterable[tuple[int, ...]]) -> str:
    return " or ".join(".".join(map(str, release)) for release in releases)


@constant_when_compiled
def _triton() -> tuple[int, ...]:
    return _parsed_triton()


@lru_cache(maxsize=1)
def _parsed_triton() -> tuple[int, ...]:
    version = triton_version()
    return () if version is None else tuple(int(part) for part in version.split(".")[:2])


@constant_when_compiled
def target(device: torch.device) -> Target:
    """The facts of `device`; for CPU tensors (the interpreter) those of a Hopper card."""
    if device.type != "cuda":
        return Target((9, 0), SHARED_MEMORY_KIB[9, 0] * 1024, 132)
    return _facts(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _facts(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    shared = getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY_KIB.get(capability, 48) * 1024)
    return Target(capability, shared, properties.multi_processor_count)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one while kernels are launched (Triton launches on the current device)."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def is_current(t: torch.Tensor) -> bool:
    """Whether a tensor lies on the current GPU."""
    return t.is_cuda and t.get_device() == torch._C._cuda_getDevice()


class _Beside(threading.local):
    """What `beside` says in this thread."""

    multiprocessors = 0


_BESIDE = _Beside()


@contextmanager
def beside(multiprocessors: int) -> Iterator[None]:
    """Within it, kernels whose programs run all at once leave so many multiprocessors to kernels of other streams.

    Else a program whose place is taken begins when those end, and the kernel takes that much longer.
    """
    before, _BESIDE.multiprocessors = _BESIDE.multiprocessors, multiprocessors
    try:
        yield
    finally:
        _BESIDE.multiprocessors = before


def multiprocessors(device: torch.device) -> int:
    """The multiprocessors of a device that kernels of this thread may fill."""
    return target(device).multiprocessors - _BESIDE.multiprocessors
