"""The sLSTM with recurrent weights: every implementation and instruction set against the definition, gradients, packed, bad input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from budget import assert_within_budget
from slstm_cases import LENGTHS, SIZES, compare, defined, inputs, ours

from flashmix import Packing, slstm
from flashmix.ops.slstm.native.binding import library, missing

pytestmark = pytest.mark.usefixtures("one_thread")
needs_library = pytest.mark.skipif(missing() is not None, reason=str(missing()))
each_impl = pytest.mark.parametrize("impl", [pytest.param("native", marks=needs_library), "portable"])


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    if library().flashmix_instructions(request.param) != request.param:
        library().flashmix_instructions(2)
        pytest.skip("this machine has no such instructions")
    yield request.param
    library().flashmix_instructions(2)


@each_impl
@pytest.mark.parametrize("heads, channels", SIZES)
def test_it_is_its_definition(heads: int, channels: int, impl: str) -> None:
    given = [t.float() for t in inputs(heads, channels, 2, 2, 20)]
    compare(ours(given, impl), given)


@each_impl
def test_packed_is_each_sequence_by_itself(impl: str) -> None:
    given = [t.float() for t in inputs(2, 20, len(LENGTHS), 1, sum(LENGTHS))]
    packing = Packing.from_lengths(LENGTHS)
    compare(ours(given, impl, packing), given, packing.cu_seqlens.tolist())


@needs_library
def test_every_instruction_set(level: int) -> None:
    given = [t.float() for t in inputs(2, 33, 2, 2, 20)]
    compare(ours(given, "native"), given)


@needs_library
def test_logits_of_any_size() -> None:
    """Gates wide open and closed: finite, and what the definition gives."""
    given = [t.float() for t in inputs(1, 24, 2, 2, 12)]
    given[:4] = [40 * t for t in given[:4]]
    compare(ours(given, "native"), given)


def test_other_sequences_change_no_bit() -> None:
    given = [t.float() for t in inputs(2, 20, 3, 3, 9)]
    whole = ours(given, "auto")[:5]
    alone = ours([t[1:2] if t.shape[0] == 3 else t for t in given], "auto")[:5]
    assert all(torch.equal(every[1:2], one) for every, one in zip(whole, alone, strict=True))


@needs_library
def test_without_recurrent_weights_in_c(level: int) -> None:
    given = inputs(2, 33, 2, 2, 20)
    given[4] = torch.zeros_like(given[4])
    given = [t.float() for t in given]
    exact, plain = defined([t.double() for t in given]), defined(given)
    gates, (c, n, m, y) = given[:4], given[5:]
    out, state = slstm(*gates, initial_state=(c, n, m, y), return_state=True, impl="native")
    assert state is not None
    for got, want, baseline in zip((out, *state), exact, plain, strict=False):
        assert_within_budget("without", got, want, baseline, steps=4)
