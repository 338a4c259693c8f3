"""The sLSTM with recurrent weights: every implementation and instruction set against the definition, gradients, packed, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from budget import assert_within_budget
from rowwise_cases import random
from torch import Tensor

from flashmix import Packing, slstm
from flashmix.ops.slstm.definition import slstm_cell as define
from flashmix.ops.slstm.native.binding import library, missing

pytestmark = pytest.mark.usefixtures("one_thread")
needs_library = pytest.mark.skipif(missing() is not None, reason=str(missing()))
each_impl = pytest.mark.parametrize("impl", [pytest.param("native", marks=needs_library), "portable"])
LENGTHS = [5, 0, 1, 14]
SIZES = [(3, 5), (1, 16), (2, 33)]


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    if library().flashmix_instructions(request.param) != request.param:
        library().flashmix_instructions(2)
        pytest.skip("this machine has no such instructions")
    yield request.param
    library().flashmix_instructions(2)


def inputs(heads: int, channels: int, sequences: int, *shape: int) -> list[Tensor]:
    """Gates `[*shape, heads, channels]`, recurrent weights and a state."""
    gates = [3 * random(*shape, heads, channels, seed=seed) for seed in range(4)]
    recurrent = random(4, heads, channels, channels, seed=4) / channels**0.5
    c, n, m, y = (random(sequences, heads, channels, seed=seed) for seed in range(5, 9))
    return [*gates, recurrent, c, n.abs(), m, torch.tanh(y)]


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of a sum of them all but `m`."""
    parts = [*outputs[:3], outputs[4]]
    flows = [random(*t.shape, seed=9 + place).to(t.dtype) for place, t in enumerate(parts)]
    found = torch.autograd.grad(parts, leaves, flows)
    return [*(t.detach() for t in outputs), *found]


def ours(given: list[Tensor], impl: str, packing: Packing | None = None) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in given]
    write, forget, candidate, output, recurrent, c, n, m, y = leaves
    out, state = slstm(
        write,
        forget,
        candidate,
        output,
        recurrent,
        initial_state=(c, n, m, y),
        return_state=True,
        cu_seqlens=packing,
        impl=impl,
    )
    assert state is not None
    return gradients([out, *state], leaves)


def defined(given: list[Tensor], ends: list[int] | None = None) -> list[Tensor]:
    """The definition with `m` a constant of the gradient, of each packed sequence by itself."""
    leaves = [t.clone().requires_grad_() for t in given]
    *gates, recurrent, c, n, m, y = leaves
    past = torch.exp(m - m.detach())
    state = [c * past, n * past, m.detach(), y]
    if ends is None:
        return gradients(list(define(tuple(gates), recurrent, tuple(state), constant=True)), leaves)
    parts = [
        define(tuple(g[:, a:b] for g in gates), recurrent, tuple(s[k : k + 1] for s in state), constant=True)
        for k, (a, b) in enumerate(pairwise(ends))
    ]
    outputs = [torch.cat([part[0] for part in parts], 1)]
    outputs += [torch.cat([part[place] for part in parts]) for place in range(1, 5)]
    return gradients(outputs, leaves)


def compare(found: list[Tensor], given: list[Tensor], ends: list[int] | None = None) -> None:
    exact, plain = defined([t.double() for t in given], ends), defined([t.float() for t in given], ends)
    for place, (got, want, baseline) in enumerate(zip(found, exact, plain, strict=True)):
        assert_within_budget(f"{place}", got, want, baseline.to(got.dtype), steps=4)


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
