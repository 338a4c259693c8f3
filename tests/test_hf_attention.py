"""flashmix's softmax attention under transformers models: the same results as with their eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_cases import ATTENTION, COMMON, VOCABULARY, error, tokens, transformers
from torch import Tensor

import flashmix.hf

pytestmark = pytest.mark.usefixtures("one_thread")
SAME, SAME_GRADIENTS = 5e-6, 2e-5  # of the largest element: two float32 evaluations of one model
LENGTHS = (20, 1, 30, 19)
TWO = COMMON | ATTENTION | {"num_hidden_layers": 2}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", TWO),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", TWO | WINDOWS | {"use_sliding_window": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", TWO | {"sliding_window": 9}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", TWO | WINDOWS | {"attn_logit_softcapping": 0.1}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", TWO | WINDOWS),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        TWO | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def tiny(family: str, families: dict[str, tuple[str, str, dict[str, Any]]] = FAMILIES) -> Any:
    config_class, model_class, options = families[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.set_attn_implementation("eager")
    return model


def padded(side: str) -> dict[str, Tensor]:
    x = tokens(2, 40)
    mask = torch.ones_like(x)
    mask[0, :13] = 0
    mask = mask if side == "left" else mask.flip(1)
    labels = torch.where(mask == 1, x, -100)
    labels[0, 13] = -100  # which the first padding token's output would be asked for
    return {"input_ids": x * mask, "attention_mask": mask, "labels": labels}


def trained(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits of real tokens, loss, and the gradient of every parameter."""
    model.zero_grad()
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    out = model(**batch, position_ids=positions)
    out.loss.backward()
    gradients = {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach() * batch["attention_mask"][..., None], "loss": out.loss.detach()} | gradients


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert error(value, expected[name]) <= (SAME_GRADIENTS if name.startswith("gradient") else SAME), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_training_agrees_with_eager(family: str, side: str) -> None:
    model = tiny(family)
    expected = trained(model, padded(side))
    model.set_attn_implementation(flashmix.hf.register_attention())
    assert_same(trained(model, padded(side)), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_agree_with_each_alone(family: str) -> None:
    model, row = tiny(family), tokens(1, sum(LENGTHS), seed=3)
    alone = torch.cat([model(input_ids=part).logits for part in row.split(LENGTHS, 1)], 1)
    model.set_attn_implementation(flashmix.hf.register_attention())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    lengths = torch.nn.functional.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    told = {"cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths, "max_length_q": 30, "max_length_k": 30}
    for options in ({"use_cache": False}, {"use_cache": True}, {"use_cache": False} | told):
        assert error(model(input_ids=row, position_ids=positions, **options).logits, alone) <= SAME
    two = model(input_ids=row.expand(2, -1), position_ids=positions.expand(2, -1), use_cache=False).logits
    assert error(two, alone.expand(2, -1, -1)) <= SAME


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_agrees_with_eager(family: str, cache: str | None) -> None:
    model, batch = tiny(family), padded("left")
    options = {"max_new_tokens": 16, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {} if cache is None else {"cache_implementation": cache}
    for masked in (True, False):
        prompt = {"input_ids": batch["input_ids"]} if masked else {"input_ids": tokens(2, 40)}
        prompt |= {"attention_mask": batch["attention_mask"]} if masked else {}
        model.set_attn_implementation("eager")
        expected = model.generate(**prompt, **options)
        model.set_attn_implementation(flashmix.hf.register_attention())
        got = model.generate(**prompt, **options)
        assert torch.equal(got.sequences, expected.sequences)
        assert error(torch.stack(got.logits), torch.stack(expected.logits)) <= SAME


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("static", [False, True])
def test_continuation_of_many_tokens_agrees_with_eager(family: str, static: bool) -> None:
    model, row = tiny(family), tokens(2, 40)

    def continued() -> Tensor:
        cache: Any = transformers.DynamicCache(config=model.config)
        if static:
            cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        parts = row.split([25, 10, 1, 4], 1)
        return torch.cat([model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in parts], 1)

    expected = continued()
    model.set_attn_implementation(flashmix.hf.register_attention())
    assert error(continued(), expected) <= SAME


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_keys_of_a_padded_batch_are_read_where_they_lie(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(*arguments: Any) -> Any:
        raise AssertionError("the batch was gathered into a packed row")

    model = tiny("gemma2")
    model.set_attn_implementation(flashmix.hf.register_attention())
    batch = padded(side)
    monkeypatch.setattr(flashmix.hf.attention.Packing, "from_lengths", gathered)
    model(batch["input_ids"], attention_mask=batch["attention_mask"])
    model.generate(**(padded("left") | {"labels": None}), max_new_tokens=3, do_sample=False)
    batch["attention_mask"][:, 20] = 0
    with pytest.raises(AssertionError, match="gathered"):
        model(batch["input_ids"], attention_mask=batch["attention_mask"])


@torch.no_grad()
def test_padding_between_tokens_agrees_with_eager() -> None:
    model, batch = tiny("llama"), padded("right")
    batch["attention_mask"][:, 7:11] = 0
    told = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**told).logits
    model.set_attn_implementation(flashmix.hf.register_attention())
    real = batch["attention_mask"].bool()
    assert error(model(**told).logits[real], expected[real]) <= SAME


@pytest.mark.parametrize("padding", [False, True])
def test_a_cross_attention_sees_all_real_keys(padding: bool) -> None:
    """A bidirectional encoder and a decoder over it (BART)."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.BartConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes, **heads)
    model = transformers.BartForConditionalGeneration(config).eval()
    batch = padded("right")
    told = {"input_ids": batch["input_ids"], "decoder_input_ids": tokens(2, 11, seed=5)}
    told |= {"attention_mask": batch["attention_mask"]} if padding else {}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**told).logits
        model.set_attn_implementation(flashmix.hf.register_attention())
        assert error(model(**told).logits, expected) <= SAME


# What a layer does not tell its attention, and the mask alone says: a causal window, boundaries, a window on both sides.
RETICENT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", TWO | {"sliding_window": 9, "num_local_experts": 4}),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0},
    ),
    "t5gemma": (
        "T5GemmaConfig",
        "T5GemmaForConditionalGeneration",
        {"vocab_size": VOCABULARY, "encoder": TWO | WINDOWS, "decoder": TWO | WINDOWS},
    ),
    # keys of some layers are another layer's, and the queries of these are the last one alone where no other logits are asked for
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        TWO
        | {"num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2, "sliding_window": 9, "global_head_dim": 8}
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("family", RETICENT)
def test_the_mask_is_believed_before_the_layer(family: str) -> None:
    model, batch = tiny(family, RETICENT), padded("left")
    batch["attention_mask"] = batch["attention_mask"].bool()
    decoder = {"decoder_input_ids": tokens(2, 30, seed=5)} if family == "t5gemma" else {}
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    only_last = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def found() -> list[Tensor]:
        real = batch["attention_mask"][..., None] if not decoder else 1
        results = [
            model(tokens(2, 40), use_cache=False, **decoder).logits,
            model(batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False, **decoder).logits * real,
            torch.stack(model.generate(tokens(2, 40), **only_last).logits),
        ]
        if not decoder:
            results.append(model(tokens(1, 70, seed=3), position_ids=positions, use_cache=False).logits)
        return results

    expected = found()
    model.set_attn_implementation(flashmix.hf.register_attention())
    for got, one in zip(found(), expected, strict=True):
        assert error(got, one) <= SAME


@torch.no_grad()
def test_a_gap_in_the_positions_begins_a_sequence() -> None:
    """As transformers' masks have it."""
    model, row = tiny("qwen3"), tokens(1, 40)
    positions = torch.cat([torch.arange(25), torch.arange(30, 45)])[None]
    expected = model(row, position_ids=positions, use_cache=False).logits
    model.set_attn_implementation(flashmix.hf.register_attention())
    assert error(model(row, position_ids=positions, use_cache=False).logits, expected) <= SAME


def test_what_it_cannot_do_raises() -> None:
    with pytest.raises(ValueError, match='name must not have "flash" in it'):
        flashmix.hf.register_attention("flashmix")
    attend = transformers.AttentionInterface()[flashmix.hf.register_attention()]
    q, module = torch.randn(1, 4, 5, 8), torch.nn.Module()
    with pytest.raises(ValueError, match="output_attentions must not be given to flashmix's attention"):
        attend(module, q, q, q, None, output_attentions=True)
    for selected in ("indices", "block_indices", "sinks"):  # of DeepSeek-V3.2, MiniMax-M3 and Inkling-2
        with pytest.raises(ValueError, match=f"{selected} must not be given to flashmix's attention"):
            attend(module, q, q, q, None, **{selected: torch.zeros(1, 5, 2, dtype=torch.int)})
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, S\], .* got \[1, 1, 5, 5\] float32"):
        attend(module, q, q, q, torch.ones(1, 1, 5, 5))
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, chunked_causal_mask_function

    mask = ALL_MASK_ATTENTION_FUNCTIONS["fmx"]
    function = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))
    with pytest.raises(ValueError, match=r"the mask must be causal, windowed or full .* got chunked_overlay"):
        mask(1, 5, 5, mask_function=function)


def test_projections_in_two_dtypes_meet() -> None:
    attend = flashmix.hf.register_attention() and transformers.AttentionInterface()["fmx"]
    q, v = torch.randn(1, 4, 5, 8), torch.randn(1, 4, 5, 8).bfloat16()
    assert attend(torch.nn.Module(), q, q, v, None)[0].dtype == torch.bfloat16
