"""Ways to stretch rotary frequencies, so that a model reads texts longer than those it was trained on.

A scaling is a small value handed to `rotary_table`. With `theta_i = base^(-2 i / dim)` the plain frequencies:

    scaling          frequency of pair i
    LinearScaling    theta_i / factor
    NTKScaling       theta_i with the base times factor^(dim / (dim - 2)): the slowest as linear, the fastest as they
    are YarnScaling      theta_i for pairs that turn often in the trained length, theta_i / factor for those that do not
                     turn once, a linear blend over the pairs between; and longer queries and keys
    Llama3Scaling    the same three zones by wavelength, blended linearly in 1 / wavelength
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from flashmix.op.checks import check_choice


@dataclass(frozen=True)
class _Scaling:
    """`factor`: how many times longer the texts may get, at least 1."""

    factor: float

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def frequencies(self, dim: int, base: float) -> Tensor:
        """`[dim / 2]` float64: the angle by which each pair turns from one position to the next."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearScaling(_Scaling):
    """Position interpolation. Source: Chen et al. (2306.15595), equation 4."""

    def frequencies(self, dim: int, base: float) -> Tensor:
        return plain_frequencies(dim, base) / self.factor


@dataclass(frozen=True)
class NTKScaling(_Scaling):
    """NTK-aware interpolation. Source: Peng et al., "YaRN" (2309.00071), definition 1."""

    def frequencies(self, dim: int, base: float) -> Tensor:
        if dim <= 2:
            raise ValueError(f"dim must be above 2 for NTKScaling, got {dim}")
        return plain_frequencies(dim, base * self.factor ** (dim / (dim - 2)))


@dataclass(frozen=True)
class YarnScaling(_Scaling):
    """NTK by parts with longer queries and keys.

    Args:
        factor: how many times longer the texts may get.
        trained: the length, in tokens, of the texts trained on.
        fast: pairs that turn at least so often in `trained` tokens keep their frequency.
        slow: pairs that turn at most so often are interpolated.
        attention: factor of queries and keys each; None for `0.1 ln(factor) + 1`.
        whole: round the borders between the zones outwards to whole pairs, as the published models do.

    Source: Peng et al., "YaRN" (2309.00071), sections 3.2 to 3.4, with the blend linear over the pairs as its released
    models have it.
    """

    trained: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    whole: bool = True

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention is None else self.attention

    def frequencies(self, dim: int, base: float) -> Tensor:
        def pair(turns: float) -> float:
            """The (broken) pair that turns so often in `trained` tokens."""
            return dim * math.log(self.trained / (2 * math.pi * turns)) / (2 * math.log(base))

        first, last = pair(self.fast), pair(self.slow)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        theta = plain_frequencies(dim, base)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
        interpolated = ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
        return theta / self.factor * interpolated + theta * (1 - interpolated)


@dataclass(frozen=True)
class Llama3Scaling(_Scaling):
    """Three zones by wavelength.

    Args:
        factor: how many times longer the texts may get.
        trained: the length, in tokens, of the texts trained on.
        slow: wavelengths above `trained / slow` are interpolated.
        fast: wavelengths below `trained / fast` keep their frequency.

    Source: Llama 3.1's rotary embedding, "The Llama 3 herd of models" (2407.21783), section 3.4.2.
    """

    trained: int = 8192
    slow: float = 1.0
    fast: float = 4.0

    def frequencies(self, dim: int, base: float) -> Tensor:
        theta = plain_frequencies(dim, base)
        turns = self.trained * theta / (2 * math.pi)
        kept = ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return theta * kept + theta / self.factor * (1 - kept)


RotaryScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling
SCALINGS: dict[str, type[RotaryScaling]] = {
    "linear": LinearScaling,
    "ntk": NTKScaling,
    "yarn": YarnScaling,
    "llama3": Llama3Scaling,
}


def rotary_scaling(kind: str, **values: Any) -> RotaryScaling:
    """The scaling of this kind ("linear", "ntk", "yarn", "llama3") with these values.

    Raises ValueError: there is no such kind, or it has no such value.
    """
    check_choice("kind", kind, *SCALINGS)
    known = [entry.name for entry in fields(SCALINGS[kind])]
    for name in values:
        check_choice(f"a value of {kind}", name, *known)
    return SCALINGS[kind](**values)


def plain_frequencies(dim: int, base: float) -> Tensor:
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / -dim)
