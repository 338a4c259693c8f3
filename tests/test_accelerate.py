"""`flashmix.accelerate` on tiny random models of transformers: the same results with it and without it, and nothing else changed."""

from __future__ import annotations

import copy
import io
from types import MethodType
from typing import Any

import pytest
import torch
from hf_cases import FAMILIES, error, tiny, tokens, transformers
from samples import sample, sample_of_rows
from torch import Tensor, nn

import flashmix
from flashmix.hf.families import KNOWN

pytestmark = pytest.mark.usefixtures("one_thread")
SAME, SAME_GRADIENTS = (
    5e-6,
    4e-5,
)  # of the largest element: two float32 evaluations of one model, two layers of recurrence; up to 2.9e-5 on an EPYC
LENGTHS = (20, 1, 30, 19)
FORGETFUL = {
    "mamba",
    "falcon_mamba",
    "jamba",
    "zamba",
}  # transformers begins many tokens after a cache with states of zero
OWN_LEAK = {  # families whose packed rows mix outside the mixers
    "inkling": "the model hands positions to its masks alone",
    "granitemoehybrid": "its causal mask is made without positions",
    "mamba2": "the model with a head drops cu_seq_lens_q and position_ids",
    "mamba": "the model hands no boundaries on",
    "zamba": "its blocks hand no boundaries on",
    "falcon_mamba": "the model hands no boundaries on",
    "qwen4_exp": "its sparse attention takes no boundaries",
}


def padded() -> dict[str, Tensor]:
    """A left-padded batch with labels; the first real token of a padded row is no label (an attention's padding reaches it)."""
    x = tokens(2, 70)
    mask = torch.ones_like(x)
    mask[0, :13] = 0
    labels = torch.where(mask == 1, x, -100)
    labels[0, 13] = -100
    return {"input_ids": x * mask, "attention_mask": mask, "labels": labels}


def trained(model: Any) -> dict[str, Tensor]:
    """Logits of real tokens, loss, and the gradient of every parameter."""
    batch = padded()
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach() * batch["attention_mask"][..., None], "loss": out.loss.detach()} | gradients


def generated(model: Any, count: int = 16) -> tuple[Tensor, Tensor]:
    """Greedy tokens after a left-padded prompt, and their logits."""
    batch = padded()
    prompt = {name: batch[name][:, :40] for name in ("input_ids", "attention_mask")}
    out = model.generate(
        **prompt, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return out.sequences, torch.stack(out.logits, 1)


@torch.no_grad()
def continued(model: Any) -> Tensor:
    """Logits of a row in three calls on one cache: many tokens, many tokens, one token."""
    row = tokens(2, 70)
    first = model(input_ids=row[:, :33], use_cache=True)
    name = "cache_params" if hasattr(first, "cache_params") else "past_key_values"
    cache, parts = first[name], [first.logits]
    for begin, end in ((33, 69), (69, 70)):
        positions = {} if name == "cache_params" else {"position_ids": torch.arange(begin, end)[None].expand(2, -1)}
        parts.append(model(input_ids=row[:, begin:end], use_cache=True, **{name: cache}, **positions).logits)
    return torch.cat(parts, 1)


# Each mixer once; the others with `-m whole`, and each of them packed below.
ALONE = (
    "bailing_hybrid",
    "bamba",
    "falcon_mamba",
    "jamba",
    "kimi_linear",
    "lfm2",
    "mamba2",
    "minimax",
    "olmo_hybrid",
    "qwen3_next",
)


@pytest.mark.parametrize("family", sample(FAMILIES, ALONE))
def test_accelerated_model_computes_the_same(family: str) -> None:
    model = tiny(family)
    expected, (sequences, logits), alone = trained(model), generated(model), continued(model)
    if family in FORGETFUL:
        with torch.no_grad():
            alone = model(input_ids=tokens(2, 70)).logits
    with flashmix.accelerate(model, strict=True, quiet=True) as accelerated:
        assert len(accelerated.replaced) == FAMILIES[family][3] and not accelerated.left
        got, (new_sequences, new_logits) = trained(model), generated(model)
        assert got.keys() == expected.keys()
        for name, value in got.items():
            limit = SAME_GRADIENTS if name.startswith("gradient") else SAME
            assert error(value, expected[name]) <= limit, f"{family}: {name}"
        assert torch.equal(sequences, new_sequences) and error(new_logits, logits) <= SAME
        assert error(continued(model), alone) <= SAME
    again = trained(model)
    assert all(torch.equal(again[name], value) for name, value in expected.items()), "undo is not bit-equal"


@torch.no_grad()
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OWN_LEAK])
@pytest.mark.parametrize("by", ["position_ids", "with_cache"])
def test_packed_samples_do_not_see_each_other(family: str, by: str) -> None:
    model, row = tiny(family), tokens(1, sum(LENGTHS), seed=3)
    alone = torch.cat([model(input_ids=part).logits for part in row.split(LENGTHS, 1)], 1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    flashmix.accelerate(model, quiet=True)
    if by == "position_ids":
        assert error(model(input_ids=row, position_ids=positions, use_cache=False).logits, alone) <= SAME
        return
    # A cache keeps the state of the last sequence, which goes on. The attention of transformers takes a call with a cache for
    # one sequence, so that only the first layers (which are mixers) can be compared: by the state they leave.
    packed = model(input_ids=row, position_ids=positions, use_cache=True).past_key_values
    last = model(input_ids=row[:, -LENGTHS[-1] :], use_cache=True).past_key_values
    if hasattr(packed, "linear_cache"):  # MiniMax
        assert error(packed.linear_cache[0], last.linear_cache[0]) <= SAME
        return
    for name in ("conv_states", "recurrent_states"):
        got, expected = getattr(packed.layers[0], name)[0], getattr(last.layers[0], name)[0]
        assert (got is None and expected is None) or error(got, expected) <= SAME


@torch.no_grad()
def test_boundaries_by_lengths_reach_the_convolutions_of_inkling() -> None:
    model, row = tiny("inkling"), tokens(1, sum(LENGTHS), seed=3)
    alone = torch.cat([model(input_ids=part).logits for part in row.split(LENGTHS, 1)], 1)
    told = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    told["cu_seq_lens_q"] = nn.functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    with flashmix.accelerate(model, quiet=True):
        assert error(model(input_ids=row, use_cache=False, **told).logits, alone) <= SAME


@pytest.mark.parametrize("family", ["bamba", "falcon_mamba"])
def test_boundaries_by_lengths_and_by_sequence_numbers(family: str) -> None:
    model, row = tiny(family), tokens(1, sum(LENGTHS), seed=3)
    mixer: Any = next(module for module in model.modules() if type(module).__name__ in KNOWN)
    x = torch.randn(1, sum(LENGTHS), 32)
    alone = torch.cat([mixer(part) for part in x.split(LENGTHS, 1)], 1)
    flashmix.accelerate(model, quiet=True)
    lengths = torch.tensor(LENGTHS)
    cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)[None].int()
    assert error(mixer(x, cu_seq_lens_q=cu_seqlens), alone) <= SAME
    assert error(mixer(x, seq_idx=numbers), alone) <= SAME
    both = torch.cat([x, x])
    assert error(mixer(both, seq_idx=numbers.expand(2, -1)), alone.expand(2, -1, -1)) <= SAME
    assert row.shape[1] == x.shape[1]


def test_gradients_of_packed_samples_are_those_of_each_alone() -> None:
    model, row = tiny("qwen3_next"), tokens(1, sum(LENGTHS), seed=3)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    flashmix.accelerate(model, quiet=True)
    logits = model(input_ids=row, position_ids=positions, use_cache=False).logits
    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for part, weight in zip(row.split(LENGTHS, 1), weights.split(LENGTHS, 1), strict=True):
        (model(input_ids=part, use_cache=False).logits * weight).sum().backward()
    for name, gradient in packed.items():
        assert error(gradient, model.get_parameter(name).grad) <= SAME_GRADIENTS, name


@pytest.mark.parametrize("family", ["qwen3_next", "zamba2", "inkling"])
def test_gradient_checkpointing_recomputes_with_the_same_boundaries(family: str) -> None:
    """In layers of layers (Zamba-2) and with several mixers in a layer (Inkling) too."""
    model, row = tiny(family).train(), tokens(1, sum(LENGTHS), seed=3)
    told = {"position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None]}
    told["cu_seq_lens_q"] = nn.functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    accelerated = flashmix.accelerate(model, quiet=True)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        packed = model(input_ids=row, labels=row, use_cache=False, **told).loss
        dense = model(input_ids=row, labels=row, use_cache=False).loss  # before the backward of the first
        (packed + dense).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        functions = [layer._gradient_checkpointing_func for layer in checkpointed(model)]
        assert functions
        for name, gradient in gradients().items():
            if reentrant:  # whose sums of a tensor's gradients are of another order
                assert error(gradient, expected[name]) <= SAME_GRADIENTS, name
            else:
                assert torch.equal(gradient, expected[name]), name
    accelerated.undo()
    assert [layer._gradient_checkpointing_func for layer in checkpointed(model)] == functions


def checkpointed(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]


def test_another_model_of_the_family_does_not_change() -> None:
    model, other = tiny("qwen3_next"), tiny("qwen3_next", seed=1)
    expected = trained(other)
    flashmix.accelerate(model, quiet=True)
    again = trained(other)
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    assert "forward" not in other.model.layers[0].linear_attn.__dict__


def test_undo_leaves_no_trace_and_twice_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("qwen3_next")
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    accelerated = flashmix.accelerate(model)
    report = capsys.readouterr().out
    assert report.splitlines()[0] == "flashmix computes 2 of 2 mixers" and "Qwen3NextGatedDeltaNet" in report
    assert flashmix.accelerate(model, quiet=True).left == dict.fromkeys(
        accelerated.replaced, "flashmix computes it already"
    )
    accelerated.undo()
    accelerated.undo()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_copy_of_an_accelerated_model_has_states_of_its_own() -> None:
    model = tiny("bamba")
    flashmix.accelerate(model, quiet=True)
    expected = trained(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    got = trained(twin)
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "minimax"])
def test_a_file_of_an_accelerated_model_is_one(family: str) -> None:
    model, row = tiny(family), tokens(1, 30)
    with flashmix.accelerate(model, quiet=True) as accelerated:
        expected = model(row, position_ids=torch.arange(15).repeat(2)[None]).logits
        torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(row, position_ids=torch.arange(15).repeat(2)[None]).logits, expected)
    for name in accelerated.replaced:
        assert loaded.get_submodule(name).forward.args[-1] is loaded.get_submodule(name)


def test_a_mixer_that_is_not_as_known_is_left_alone_and_named() -> None:
    model = tiny("qwen3_next")
    mixer = model.model.layers[0].linear_attn
    mixer.out_proj = nn.Linear(48, 33)
    mixer.hidden_size, name = 32, "model.layers.0.linear_attn"
    with flashmix.accelerate(model, quiet=True) as accelerated:
        assert accelerated.left == {name: "out_proj has the shape [33, 48], known is [32, 48]"}
        assert "left alone: " + name in str(accelerated)
    with pytest.raises(
        ValueError, match=r"model must have mixers that flashmix knows \(strict=True\), got model.layers.0"
    ):
        flashmix.accelerate(model, strict=True, quiet=True)
    assert not any("flashmix_given" in module.__dict__ for module in model.modules()), "strict replaced something"


def test_other_signatures_activations_and_replacements_are_left_alone() -> None:
    class BambaMixer(nn.Module):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log = nn.Parameter(torch.zeros(2))

    model = tiny("qwen3_5")
    first, _, last = model.model.layers

    class DynamicShortConvolution(nn.Module):
        pass

    first.linear_attn.activation = "gelu"
    last.linear_attn.forward = MethodType(lambda self, hidden_states, **options: hidden_states, last.linear_attn)
    left = flashmix.accelerate(nn.ModuleList([BambaMixer(), Scan(), DynamicShortConvolution(), model]), quiet=True).left
    assert list(left.values()) == [
        "its forward takes hidden_states, known is hidden_states, cache_params, attention_mask, kwargs",
        "Scan is no class that flashmix knows",
        "DynamicShortConvolution is no class that flashmix knows",
        "the activation of its convolution is gelu, known is silu",
        "something else replaced its forward",
    ]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        flashmix.accelerate("model")  # type: ignore[arg-type]


def test_hooks_of_the_package_accelerate_stay_around_the_new_forward() -> None:
    """As `add_hook_to_module` leaves a module: its wrapper in `forward`, what it wraps in `_old_forward`."""
    model, seen = tiny("qwen3_next"), []
    mixer = model.model.layers[0].linear_attn
    mixer._old_forward = mixer.forward

    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        seen.append("mixer")
        return self._old_forward(*arguments, **options)

    class Hook:
        def pre_forward(self, module: nn.Module) -> None:
            seen.append(f"before {type(module).__name__}")

        def post_forward(self, module: nn.Module, output: Any) -> None:
            seen.append(f"after {type(module).__name__}")

    mixer.forward = MethodType(wrapper, mixer)
    mixer.conv1d._hf_hook = Hook()
    x = tokens(2, 9)
    with torch.no_grad():
        expected = model(input_ids=x).logits
        calls = list(seen)
        with flashmix.accelerate(model, quiet=True) as accelerated:
            assert len(accelerated.replaced) == 2 and error(model(input_ids=x).logits, expected) <= SAME
        assert calls == ["mixer", "before Conv1d", "after Conv1d"] and seen == 2 * calls
        assert torch.equal(model(input_ids=x).logits, expected)


def test_a_projection_with_an_adapter_on_it_is_called() -> None:
    """LoRA replaces a projection by a module with the same `in_features` and `out_features`."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
            self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.up(self.down(x))

    model = tiny("qwen3_next")
    mixer = model.model.layers[0].linear_attn
    mixer.in_proj_qkvz, mixer.out_proj = Adapted(mixer.in_proj_qkvz), Adapted(mixer.out_proj)
    expected = trained(model)
    with flashmix.accelerate(model, strict=True, quiet=True):
        got = trained(model)
    for name, value in got.items():
        assert error(value, expected[name]) <= (SAME_GRADIENTS if name.startswith("gradient") else SAME), name


def test_sixteen_bit_inputs_err_no_more_than_transformers_itself() -> None:
    from budget import assert_within_budget

    model, x = tiny("qwen3_next"), tokens(2, 70)
    with torch.no_grad():
        half = copy.deepcopy(model).bfloat16()
        wide = copy.deepcopy(half).float()
        expected, baseline = wide(input_ids=x).logits, half(input_ids=x).logits
        flashmix.accelerate(half, quiet=True)
        assert_within_budget("logits", half(input_ids=x).logits, expected, baseline)
        prompt = {"max_new_tokens": 4, "do_sample": False}
        assert half.generate(input_ids=x[:, :9], **prompt).shape == (2, 13)


def test_the_mixer_of_glm5_next_alone() -> None:
    """Its model needs an image encoder around it; the mixer is built and called as the model does, with a cache."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "linear_attention"]}
    sizes = {
        "hidden_size": 32,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "dense"],
    }
    config = transformers.Glm5NextTextConfig(**layers, **sizes)
    torch.manual_seed(0)
    mixer = Glm5NextTextLinearAttention(config, 0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 21, 32)

    def results() -> list[Tensor]:
        mixer.zero_grad()
        mixer(x).square().sum().backward()
        gradients = [p.grad.clone() for p in mixer.parameters() if p.grad is not None]
        with torch.no_grad():
            cache = transformers.DynamicCache(config=config)
            parts = [mixer(part, cache_params=cache) for part in x.split([12, 8, 1], 1)]
        return [torch.cat(parts, 1), *gradients]

    expected = results()
    with flashmix.accelerate(mixer, strict=True, quiet=True):
        got = results()
    assert error(got[0], expected[0]) <= SAME and len(got) == len(expected) > 8
    assert all(error(a, b) <= SAME_GRADIENTS for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "packed, backend", sample_of_rows([(True, "eager"), (True, "aot_eager"), (False, "aot_eager")], [(True, "eager")])
)
@torch.no_grad()
def test_an_accelerated_model_compiles(packed: bool, backend: str) -> None:
    model, row = tiny("qwen3_next"), tokens(1, sum(LENGTHS), seed=3)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None] if packed else None
    flashmix.accelerate(model, quiet=True)
    expected = model(input_ids=row, position_ids=positions, use_cache=False).logits
    compiled = torch.compile(model, backend=backend)
    assert error(compiled(input_ids=row, position_ids=positions, use_cache=False).logits, expected) <= SAME


@torch.no_grad()
def test_the_first_sample_of_a_packed_row_goes_on_from_the_cache() -> None:
    """Two rows; in the second call each row ends the sample that is in the cache and begins another."""
    model = tiny("bamba")
    mixer: Any = model.model.layers[0].mamba
    x = torch.randn(2, 30, 32)
    config = model.config
    whole = mixer(x[:, :17], cache_params=transformers.DynamicCache(config=config))
    other_cache, cache = (transformers.DynamicCache(config=config) for _ in range(2))
    other = mixer(x[:, 17:], cache_params=other_cache)
    flashmix.accelerate(model, quiet=True)
    first = mixer(x[:, :12], cache_params=cache)
    numbers = torch.tensor([[0] * 5 + [1] * 13]).int()
    rest = mixer(x[:, 12:], cache_params=cache, seq_idx=numbers.expand(2, -1))
    assert error(torch.cat([first, rest], 1), torch.cat([whole, other], 1)) <= SAME
    for name in ("conv_states", "recurrent_states"):
        assert error(getattr(cache.layers[0], name)[0], getattr(other_cache.layers[0], name)[0]) <= SAME


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba", "lfm2"])
def test_a_cache_that_records_its_past_is_respected(family: str) -> None:
    """As assisted decoding asks: no state is overwritten in place, and the convolution's inputs pile up."""
    model, row = tiny(family), tokens(2, 20)

    def recorded() -> tuple[Tensor, Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(input_ids=row[:, :12], past_key_values=cache, use_cache=True).logits]
        cache.layers[0].activate_past_recording()
        for part, begin in zip(row[:, 12:].split([5, 1, 2], 1), (12, 17, 18), strict=True):
            positions = torch.arange(begin, begin + part.shape[1])[None].expand(2, -1)
            out = model(input_ids=part, past_key_values=cache, use_cache=True, position_ids=positions)
            parts.append(out.logits)
        return torch.cat(parts, 1), cache.layers[0].conv_states[0]

    expected, past = recorded()
    flashmix.accelerate(model, quiet=True)
    got, new_past = recorded()
    assert error(got, expected) <= SAME
    if family != "kimi_linear":  # transformers itself does not record a single token there
        assert error(new_past, past) <= SAME and past.shape[2] > 8
    assert new_past.shape[2] > 8
