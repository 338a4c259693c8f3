"""Token shift against its meaning: whole, split, packed, one token at a time."""

from __future__ import annotations

import definitions
import pytest
import torch
from rowwise_cases import DTYPES, assert_compiles, assert_matches, assert_rows_do_not_meet, assert_same_bits, random

from flashmix import Packing, explain
from flashmix.ops.token_shift.op import token_shift


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_token_shift_is_its_definition(tokens: int, dtype: torch.dtype) -> None:
    x, state = random(2, tokens, 7, dtype=dtype), random(2, 1, 7, dtype=dtype, seed=1)
    assert_matches(lambda x: token_shift(x)[0], lambda x: definitions.token_shift(x)[0], x)
    assert_matches(lambda x, s: token_shift(x, initial_state=s, return_state=True), definitions.token_shift, x, state)


@pytest.mark.parametrize("lengths", [[3, 0, 1, 7, 0], [0, 0, 4], [1, 1, 1]])
def test_packed_is_one_by_one(lengths: list[int]) -> None:
    x = random(1, sum(lengths), 6).requires_grad_()
    state = random(len(lengths), 1, 6, seed=1).requires_grad_()
    packing = Packing.from_lengths(lengths)
    for first in (state, None):
        rows = [None] * len(lengths) if first is None else first.split(1)
        parts = [
            token_shift(part, initial_state=s, return_state=True)
            for part, s in zip(x.split(lengths, dim=1), rows, strict=True)
        ]
        alone = torch.cat([y for y, _ in parts], dim=1), torch.cat([s for _, s in parts])
        grads = [random(*y.shape, seed=2) for y in alone]
        leaves = (x,) if first is None else (x, state)
        wanted = torch.autograd.grad(alone, leaves, grads, materialize_grads=True)
        for cu_seqlens in (packing, packing.cu_seqlens.int()):
            packed = token_shift(x, initial_state=first, return_state=True, cu_seqlens=cu_seqlens)
            found = torch.autograd.grad(packed, leaves, grads, materialize_grads=True)
            for have, want in zip((*packed, *found), (*alone, *wanted), strict=True):
                assert_same_bits("packed", have, want)


def test_nothing_packed_is_nothing() -> None:
    y, state = token_shift(torch.ones(1, 0, 4), return_state=True, cu_seqlens=torch.tensor([0, 0]))
    assert y.shape == (1, 0, 4) and state.shape == (1, 1, 4) and not state.any()


@pytest.mark.parametrize("cuts", [[4, 5], [1] * 9, [0, 9], [2, 0, 7]])
def test_split_and_carried_is_whole(cuts: list[int]) -> None:
    x = random(2, 9, 8)
    whole, last = token_shift(x, return_state=True)
    state, parts = None, []
    for part in x.split(cuts, dim=1):
        y, state = token_shift(part, initial_state=state, return_state=True)
        parts.append(y)
    assert_same_bits("outputs", torch.cat(parts, 1), whole)
    assert_same_bits("state", state, last)
    assert state.untyped_storage().nbytes() == 2 * 8 * 4


def test_laws() -> None:
    x, state = (random(*s, dtype=torch.float64, seed=1).requires_grad_() for s in ((1, 4, 3), (2, 1, 3)))
    packing = Packing.from_lengths([1, 3])

    def op(x, s):  # type: ignore[no-untyped-def]
        return token_shift(x, initial_state=s, return_state=True, cu_seqlens=packing)

    assert torch.autograd.gradcheck(op, (x, state)) and torch.autograd.gradgradcheck(op, (x, state))
    cu_seqlens = torch.tensor([0, 1, 1, 4])
    inputs = random(1, 4, 3), random(3, 1, 3)
    assert_compiles(lambda x, s: token_shift(x, initial_state=s, return_state=True, cu_seqlens=cu_seqlens), *inputs)
    assert_rows_do_not_meet(lambda x: token_shift(x)[0], random(3, 403, 7))
    assert explain(token_shift, x).choice == "portable"


X = torch.ones(2, 5, 8)
REFUSED = [
    ({"x": X[0]}, ValueError, r"x must have shape \[B, T, D\], got \[5, 8\]"),
    ({"x": X.long()}, TypeError, "x must have a floating dtype, got int64"),
    ({"initial_state": torch.ones(2, 8)}, ValueError, r"initial_state must have shape \[2, 1, 8\], got \[2, 8\]"),
    ({"initial_state": torch.ones(2, 1, 8).double()}, TypeError, "initial_state must have dtype float32 like x"),
    ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens must come with inputs of batch size 1"),
    ({"x": X[:1], "cu_seqlens": torch.tensor([1, 5])}, ValueError, "cu_seqlens must start at 0, got 1"),
    ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'portable', got 'cuda'"),
]


@pytest.mark.parametrize("arguments, error, text", REFUSED)
def test_token_shift_refuses(arguments: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        token_shift(**{"x": X, **arguments})
