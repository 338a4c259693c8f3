"""Generation equals the full forward: greedy, sampled, padded, continued, stopped."""

from __future__ import annotations

import math

import pytest
import torch
from model_cases import MODELS, left_padded, make_model, some_models, some_tokens

from flashmix.models import Decoder, generate, stream
from flashmix.models.generate import sample

pytestmark = pytest.mark.usefixtures("one_thread")
every_model = pytest.mark.parametrize("name", MODELS)


def assert_greedy(model: Decoder, prompt: torch.Tensor, new: torch.Tensor) -> None:
    """Each token of `new` `[n]` is the argmax of a full forward over all before it."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, new])[None])[0]
    assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), new)


@every_model
def test_greedy_is_the_argmax_of_the_full_forward(name: str) -> None:
    model, prompt = make_model(name), some_tokens(2, 5)
    new = generate(model, prompt, 12)
    assert new.shape == (2, 12) and new.dtype == torch.int64
    for row in range(2):
        assert_greedy(model, prompt[row], new[row])


@some_models(1)
def test_prompts_of_unequal_length_do_not_meet(name: str) -> None:
    model = make_model(name)
    rows = [some_tokens(1, length, seed=length) for length in (1, 9, 4)]
    left, left_mask = left_padded(rows)
    right, right_mask = left.clone(), left_mask.clone()
    for index, row in enumerate(rows):
        right[index] = left[index].roll(row.shape[1])
        right_mask[index] = left_mask[index].roll(row.shape[1])
    expected = torch.cat([generate(model, row, 8) for row in rows])
    assert torch.equal(generate(model, left, 8, attention_mask=left_mask), expected)
    assert torch.equal(generate(model, right, 8, attention_mask=right_mask), expected)


@some_models(2)
def test_going_on_from_a_cache_with_a_longer_prompt(name: str) -> None:
    model = make_model(name)
    rows = [some_tokens(1, length, seed=length) for length in (6, 2)]
    tokens, mask = left_padded(rows)
    cache = model.new_cache()
    first = generate(model, tokens, 4, attention_mask=mask, cache=cache)
    more = torch.cat([first[:, -1:], some_tokens(2, 3, seed=9)], dim=1)
    second = generate(model, more, 5, cache=cache)
    for index, row in enumerate(rows):
        whole = torch.cat([row[0], first[index, :-1], more[index]])
        assert_greedy(model, row[0], first[index])
        assert_greedy(model, whole, second[index])


@some_models(0)
def test_a_row_that_has_stopped_does_not_enter_the_cache(name: str) -> None:
    model, prompt = make_model(name), some_tokens(3, 4)
    free = generate(model, prompt, 8)
    stop = int(free[0, 2])
    cache = model.new_cache()
    new = generate(model, prompt, 8, stop=stop, cache=cache)
    more = torch.cat([new[:, -1:], some_tokens(3, 2, seed=4)], dim=1)
    second = generate(model, more, 3, cache=cache)
    for row in range(3):
        ends = (new[row] == stop).nonzero()
        length = int(ends[0]) + 1 if len(ends) else new.shape[1]
        assert torch.equal(new[row, :length], free[row, :length])
        assert (new[row, length:] == stop).all()
        assert_greedy(model, torch.cat([prompt[row], new[row, : length - 1], more[row]]), second[row])


def test_stopping_ends_early_and_takes_several_tokens() -> None:
    model, prompt = make_model("gla"), some_tokens(1, 4)
    free = generate(model, prompt, 6)[0].tolist()
    assert generate(model, prompt, 6, stop=free[0]).tolist() == [free[:1]]
    assert generate(model, prompt, 6, stop=[99, free[0]]).tolist() == [free[:1]]
    assert generate(model, prompt, 0).shape == (1, 0)
    assert [token.tolist() for token in stream(model, prompt, 3)] == [[token] for token in free[:3]]


def test_sampling_repeats_with_its_generator() -> None:
    model, prompt = make_model("hybrid"), some_tokens(2, 4)

    def draw(seed: int, **options: float) -> torch.Tensor:
        return generate(model, prompt, 20, temperature=1.5, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    greedy = generate(model, prompt, 20)
    assert torch.equal(draw(0, top_k=1), greedy)
    assert torch.equal(draw(0, top_p=0.0), greedy)
    assert torch.equal(draw(0, top_k=1000, top_p=1.0), draw(0))


def test_sampling_draws_from_the_right_tokens_at_the_right_rate() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(20000, 4)
    generator = torch.Generator().manual_seed(0)

    def rates(**options: float) -> torch.Tensor:
        drawn = sample(logits, generator=generator, **options)
        return torch.bincount(drawn, minlength=4) / len(drawn)

    def assert_near(got: torch.Tensor, *expected: float) -> None:
        wanted = torch.tensor(expected) / sum(expected)
        assert ((got == 0) == (wanted == 0)).all()
        assert ((got - wanted).abs() <= 5 * (wanted * (1 - wanted) / 20000).sqrt()).all()  # five standard errors

    assert_near(rates(temperature=1.0), 0.5, 0.3, 0.15, 0.05)
    assert_near(rates(temperature=0.5), 0.25, 0.09, 0.0225, 0.0025)
    assert_near(rates(temperature=1.0, top_k=2), 0.5, 0.3, 0, 0)
    assert_near(rates(temperature=1.0, top_p=0.6), 0.5, 0.3, 0, 0)
    assert_near(rates(temperature=1.0, top_p=0.81), 0.5, 0.3, 0.15, 0)
    assert_near(rates(temperature=1.0, top_k=3, top_p=0.9), 0.5, 0.3, 0.15, 0)
    assert_near(rates(), 1, 0, 0, 0)
    for temperature in (1e-320, 1e-40, 1e-30):  # by which a logit is infinite
        assert_near(rates(temperature=temperature), 1, 0, 0, 0)
    assert_near(rates(temperature=math.inf), 0.25, 0.25, 0.25, 0.25)


def test_what_generation_refuses() -> None:
    model, prompt = make_model("gla"), some_tokens(2, 3)
    for options, text in (
        ({"temperature": -1.0}, "temperature must be between"),
        ({"top_k": 0}, "top_k must be between"),
        ({"top_p": 1.5}, "top_p must be between"),
        ({"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "at least one token in every row"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must have shape \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=text):
            generate(model, prompt, 4, **options)
    with pytest.raises(ValueError, match="max_new_tokens must be between"):
        generate(model, prompt, -1)
    with pytest.raises(ValueError, match="at least one token a row"):
        generate(model, prompt[:, :0], 4)


def test_gradients_can_be_taken_after_generating() -> None:
    model, prompt = make_model("transformer"), some_tokens(1, 3)
    with torch.inference_mode():
        generate(model, prompt, 3)
    model(prompt, targets=prompt).backward()
    assert model.embedding.weight.grad is not None
