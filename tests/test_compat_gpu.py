"""Every name of flashmix.compat called once on a GPU in bfloat16, with gradients, beside the same call in float64 on a CPU.

The yardstick is the same call in bfloat16 on a CPU. With flash-linear-attention installed its own functions are called with the same
values and held to the same budget; its autotuner takes the first variant.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from compat_calls import CALLS, THINGS, run
from torch import Tensor

STAGES = 6  # norms of keys, gates, transform, state, output, norm of the output


@functools.cache
def in_float64(name: str) -> dict[str, Tensor]:
    return run(name, THINGS[name], "cpu", torch.float64)


def test_every_name_has_a_call() -> None:
    assert sorted(CALLS) == sorted(THINGS)


@pytest.mark.parametrize("name", THINGS)
def test_call_runs_on_a_cpu(name: str) -> None:
    """The same results in number and shape in both dtypes, finite, and not all 0."""
    wide, narrow = in_float64(name), run(name, THINGS[name], "cpu", torch.bfloat16)
    assert list(wide) == list(narrow)
    for key, tensor in wide.items():
        assert tensor.shape == narrow[key].shape and tensor.isfinite().all() and tensor.any(), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", THINGS)
def test_call_on_a_gpu(name: str) -> None:
    compare(name, THINGS[name])


def compare(name: str, thing: Any, gradient: bool = True) -> None:
    got, plain = run(name, thing, "cuda", torch.bfloat16, gradient), run(name, THINGS[name], "cpu", torch.bfloat16)
    exact = in_float64(name)
    assert got and set(got) <= set(exact)
    for key, tensor in got.items():
        assert tensor.device.type == "cuda"
        assert_within_budget(f"{name} {key}", tensor.cpu(), exact[key], plain[key], torch.bfloat16, STAGES)


@functools.cache
def original(name: str) -> Any:
    """The function or class of this name in flash-linear-attention."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    autotuner._bench = lambda self, *_, **__: [0.0, 0.0, 0.0]
    fla = pytest.importorskip("fla")
    for package in ("ops", "modules"):
        for found in pkgutil.walk_packages([f"{fla.__path__[0]}/{package}"], f"fla.{package}."):
            if not any(part in found.name for part in ("triton_ascend", "backends", "tilelang")):
                thing = getattr(importlib.import_module(found.name), name, None)
                if thing is not None:
                    return thing
    raise AssertionError(f"flash-linear-attention has no {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in THINGS if name.startswith("fla.")])
def test_call_of_the_original(name: str) -> None:
    """Without gradients, for which the original refuses some cards and versions of Triton."""
    compare(name, original(name.removeprefix("fla.")), gradient=False)
