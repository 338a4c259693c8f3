"""Llama and Qwen3: softmax attention in every layer."""

from __future__ import annotations

from typing import Any

from flashmix.checkpoints.family import (
    Config,
    Layer,
    ModelFamily,
    attention_rules,
    first_of,
    head_rules,
    layers_of,
    mlp_rules,
    need,
    refuse,
    rope_parameters,
    rotary_of,
)
from flashmix.checkpoints.rules import WeightRule, same
from flashmix.models.config import DecoderConfig, LayerConfig


def attention_options(config: Config, whole: float = 1.0) -> dict[str, Any]:
    """Heads and rotary embedding of a configuration's attention."""
    width, heads = need(config, "hidden_size", "num_attention_heads")
    refuse(config, attention_bias=False, hidden_act="silu", mlp_bias=False)
    D = config.get("head_dim") or width // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": D, **rotary_of(config, D, whole)}


def decoder_of(config: Config, layers: list[LayerConfig], **given: Any) -> DecoderConfig:
    """The decoder with these layers and the sizes of the configuration."""
    vocab_size, width = need(config, "vocab_size", "hidden_size")
    sizes = {
        "mlp_width": config.get("intermediate_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }
    return DecoderConfig(vocab_size, width, layers, **{**sizes, **given})


def common_config(config: DecoderConfig, attention: Layer | None) -> dict[str, Any]:
    """What every family's configuration has, and its attention's if there is one."""
    plain: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
    }
    hidden = [layer.mlp["hidden"] for layer in layers_of(config) if layer.mlp["kind"] == "swiglu"]
    if hidden:
        plain["intermediate_size"] = hidden[0]
    if attention is not None:
        plain |= {
            "num_attention_heads": attention["heads"],
            "num_key_value_heads": attention["kv_heads"],
            "head_dim": attention["head_dim"],
        }
        if attention["rotary"]:
            plain["rope_parameters"] = rope_parameters(attention)
    return plain


def _llama(config: Config) -> DecoderConfig:
    (depth,) = need(config, "num_hidden_layers")
    return decoder_of(config, depth * [LayerConfig("attention", attention_options(config))])


def _qwen3(config: Config) -> DecoderConfig:
    (depth,) = need(config, "num_hidden_layers")
    options = attention_options(config) | {"qk_norm": True, "eps": config.get("rms_norm_eps", 1e-6)}
    kinds = config.get("layer_types") or depth * ["full_attention"]
    windows = {"full_attention": None, "sliding_attention": config.get("sliding_window")}
    return decoder_of(config, [LayerConfig("attention", options | {"window": windows[kind]}) for kind in kinds])


def _their_llama(config: DecoderConfig) -> dict[str, Any]:
    return common_config(config, first_of(config, "attention"))


def _their_qwen3(config: DecoderConfig) -> dict[str, Any]:
    windows = [layer["window"] if layer.mixer == "attention" else None for layer in layers_of(config)]
    window = next((size for size in windows if size is not None), None)
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    sliding = {"layer_types": kinds, "sliding_window": window, "use_sliding_window": window is not None}
    return _their_llama(config) | sliding


def _rules(config: DecoderConfig) -> list[WeightRule]:
    rules = head_rules(config, "model.embed_tokens.weight", "model.norm.weight")
    for i, layer in enumerate(layers_of(config)):
        ours, theirs, D = f"blocks.{i}", f"model.layers.{i}", config.width
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.input_layernorm.weight", D),
            *attention_rules(f"{ours}.mixer", f"{theirs}.self_attn", D, layer),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", D),
            *mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", D, layer.mlp["hidden"]),
        ]
    return rules


LLAMA = ModelFamily("llama", "LlamaForCausalLM", _llama, _their_llama, _rules)
QWEN3 = ModelFamily("qwen3", "Qwen3ForCausalLM", _qwen3, _their_qwen3, _rules)
