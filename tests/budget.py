"""The error budget of every implementation as an assertion: no literal tolerances, only the rounding of its dtype.

The reference is the definition in float64. `baseline` is the plain evaluation of the same thing in the dtype under test
(the definition's own loop or formula). An implementation may err at most twice as much as the baseline, plus one rounding
step of the dtype. `flashmix doctor --check` has the same budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.selftest.budget import relative_errors, spend

__all__ = ["assert_within_budget", "relative_errors", "spend"]


def assert_within_budget(
    name: str,
    got: Tensor,
    reference: Tensor,
    baseline: Tensor,
    dtype: torch.dtype | None = None,
    steps: int = 1,
    times: int = 2,
) -> None:
    """Fails unless `got` is finite and errs at most twice as much as `baseline`, plus rounding steps of `dtype` (default: got's).

    One step, unless the implementation rounds between more stages than the baseline does: then one a stage. `times` the baseline instead
    of twice is the budget of correlated keys alone.
    """
    assert torch.isfinite(got).all(), f"{name}: not finite"
    for spent in spend(got, reference, baseline, dtype, steps, times):
        assert spent.within, (
            f"{name}: {spent.kind} error {spent.error:.2e} is over the budget {spent.budget:.2e} (baseline {spent.baseline:.2e})"
        )
