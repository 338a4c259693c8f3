"""Qwen3-Next, Qwen3.5 and OLMo-hybrid: Gated DeltaNet with softmax attention in some layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flashmix.checkpoints.families.attention import attention_options, common_config, decoder_of
from flashmix.checkpoints.family import (
    Config,
    Layer,
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
from flashmix.checkpoints.rules import WeightRows, WeightRule, joined, same
from flashmix.models.config import DecoderConfig, LayerConfig

EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")


def delta_options(config: Config) -> dict[str, Any]:
    """Heads and convolution of a configuration's Gated DeltaNet."""
    heads, value_heads = need(config, "linear_num_key_heads", "linear_num_value_heads")
    head_dim, value_dim = need(config, "linear_key_head_dim", "linear_value_head_dim")
    return {
        "heads": heads,
        "head_dim": head_dim,
        "value_heads": value_heads,
        "value_dim": value_dim,
        "conv_width": config.get("linear_conv_kernel_dim", 4),
    }


def delta_config(layer: Layer) -> dict[str, Any]:
    """The other way."""
    return {
        "linear_num_key_heads": layer["heads"],
        "linear_key_head_dim": layer["head_dim"],
        "linear_num_value_heads": layer["value_heads"],
        "linear_value_head_dim": layer["value_dim"],
        "linear_conv_kernel_dim": layer["conv_width"],
    }


def kinds_of(config: Config, every: int = 4) -> list[str]:
    """The type of each layer; without a list every fourth is softmax attention."""
    (depth,) = need(config, "num_hidden_layers")
    every = config.get("full_attention_interval") or every
    kinds = config.get("layer_types")
    return kinds or ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]


def layer_types(config: DecoderConfig, full: str = "attention") -> list[str]:
    """The other way; `full` is the mixer of softmax attention."""
    return ["full_attention" if layer.mixer == full else "linear_attention" for layer in config.layers]


def _experts(config: Config) -> dict[str, Any]:
    hidden, experts, active = need(config, "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    return {
        "kind": "experts",
        "hidden": hidden,
        "experts": experts,
        "active": active,
        "shared": config.get("shared_expert_intermediate_size") or 0,
        "shared_gate": bool(config.get("shared_expert_intermediate_size")),
        "normalise": config.get("norm_topk_prob", True),
    }


def _qwen(config: Config, *, sparse: bool, nested: bool = False) -> DecoderConfig:
    eps = config.get("rms_norm_eps", 1e-6)
    attention = attention_options(config, 0.25) | {"qk_norm": True, "unit_offset": True, "gated": True, "eps": eps}
    mixers = {
        "linear_attention": ("gated_deltanet", delta_options(config) | {"eps": eps}),
        "full_attention": ("attention", attention),
    }
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = []
    for i, kind in enumerate(kinds_of(config)):
        has_experts = sparse and i not in dense and (i + 1) % step == 0 and config.get("num_experts", 1) > 0
        layers.append(LayerConfig(*mixers[kind], mlp=_experts(config) if has_experts else None))
    return decoder_of(config, layers, norm="unit_offset_rms")


def _their_qwen(config: DecoderConfig) -> dict[str, Any]:
    plain = common_config(config, first_of(config, "attention")) | delta_config(first_of(config, "gated_deltanet"))
    plain["layer_types"] = layer_types(config)
    mlps = [layer.mlp for layer in layers_of(config)]
    found = next((mlp for mlp in mlps if mlp["kind"] == "experts"), None)
    if found is not None:
        plain |= {
            "moe_intermediate_size": found["hidden"],
            "num_experts": found["experts"],
            "num_experts_per_tok": found["active"],
            "shared_expert_intermediate_size": found["shared"],
            "norm_topk_prob": found["normalise"],
            "mlp_only_layers": [i for i, mlp in enumerate(mlps) if mlp["kind"] != "experts"],
        }
    return plain


def _delta_rules(ours: str, theirs: str, width: int, layer: Layer, fused: bool) -> list[WeightRule]:
    """Gated DeltaNet of Qwen; with `fused` queries, keys, values and gates of a head of keys lie together (Qwen3-Next)."""
    H, K, HV, V = layer["heads"], layer["head_dim"], layer["value_heads"], layer["value_dim"]
    keys, values, g = H * K, HV * V, HV // H
    qkv = WeightRows(f"{ours}.qkv.weight", (2 * keys + values, width), {"q": keys, "k": keys, "v": values})
    gate = WeightRows(f"{ours}.gate.weight", (values, width), {"z": values})
    both = WeightRows(f"{ours}.strength_and_decay.weight", (2 * HV, width), {"b": HV, "a": HV})
    if fused:
        heads = {"q": K, "k": K, "v": g * V, "z": g * V}
        theirs_qkvz = WeightRows(f"{theirs}.in_proj_qkvz.weight", (2 * (keys + values), width), heads, repeat=H)
        theirs_ba = WeightRows(f"{theirs}.in_proj_ba.weight", (2 * HV, width), {"b": g, "a": g}, repeat=H)
        rules = [WeightRule((qkv, gate), (theirs_qkvz,)), WeightRule((both,), (theirs_ba,))]
    else:
        b, a = f"{theirs}.in_proj_b.weight", f"{theirs}.in_proj_a.weight"
        rules = [
            same(qkv.name, f"{theirs}.in_proj_qkv.weight", *qkv.shape),
            same(gate.name, f"{theirs}.in_proj_z.weight", *gate.shape),
            joined(both.name, {b: HV, a: HV}, width),
        ]
    D, W = 2 * keys + values, layer["conv_width"]
    return [
        *rules,
        same(f"{ours}.convolution.weight", f"{theirs}.conv1d.weight", D, W, as_shape=(D, 1, W)),
        same(f"{ours}.decay.A_log", f"{theirs}.A_log", HV),
        same(f"{ours}.decay.dt_bias", f"{theirs}.dt_bias", HV),
        same(f"{ours}.norm.weight", f"{theirs}.norm.weight", V),
        same(f"{ours}.output.weight", f"{theirs}.out_proj.weight", width, values),
    ]


def _qwen_rules(config: DecoderConfig, *, fused: bool) -> list[WeightRule]:
    rules = head_rules(config, "model.embed_tokens.weight", "model.norm.weight")
    D = config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.input_layernorm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", D),
        ]
        if layer.mixer == "attention":
            rules += attention_rules(f"{ours}.mixer", f"{theirs}.self_attn", D, layer)
        else:
            rules += _delta_rules(f"{ours}.mixer", f"{theirs}.linear_attn", D, layer, fused)
        if layer.mlp["kind"] == "experts":
            rules += expert_rules(f"{ours}.mlp", f"{theirs}.mlp", D, layer.mlp, EXPERT_NAMES, "shared_expert")
        else:
            rules += mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", D, layer.mlp["hidden"])
    return rules


def _olmo(config: Config) -> DecoderConfig:
    refuse(config, attention_bias=False)
    options = attention_options(config)
    if config.get("rope_parameters") is None and config.get("rope_theta") is None:
        options = {"heads": options["heads"], "kv_heads": options["kv_heads"], "head_dim": options["head_dim"]}
        options["rotary"] = 0
    options |= {"qk_norm": True, "joint_qk_norm": True, "eps": config.get("rms_norm_eps", 1e-6)}
    negative = {"negative_eigenvalues": config.get("linear_allow_neg_eigval", True)}
    delta = LayerConfig("gated_deltanet", delta_options(config) | negative | {"eps": 1e-5})
    full = LayerConfig("attention", options, norm_after=True)
    return decoder_of(config, [full if kind == "full_attention" else delta for kind in kinds_of(config)])


def _their_olmo(config: DecoderConfig) -> dict[str, Any]:
    delta, attention = first_of(config, "gated_deltanet"), first_of(config, "attention")
    negative = {"linear_allow_neg_eigval": delta["negative_eigenvalues"]}
    return common_config(config, attention) | delta_config(delta) | negative | {"layer_types": layer_types(config)}


def _olmo_delta_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, K, HV, V = layer["heads"], layer["head_dim"], layer["value_heads"], layer["value_dim"]
    rows, W = {"q": H * K, "k": H * K, "v": HV * V}, layer["conv_width"]
    convolutions = tuple(WeightRows(f"{theirs}.{n}_conv1d.weight", (size, 1, W), {n: size}) for n, size in rows.items())
    whole = WeightRows(f"{ours}.convolution.weight", (sum(rows.values()), W), rows)
    b, a = f"{theirs}.b_proj.weight", f"{theirs}.a_proj.weight"
    return [
        joined(f"{ours}.qkv.weight", {f"{theirs}.{name}_proj.weight": size for name, size in rows.items()}, width),
        WeightRule((whole,), convolutions, any_cut=True),  # transformers 5.17 cuts the file's into three equal parts
        joined(f"{ours}.strength_and_decay.weight", {b: HV, a: HV}, width),
        same(f"{ours}.gate.weight", f"{theirs}.g_proj.weight", HV * V, width),
        same(f"{ours}.decay.A_log", f"{theirs}.A_log", HV),
        same(f"{ours}.decay.dt_bias", f"{theirs}.dt_bias", HV),
        same(f"{ours}.norm.weight", f"{theirs}.o_norm.weight", V),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, HV * V),
    ]


# Names of the norms of OLMo-hybrid, before mixer and MLP, in layers of the delta rule and of attention; other names in files.
OLMO_NORMS = {
    "gated_deltanet": (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ),
    "attention": (
        ("post_attention_layernorm", "feedforward_layer_norm"),
        ("post_feedforward_layernorm", "post_feedforward_layer_norm"),
    ),
}


def _olmo_rules(config: DecoderConfig) -> list[WeightRule]:
    rules = head_rules(config, "model.embed_tokens.weight", "model.norm.weight")
    D = config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for norm, (name, other) in zip(("mixer_norm", "mlp_norm"), OLMO_NORMS[layer.mixer], strict=True):
            names = [f"{theirs}.{other}.weight"]
            rules.append(same(f"{ours}.{norm}.weight", f"{theirs}.{name}.weight", D, aliases=names))
        if layer.mixer == "attention":
            rules += attention_rules(f"{ours}.mixer", f"{theirs}.self_attn", D, layer)
        else:
            rules += _olmo_delta_rules(f"{ours}.mixer", f"{theirs}.linear_attn", D, layer)
        rules += mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", D, layer.mlp["hidden"])
    return rules


VISION = (r"^model\.language_model\.", "model.")
NO_DRAFT = (r"\.rotary_emb\.inv_freq$", r"^mtp\.", r"^model\.visual\.")
QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    partial(_qwen, sparse=True),
    _their_qwen,
    partial(_qwen_rules, fused=True),
    ignored=NO_DRAFT,
)
QWEN3_5 = ModelFamily(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    partial(_qwen, sparse=False),
    _their_qwen,
    partial(_qwen_rules, fused=False),
    renames=(VISION,),
    ignored=NO_DRAFT,
    also=("qwen3_5",),
    nested="text_config",
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    ours=partial(_qwen, sparse=True),
    also=("qwen3_5_moe",),
)
OLMO_HYBRID = ModelFamily("olmo_hybrid", "OlmoHybridForCausalLM", _olmo, _their_olmo, _olmo_rules)
