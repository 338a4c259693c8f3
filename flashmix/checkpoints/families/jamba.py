"""Jamba: Mamba with norms of step sizes, `B` and `C`, softmax attention without positions, and experts in every few layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmix.checkpoints.families.attention import common_config, decoder_of
from flashmix.checkpoints.families.gated_delta import EXPERT_NAMES
from flashmix.checkpoints.families.mamba import mamba_rules
from flashmix.checkpoints.family import (
    Config,
    ModelFamily,
    attention_rules,
    expert_rules,
    first_of,
    head_rules,
    layers_of,
    mlp_rules,
    need,
    refuse,
)
from flashmix.checkpoints.rules import WeightRule, same
from flashmix.models.config import DecoderConfig, LayerConfig

NORMS = {"dt_layernorm": "rank", "b_layernorm": "state_dim", "c_layernorm": "state_dim"}  # and the channels of each


def _jamba(config: Config) -> DecoderConfig:
    refuse(config, mamba_proj_bias=False, hidden_act="silu")
    depth, width, heads, hidden = need(
        config, "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    )
    rank = config.get("mamba_dt_rank", "auto")
    attention = {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
        "rotary": 0,
    }
    scan = {
        "inner": config.get("mamba_expand", 2) * width,
        "state_dim": config.get("mamba_d_state", 16),
        "rank": -(-width // 16) if rank == "auto" else rank,
        "conv_width": config.get("mamba_d_conv", 4),
        "conv_bias": config.get("mamba_conv_bias", True),
        "norms": True,
        "eps": config.get("rms_norm_eps", 1e-6),
    }
    experts = {
        "kind": "experts",
        "hidden": hidden,
        "experts": config.get("num_experts", 16),
        "active": config.get("num_experts_per_tok", 2),
        "normalise": False,
    }
    layers = []
    for i in range(depth):
        full = i % config.get("attn_layer_period", 8) == config.get("attn_layer_offset", 4)
        many = i % config.get("expert_layer_period", 2) == config.get("expert_layer_offset", 1)
        mlp = experts if many and experts["experts"] > 1 else None
        layers.append(LayerConfig(*(("attention", attention) if full else ("mamba", scan)), mlp=mlp))
    return decoder_of(config, layers)


def _period(chosen: Sequence[bool]) -> tuple[int, int]:
    """The smallest period, and the offset in it, with which exactly these layers are chosen."""
    offset = chosen.index(True) if any(chosen) else len(chosen)
    periods = range(offset + 1, len(chosen) + 2)
    return next(
        p for p in periods if all(c == (i % p == offset) for i, c in enumerate(chosen)) or p == periods[-1]
    ), offset


def _their_jamba(config: DecoderConfig) -> dict[str, Any]:
    layers, scan = layers_of(config), first_of(config, "mamba")
    plain = common_config(config, first_of(config, "attention"))
    experts = next((layer.mlp for layer in layers if layer.mlp["kind"] == "experts"), None)
    period, offset = _period([layer.mixer == "attention" for layer in layers])
    expert_period, expert_offset = _period([layer.mlp["kind"] == "experts" for layer in layers])
    return plain | {
        "intermediate_size": layers[0].mlp["hidden"],
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": 1 if experts is None else experts["experts"],
        "num_experts_per_tok": 1 if experts is None else experts["active"],
        "mamba_expand": scan["inner"] // config.width,
        "mamba_d_state": scan["state_dim"],
        "mamba_dt_rank": scan["rank"],
        "mamba_d_conv": scan["conv_width"],
        "mamba_conv_bias": scan["conv_bias"],
    }


def _rules(config: DecoderConfig) -> list[WeightRule]:
    rules, D = head_rules(config, "model.embed_tokens.weight", "model.final_layernorm.weight"), config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.input_layernorm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.pre_ff_layernorm.weight", D),
        ]
        if layer.mixer == "attention":
            rules += attention_rules(f"{ours}.mixer", f"{theirs}.self_attn", D, layer)
        else:
            rules += mamba_rules(f"{ours}.mixer", f"{theirs}.mamba", D, layer)
            for index, (name, channels) in enumerate(NORMS.items()):
                rules.append(
                    same(f"{ours}.mixer.norms.{index}.weight", f"{theirs}.mamba.{name}.weight", layer[channels])
                )
        mlp, place = layer.mlp, f"{theirs}.feed_forward"
        if mlp["kind"] == "experts":
            rules += expert_rules(f"{ours}.mlp", place, D, mlp, EXPERT_NAMES, "shared_expert", "router")
        else:
            rules += mlp_rules(f"{ours}.mlp", place, D, mlp["hidden"])
    return rules


JAMBA = ModelFamily("jamba", "JambaForCausalLM", _jamba, _their_jamba, _rules)
