"""Kimi-Linear: Kimi Delta Attention with latent attention in some layers, and experts."""

from __future__ import annotations

from typing import Any

from flashmix.checkpoints.families.attention import common_config, decoder_of
from flashmix.checkpoints.families.gated_delta import layer_types
from flashmix.checkpoints.family import (
    Config,
    Layer,
    ModelFamily,
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

LATENT_EPS = 1e-6  # transformers' class has this constant for the norms of both vectors
EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up, down


def _kinds(config: Config) -> list[str]:
    depth = config["num_hidden_layers"]
    told = config.get("linear_attn_config") or {}
    if config.get("layer_types"):
        return list(config["layer_types"])
    if "full_attn_layers" in told:  # numbered from 1
        return ["full_attention" if i + 1 in told["full_attn_layers"] else "linear_attention" for i in range(depth)]
    return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(depth)]


def _ours(config: Config) -> DecoderConfig:
    heads, depth = need(config, "num_attention_heads", "num_hidden_layers")
    rank, shared_dim, value_dim, head_dim = need(
        config, "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"
    )
    refuse(config, attention_bias=False, hidden_act="silu")
    refuse(config, num_key_value_heads=heads) if config.get("num_key_value_heads") else None
    told = config.get("linear_attn_config") or {}
    eps = config.get("rms_norm_eps", 1e-5)
    delta = {
        "heads": told.get("num_heads", config.get("linear_num_heads", 32)),
        "head_dim": told.get("head_dim", config.get("linear_head_dim", 128)),
        "conv_width": told.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
        "gate_bias": False,
        "eps": eps,
    }
    latent = {"heads": heads, "rank": rank, "query_rank": config.get("q_lora_rank"), "head_dim": head_dim}
    latent |= {"shared_dim": shared_dim, "value_dim": value_dim, "eps": LATENT_EPS}
    mixers = {"linear_attention": ("kda", delta), "full_attention": ("latent_attention", latent)}
    first = config.get("first_k_dense_replace", 1)
    mlps = config.get("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(depth)]
    experts = _experts(config) if "sparse" in mlps else None
    layers = [
        LayerConfig(*mixers[kind], mlp=experts if mlp == "sparse" else None)
        for kind, mlp in zip(_kinds(config), mlps, strict=True)
    ]
    return decoder_of(config, layers, norm_eps=eps)


def _either(config: Config, *names: str) -> Any:
    """The value under the first of these names."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def _experts(config: Config) -> dict[str, Any]:
    (hidden,) = need(config, "moe_intermediate_size")
    return {
        "kind": "experts",
        "hidden": hidden,
        "experts": _either(config, "num_experts", "num_local_experts"),
        "active": _either(config, "num_experts_per_token", "num_experts_per_tok"),
        "shared": hidden * (_either(config, "num_shared_experts", "n_shared_experts") or 0),
        "scores": "sigmoid",
        "normalise": config.get("moe_renormalize", config.get("norm_topk_prob", True)),
        "scale": config.get("routed_scaling_factor", 1.0),
        "groups": _either(config, "num_expert_group", "n_group") or 1,
        "active_groups": config.get("topk_group") or 1,
        "balance": True,
    }


def _theirs(config: DecoderConfig) -> dict[str, Any]:
    delta, latent, plain = first_of(config, "kda"), first_of(config, "latent_attention"), common_config(config, None)
    mlps = [layer.mlp for layer in layers_of(config)]
    found = next((mlp for mlp in mlps if mlp["kind"] == "experts"), None)
    plain |= {
        "num_attention_heads": latent["heads"],
        "num_key_value_heads": latent["heads"],
        "kv_lora_rank": latent["rank"],
        "q_lora_rank": latent["query_rank"],
        "qk_rope_head_dim": latent["shared_dim"],
        "qk_nope_head_dim": latent["head_dim"],
        "v_head_dim": latent["value_dim"],
        "linear_num_heads": delta["heads"],
        "linear_head_dim": delta["head_dim"],
        "linear_conv_kernel_dim": delta["conv_width"],
        "layer_types": layer_types(config, "latent_attention"),
        "mlp_layer_types": ["sparse" if mlp["kind"] == "experts" else "dense" for mlp in mlps],
    }
    if found is not None:
        plain |= {
            "moe_intermediate_size": found["hidden"],
            "num_experts": found["experts"],
            "num_experts_per_token": found["active"],
            "num_shared_experts": found["shared"] // found["hidden"],
            "moe_renormalize": found["normalise"],
            "routed_scaling_factor": found["scale"],
            "num_expert_group": found["groups"],
            "topk_group": found["active_groups"],
        }
    return plain


def _delta_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, K, W = layer["heads"], layer["head_dim"], layer["conv_width"]
    D = H * K
    convolutions = tuple(WeightRows(f"{theirs}.{n}_conv1d.weight", (D, 1, W), {n: D}) for n in "qkv")
    decay, gate = f"{ours}.decay_projection", f"{ours}.gate"
    return [
        joined(f"{ours}.qkv.weight", {f"{theirs}.{name}_proj.weight": D for name in "qkv"}, width),
        WeightRule((WeightRows(f"{ours}.convolution.weight", (3 * D, W), {"q": D, "k": D, "v": D}),), convolutions),
        same(f"{ours}.strength.weight", f"{theirs}.b_proj.weight", H, width),
        same(f"{decay}.down.weight", f"{theirs}.f_a_proj.weight", K, width),
        same(f"{decay}.up.weight", f"{theirs}.f_b_proj.weight", D, K),
        same(f"{ours}.decay.A_log", f"{theirs}.A_log", H, as_shape=(1, 1, H, 1)),
        same(f"{ours}.decay.dt_bias", f"{theirs}.dt_bias", H, K, as_shape=(D,)),
        same(f"{gate}.down.weight", f"{theirs}.g_a_proj.weight", K, width),
        same(f"{gate}.up.weight", f"{theirs}.g_b_proj.weight", D, K),
        same(f"{ours}.norm.weight", f"{theirs}.o_norm.weight", K),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, D),
    ]


def _latent_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, K, V, S, R = (layer[n] for n in ("heads", "head_dim", "value_dim", "shared_dim", "rank"))
    Q, inner = layer["query_rank"], width if layer["query_rank"] is None else layer["query_rank"]
    rules = [
        same(f"{ours}.down.weight", f"{theirs}.kv_a_proj_with_mqa.weight", R + S, width),
        same(f"{ours}.norm.weight", f"{theirs}.kv_a_layernorm.weight", R),
        same(f"{ours}.up.weight", f"{theirs}.kv_b_proj.weight", H * (K + V), R),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, H * V),
        same(f"{ours}.query.weight", f"{theirs}.q{'' if Q is None else '_b'}_proj.weight", H * (K + S), inner),
    ]
    if Q is not None:
        rules.append(same(f"{ours}.query_down.weight", f"{theirs}.q_a_proj.weight", Q, width))
        rules.append(same(f"{ours}.query_norm.weight", f"{theirs}.q_a_layernorm.weight", Q))
    return rules


def _rules(config: DecoderConfig) -> list[WeightRule]:
    rules = head_rules(config, "model.embed_tokens.weight", "model.norm.weight")
    D = config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        mixer = _delta_rules if layer.mixer == "kda" else _latent_rules
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.input_layernorm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", D),
            *mixer(f"{ours}.mixer", f"{theirs}.self_attn", D, layer),
        ]
        experts = f"{theirs}.block_sparse_moe"
        if layer.mlp["kind"] == "experts":
            rules += expert_rules(f"{ours}.mlp", experts, D, layer.mlp, EXPERT_NAMES, "shared_experts")
        else:
            rules += mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", D, layer.mlp["hidden"], alias=experts)
    return rules


KIMI_LINEAR = ModelFamily("kimi_linear", "KimiLinearForCausalLM", _ours, _theirs, _rules)
