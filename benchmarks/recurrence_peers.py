"""Peers of `recurrence_hopper.py`: FlashQLA, a Gated DeltaNet layer with it, and quick tuning of flash-linear-attention."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from recurrence_rows import Row, Tensors
from torch import Tensor
from torch.nn import functional as F

SHARED_MEMORY = 227 << 10  # bytes that a program of a Hopper GPU can have


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def flash_qla_takes(row: Row) -> bool:
    """FlashQLA is there and has the row's kernels."""
    return row.rule == "gated_delta_rule" and row.K == row.V == 128 and installed("flash_qla")


def flash_qla(x: Tensors) -> Tensor:
    """The gated delta rule by FlashQLA."""
    return importlib.import_module("flash_qla").chunk_gated_delta_rule(**x)[0]


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raises after so many seconds; 0: never. A peer may compile and tune for minutes."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not compiled and tuned within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Processes that measure candidates side by side take turns on the GPU."""
    with open(Path(tempfile.gettempdir()) / "tuning.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def quick_tuning(milliseconds: int, share: tuple[int, int] | None) -> None:
    """Triton's autotuner measures each candidate for so long, in place of 100 ms.

    With a `share` (index, of how many) it compiles each so many-th candidate into the cache of compiled kernels and measures none:
    as many processes, each with another index, compile all of them, and one without a share then finds them there.
    """
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    prune = Autotuner.prune_configs

    def bench(call: Callable[[], Any], **more: Any) -> Any:
        with one_at_a_time():
            return do_bench(call, warmup=max(1, milliseconds // 4), rep=milliseconds, **more)

    def compile_share(self: Any, given: dict[str, Any]) -> Any:
        assert share is not None
        found = prune(self, given)
        runs = []
        for config in found[share[0] :: share[1]] or found[:1]:
            with contextlib.suppress(Exception):  # a candidate that does not compile: measuring it says what
                kernel = self.fn.run(*self.nargs.values(), **{**given, **config.all_kwargs(), "warmup": True})
                if kernel.metadata.shared <= SHARED_MEMORY:
                    runs.append(config)
        return (runs or found)[:1]

    mock.patch.object(driver.active, "get_benchmarker", lambda: bench).start()
    if share:
        mock.patch.object(Autotuner, "prune_configs", compile_share).start()


def with_flash_qla(width: int, sizes: dict[str, Any]) -> torch.nn.Module:
    """FLA's Gated DeltaNet layer with its recurrence by FlashQLA, which version 0.6.0 does not give it: the layer passes raw gates."""
    module = importlib.import_module("fla.layers.gated_deltanet")
    normalised = importlib.import_module("fla.modules.norm.l2norm").l2norm

    def recurrence(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        decay = -A_log.float().exp() * F.softplus(g.float() + dt_bias)
        call = importlib.import_module("flash_qla").chunk_gated_delta_rule
        return call(normalised(q), normalised(k), v, decay, beta.float().sigmoid())[0], None

    layer = module.GatedDeltaNet(width, **sizes)
    forward = layer.forward

    def patched(*arguments: Any, **named: Any) -> Any:
        with mock.patch.object(module, "chunk_gated_delta_rule", recurrence):
            return forward(*arguments, **named)

    layer.forward = partial(patched)
    return layer
