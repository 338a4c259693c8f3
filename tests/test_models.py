"""The decoder of every preset: padding, packing, loss, gradients, checkpoints; and what configurations refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from model_cases import MODELS, assert_same, left_padded, make_model, some_models, some_tokens
from samples import sample, sample_of_rows
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy

from flashmix.models import PRESETS, SIZES, Decoder, DecoderConfig, LayerConfig, parameter_groups, preset
from flashmix.modules import next_token_targets
from flashmix.op.packing import Packing

LENGTHS = [4, 0, 1, 7]

every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_cached_is_the_full_forward(name: str) -> None:
    model, tokens = make_model(name), some_tokens(2, 11)
    with torch.no_grad():
        full = model(tokens)
        for parts in ([4, 1, 1, 1, 4], [1] * 11):
            cache = model.new_cache()
            assert_same(torch.cat([model(part, cache=cache) for part in tokens.split(parts, dim=1)], dim=1), full)


@some_models(1)
def test_packed_is_one_by_one(name: str) -> None:
    model, tokens = make_model(name), some_tokens(1, sum(LENGTHS))
    one_by_one = torch.cat([model(part) for part in tokens.split(LENGTHS, dim=1)], dim=1)
    assert_same(model(tokens, cu_seqlens=Packing.from_lengths(LENGTHS)), one_by_one)


@some_models(2)
def test_left_padding_gives_the_same_numbers_as_none(name: str) -> None:
    model = make_model(name)
    rows = [some_tokens(1, length, seed=length) for length in (9, 3, 6)]
    later = some_tokens(3, 4)
    tokens, mask = left_padded(rows)
    got = model(tokens, attention_mask=mask)
    for index, row in enumerate(rows):
        assert_same(got[index, mask[index]], model(row)[0])
    with torch.no_grad():
        cache = model.new_cache()
        assert_same(model(tokens, attention_mask=mask, cache=cache), got.detach())
        steps = torch.cat([model(later[:, t : t + 1], cache=cache) for t in range(4)], dim=1)
        for index, row in enumerate(rows):
            assert_same(steps[index], model(torch.cat([row, later[index : index + 1]], dim=1))[0, -4:])


@some_models(0)
def test_what_padding_holds_does_not_matter(name: str) -> None:
    model, tokens = make_model(name, torch.float32), some_tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    other = torch.where(mask == 1, tokens, 63 - tokens)
    assert torch.equal(model(tokens, attention_mask=mask), model(other, attention_mask=mask))


@some_models(1)
def test_the_loss_is_cross_entropy_and_never_makes_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model(name), some_tokens(2, 9)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :3] = -100
    logits = model(inputs)
    monkeypatch.setattr(model.head, "forward", None)
    for reduction in ("mean", "sum", "none"):
        expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        got = model(inputs, targets=targets, reduction=reduction)
        assert_same(got.flatten(), expected.flatten())


@some_models(2)
def test_loss_and_gradients_of_padded_packed_and_separate_are_the_same(name: str) -> None:
    model = make_model(name)
    rows = [some_tokens(1, length, seed=length) for length in (7, 2, 5)]
    padded, mask = left_padded(rows)
    packing = Packing.from_lengths([7, 2, 5])
    packed = torch.cat(rows, dim=1)

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    separate = torch.stack([model(row, targets=next_token_targets(row), reduction="sum") for row in rows]).sum() / 11
    in_padding = model(padded, attention_mask=mask, targets=next_token_targets(padded))
    targets = next_token_targets(packed, packing.cu_seqlens)
    in_packing = model(packed, cu_seqlens=packing, targets=targets)
    expected = gradients(separate)
    for loss in (in_padding, in_packing):
        assert_same(loss, separate)
        assert_same(gradients(loss), expected)
    every = model(padded, attention_mask=mask, targets=next_token_targets(padded), reduction="none")
    assert every.shape == padded.shape and not every[~mask].any()


@some_models(0)
def test_gradients_reach_every_parameter(name: str) -> None:
    model, tokens = make_model(name), some_tokens(2, 8)
    model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} has no gradient"
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), parameter_name


@some_models(1)
def test_recomputed_activations_give_the_same_gradients(name: str) -> None:
    tokens, packing = some_tokens(1, 12), Packing.from_lengths(LENGTHS)
    losses, gradients = [], []
    for recompute in (False, True):
        model = make_model(name, checkpoint_activations=recompute)
        loss = model(tokens, cu_seqlens=packing, targets=tokens)
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*losses) and torch.equal(*gradients)


@pytest.mark.parametrize("name", ["gated_deltanet", "rwkv7", "hybrid"])
def test_recomputed_activations_give_the_same_gradients_under_autocast(name: str) -> None:
    """The residual stream is float32 there, and what a block adds to it is not."""
    model, tokens, packing = make_model(name).float(), some_tokens(1, 12), Packing.from_lengths(LENGTHS)
    found = []
    for recompute in (False, True):
        model.checkpoint_activations = recompute
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, cu_seqlens=packing, targets=tokens)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@some_models(2)
def test_state_dict_round_trip_and_plain_configuration(name: str) -> None:
    model, tokens = make_model(name), some_tokens(2, 5)
    written = json.loads(json.dumps(model.config.to_dict()))
    torch.manual_seed(1)
    other = Decoder(DecoderConfig.from_dict(written)).double()
    assert other.config == model.config
    assert not torch.equal(other(tokens), model(tokens))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


@pytest.mark.parametrize("name", sample(MODELS, ("hybrid", "rwkv7")))  # of others each layer compiles in test_layers.py
def test_compiles_without_a_break(name: str) -> None:
    """One block of each kind: a second one is the same code."""
    torch.compiler.reset()
    model, tokens = make_model(name), some_tokens(2, 5)
    model.blocks = torch.nn.ModuleList({repr(block): block for block in model.blocks}.values())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(compiled(tokens, targets=tokens).detach(), model(tokens, targets=tokens).detach())


def test_packings_do_not_recompile() -> None:
    torch.compiler.reset()
    model, tokens, counter = make_model("hybrid"), some_tokens(1, 32), CompileCounter()
    model.blocks = model.blocks[-2:]  # a recurrence and attention
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    counts = []
    for lengths in ([10, 22], [1, 2, 3, 26], [32], [5, 5, 5, 5, 12], [0, 32], [16, 16], [1] * 32, [3, 29]):
        loss = compiled(tokens, cu_seqlens=Packing.from_lengths(lengths), targets=tokens)
        assert_same(loss.detach(), model(tokens, cu_seqlens=Packing.from_lengths(lengths), targets=tokens).detach())
        counts.append(counter.frame_count)
    assert counts[-1] == counts[2] <= 3, f"one for the first, any number, a single one; got {counts}"


def test_exports_with_a_dynamic_length() -> None:
    """One program for all lengths, past the rows of the table of angles that a module keeps too; the module is left as it was."""
    model = make_model("hybrid")
    model.blocks = model.blocks[-2:]  # a recurrence and attention
    tokens, lengths = some_tokens(1, 8), {1: torch.export.Dim("T", min=2, max=4096)}
    with torch.no_grad():
        program = torch.export.export(model, (tokens,), dynamic_shapes=(lengths,), strict=False).module()
        for length in (2, 8, 300):
            tokens = some_tokens(1, length)
            assert_same(program(tokens), model(tokens))


@pytest.mark.parametrize("name", sample(PRESETS, MODELS))
def test_shapes_without_data(name: str) -> None:
    """All tensors are on "meta": logits and the loss, and a gradient of every parameter."""
    model = Decoder(preset(f"{name}_nano", vocab_size=50), device="meta")
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    logits, loss = model(tokens), model(tokens, targets=tokens)
    assert logits.is_meta and logits.shape == (2, 5, 50) and loss.is_meta and loss.shape == ()
    loss.backward()
    assert all(p.grad is not None and p.grad.is_meta for p in model.parameters())


TRAINED = (
    "gated_deltanet",
    "hybrid",
    "kimi_linear_like",
    "mamba2",
    "recurrent_gemma_like",
    "retnet",
    "rwkv7",
    "transformer",
)


@pytest.mark.parametrize("name", sample(PRESETS, TRAINED[::2]))
def test_learns(name: str) -> None:
    model, tokens = make_model(name, torch.float32), some_tokens(2, 17)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(tokens[:, :-1], targets=tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize(
    "name",
    sample(
        [name for name in PRESETS if name not in MODELS],
        ("falcon_mamba_like", "hgrn2", "jamba_like", "mlstm", "recurrent_gemma_like", "rwkv4", "rwkv6"),
    ),
)
def test_the_other_presets(name: str) -> None:
    """Gradients reach every parameter; packed is one by one; a cache gives the full forward, also rolled back."""
    model, tokens = make_model(name), some_tokens(1, sum(LENGTHS))
    model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all() and parameter.grad.any(), (
            parameter_name
        )
    one_by_one = torch.cat([model(part) for part in tokens.split(LENGTHS, dim=1)], dim=1)
    assert_same(model(tokens, cu_seqlens=Packing.from_lengths(LENGTHS)), one_by_one)
    tokens = some_tokens(2, 9)
    with torch.no_grad():
        full, cache = model(tokens), model.new_cache(history=3)
        model(tokens[:, :5], cache=cache)
        model(some_tokens(2, 3, seed=5), cache=cache)
        model.roll_back(cache, torch.tensor([3, 3]))
        assert_same(torch.cat([model(part, cache=cache) for part in tokens[:, 5:].split(1, 1)], 1), full[:, 5:])


OF_EVERY_SIZE = [(size, name) for size in SIZES for name in PRESETS]


@pytest.mark.parametrize(
    "size, name",
    sample_of_rows(OF_EVERY_SIZE, [(size, name) for size, name in OF_EVERY_SIZE if size == "tiny" or name in MODELS]),
)
def test_presets_of_every_size(name: str, size: str) -> None:
    config = preset(f"{name}_{size}", vocab_size=1000)
    assert config.vocab_size == 1000 and len(config.layers) == SIZES[size].depth
    model = Decoder(config, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    if size == "small":
        assert preset(name, vocab_size=1000) == config


def test_the_values_of_the_first_rwkv7_layer_serve_the_others() -> None:
    rwkv7 = LayerConfig("rwkv7", {"heads": 2})
    later = LayerConfig("rwkv7", {"heads": 2, "value_residual": True})
    attention = LayerConfig("attention", {"heads": 2})
    model = Decoder(DecoderConfig(vocab_size=64, width=16, layers=[attention, rwkv7, attention, later, later]))
    tokens = some_tokens(2, 5)
    before = model(tokens)
    handed: list[torch.Tensor] = []
    model.blocks[3].mixer.register_forward_pre_hook(
        lambda _, __, kw: handed.append(kw["first_values"]), with_kwargs=True
    )
    model.blocks[4].mixer.register_forward_pre_hook(
        lambda _, __, kw: handed.append(kw["first_values"]), with_kwargs=True
    )
    assert torch.equal(model(tokens), before)
    assert handed[0] is handed[1]
    with pytest.raises(ValueError, match=r"layers\[1\].value_residual must be false"):
        DecoderConfig(vocab_size=64, width=16, layers=[attention, later])


def test_the_lower_bounds_of_the_first_hgrn2_layer_serve_the_others() -> None:
    """Three layers share one `[3, D]`: the bounds grow from 0 to below 1, gradients reach it, and a layer alone needs it."""
    layers = [LayerConfig("hgrn2", {"heads": 2, "layers": 3, "layer": index}) for index in range(3)]
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=64, width=16, layers=layers)).double()
    bounds = model.blocks[0].mixer.lower_bounds
    torch.nn.init.normal_(bounds)
    tokens = some_tokens(1, 9)
    forgets: list[torch.Tensor] = []
    for block in model.blocks:
        block.mixer.log_forget.register_forward_hook(lambda _, __, log: forgets.append(log.exp()))
        block.mixer.qfv.weight.data[16:32].mul_(-1e4)  # gates at 0 or 1 but for their bounds
    model(tokens).sum().backward()
    share = bounds.softmax(0)
    for index, forget in enumerate(forgets):
        assert_same(forget.flatten(-2).amin((0, 1)), share[1 : index + 1].sum(0))
    assert bounds.grad is not None and bounds.grad.isfinite().all() and bounds.grad.any()
    with torch.no_grad():
        cache = model.new_cache()
        parts = [model(part, cache=cache) for part in tokens.split([4, 1, 4], dim=1)]
        assert_same(torch.cat(parts, dim=1), model(tokens))
    with pytest.raises(ValueError, match="first_values must be given"):
        model.blocks[1].mixer(torch.zeros(1, 2, 16).double())


def test_output_projections_are_smaller_in_deeper_models() -> None:
    layer = LayerConfig("gla", {"heads": 2})

    def weights(depth: int, find: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(vocab_size=64, width=64, layers=depth * [layer]))
        return torch.cat([p.detach().flatten() for n, p in model.named_parameters() if n.endswith(find)])

    for find, ratio in (("mixer.output.weight", 0.5), ("mlp.down.weight", 0.5), ("mlp.gate_up.weight", 1.0)):
        shallow, deep = weights(2, find), weights(8, find)
        error = 4 * (1 / (2 * shallow.numel()) + 1 / (2 * deep.numel())) ** 0.5  # four standard errors of a spread
        assert abs(deep.std() / shallow.std() / ratio - 1) <= error


def test_tied_untied_and_capped_heads() -> None:
    tokens = some_tokens(1, 5)
    layers = [LayerConfig("gla", {"heads": 2})]
    tied = Decoder(DecoderConfig(vocab_size=64, width=16, layers=layers, tied=True))
    untied = Decoder(DecoderConfig(vocab_size=64, width=16, layers=layers))
    scaled = Decoder(DecoderConfig(vocab_size=64, width=16, layers=layers, tied=True, embedding_scale=4.0))
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight
    for model in (tied, untied, scaled):
        assert 0.04 < model(tokens).std() < 0.16, "0.02 sqrt(width): near the uniform distribution"
    untied.load_state_dict(scaled.state_dict() | {"embedding.weight": 4 * scaled.embedding.weight})
    assert torch.equal(untied(tokens), scaled(tokens))
    torch.manual_seed(0)
    capped = Decoder(DecoderConfig(vocab_size=64, width=16, layers=layers, logit_softcap=0.1)).double()
    nn.init.normal_(capped.head.weight)
    logits = capped(tokens)
    assert logits.abs().max() <= 0.1
    assert_same(capped(tokens, targets=tokens), cross_entropy(logits[0], tokens[0]))


def test_weight_decay_is_for_matrices() -> None:
    model = make_model("kda", torch.float32)
    decayed, others = parameter_groups(model, 0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert {names[id(p)].split(".")[-1] for p in decayed["params"]} == {"weight"}
    left = {names[id(p)] for p in others["params"]}
    assert {"blocks.0.mixer.decay.dt_bias", "blocks.0.mixer.convolution.weight", "norm.weight"} <= left


ATTENTION = {"mixer": "attention", "heads": 4}
GOOD: dict[str, Any] = {
    "vocab_size": 64,
    "width": 16,
    "layers": [{"mixer": "gla", "heads": 2}, {"mixer": "attention", "heads": 4, "window": 8}],
}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"width": 0}, ValueError, "width must be positive, got 0"),
        ({"width": 16.0}, TypeError, "width must be a whole number, got 16.0"),
        ({"vocab_size": "many"}, TypeError, "vocab_size must be a whole number, got 'many'"),
        ({"mlp_width": -1}, ValueError, "mlp_width must be positive, got -1"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps must be positive, got 0.0"),
        ({"norm_eps": "small"}, TypeError, "norm_eps must be a number, got 'small'"),
        ({"logit_softcap": -3.0}, ValueError, "logit_softcap must be positive, got -3.0"),
        ({"tied": 1}, TypeError, "tied must be true or false, got 1"),
        ({"depth": 3}, ValueError, "depth is not a field of DecoderConfig, which has vocab_size, width, layers"),
        ({"layers": [{"mixer": "glu"}]}, ValueError, "layers[0].mixer must be one of 'attention', 'deltanet'"),
        ({"layers": ["gla"]}, TypeError, "layers[0] must be a dict, got str"),
        ({"layers": [{"heads": 2}]}, ValueError, "layers[0].mixer must be one of attention, deltanet"),
        ({"layers": [{"mixer": "gla"}]}, ValueError, "layers[0].heads must be given for gla, got nothing"),
        (
            {"layers": [GOOD["layers"][0], {"mixer": "gla", "heads": 2, "widnow": 4}]},
            ValueError,
            "layers[1].widnow is not an option of gla, which takes heads, head_dim, value_dim, kv_heads",
        ),
        ({"layers": [{"mixer": "gla", "heads": 2.5}]}, TypeError, "layers[0].heads must be a whole number, got 2.5"),
        ({"layers": [{"mixer": "gla", "heads": True}]}, TypeError, "layers[0].heads must be a whole number, got True"),
        (
            {"layers": [{"mixer": "attention", "heads": 4, "gated": "yes"}]},
            TypeError,
            "layers[0].gated must be true or false, got 'yes'",
        ),
        (
            {"layers": [{"mixer": "kda", "heads": 4, "lower": "low"}]},
            TypeError,
            "layers[0].lower must be a number, got 'low'",
        ),
        (
            {"layers": [{"mixer": "rwkv7", "heads": 2, "ranks": 8}]},
            TypeError,
            "layers[0].ranks must be a list of whole numbers, got 8",
        ),
        ({"norm": "none"}, ValueError, "norm must be one of 'rms', 'unit_offset_rms', 'layer'"),
        ({"embedding_norm": 1}, TypeError, "embedding_norm must be true or false, got 1"),
        (
            {"layers": [ATTENTION | {"mlp": {}}]},
            ValueError,
            "layers[0].mlp.kind must be one of 'none', 'swiglu', 'gated'",
        ),
        (
            {"layers": [ATTENTION | {"mlp": {"kind": "swiglu", "wide": 2}}]},
            ValueError,
            "layers[0].mlp.wide is not an option of swiglu, which takes hidden",
        ),
        (
            {"layers": [ATTENTION | {"mlp": {"kind": "experts", "hidden": 4, "experts": 4, "active": 5}}]},
            ValueError,
            "layers[0].mlp.active must be between 1 and 4, got 5",
        ),
        ({"layers": [ATTENTION | {"norm_after": 1}]}, TypeError, "layers[0].norm_after must be true or false, got 1"),
        ({"layers": [{"mixer": "gla", "heads": 3}]}, ValueError, "layers[0].value_dim must be given where heads = 3"),
        (
            {"layers": [{"mixer": "attention", "heads": 4, "kv_heads": 3}]},
            ValueError,
            "layers[0].heads must be a positive multiple of kv_heads = 3, got 4",
        ),
        (
            {"layers": [{"mixer": "attention", "heads": 4, "window": 0}]},
            ValueError,
            "layers[0].window must be between 1",
        ),
    ],
)
def test_what_a_configuration_refuses(change: dict[str, Any], error: type[Exception], text: str) -> None:
    DecoderConfig.from_dict(GOOD)
    with pytest.raises(error, match="^" + re.escape(text)):
        DecoderConfig.from_dict({**GOOD, **change})


def test_blocks_with_experts_with_norms_after_and_without_an_mlp() -> None:
    """Cached equals whole, every parameter has a gradient, and the matrices that write to the residual stream start small."""
    experts = {"kind": "experts", "hidden": 8, "experts": 4, "active": 2, "shared": 6, "shared_gate": True}
    layers = [
        LayerConfig("gated_deltanet", {"heads": 2}, mlp={"kind": "none"}),
        LayerConfig("attention", {"heads": 2}, mlp=experts),
        LayerConfig("latent_attention", {"heads": 2, "rank": 8, "shared_dim": 4}, norm_after=True),
    ]
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(64, 16, layers, norm="unit_offset_rms")).double()
    tokens = some_tokens(2, 9)
    full = model(tokens)
    with torch.no_grad():
        cache = model.new_cache()
        assert_same(torch.cat([model(part, cache=cache) for part in tokens.split([4, 1, 4], dim=1)], dim=1), full)
    model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    block = model.blocks[1]
    assert block.mlp.down.std() < 0.6 * (3 * 8) ** -0.5 and block.mlp.shared.down.weight.std() < 0.6 * (3 * 6) ** -0.5
    decayed = {id(p) for p in parameter_groups(model, 0.1)[0]["params"]}
    assert {id(block.mlp.gate_up), id(block.mlp.down), id(block.mlp.router.weight)} <= decayed
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith("mlp_norm.weight"))
    assert DecoderConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))) == model.config


def test_channel_mixing_remembers_the_token_before() -> None:
    """Cached, packed and padded calls equal the whole; snapshots and reordering keep the MLP's memory."""
    mixing = [{"kind": "channel_mixing", "hidden": 12, "receptance": receptance} for receptance in (False, True)]
    layers = [LayerConfig("rwkv7", {"heads": 2}, mlp=mixing[0]), LayerConfig("attention", {"heads": 2}, mlp=mixing[1])]
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(64, 16, layers, norm="layer", embedding_norm=True)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = some_tokens(2, 9)
    full = model(tokens)
    with torch.no_grad():
        cache = model.new_cache()
        first = model(tokens[:, :4], cache=cache)
        snapshot = cache.snapshot()
        one_by_one = [model(tokens[:, t : t + 1], cache=cache) for t in range(4, 9)]
        assert_same(torch.cat([first, *one_by_one], dim=1), full)
        cache.restore(snapshot)
        cache.reorder(torch.tensor([1, 0]))
        assert_same(model(tokens.flip(0)[:, 4:], cache=cache), full.flip(0)[:, 4:])
        assert_same(model(tokens.view(1, -1), cu_seqlens=torch.tensor([0, 9, 18])).view_as(full), full)
        padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), tokens], dim=1)
        assert_same(model(padded, attention_mask=torch.arange(12).expand(2, 12) >= 3)[:, 3:], full)
    model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_options_survive_json() -> None:
    layers = [
        LayerConfig("rwkv7", {"heads": 2, "ranks": (4, 4, 4, 8)}),
        LayerConfig("attention", {"heads": 2, "window": None}),
    ]
    config = DecoderConfig(vocab_size=64, width=16, layers=layers, logit_softcap=30, mlp_width=24)
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_more_that_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size must be given, got nothing"):
        DecoderConfig.from_dict({"width": 16, "layers": []})
    with pytest.raises(TypeError, match=r"layers\[0\] must be a LayerConfig, got dict"):
        DecoderConfig(64, 16, [{"mixer": "gla", "heads": 2}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"name must be one of deltanet, .*, gla, .*, got 'gal_tiny'"):
        preset("gal_tiny")


def test_what_the_decoder_refuses() -> None:
    model, tokens = make_model("hybrid", torch.float32), some_tokens(2, 4)
    with pytest.raises(ValueError, match="attention_mask and cu_seqlens must not both be given"):
        model(tokens[:1], cu_seqlens=torch.tensor([0, 4]), attention_mask=torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"tokens must be between 0 and vocab_size - 1 = 63, got 64"):
        model(tokens + 64 - tokens.max())
    with pytest.raises(ValueError, match=r"vocab_size - 1 = 63, got -1"):
        model(tokens - 1 - tokens.min())
    with pytest.raises(TypeError, match="tokens must have dtype int64 or int32, got float32"):
        model(tokens.float())
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\], got \[4\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"targets must have shape \[2, 4\], got \[2, 3\]"):
        model(tokens, targets=tokens[:, 1:])
    with pytest.raises(ValueError, match="it carries no gradient"):
        model(tokens, cache=model.new_cache())
    with torch.no_grad():
        cache = model.new_cache()
        model(tokens, cache=cache)
        with pytest.raises(ValueError, match="cache must hold 1 sequences like x, got 2"):
            model(tokens[:1], cache=cache)
        other = make_model("gla", torch.float32).new_cache()
        with pytest.raises(TypeError, match="cache must be"):
            model(tokens, cache=other)
