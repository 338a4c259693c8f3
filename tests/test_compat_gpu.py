"""Every name of flashmix.compat called once on a GPU in bfloat16, with gradients, beside the same call in float64 on a CPU.

The yardstick is the same call in bfloat16 on a CPU. With flash-linear-attention installed its own functions are called with the same
values and held to the same budget; its autotuner takes the first variant.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import assert_within_budget
from compat_calls import CALLS, SIZES, THINGS, flow, run, sizes, values
from decay_roundings import assert_within_roundings, kda_pairs
from torch import Tensor
from torch.nn.functional import normalize, softplus

KDA = "fla.fused_recurrent_kda"
# Of flash-linear-attention's own functions, those whose results differ from ours, which are held to the definition (docs/compat.md).
OTHERWISE = {
    "fla.prepare_sequence_ids": "counts sequences without tokens out",
    "fla.chunk_linear_attn": "returns the normaliser's state unasked",
    "fla.fused_chunk_linear_attn": "failed on an H100 with Triton 3.6; the run was cut before it said how",
    "fla.chunk_simple_gla": "failed on an H100 with Triton 3.6; the run was cut before it said how",
    "fla.chunk_lightning_attn": "final state not finite on an H100 with Triton 3.6",
    "fla.chunk_mesa_net": "beyond the budget on an H100 with Triton 3.6",
}
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
    compare(name, run(name, THINGS[name], "cuda", torch.bfloat16))


def compare(name: str, got: dict[str, Tensor]) -> None:
    plain, exact = run(name, THINGS[name], "cpu", torch.bfloat16), in_float64(name)
    assert got and set(got) <= set(exact)
    for key, tensor in got.items():
        assert tensor.device.type == "cuda"
        stages = STAGES if key.startswith("result") else 2 * STAGES  # as of random calls, docs/numerics.md
        assert_within_budget(f"{name} {key}", tensor.cpu(), exact[key], plain[key], torch.bfloat16, stages)


def moved_by_roundings() -> Tensor:
    """What roundings of 16-bit operands move the gradient of KDA's `A_log` by, over one rounding; exact up to one more."""
    with sizes():
        x = values(KDA, "cpu", torch.float64)
    q, k = (normalize(x[name], dim=-1) for name in ("q", "raw_k"))
    g = -x["A_log"].exp()[:, None] * softplus(x["raw_gk"] + x["dt_bias_k"].view(q.shape[2:]))
    made = kda_pairs(q, k, x["v"], x["raw_beta"].sigmoid(), g, flow(x["v"]))
    return torch.stack([pair.moved(dA) for pair, dA in made]).sum(0).sqrt()


@pytest.mark.interpreted
def test_the_gradient_of_a_log_is_within_its_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum that cancels, by the kernels in float16, whose roundings are an eighth of bfloat16's."""
    monkeypatch.setitem(SIZES, "T", 40)
    exact = run(KDA, THINGS[KDA], "cpu", torch.float64)["dA_log"]
    got = run(KDA, THINGS[KDA], "cpu", torch.float16)["dA_log"]
    assert_within_roundings("dA_log", got, exact, exact, moved_by_roundings(), torch.float16)


@functools.cache
def original(name: str) -> Any:
    """The function or class of this name in flash-linear-attention."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    autotuner._bench = lambda self, *_, **__: [0.0, 0.0, 0.0]
    fla = pytest.importorskip("fla")
    for package in ("fla.ops", "fla.modules"):
        thing = getattr(importlib.import_module(package), name, None)
        if thing is not None:
            return thing
    for path in sorted(Path(fla.__path__[0]).rglob("*.py")):  # names that no package hands on
        text = path.read_text()
        if f"def {name}(" in text or f"class {name}(" in text or f"\n{name} = " in text:
            parts = path.relative_to(fla.__path__[0]).with_suffix("").parts
            return getattr(importlib.import_module(".".join(("fla", *parts))), name)
    raise AssertionError(f"flash-linear-attention has no {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in THINGS if name.startswith("fla.") and name not in OTHERWISE])
def test_call_of_the_original(name: str) -> None:
    """Without gradients, for which the original refuses some cards and versions of Triton."""
    thing = original(name.removeprefix("fla."))
    try:
        got = run(name, thing, "cuda", torch.bfloat16, gradient=False)
    except Exception as error:
        pytest.skip(f"the original cannot be called so: {type(error).__name__}: {error}")
    compare(name, got)
