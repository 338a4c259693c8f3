"""The error budget of every implementation: no literal tolerances, only the rounding of its dtype.

The reference is the definition in float64. `baseline` is the plain evaluation of the same thing in the dtype under test
(the definition's own loop or formula). An implementation may err at most twice as much as the baseline, plus one rounding
step of the dtype; the error is measured as RMS(error) / RMS(reference) and as max|error| / max|reference|.
"""

from __future__ import annotations

import torch
from torch import Tensor


def relative_errors(got: Tensor, reference: Tensor) -> tuple[float, float]:
    """RMS and maximum error of `got`, each relative to the reference's RMS and maximum (absolute where that is 0)."""
    if got.shape != reference.shape:
        raise AssertionError(f"shape {tuple(got.shape)} is not the reference's {tuple(reference.shape)}")
    if reference.numel() == 0:
        return 0.0, 0.0
    reference = reference.double()
    error = got.double() - reference
    rms = reference.square().mean().sqrt().item()
    largest = reference.abs().max().item()
    return error.square().mean().sqrt().item() / (rms or 1.0), error.abs().max().item() / (largest or 1.0)


def assert_within_budget(
    name: str, got: Tensor, reference: Tensor, baseline: Tensor, dtype: torch.dtype | None = None, steps: int = 1
) -> None:
    """Fails unless `got` is finite and errs at most twice as much as `baseline`, plus rounding steps of `dtype` (default: got's).

    One step, unless the implementation rounds between more stages than the baseline does: then one a stage.
    """
    assert torch.isfinite(got).all(), f"{name}: not finite"
    step = steps * torch.finfo(dtype or got.dtype).eps
    for kind, have, allowed in zip(
        ("RMS", "max"), relative_errors(got, reference), relative_errors(baseline, reference), strict=True
    ):
        budget = 2 * allowed + step
        assert have <= budget, (
            f"{name}: {kind} error {have:.2e} is over the budget {budget:.2e} (baseline {allowed:.2e})"
        )
