"""The recurrence's kernels for Hopper on a CPU, in the emulator of Gluon: results, the order of roles, barriers that everybody passes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import test_recurrence_gpu
import torch
from cases import Case
from compilers import gluon_emulator

from flashmix.gpu import device as gpu
from flashmix.gpu.launch import Kernel
from flashmix.ops.recurrence import gluon_hopper

triton = pytest.importorskip("triton")
NAMES = [found.name for found in pkgutil.iter_modules(gluon_hopper.__path__) if found.name != "plan"]
MODULES: list[ModuleType] = [importlib.import_module(f"{gluon_hopper.__name__}.{name}") for name in NAMES]
# Of Triton: decays here are in range for one pass, for which these have nothing to do.
OUT_OF_RANGE = ("channel_far_rows_kernel", "channel_pairs_backward_kernel")
CASES = [
    Case("grouped-token", "delta", "token", B=1, T=70, H=1, HV=2, K=128, V=128),
    Case("head-K96V80", "delta", "head", B=1, T=66, H=1, HV=1, K=96, V=80),
    Case("linear", "linear", "token", B=1, T=70, H=1, HV=1, K=128, V=128),
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Gluon kernels are emulated, on a card of one multiprocessor, so that persistent programs have several items; names of launches."""
    launched: list[str] = []

    def launch(self: Kernel, grid: int, *structs: Any) -> None:
        launched.append(self.kernel.fn.__name__)
        if self.kernel.is_gluon():
            gluon_emulator.run(self.kernel, grid, structs, self.spec)
        else:
            assert launched[-1] in OUT_OF_RANGE

    monkeypatch.setattr(gpu, "target", lambda device: gpu.Target((9, 0), 227 * 1024, 1))
    monkeypatch.setattr(gpu, "hopper_refuses", lambda device, dtype, dtypes: None)
    monkeypatch.setattr(Kernel, "__call__", launch)
    monkeypatch.setattr(gluon_hopper, "launch", lambda known, device, kind, tensors, make: make())
    with gluon_emulator.emulated(*MODULES):
        yield launched


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_emulated_kernels_are_within_budget(case: Case, emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_recurrence_gpu, "DEVICE", "cpu")
    test_recurrence_gpu.assert_kernels_within_budget(case, torch.bfloat16, "gluon")
    assert "output_backward_kernel" in emulated
