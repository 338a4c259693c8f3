"""Gluon's kernels beside another process on the same card (tests/rival.py): the bits of a call do not change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rival import CASES, PASSES, Rival, known, wrong_calls

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
CALLS = 30


@pytest.fixture(scope="module")
def rival() -> Iterator[Rival]:
    other = Rival()
    try:
        yield other.ready()
    finally:
        other.end()


@pytest.mark.parametrize("name", CASES)
def test_a_call_beside_another_process_has_the_bits_of_a_call_alone(name: str, rival: Rival) -> None:
    """Before barriers kept their memory, 150 of 150 calls of the first case were wrong."""
    for kind, run in zip(PASSES, CASES[name](), strict=True):
        wanted = known(run)
        with rival.beside():
            wrong = wrong_calls(run, wanted, CALLS)
        assert wrong == 0, f"{kind}: {wrong} of {CALLS}"
    torch.cuda.empty_cache()
