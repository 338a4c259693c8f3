"""Mamba-2 (transformers and flash-linear-attention) and Bamba: the scan of Mamba-2, alone and with softmax attention in some layers."""

from __future__ import annotations

from typing import Any

from flashmix.checkpoints.families.attention import attention_options, common_config, decoder_of
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
)
from flashmix.checkpoints.rules import ConversionError, WeightRows, WeightRule, same
from flashmix.models.config import DecoderConfig, LayerConfig


def _steps_unbounded(config: Config) -> None:
    """Raises ConversionError where the step size has a limit."""
    low, high = config.get("time_step_limit") or config.get("dt_limit") or (0.0, float("inf"))
    high = float("inf") if isinstance(high, dict) else float(high)  # {"__float__": "Infinity"}
    if (low, high) != (0.0, float("inf")):
        raise ConversionError(f"no decoder of flashmix has time_step_limit = {[low, high]}")


def _mamba2(config: Config) -> DecoderConfig:
    """Mamba-2 of transformers, or of flash-linear-attention, whose configuration has `norm_eps`; both normalise by group.

    transformers 5.17 normalises all groups at once, unlike the library that trained the published models and unlike later versions.
    """
    fla, eps = "norm_eps" in config, config.get("norm_eps", config.get("layer_norm_epsilon", 1e-5))
    refuse(config, use_bias=False, hidden_act="silu", rmsnorm=True, D_has_hdim=False)
    if fla:  # transformers gates first whatever its published configurations say
        refuse(config, norm_before_gate=False)
    _steps_unbounded(config)
    depth, width, head_dim = need(config, "num_hidden_layers", "hidden_size", "head_dim")
    heads = config.get("num_heads") or config.get("expand", 2) * width // head_dim
    options = {
        "heads": heads,
        "head_dim": head_dim,
        "state_dim": config.get("state_size", 128),
        "groups": config.get("n_groups", 1 if fla else 8),
        "conv_width": config.get("conv_kernel", 4),
        "conv_bias": config.get("use_conv_bias", True),
        "eps": eps,
    }
    return decoder_of(config, depth * [LayerConfig("mamba2", options, mlp={"kind": "none"})], norm_eps=eps)


def _their_mamba2(config: DecoderConfig) -> dict[str, Any]:
    layer, plain = first_of(config, "mamba2"), common_config(config, None)
    del plain["rms_norm_eps"]
    return plain | {
        "layer_norm_epsilon": config.norm_eps,
        "norm_eps": config.norm_eps,  # its name in flash-linear-attention
        "num_heads": layer["heads"],
        "head_dim": layer["head_dim"],
        "expand": layer["heads"] * layer["head_dim"] // config.width,
        "state_size": layer["state_dim"],
        "n_groups": layer["groups"],
        "conv_kernel": layer["conv_width"],
        "use_conv_bias": layer["conv_bias"],
    }


def _bamba(config: Config) -> DecoderConfig:
    refuse(config, mamba_proj_bias=False)
    _steps_unbounded(config)
    depth, heads, width = need(config, "num_hidden_layers", "mamba_n_heads", "hidden_size")
    eps = config.get("rms_norm_eps", 1e-5)
    head_dim = config.get("mamba_d_head", "auto")
    options = {
        "heads": heads,
        "head_dim": config.get("mamba_expand", 2) * width // heads if head_dim == "auto" else head_dim,
        "state_dim": config.get("mamba_d_state", 256),
        "groups": config.get("mamba_n_groups", 1),
        "conv_width": config.get("mamba_d_conv", 4),
        "conv_bias": config.get("mamba_conv_bias", True),
        "eps": eps,
    }
    full = config.get("attn_layer_indices") or []
    attention, scan = LayerConfig("attention", attention_options(config, 0.5)), LayerConfig("mamba2", options)
    return decoder_of(config, [attention if i in full else scan for i in range(depth)], norm_eps=eps)


def _their_bamba(config: DecoderConfig) -> dict[str, Any]:
    layer = first_of(config, "mamba2")
    plain = common_config(config, first_of(config, "attention"))
    if plain["rope_parameters"].get("partial_rotary_factor") != 0.5:
        raise ConversionError("bamba must have half of the channels rotated")
    return plain | {
        "attn_layer_indices": [i for i, other in enumerate(config.layers) if other.mixer == "attention"],
        "mamba_n_heads": layer["heads"],
        "mamba_d_head": layer["head_dim"],
        "mamba_expand": layer["heads"] * layer["head_dim"] // config.width,
        "mamba_d_state": layer["state_dim"],
        "mamba_n_groups": layer["groups"],
        "mamba_d_conv": layer["conv_width"],
        "mamba_conv_bias": layer["conv_bias"],
    }


def scan_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """The mixer of Mamba-2; theirs projects to gate, `x B C` and step, in this order."""
    H, inner, W = layer["heads"], layer["heads"] * layer["head_dim"], layer["conv_width"]
    channels = inner + 2 * layer["groups"] * layer["state_dim"]
    shape = (channels + inner + H, width)
    project = WeightRule(
        (WeightRows(f"{ours}.input.weight", shape, {"xbc": channels, "gate": inner, "step": H}),),
        (WeightRows(f"{theirs}.in_proj.weight", shape, {"gate": inner, "xbc": channels, "step": H}),),
    )
    rules = [
        project,
        same(f"{ours}.convolution.weight", f"{theirs}.conv1d.weight", channels, W, as_shape=(channels, 1, W)),
        same(f"{ours}.decay.A_log", f"{theirs}.A_log", H),
        same(f"{ours}.decay.dt_bias", f"{theirs}.dt_bias", H),
        same(f"{ours}.skip", f"{theirs}.D", H),
        same(f"{ours}.norm.weight", f"{theirs}.norm.weight", inner),
        same(f"{ours}.output.weight", f"{theirs}.out_proj.weight", width, inner),
    ]
    if layer["conv_bias"]:
        rules.append(same(f"{ours}.convolution.bias", f"{theirs}.conv1d.bias", channels))
    return rules


def _mamba2_rules(config: DecoderConfig) -> list[WeightRule]:
    rules = head_rules(config, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for i, layer in enumerate(layers_of(config)):
        rules.append(same(f"blocks.{i}.mixer_norm.weight", f"backbone.layers.{i}.norm.weight", config.width))
        rules += scan_rules(f"blocks.{i}.mixer", f"backbone.layers.{i}.mixer", config.width, layer)
    return rules


def _bamba_rules(config: DecoderConfig) -> list[WeightRule]:
    rules = head_rules(config, "model.embed_tokens.weight", "model.final_layernorm.weight")
    D = config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.input_layernorm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.pre_ff_layernorm.weight", D),
            *mlp_rules(f"{ours}.mlp", f"{theirs}.feed_forward", D, layer.mlp["hidden"]),
        ]
        if layer.mixer == "attention":
            rules += attention_rules(f"{ours}.mixer", f"{theirs}.self_attn", D, layer)
        else:
            rules += scan_rules(f"{ours}.mixer", f"{theirs}.mamba", D, layer)
    return rules


MAMBA2 = ModelFamily("mamba2", "Mamba2ForCausalLM", _mamba2, _their_mamba2, _mamba2_rules)
BAMBA = ModelFamily("bamba", "BambaForCausalLM", _bamba, _their_bamba, _bamba_rules)
