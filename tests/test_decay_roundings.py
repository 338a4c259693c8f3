"""The budget of the gradient of a decay's own parameter: its pairs are the gradient's, and it foresees what roundings do."""

from __future__ import annotations

import torch
from decay_roundings import Pairs, kda_pairs
from torch import Tensor
from torch.nn.functional import normalize


def drawn(heads: int) -> list[tuple[Pairs, Tensor]]:
    """Two chunks of KDA with decays of up to e^-1 per token."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 80, heads, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    beta, g = (torch.rand(1, 80, heads, *more, generator=generator, dtype=torch.float64) for more in ((), (8,)))
    return kda_pairs(normalize(q, dim=-1), normalize(k, dim=-1), v, beta, -g, do)


def test_rows_less_columns_are_the_sum_over_pairs() -> None:
    for pair, dA in drawn(2):
        distance = pair.G.unsqueeze(3) - pair.G.unsqueeze(2)
        wanted = (pair.terms(dA) * distance).sum((0, 2, 3, 4))
        torch.testing.assert_close(pair.rows_less_columns(dA, torch.float64), wanted)


def test_roundings_move_the_gradient_as_far_as_foreseen() -> None:
    """Of 64 heads: the error is below what whole unit roundoffs give, which roundings are less than, and not far below."""
    made = drawn(64)
    error = sum(
        pair.rows_less_columns(dA, torch.bfloat16) - pair.rows_less_columns(dA, torch.float64) for pair, dA in made
    )
    foreseen = torch.stack([pair.moved(dA) for pair, dA in made]).sum(0).sqrt() * torch.finfo(torch.bfloat16).eps / 2
    ratio = (error / foreseen).square().mean().sqrt()
    assert 0.25 < ratio < 1, ratio
