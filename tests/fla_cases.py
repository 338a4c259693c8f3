"""Weights of recorded models of flash-linear-attention, drawn from their names."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor

RECORDED = Path(__file__).parent / "recorded_fla.json"


def weights(shapes: dict[str, list[int]]) -> dict[str, Tensor]:
    """A weight for each name: factors of norms near 1, matrices of variance `1 / inputs`, others of half a unit."""
    made = {}
    for name, shape in shapes.items():
        draw = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        if len(shape) == 1:
            made[name] = 0.5 * draw + (1.0 if name.endswith("weight") else 0.0)
        else:
            made[name] = draw * (shape[-1] ** -0.5 if "conv1d" not in name else 0.5)
    return made


def row(vocabulary: int, length: int = 10) -> Tensor:
    """One row of tokens."""
    return torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(5))
