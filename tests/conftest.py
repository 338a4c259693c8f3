"""Shared by all tests: two threads, as on the smallest supported machine, or one in each of several workers; fresh memory is NaN, so that
nothing unwritten is read.

Tests marked `gpu` run where there is a CUDA device. Tests marked `interpreted` run their kernels in Triton's interpreter;
that is decided when triton is imported, so they run in a process of their own (tests/test_interpreted.py). Tests marked `whole` run with
`-m whole` alone: the rest of long products, of which a sample runs by default (tests/samples.py), and half of an interpreted test's cases.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from compilers.interpreter import make_types_once, mend_splat, patch_language_once

if TYPE_CHECKING:
    from flashmix.train.folder import TrainConfig

THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
torch.set_num_threads(THREADS)
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"  # where torch warns of shared memory unless `CI` is set
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MANY = 4  # cases of an interpreted test from which on half of them run by default
if INTERPRETED:
    mend_splat()
    patch_language_once()
    make_types_once()


def left_out(item: pytest.Item) -> str | None:
    """Why this process does not run a test."""
    if (item.get_closest_marker("interpreted") is not None) != INTERPRETED:
        return "runs in a process of its own, see tests/test_interpreted.py"
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        return "needs a CUDA device"
    whole = item.get_closest_marker("whole") is not None and "whole" not in item.config.option.markexpr
    return "runs with -m whole" if whole else None


def thin(items: list[pytest.Item]) -> None:
    """Of an interpreted test of MANY cases or more, half get the mark `whole`: the interpreter takes a sixth of all tests' time."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("interpreted") is not None and item.get_closest_marker("whole") is None:
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for its in cases.values():
        for item in its[1::2] if len(its) >= MANY else ():
            item.add_marker(pytest.mark.whole)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    """Skips what this process cannot run, and under the interpreter everything that is not meant for it.

    Of several workers, who would each report every one of these thousands, they are taken from the list, unless nothing else is on it.
    """
    if INTERPRETED:
        thin(items)
    reasons = [left_out(item) for item in items]
    if "PYTEST_XDIST_WORKER" in os.environ and None in reasons:
        config.hook.pytest_deselected(items=[item for item, why in zip(items, reasons, strict=True) if why])
        items[:] = [item for item, why in zip(items, reasons, strict=True) if not why]
        return
    for item, why in zip(items, reasons, strict=True):
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """`torch.empty` gives NaN, in every test. `use_deterministic_algorithms` would do the same, and import torch's compiler: seconds."""
    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """However many threads a test sets, the next one finds as many as the first."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def one_thread(same_threads: None) -> None:
    """One thread: for tensors so tiny that a second one would only be waited for. A file takes it by `pytestmark`."""
    torch.set_num_threads(1)


@pytest.fixture
def deterministic_only(nan_filled_memory: None) -> None:
    """What torch calls not deterministic raises instead of warning."""
    torch.set_deterministic_debug_mode("error")


@pytest.fixture
def much_memory() -> Iterator[None]:
    """For tests that take tens of GiB of a GPU: one at a time, whatever the number of workers, and all of it is given back."""
    with (Path(tempfile.gettempdir()) / "flashmix-tests-of-much-memory").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture
def room_for_factors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Lets float16 kernels of the recurrence have factors up to 2^n in one pass over pairs, as bfloat16's have."""
    plans = importlib.import_module("flashmix.ops.recurrence.triton_gpu.plan")

    def change(n: int) -> None:
        plans.cached_plan.cache_clear()
        monkeypatch.setitem(plans.FACTOR_LIMIT, torch.float16, n)

    yield change
    plans.cached_plan.cache_clear()  # what was made there is for this test


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of ten documents of 60 to 330 bytes."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(10):
        lines = [f"line {line} of document {index}: {'abc' * (line % 3)}" for line in range(2 + index)]
        (folder / f"{index}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def small(texts: Path) -> TrainConfig:
    """The settings of a small run on these documents."""
    from train_cases import SMALL

    return replace(SMALL, text=(str(texts),))
