"""The options of `mamba2` that mamba_ssm has: each is the plain call of what it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import assert_within_budget
from torch import Tensor
from torch.nn import functional as F

import flashmix

H, P, N = 4, 6, 5


def operands(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = {"x": normal(2, 9, H, P), "dt": normal(2, 9, H), "B": normal(2, 9, 2, N), "C": normal(2, 9, 2, N)}
    return x | {"A": -normal(H).abs(), "D": normal(H, P), "z": normal(2, 9, H, P), "dt_bias": normal(H)}


def composed(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, z: Tensor, dt_bias: Tensor) -> Tensor:
    step = F.softplus(dt + dt_bias).clamp(0.1, 1.0)
    y, _ = flashmix.mamba2(x, step, (-A).log(), B, C, impl="portable")
    return (y + D * x) * F.silu(z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_they_are_the_plain_call_of_what_they_stand_for(dtype: torch.dtype) -> None:
    given = operands(dtype)
    exact = composed(**{name: t.double() for name, t in given.items()})
    baseline = composed(**{name: t.float() if dtype == torch.float64 else t for name, t in given.items()})
    options: dict[str, Any] = {"A_log": None, "softplus": True, "dt_limit": (0.1, 1.0)}
    y, _ = flashmix.mamba2(**given, **options)
    assert y.dtype == dtype
    assert_within_budget("y", y, exact, baseline, dtype)


def test_what_does_not_fit_raises() -> None:
    given = operands(torch.float32)
    plain = {name: given[name] for name in ("x", "dt", "B", "C")}
    for more, match in (
        ({"A_log": None}, "A must be given in place of A_log, got neither"),
        ({"A_log": given["A"], "A": given["A"]}, "A must be given in place of A_log, got both"),
        ({"A_log": given["A"], "dt_bias": given["dt_bias"]}, "dt_bias must be given with softplus=True"),
        ({"A_log": None, "A": given["A"][:2]}, "A must have shape \\[4\\], got \\[2\\]"),
        ({"A_log": given["A"], "z": given["z"][:1]}, "z must have shape"),
        ({"A_log": given["A"], "D": given["D"][:, :2]}, "D must have shape"),
    ):
        with pytest.raises(ValueError, match=match):
            flashmix.mamba2(**plain, **more)  # type: ignore[arg-type]
