"""Mamba and Falcon-Mamba of transformers: blocks of the selective scan without MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashmix.checkpoints.families.attention import common_config, decoder_of
from flashmix.checkpoints.family import Config, Layer, ModelFamily, first_of, head_rules, layers_of, need, refuse
from flashmix.checkpoints.rules import WeightRule, same
from flashmix.models.config import DecoderConfig, LayerConfig


def _mamba(config: Config) -> DecoderConfig:
    refuse(config, use_bias=False, hidden_act="silu")
    depth, width = need(config, "num_hidden_layers", "hidden_size")
    rank = config.get("time_step_rank", "auto")
    options = {
        "inner": config.get("intermediate_size") or int(config.get("expand", 2) * width),
        "state_dim": config.get("state_size", 16),
        "rank": -(-width // 16) if rank == "auto" else rank,
        "conv_width": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
    }
    layers = depth * [LayerConfig("mamba", options, mlp={"kind": "none"})]
    tied = bool(config.get("tie_word_embeddings", True))
    return decoder_of(config, layers, norm_eps=config.get("layer_norm_epsilon", 1e-5), tied=tied, mlp_width=None)


def _their_mamba(config: DecoderConfig) -> dict[str, Any]:
    layer, plain = first_of(config, "mamba"), common_config(config, None)
    del plain["rms_norm_eps"]
    return plain | {
        "layer_norm_epsilon": config.norm_eps,
        "intermediate_size": layer["inner"],
        "expand": layer["inner"] // config.width,
        "state_size": layer["state_dim"],
        "time_step_rank": layer["rank"],
        "conv_kernel": layer["conv_width"],
        "use_conv_bias": layer["conv_bias"],
    }


def mamba_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """The mixer of Mamba, without norms of step sizes, `B` and `C`."""
    inner, rank, S, W = layer["inner"], layer["rank"], layer["state_dim"], layer["conv_width"]
    rules = [
        same(f"{ours}.input.weight", f"{theirs}.in_proj.weight", 2 * inner, width),
        same(f"{ours}.convolution.weight", f"{theirs}.conv1d.weight", inner, W, as_shape=(inner, 1, W)),
        same(f"{ours}.selection.weight", f"{theirs}.x_proj.weight", rank + 2 * S, inner),
        same(f"{ours}.step.weight", f"{theirs}.dt_proj.weight", inner, rank),
        same(f"{ours}.decay.dt_bias", f"{theirs}.dt_proj.bias", inner),
        same(f"{ours}.decay.A_log", f"{theirs}.A_log", inner, S),
        same(f"{ours}.skip", f"{theirs}.D", inner),
        same(f"{ours}.output.weight", f"{theirs}.out_proj.weight", width, inner),
    ]
    if layer["conv_bias"]:
        rules.append(same(f"{ours}.convolution.bias", f"{theirs}.conv1d.bias", inner))
    return rules


def _rules(config: DecoderConfig) -> list[WeightRule]:
    rules = head_rules(config, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for i, layer in enumerate(layers_of(config)):
        theirs = f"backbone.layers.{i}"
        rules.append(same(f"blocks.{i}.mixer_norm.weight", f"{theirs}.norm.weight", config.width))
        rules += mamba_rules(f"blocks.{i}.mixer", f"{theirs}.mixer", config.width, layer)
    return rules


def _falcon_mamba(config: Config) -> DecoderConfig:
    """Mamba whose step sizes, `B` and `C` are normalised, without weights."""
    given = _mamba(config)
    norms = {"norms": True, "norm_weights": False, "eps": config.get("mixer_rms_eps", 1e-6)}
    return replace(given, layers=[replace(layer, options={**layer.options, **norms}) for layer in given.layers])


def _their_falcon_mamba(config: DecoderConfig) -> dict[str, Any]:
    return _their_mamba(config) | {"mixer_rms_eps": first_of(config, "mamba")["eps"]}


MAMBA = ModelFamily("mamba", "MambaForCausalLM", _mamba, _their_mamba, _rules)
FALCON_MAMBA = ModelFamily("falcon_mamba", "FalconMambaForCausalLM", _falcon_mamba, _their_falcon_mamba, _rules)
