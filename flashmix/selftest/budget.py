"""The error budget: how far an implementation may be from the definition in float64, by the rounding of its dtype alone.

`baseline` is the plain evaluation of the same thing in the dtype under test (the definition's own loop or formula). An implementation
may err at most twice as much as the baseline, plus one rounding step of the dtype for each of its stages; the error is measured as
RMS(error) / RMS(reference) and as max|error| / max|reference|.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def relative_errors(got: Tensor, reference: Tensor) -> tuple[float, float]:
    """RMS and maximum error of `got`, each relative to the reference's RMS and maximum (absolute where that is 0).

    Raises AssertionError: the shapes differ.
    """
    if got.shape != reference.shape:
        raise AssertionError(f"shape {tuple(got.shape)} is not the reference's {tuple(reference.shape)}")
    if reference.numel() == 0:
        return 0.0, 0.0
    reference = reference.double()
    error = got.double() - reference
    rms = reference.square().mean().sqrt().item()
    largest = reference.abs().max().item()
    return error.square().mean().sqrt().item() / (rms or 1.0), error.abs().max().item() / (largest or 1.0)


@dataclass(frozen=True)
class Spent:
    """The error of one result beside its budget, by one of the two measures (`kind`: "RMS" or "max")."""

    kind: str
    error: float
    budget: float
    baseline: float

    @property
    def share(self) -> float:
        """Error over budget; infinite for a result that is not finite."""
        return self.error / self.budget if self.error == self.error else float("inf")

    @property
    def within(self) -> bool:
        return self.error <= self.budget


def spend(
    got: Tensor, reference: Tensor, baseline: Tensor, dtype: torch.dtype | None = None, steps: int = 1, times: int = 2
) -> list[Spent]:
    """The errors of `got` beside the budget `times baseline + steps eps`, where eps is the rounding step of `dtype` (default: got's)."""
    step = steps * torch.finfo(dtype or got.dtype).eps
    have, allowed = relative_errors(got, reference), relative_errors(baseline, reference)
    return [
        Spent(kind, error, times * base + step, base)
        for kind, error, base in zip(("RMS", "max"), have, allowed, strict=True)
    ]
