"""Heads of queries that share keys, values and slots in `gsa` and `abc`: as if the shared ones were written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashmix


@pytest.mark.parametrize("name", ["gsa", "abc"])
def test_shared_heads_are_the_written_out_ones(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, *shared = (torch.randn(2, 9, heads, 6, generator=generator) for heads in (4, 2, 2, 2))
    if name == "gsa":
        shared.append(-torch.rand(2, 9, 2, 6, generator=generator))
    op: Any = getattr(flashmix, name)
    written = [x.repeat_interleave(2, 2) for x in shared]
    (o, states), (expected, last) = (op(q, *x, return_state=True) for x in (shared, written))
    assert torch.equal(o, expected) and all(map(torch.equal, states, last))
    more = op(q, *shared, initial_state=states)[0]
    assert torch.equal(more, op(q, *written, initial_state=last)[0])
    with pytest.raises(ValueError, match="heads of v"):
        op(q[:, :, :3], *shared)
