"""RecurrentGemma: RG-LRU and attention to a window, a gated MLP with biases, norms of `1 + weight`, scaled embeddings."""

from __future__ import annotations

from typing import Any

import torch

from flashmix.checkpoints.families.attention import common_config, decoder_of
from flashmix.checkpoints.family import (
    Config,
    Layer,
    ModelFamily,
    attention_rules,
    first_of,
    head_rules,
    layers_of,
    need,
    refuse,
    rotary_of,
)
from flashmix.checkpoints.rules import WeightRule, joined, same
from flashmix.models.config import DecoderConfig, LayerConfig

KINDS = {"rg_lru": "recurrent", "attention": "attention"}
ACTIVATION = "gelu_pytorch_tanh"


def _scale(width: int) -> float:
    """The factor of the embedded tokens, which theirs has in bfloat16."""
    return float(torch.tensor(width**0.5, dtype=torch.bfloat16))


def _ours(config: Config) -> DecoderConfig:
    refuse(config, attention_bias=False, hidden_activation=ACTIVATION)
    depth, width, heads, hidden = need(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    )
    recurrent = {"heads": heads, "inner": config.get("lru_width") or width, "conv_width": config.get("conv1d_width", 4)}
    attention = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": width // heads,
        "window": config.get("attention_window_size", 2048),
        "output_bias": True,
        **rotary_of(config, width // heads, 0.5),
    }
    mlp = {"kind": "gated", "hidden": hidden // 2, "activation": "gelu_tanh", "bias": True}
    made = {
        "recurrent": LayerConfig("rg_lru", recurrent, mlp=mlp),
        "attention": LayerConfig("attention", attention, mlp=mlp),
    }
    kinds = config.get("block_types") or ["recurrent", "recurrent", "attention"]
    return decoder_of(
        config,
        [made[kinds[i % len(kinds)]] for i in range(depth)],
        mlp_width=None,
        tied=bool(config.get("tie_word_embeddings", True)),
        norm="unit_offset_rms",
        embedding_scale=_scale(width),
        logit_softcap=config.get("logits_soft_cap", 30.0),
    )


def _theirs(config: DecoderConfig) -> dict[str, Any]:
    recurrent, attention = first_of(config, "rg_lru"), first_of(config, "attention")
    plain = common_config(config, attention)
    del plain["hidden_act"]
    kinds = [KINDS[layer.mixer] for layer in config.layers]
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return plain | {
        "intermediate_size": 2 * recurrent.mlp["hidden"],
        "hidden_activation": ACTIVATION,
        "lru_width": recurrent["inner"],
        "conv1d_width": recurrent["conv_width"],
        "attention_window_size": attention["window"],
        "block_types": kinds[:period],
        "logits_soft_cap": config.logit_softcap,
    }


def _recurrent_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, inner, W = layer["heads"], layer["inner"], layer["conv_width"]
    K, unit, up = inner // H, f"{theirs}.rg_lru", {f"{theirs}.linear_{name}": inner for name in "yx"}
    gates = {"recurrence": "recurrent_gate", "input": "input_gate"}
    return [
        joined(f"{ours}.input.weight", {f"{name}.weight": rows for name, rows in up.items()}, width),
        joined(f"{ours}.input.bias", {f"{name}.bias": rows for name, rows in up.items()}),
        same(f"{ours}.convolution.weight", f"{theirs}.conv_1d.weight", inner, W, as_shape=(inner, 1, W)),
        same(f"{ours}.convolution.bias", f"{theirs}.conv_1d.bias", inner),
        *(same(f"{ours}.{name}_weight", f"{unit}.{gate}_weight", H, K, K) for name, gate in gates.items()),
        *(same(f"{ours}.{name}_bias", f"{unit}.{gate}_bias", H, K) for name, gate in gates.items()),
        same(f"{ours}.decay.weight", f"{unit}.recurrent_param", H, K, as_shape=(inner,)),
        same(f"{ours}.output.weight", f"{theirs}.linear_out.weight", width, inner),
        same(f"{ours}.output.bias", f"{theirs}.linear_out.bias", width),
    ]


def _mlp_rules(ours: str, theirs: str, width: int, hidden: int) -> list[WeightRule]:
    up = {f"{theirs}.{name}_proj": hidden for name in ("gate", "up")}
    return [
        joined(f"{ours}.gate_up.weight", {f"{name}.weight": rows for name, rows in up.items()}, width),
        joined(f"{ours}.gate_up.bias", {f"{name}.bias": rows for name, rows in up.items()}),
        same(f"{ours}.down.weight", f"{theirs}.down_proj.weight", width, hidden),
        same(f"{ours}.down.bias", f"{theirs}.down_proj.bias", width),
    ]


def _rules(config: DecoderConfig) -> list[WeightRule]:
    rules, D = head_rules(config, "model.embed_tokens.weight", "model.final_norm.weight"), config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        mixer = _recurrent_rules if layer.mixer == "rg_lru" else attention_rules
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.temporal_pre_norm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.channel_pre_norm.weight", D),
            *mixer(f"{ours}.mixer", f"{theirs}.temporal_block", D, layer),
            *_mlp_rules(f"{ours}.mlp", f"{theirs}.mlp_block", D, layer.mlp["hidden"]),
        ]
    return rules


RECURRENT_GEMMA = ModelFamily("recurrent_gemma", "RecurrentGemmaForCausalLM", _ours, _theirs, _rules)
