"""What layers and models remember: buffers and rings, constant cost, snapshots, beams, and rolling back."""

from __future__ import annotations

import pytest
import torch
from model_cases import MODELS, assert_same, make_model, numbers, some_tokens
from torch import Tensor

from flashmix.layer.cache import AttentionCache, Lengths, RecurrentCache
from flashmix.op.packing import Packing

pytestmark = pytest.mark.usefixtures("one_thread")


def in_order(cache: AttentionCache, row: int) -> Tensor:
    """The keys of one sequence that a next token could see, oldest first."""
    assert cache.keys is not None and cache.lengths is not None
    length = int(cache.lengths.tokens[row])
    first = 0 if cache.window is None else max(0, length - cache.window)
    return torch.stack([cache.keys[row, t % cache.keys.shape[1]] for t in range(first, length)])


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("pieces", [[1] * 50, [20, 30], [3, 1, 1, 45], [50], [0, 7, 43]])
def test_the_buffer_holds_the_last_tokens(window: int | None, pieces: list[int]) -> None:
    k, v = numbers(2, 50, 3, 4), numbers(2, 50, 3, 4, seed=2)
    cache, seen = AttentionCache(window), 0
    for new_k, new_v in zip(k.split(pieces, 1), v.split(pieces, 1), strict=True):
        cache.append(new_k, new_v, None)
        seen += new_k.shape[1]
        for row in range(2):
            if seen:
                kept = seen if window is None else min(seen, window)
                assert torch.equal(in_order(cache, row), k[row, seen - kept : seen])
    assert cache.lengths is not None and cache.lengths.longest == 50 and cache.lengths.equal
    assert cache.keys is not None and cache.keys.shape[1] <= (64 if window is None else window)


@pytest.mark.parametrize("window", [None, 1, 4, 40])
def test_sequences_of_unequal_lengths(window: int | None) -> None:
    cache = AttentionCache(window)
    rows: list[list[Tensor]] = [[], [], []]
    for seed, lengths in enumerate([[3, 0, 7], [0, 5, 1], [1, 1, 1], [9, 2, 0]]):
        k = numbers(1, sum(lengths), 2, 4, seed=seed)
        cache.append(k, k, Packing.from_lengths(lengths))
        for row, part in zip(rows, k[0].split(lengths), strict=True):
            row.append(part)
        step = numbers(3, 1, 2, 4, seed=10 + seed)
        cache.append(step, step, None)
        for row, part in zip(rows, step, strict=True):
            row.append(part)
        for index, row in enumerate(rows):
            expected = torch.cat(row)
            assert torch.equal(in_order(cache, index), expected if window is None else expected[-window:])
    assert cache.lengths is not None and cache.lengths.tokens.tolist() == [17, 12, 13] and not cache.lengths.equal


def test_the_cost_of_a_token_is_constant() -> None:
    ring, buffer, moves = AttentionCache(8), AttentionCache(), 0
    k = numbers(1, 1, 1, 2)
    places = set()
    for step in range(1000):
        before = None if buffer.keys is None else buffer.keys.data_ptr()
        ring.append(k, k, None)
        buffer.append(k, k, None)
        assert ring.keys is not None and buffer.keys is not None
        moves += before != buffer.keys.data_ptr()
        if step >= 8:
            places.add(ring.keys.data_ptr())
    assert len(places) == 1, "the ring is written in place"
    assert moves == 7, "16, 32, ..., 1024: the buffer doubles"


def test_a_snapshot_is_a_snapshot_through_branches() -> None:
    for window in (None, 3):
        cache = AttentionCache(window)
        steps = [numbers(2, 1, 1, 2, seed=seed) for seed in range(12)]

        def run(seeds: range, cache: AttentionCache = cache, steps: list[Tensor] = steps) -> Tensor:
            for seed in seeds:
                cache.append(steps[seed], steps[seed], None)
            return in_order(cache, 0)

        at_4 = run(range(4))
        first = cache.snapshot()
        at_7 = run(range(4, 7))
        second = cache.snapshot()
        run(range(7, 9))
        cache.restore(first)
        assert torch.equal(in_order(cache, 0), at_4)
        run(range(8, 12))
        cache.restore(second)
        assert torch.equal(in_order(cache, 0), at_7)
        run(range(9, 12))
        cache.restore(first)
        assert torch.equal(in_order(cache, 0), at_4)


def test_lengths() -> None:
    lengths = Lengths.zero(3, torch.device("cpu"))
    assert lengths.positions(None, 2) == 0
    later = lengths.advanced(None, 4)
    assert later.positions(None, 1) == 4 and later.longest == 4
    packing = Packing.from_lengths([2, 0, 1])
    uneven = later.advanced(packing, 3)
    assert uneven.tokens.tolist() == [6, 4, 5] and uneven.longest == 6 and not uneven.equal
    positions = uneven.positions(None, 2)
    assert isinstance(positions, Tensor) and positions.tolist() == [[6, 7], [4, 5], [5, 6]]
    packed = uneven.positions(packing, 3)
    assert isinstance(packed, Tensor) and packed.tolist() == [[6, 7, 5]]


def test_empty_caches_know_nothing() -> None:
    for cache in (AttentionCache(), RecurrentCache()):
        assert cache.sequences is None
        cache.reorder(torch.tensor([0]))
        cache.restore(cache.snapshot())
        assert cache.sequences is None


@pytest.mark.parametrize("name", MODELS)
def test_model_snapshot_beams_and_roll_back(name: str) -> None:
    model, tokens = make_model(name), some_tokens(2, 14)
    with torch.no_grad():
        full = model(tokens)
        cache = model.new_cache(history=6)
        model(tokens[:, :7], cache=cache)
        snapshot = cache.snapshot()
        model(some_tokens(2, 3, seed=5), cache=cache)
        model(some_tokens(2, 1, seed=6), cache=cache)
        model.roll_back(cache, 2)
        model.roll_back(cache, 2)
        assert_same(model(tokens[:, 7:9], cache=cache), full[:, 7:9])
        model(some_tokens(2, 4, seed=7), cache=cache)
        model.roll_back(cache, torch.tensor([4, 4]))
        assert_same(model(tokens[:, 9:], cache=cache), full[:, 9:])
        cache.restore(snapshot)
        cache.reorder(torch.tensor([1, 1, 0]))
        assert_same(model(tokens[[1, 1, 0], 7:], cache=cache), full[[1, 1, 0], 7:])


@pytest.mark.parametrize("name", MODELS)
def test_each_sequence_rolls_back_on_its_own(name: str) -> None:
    model, tokens, drafted = make_model(name), some_tokens(3, 8), some_tokens(3, 4, seed=2)
    with torch.no_grad():
        cache = model.new_cache(history=4)
        model(tokens, cache=cache)
        model(drafted, cache=cache)
        model.roll_back(cache, torch.tensor([4, 1, 0]))
        new = some_tokens(3, 1, seed=3)
        got = model(new, cache=cache)
        for row, accepted in enumerate((0, 3, 4)):
            whole = torch.cat([tokens[row], drafted[row, :accepted], new[row]])[None]
            assert_same(got[row], model(whole)[0, -1:])


def test_how_far_back() -> None:
    model, tokens = make_model("hybrid"), some_tokens(1, 6)
    with torch.no_grad():
        for history, calls in ((0, [6]), (2, [3, 1, 1, 1])):
            cache = model.new_cache(history)
            for part in tokens.split(calls, dim=1):
                model(part, cache=cache)
            with pytest.raises(ValueError, match=f"count must be between 0 and the {history} tokens of the history"):
                model.roll_back(cache, history + 1)
        model.roll_back(cache, 2)
        assert_same(model(tokens[:, 4:], cache=cache), model(tokens)[:, 4:])
    with pytest.raises(ValueError, match="history must be between 0"):
        model.new_cache(-1)


def test_memory_of_a_recurrent_model_does_not_grow() -> None:
    model = make_model("gated_deltanet")
    with torch.no_grad():
        cache = model.new_cache()

        def size() -> int:
            layers = [layer for layer in cache.layers if isinstance(layer, RecurrentCache)]
            return sum(t.untyped_storage().nbytes() for x in layers for t in (x.state, x.recent) if t is not None)

        model(some_tokens(1, 3), cache=cache)
        first = size()
        model(some_tokens(1, 200), cache=cache)
        model(some_tokens(1, 1), cache=cache)
        assert size() == first
