"""Speculative decoding gives what the model alone would: the same tokens greedily, the same distribution in sampling."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from model_cases import MODELS, left_padded, make_model, some_tokens
from samples import sample
from torch import Tensor

from flashmix.models import Acceptance, Decoder, DecoderConfig, LayerConfig, generate, generate_speculatively
from flashmix.models.generate import probabilities
from flashmix.models.speculative import keep_probability, leftover, stream_speculatively, verify

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [some_tokens(1, length, seed=length) for length in (1, 9, 4)]


def half_right(model: Decoder) -> Decoder:
    """A copy of `model` with noise in its head, so that it drafts some of the right tokens."""
    torch.manual_seed(7)
    copy = Decoder(model.config).to(model.embedding.weight.dtype)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        copy.head.weight += 0.25 * copy.head.weight.std() * torch.randn_like(copy.head.weight)
    return copy


@pytest.mark.parametrize("name", sample(MODELS, ("hybrid", "mamba2", "transformer")))
def test_greedy_is_the_plain_generation_token_by_token(name: str) -> None:
    model = make_model(name)
    tokens, mask = left_padded(ROWS)
    expected = generate(model, tokens, 11, attention_mask=mask)
    counts = Acceptance()
    for draft, drafted in ((half_right(model), 3), (make_model("rwkv7"), 2), (model, 4)):
        got = generate_speculatively(
            model, draft, tokens, 11, draft_tokens=drafted, attention_mask=mask, acceptance=counts
        )
        assert torch.equal(got, expected)
    assert 0 < counts.accepted < counts.drafted


@pytest.mark.parametrize("draft", sample(MODELS, ("kda", "kimi_linear_like", "transformer")))
def test_any_architecture_drafts(draft: str) -> None:
    model = make_model("hybrid")
    tokens = some_tokens(2, 6)
    expected = generate(model, tokens, 9)
    assert torch.equal(generate_speculatively(model, make_model(draft), tokens, 9, draft_tokens=3), expected)
    assert torch.equal(generate_speculatively(model, half_right(model), tokens, 9, draft_tokens=20), expected)


@pytest.mark.parametrize("name", sample(("hybrid", "kimi_linear_like", "transformer"), ("hybrid",)))
def test_rows_stop_where_they_would(name: str) -> None:
    model = make_model(name)
    tokens, mask = left_padded(ROWS)
    free = generate(model, tokens, 12, attention_mask=mask)
    for stop in (int(free[0, 0]), int(free[1, 4]), [int(free[0, 5]), int(free[2, 2])], free[:, 3].tolist()):
        expected = generate(model, tokens, 12, attention_mask=mask, stop=stop)
        for draft in (model, half_right(model)):
            got = generate_speculatively(model, draft, tokens, 12, attention_mask=mask, stop=stop)
            assert torch.equal(got, expected)


def test_a_draft_that_is_right_saves_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_model("hybrid"), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda tokens, **options: calls.append(0) or hidden(tokens, **options))
    counts = Acceptance()
    copy = Decoder(model.config).double()
    copy.load_state_dict(model.state_dict())
    new = generate_speculatively(model, copy, some_tokens(1, 5), 21, draft_tokens=4, acceptance=counts)
    assert new.shape == (1, 21) and len(calls) == 1 + 4, "one for the prompt, then one for each five tokens"
    assert counts.accepted == counts.drafted == 16


def test_short_requests_and_streams() -> None:
    model, draft, prompt = make_model("gla"), make_model("deltanet"), some_tokens(2, 3)
    assert generate_speculatively(model, draft, prompt, 0).shape == (2, 0)
    for length in (1, 2, 5):
        assert torch.equal(generate_speculatively(model, draft, prompt, length), generate(model, prompt, length))
    streamed = list(stream_speculatively(model, half_right(model), prompt, 6))
    assert torch.equal(torch.stack(streamed, dim=1), generate(model, prompt, 6))


# The rule of rejection, by exact enumeration.

SMALL = 3


def tiny(mixer: str, seed: int, vocab: int = SMALL, spread: float = 2.0) -> Decoder:
    """A model of `vocab` tokens whose probabilities are far from even."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(vocab_size=vocab, width=8, layers=[LayerConfig(mixer, {"heads": 2})])).double()
    with torch.no_grad():
        model.head.weight.normal_(std=spread)
    return model


def next_probabilities(model: Decoder, words: list[int], **sampling: float) -> Tensor:
    with torch.no_grad():
        return probabilities(model(torch.tensor([words]))[0, -1], **sampling)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.6, "top_k": 2}, {"temperature": 1.3, "top_p": 0.8}], ids=str
)
def test_the_distribution_is_the_models_own_exactly(sampling: dict[str, float]) -> None:
    """Every draft and every outcome of a round, each with its probability: the sums are the model's probabilities."""
    model, draft, prompt, count = tiny("deltanet", 0), tiny("attention", 1), [0, 2, 1], 2
    likely = lru_cache(lambda words: next_probabilities(model, [*prompt, *words], **sampling))
    begins: dict[tuple[int, ...], float] = {}  # the probability that the text goes on like this
    for words in itertools.product(range(SMALL), repeat=count):
        p = torch.stack([likely(words[:i]) for i in range(count + 1)])[None]
        q = torch.stack([next_probabilities(draft, [*prompt, *words[:i]], **sampling) for i in range(count)])[None]
        drafted = torch.tensor([words])
        chance = float(q.gather(2, drafted[..., None]).prod())
        if chance == 0:
            continue
        keep = keep_probability(p, q, drafted)[0]
        for kept in range(count + 1):
            reach = chance * float(keep[:kept].prod()) * (1.0 if kept == count else 1.0 - float(keep[kept]))
            for token, share in enumerate(leftover(p, q, torch.tensor([kept]))[0].tolist()):
                text = (*words[:kept], token)
                # A round that ends early is followed by others, which the same argument covers: the model's own.
                for more in itertools.product(range(SMALL), repeat=count + 1 - len(text)):
                    weight = reach * share
                    for place, following in enumerate(more):
                        weight *= float(likely((*text, *more[:place]))[following])
                    begins[text + more] = begins.get(text + more, 0.0) + weight
    for text, found in begins.items():
        wanted = 1.0
        for place, token in enumerate(text):
            wanted *= float(likely(text[:place])[token])
        assert abs(found - wanted) <= 64 * torch.finfo(torch.float64).eps
    assert abs(sum(begins.values()) - 1) <= 64 * torch.finfo(torch.float64).eps


def test_drawn_texts_come_at_the_models_rate() -> None:
    model, draft, rows = tiny("gated_deltanet", 0).float(), tiny("attention", 1).float(), 6000
    prompt = torch.tensor([[0, 2, 1]])
    generator, counts = torch.Generator().manual_seed(0), Acceptance()
    new = generate_speculatively(
        model, draft, prompt.expand(rows, 3), 3, draft_tokens=2, temperature=1.0, generator=generator, acceptance=counts
    )
    assert 0 < counts.accepted < counts.drafted
    for text in itertools.product(range(SMALL), repeat=3):
        wanted = 1.0
        for place, token in enumerate(text):
            wanted *= float(next_probabilities(model, [0, 2, 1, *text[:place]], temperature=1.0)[token])
        found = float((new == torch.tensor(text)).all(dim=1).double().mean())
        assert abs(found - wanted) <= 5 * (wanted * (1 - wanted) / rows) ** 0.5, text  # five standard errors


def test_sampling_repeats_with_its_generator() -> None:
    model, draft, prompt = make_model("hybrid"), make_model("gla"), some_tokens(2, 4)

    def draw(seed: int, **options: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate_speculatively(model, draft, prompt, 20, temperature=1.5, generator=generator, **options)

    assert torch.equal(draw(0), draw(0)) and not torch.equal(draw(0), draw(1))
    assert torch.equal(draw(0, top_k=1), generate(model, prompt, 20))


def test_verify_keeps_all_of_a_draft_that_is_the_model() -> None:
    p = torch.rand(50, 4, 6, generator=torch.Generator().manual_seed(0)).softmax(dim=2)
    drafted = torch.multinomial(p[:, :3].flatten(0, 1), 1).view(50, 3)
    accepted, following = verify(p, p[:, :3], drafted)
    assert (accepted == 3).all() and ((following >= 0) & (following < 6)).all()


def test_what_speculation_refuses() -> None:
    model, prompt = make_model("gla"), some_tokens(2, 3)
    other = tiny("gla", 0)
    with pytest.raises(ValueError, match="draft must have vocab_size 64 like model, got 3"):
        generate_speculatively(model, other, prompt, 3)
    with pytest.raises(ValueError, match="draft must be on cpu like model, got meta"):
        generate_speculatively(model, make_model("gla").to("meta"), prompt, 3)
    for options, text in (
        ({"draft_tokens": 0}, "draft_tokens must be between 1"),
        ({"temperature": -1.0}, "temperature must be between"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must have shape \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=text):
            generate_speculatively(model, model, prompt, 3, **options)
