"""The halves of a call of the recurrence over ranks, and the pieces that states leave and enter.

An implementation that has its phases apart has `halves(call)`, which gives them, or None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Shape = Mapping[str, torch.Size]  # of `N` and `M` of one piece


class Pieces(NamedTuple):
    """Pieces of a rank by what states do there, as their indices in order."""

    begun: tuple[int, ...]  # they begin, and their state leaves
    through: tuple[int, ...]  # a state enters, and leaves
    continued: tuple[int, ...]  # a state enters


class Halves(NamedTuple):
    """Both halves of a call, forward and backward, as an implementation has them.

    `forward(call)` has `maps(pieces, shape) -> N, M` by piece, then `outputs(initial_state, save) -> outputs, kept`;
    `backward(call, kept, do)` has `entering(dstate, pieces) -> gradients` by piece, then `gradients(dstate, wanted)`.
    """

    forward: Any
    backward: Any


def uncut(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Rising indices as intervals `(first, stop)`."""
    found: list[tuple[int, int]] = []
    for i in indices:
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found


def each(rows: Tensor, first: int) -> dict[int, Tensor]:
    """The rows of a tensor by their indices, from `first` on."""
    return dict(enumerate(rows.unbind(0), first))
