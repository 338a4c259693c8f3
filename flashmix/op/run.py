"""How an implementation runs: on the device of its tensors, without autocast, known to those who compile its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.ahead import running

Found = TypeVar("Found")


def launched(run: Callable[[], Found], again: Callable[[], object] | None, first: Tensor) -> Found:
    """`run()` for tensors where `first` is; `again` of flashmix.gpu.ahead."""
    before, running.again = running.again, again
    try:
        if plain(first):
            return run()
        with plainly(first.device):
            return run()
    finally:
        running.again = before


def plain(t: Tensor) -> bool:
    """Whether an implementation can run as things are: no autocast on the device of `t`, and that device is the current one."""
    if t.is_cpu:
        return not torch.is_autocast_enabled("cpu")
    if t.is_cuda:
        return gpu.is_current(t) and not torch.is_autocast_enabled("cuda")
    return not torch.is_autocast_enabled(t.device.type)


def plainly(device: torch.device) -> AbstractContextManager[object]:
    """Implementations run without autocast, and launch on the device of their tensors."""
    if torch.is_autocast_enabled(device.type):
        return _without_autocast(device)
    return gpu.on(device)


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), gpu.on(device):
        yield
