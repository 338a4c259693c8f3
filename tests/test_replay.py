"""Tokens as replays of one fixed step: the same as without, whatever a caller does with the cache in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_cases import MODELS, assert_same, left_padded, make_model, some_models, some_tokens
from recorded_graph import recorded
from samples import sample
from torch import Tensor

from flashmix.models import Decoder, DecoderConfig, LayerConfig, generate, stream
from flashmix.models import replay as replays
from flashmix.models.presets import PRESETS
from flashmix.models.replay import FixedStep, TokenSteps, leaves

pytestmark = pytest.mark.usefixtures("one_thread")
every_model = pytest.mark.parametrize("name", MODELS)
OTHERS = sorted(set(PRESETS) - set(MODELS))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[FixedStep]:
    """Lets a CPU replay what it recorded, from the second token on, in pieces of few tokens; the steps that were captured."""
    found: list[FixedStep] = []

    def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        step: FixedStep = run.__self__  # type: ignore[attr-defined]
        found.append(step)
        tensors = [t for t in leaves(tuple(step._memory)) if isinstance(t, Tensor)]
        before = [t.clone() for t in tensors]
        replay = recorded(run, device)  # which also runs it
        for t, old in zip(tensors, before, strict=True):
            t.copy_(old)
        return replay

    monkeypatch.setattr(replays, "captured", captured)
    monkeypatch.setattr(replays, "why_not", lambda model, cache: replays._refused.get(model))
    monkeypatch.setattr(replays, "ROOM", 12)
    return found


@pytest.mark.parametrize(
    "name",
    sample(
        [*MODELS, *OTHERS],
        ["transformer", "hybrid", "gla", "mamba2", "rwkv7", "kimi_linear_like", "mlstm", "rg_lru", "rwkv4"],
    ),
)
def test_the_same_tokens(name: str, graphs: list[FixedStep]) -> None:
    model, prompt = make_model(name), some_tokens(2, 7)
    plain = generate(model, prompt, 34, cuda_graph=False)
    assert not graphs
    assert torch.equal(generate(model, prompt, 34, cuda_graph=True), plain)
    counts = any(c.lengths is not None for c in graphs[0].cache.layers)
    assert len(graphs) == (3 if counts else 1), "a layer that counts tokens is captured anew where its room doubles"


@every_model
def test_logits_and_memory(name: str, graphs: list[FixedStep]) -> None:
    """Not only the likeliest token: every logit, and the whole cache after many."""
    model, tokens = make_model(name), some_tokens(3, 30)
    with torch.no_grad():
        plain, fixed = model.new_cache(), model.new_cache()
        for cache in (plain, fixed):
            model(tokens[:, :9], cache=cache)
        steps = TokenSteps(model, fixed, True)
        for i in range(9, 30):
            want = model(tokens[:, i : i + 1], cache=plain)[:, 0]
            got = steps(tokens[:, i], 30 - i)
            assert_same(got, want)
    for a, b in zip(plain.layers, fixed.layers, strict=True):
        assert (a.lengths is None) == (b.lengths is None)
        if a.lengths is not None and b.lengths is not None:
            assert (a.lengths.longest, a.lengths.equal, b.lengths.limit) == (b.lengths.longest, b.lengths.equal, None)
            assert torch.equal(a.lengths.tokens, b.lengths.tokens)
        for x, y in zip(leaves(getattr(a, "state", ())), leaves(getattr(b, "state", ())), strict=True):
            if isinstance(x, Tensor):
                assert_same(y, x)


@some_models(1)
def test_prompts_of_unequal_length_and_sampling(name: str, graphs: list[FixedStep]) -> None:
    model = make_model(name)
    tokens, mask = left_padded([some_tokens(1, length, seed=length) for length in (1, 9, 4)])

    def drawn(cuda_graph: bool) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        options: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "generator": generator}
        return generate(model, tokens, 25, attention_mask=mask, cuda_graph=cuda_graph, **options)

    assert torch.equal(drawn(True), drawn(False)) and graphs


@some_models(2)
def test_a_conversation_with_stops(name: str, graphs: list[FixedStep]) -> None:
    model, prompt = make_model(name), some_tokens(3, 4)
    free = generate(model, prompt, 12, cuda_graph=False)
    stop = int(free[0, 7])

    def talk(cuda_graph: bool) -> tuple[Tensor, Tensor]:
        cache = model.new_cache()
        first = generate(model, prompt, 12, stop=stop, cache=cache, cuda_graph=cuda_graph)
        more = torch.cat([first[:, -1:], some_tokens(3, 2, seed=4)], dim=1)
        return first, generate(model, more, 9, cache=cache, cuda_graph=cuda_graph)

    for a, b in zip(talk(True), talk(False), strict=True):
        assert torch.equal(a, b)
    assert graphs


@pytest.mark.parametrize("name", ["transformer", "hybrid", "retnet", "mamba2", "kimi_linear_like"])
def test_a_caller_may_use_the_cache_between_tokens(name: str, graphs: list[FixedStep]) -> None:
    """Snapshots stay as they were, beams move, a restored cache goes on from where it was."""
    model, prompt = make_model(name), some_tokens(2, 5)

    def run(cuda_graph: bool) -> list[Tensor]:
        cache, seen, kept = model.new_cache(), [], None
        for i, token in enumerate(stream(model, prompt, 24, cache=cache, cuda_graph=cuda_graph)):
            seen.append(token.clone())
            if i == 6:
                kept = cache.snapshot()
            if i == 11:
                cache.reorder(torch.tensor([1, 0]))
            if i == 16:
                assert kept is not None
                cache.restore(kept)
            if i == 19:
                model.hidden(some_tokens(2, 3, seed=8), cache=cache)
        assert kept is not None
        cache.restore(kept)
        with torch.no_grad():
            seen.append(model(some_tokens(2, 2, seed=5), cache=cache).argmax(-1))
        return seen

    with torch.no_grad():
        for a, b in zip(run(True), run(False), strict=True):
            assert torch.equal(a, b)
    assert len(graphs) >= 4


def test_a_layer_whose_cache_changes_is_not_replayed(graphs: list[FixedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_model("gla"), some_tokens(2, 5)
    plain = generate(model, prompt, 12, cuda_graph=False)
    mixer = model.blocks[0].mixer
    mix = mixer.mix

    def counting(x: Tensor, packing: Any, cache: Any) -> Tensor:
        y = mix(x, packing, cache)
        cache.recent = torch.zeros(2, 1 if cache.recent is None else cache.recent.shape[1] + 1)
        return y

    monkeypatch.setattr(mixer, "mix", counting)
    assert torch.equal(generate(model, prompt, 12), plain) and not graphs
    with pytest.raises(ValueError, match=r"cuda_graph=True cannot run this: the cache of layer 0 changes with a token"):
        generate(model, prompt, 12, cuda_graph=True)


def test_a_failed_capture_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = make_model("hybrid"), some_tokens(2, 5)
    plain, tries = generate(model, prompt, 12), []

    def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        tries.append(run)
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(replays, "captured", captured)
    monkeypatch.setattr(replays, "why_not", lambda model, cache: replays._refused.get(model))
    cache = model.new_cache()
    assert torch.equal(generate(model, prompt, 12, cache=cache), plain)
    assert torch.equal(generate(model, prompt, 12), plain) and len(tries) == 1, "it is not tried again"
    with pytest.raises(ValueError, match="cannot be captured: operation not permitted"):
        generate(model, prompt, 12, cuda_graph=True)


def test_when_it_is_not_tried(graphs: list[FixedStep]) -> None:
    model, prompt = make_model("gla"), some_tokens(1, 5)
    generate(model, prompt, replays.PAYS)
    assert not graphs, "too few tokens"
    generate(model, prompt, replays.PAYS + 1)
    generate(model, prompt, 3, cuda_graph=True)
    assert len(graphs) == 2


def test_reasons() -> None:
    model, prompt = make_model("gla"), some_tokens(1, 5)
    with pytest.raises(ValueError, match="cuda_graph=True cannot run this: the model is on cpu"):
        generate(model, prompt, 3, cuda_graph=True)
    for hidden in (False, True):
        assert not replays.has_hooks(model.blocks[0])
        register = model.blocks[0].register_forward_pre_hook if hidden else model.blocks[0].register_forward_hook
        handle = register(lambda *_: None)
        assert replays.has_hooks(model.blocks[0])
        handle.remove()


def test_what_a_module_replaces_stays_alive() -> None:
    """A graph reads tables and parameters where they lay when it was captured."""
    model = make_model("transformer")
    generate(model, some_tokens(1, 5), 3)
    table = next(m for m in model.modules() if getattr(m, "_table", None) is not None)._table
    held = [id(t) for t in leaves(tuple(tuple(part) for part in replays.alive(model)))]
    assert id(table[0]) in held and id(model.head.weight) in held


# ---- on a GPU ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_a_graph_gives_the_same_tokens(name: str) -> None:
    model, prompt = make_model(name, torch.float32).cuda(), some_tokens(2, 7).cuda()
    plain = generate(model, prompt, 40, cuda_graph=False)
    assert torch.equal(generate(model, prompt, 40, cuda_graph=True), plain)


@pytest.mark.gpu
def test_experts_wait_for_the_device() -> None:
    mlp = {"kind": "experts", "experts": 4, "active": 2, "hidden": 48}
    layers = [LayerConfig("gated_deltanet", {"heads": 2}, mlp)]
    model = Decoder(DecoderConfig(64, 32, layers), device="cuda")
    prompt = some_tokens(2, 7).cuda()
    plain = generate(model, prompt, 20, cuda_graph=False)
    assert torch.equal(generate(model, prompt, 20), plain)
    with pytest.raises(ValueError, match="a layer waits for the device"):
        generate(model, prompt, 20, cuda_graph=True)


@pytest.mark.gpu
def test_refusals_on_a_gpu() -> None:
    model, prompt = make_model("gla", torch.float32).cuda(), some_tokens(1, 5).cuda()
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a module has hooks"):
        generate(model, prompt, 3, cuda_graph=True)
    handle.remove()
    with torch.autocast("cuda", torch.bfloat16), pytest.raises(ValueError, match="autocast"):
        generate(model, prompt, 3, cuda_graph=True)
    assert generate(model, prompt, 12, cuda_graph=True).shape == (1, 12)
