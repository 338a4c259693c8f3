"""The decoder as a transformers model: the same numbers, saving and loading, generation, training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import error, tokens, transformers

import flashmix.hf
from flashmix.models import Decoder, DecoderConfig, LayerConfig, generate

pytestmark = pytest.mark.usefixtures("one_thread")
SAME = 5e-6  # of the largest element: the same sums in another order
LENGTHS = (20, 1, 30, 19)
LAYERS = [
    LayerConfig("gated_deltanet", {"heads": 2}),
    LayerConfig("retnet", {"heads": 2}),
    LayerConfig("attention", {"heads": 4, "window": 16}),
]


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=97, width=32, layers=LAYERS, **options)
    return flashmix.hf.FlashmixForCausalLM(flashmix.hf.FlashmixConfig.of(config, pad_token_id=0)).eval()


def test_its_logits_and_loss_are_the_decoders() -> None:
    model, x = small(), tokens(2, 30)
    torch.manual_seed(0)
    alone = Decoder(model.config.decoder_config())
    out = model(x, labels=x)
    assert torch.equal(out.logits, alone(x))
    targets = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
    assert torch.equal(out.loss, alone(x, targets=targets))
    counted = model(x, labels=x, num_items_in_batch=29).loss
    assert error(counted.detach(), out.loss.detach() * 2) <= SAME


@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_through_the_auto_classes(tmp_path: Path, tied: bool) -> None:
    model, x = small(tied=tied), tokens(2, 30)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert transformers.AutoConfig.from_pretrained(tmp_path).decoder_config() == model.config.decoder_config()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert (loaded.decoder.head.weight is loaded.decoder.embedding.weight) == tied


def test_a_file_that_lacks_weights_is_an_error(tmp_path: Path) -> None:
    model = small()
    weights = model.state_dict()
    del weights["decoder.blocks.1.mlp.down.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match="the weights must hold weight of a Linear, got nothing"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_greedy_generation_is_the_decoders() -> None:
    model, x = small(), tokens(2, 20)
    got = model.generate(x, max_new_tokens=16, do_sample=False)
    assert torch.equal(got[:, 20:], generate(model.decoder, x, 16, temperature=0.0))
    assert torch.equal(got, model.generate(x, max_new_tokens=16, do_sample=False, use_cache=False))


def test_left_padded_generation_is_that_of_each_row_alone() -> None:
    model, x = small(), tokens(2, 20)
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    got = model.generate(x * mask, attention_mask=mask, max_new_tokens=12, do_sample=False)
    short = model.generate(x[:1, 7:], max_new_tokens=12, do_sample=False)
    assert torch.equal(got[0, 20:], short[0, 13:])


def test_sampling_and_beams_run() -> None:
    model, x = small(), tokens(2, 9)
    assert model.generate(x, max_new_tokens=5, do_sample=True, top_p=0.9, num_return_sequences=2).shape == (4, 14)
    beams = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(x, **beams), model.generate(x, use_cache=False, **beams))


def test_packed_samples_do_not_see_each_other() -> None:
    model, row = small(), tokens(1, sum(LENGTHS), seed=3)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    alone = torch.cat([model(part).logits for part in row.split(LENGTHS, 1)], 1).detach()
    assert error(model(row, position_ids=positions).logits.detach(), alone) <= SAME
    two = model(row.expand(2, -1), position_ids=positions.expand(2, -1)).logits.detach()
    assert error(two, alone.expand(2, -1, -1)) <= SAME


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, x = small().train(), tokens(2, 30)
    out = model(x, labels=x)
    assert out.logits is None
    out.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    model(x, labels=x).loss.backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())


def test_a_configuration_without_an_architecture_builds_no_model() -> None:
    with pytest.raises(ValueError, match="architecture must be given, got nothing"):
        flashmix.hf.FlashmixForCausalLM(flashmix.hf.FlashmixConfig())
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = flashmix.hf.nothing
