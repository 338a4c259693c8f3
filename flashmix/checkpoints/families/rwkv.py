"""RWKV-4 of transformers, RWKV-6 and RWKV-7 of flash-linear-attention: layer norms, channel mixing, and a norm of the embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashmix.checkpoints.families.attention import decoder_of
from flashmix.checkpoints.family import Config, Layer, ModelFamily, first_of, head_rules, layers_of, need, refuse
from flashmix.checkpoints.rules import WeightRows, WeightRule, same
from flashmix.models.config import DecoderConfig, LayerConfig

MIXES = "rwkvag"  # order of the shift's factors in ours: receptance, decay, key, value, removal, gate


def _decoder(config: Config, layers: list[LayerConfig]) -> DecoderConfig:
    refuse(config, hidden_act="sqrelu", norm_first=True, norm_bias=True, attn=None)
    return decoder_of(config, layers, norm="layer", norm_eps=config.get("norm_eps", 1e-5), embedding_norm=True)


def _mlp(config: Config, ratio: float, receptance: bool) -> dict[str, Any]:
    hidden = config.get("intermediate_size")
    if hidden is None:
        hidden = -(-int(config["hidden_size"] * (config.get("hidden_ratio") or ratio)) // 32) * 32
    return {"kind": "channel_mixing", "hidden": hidden, "receptance": receptance}


def _rwkv7(config: Config) -> DecoderConfig:
    width, depth = need(config, "hidden_size", "num_hidden_layers")
    head_dim = config.get("head_dim") or width // config["num_heads"]
    values = config.get("value_dim")
    if values is not None:
        refuse(config, value_dim=values if isinstance(values, int) and values == width else depth * [width])
    names = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
    options = {
        "heads": width // head_dim,
        "head_dim": head_dim,
        "ranks": need(config, *names),
        "eps": head_dim * config.get("norm_eps", 1e-5),
    }
    mlp = _mlp(config, 4, False)
    return _decoder(
        config, [LayerConfig("rwkv7", options | {"value_residual": index > 0}, mlp=mlp) for index in range(depth)]
    )


def _rwkv6(config: Config) -> DecoderConfig:
    width, heads, depth = need(config, "hidden_size", "num_heads", "num_hidden_layers")
    options = {
        "heads": heads,
        "head_dim": round(width * config.get("expand_k", 0.5)) // heads,
        "value_dim": round(width * config.get("expand_v", 1.0)) // heads,
        "shift_rank": config.get("proj_low_rank_dim", 32),
        "decay_rank": config.get("gate_low_rank_dim", 64),
        "eps": config.get("norm_eps", 1e-5),
    }
    return _decoder(config, depth * [LayerConfig("rwkv6", options, mlp=_mlp(config, 3.5, True))])


def _rwkv4(config: Config) -> DecoderConfig:
    """RWKV-4, whose last norm has another eps than the others where theirs is not 1e-5."""
    refuse(config, layer_norm_epsilon=1e-5)
    width, depth = need(config, "hidden_size", "num_hidden_layers")
    hidden = config.get("intermediate_size") or 4 * width
    mlp = {"kind": "channel_mixing", "hidden": hidden, "receptance": True, "factor_of": "current"}
    layers = depth * [LayerConfig("rwkv4", {"inner": config.get("attention_hidden_size") or width}, mlp=mlp)]
    return decoder_of(config, layers, norm="layer", norm_eps=1e-5, embedding_norm=True, mlp_width=None)


def _common(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "intermediate_size": layers_of(config)[0].mlp["hidden"],
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }


def _their_rwkv7(config: DecoderConfig) -> dict[str, Any]:
    layer = first_of(config, "rwkv7")
    decay, remove, value, gate = layer["ranks"]
    return _common(config) | {
        "head_dim": layer["head_dim"],
        "decay_low_rank_dim": decay,
        "a_low_rank_dim": remove,
        "v_low_rank_dim": value,
        "gate_low_rank_dim": gate,
    }


def _their_rwkv6(config: DecoderConfig) -> dict[str, Any]:
    layer = first_of(config, "rwkv6")
    return _common(config) | {
        "num_heads": layer["heads"],
        "expand_k": layer["heads"] * layer["head_dim"] / config.width,
        "expand_v": layer["heads"] * layer["value_dim"] / config.width,
        "proj_low_rank_dim": layer["shift_rank"],
        "gate_low_rank_dim": layer["decay_rank"],
    }


def _their_rwkv4(config: DecoderConfig) -> dict[str, Any]:
    plain = _common(config) | {"attention_hidden_size": first_of(config, "rwkv4")["inner"]}
    return plain | {"layer_norm_epsilon": plain.pop("norm_eps")}


def _norm(ours: str, theirs: str, width: int) -> list[WeightRule]:
    return [same(f"{ours}.{name}", f"{theirs}.{name}", width) for name in ("weight", "bias")]


def _low_rank(ours: str, theirs: str, width: int, rank: int, out: int, bias: bool = True) -> list[WeightRule]:
    rules = [
        same(f"{ours}.down.weight", f"{theirs}.lora.0.weight", rank, width),
        same(f"{ours}.up.weight", f"{theirs}.lora.2.weight", out, rank),
    ]
    return [*rules, same(f"{ours}.up.bias", f"{theirs}.lora.2.bias", out)] if bias else rules


def _output(ours: str, theirs: str, width: int, values: int) -> list[WeightRule]:
    """The norm of each head's output, and the output's projection."""
    return [
        same(f"{ours}.norm_weight", f"{theirs}.g_norm.weight", values),
        same(f"{ours}.norm_bias", f"{theirs}.g_norm.bias", values),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, values),
    ]


def _rwkv7_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, K = layer["heads"], layer["head_dim"]
    decay, remove, value, gate = layer["ranks"]
    D = H * K
    mixes = tuple(WeightRows(f"{theirs}.x_{name}", (1, 1, width), {name: 1}) for name in MIXES)
    rules = [
        WeightRule((WeightRows(f"{ours}.shift_mix", (6, width), dict.fromkeys(MIXES, 1)),), mixes),
        same(f"{ours}.receptance.weight", f"{theirs}.r_proj.weight", D, width),
        same(f"{ours}.key.weight", f"{theirs}.k_proj.weight", D, width),
        same(f"{ours}.value.weight", f"{theirs}.v_proj.weight", D, width),
        same(f"{ours}.removal_key", f"{theirs}.k_k", D),
        same(f"{ours}.key_keep", f"{theirs}.k_a", D),
        same(f"{ours}.bonus", f"{theirs}.r_k", H, K),
        *_low_rank(f"{ours}.decay_projection", f"{theirs}.w_lora", width, decay, D),
        *_low_rank(f"{ours}.remove", f"{theirs}.a_lora", width, remove, D),
        *_low_rank(f"{ours}.gate", f"{theirs}.g_lora", width, gate, D, bias=False),
        *_output(ours, theirs, width, D),
    ]
    if layer["value_residual"]:
        rules += _low_rank(f"{ours}.value_mix", f"{theirs}.v_lora", width, value, D)
    return rules


def _rwkv6_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, K, V, r = layer["heads"], layer["head_dim"], layer["value_dim"], layer["shift_rank"]
    keys, values = H * K, H * V
    up = WeightRows(f"{ours}.shift_up", (5, r, width), {"all": 1})
    their_up = WeightRows(f"{theirs}.x_proj.2.weight", (width, 5 * r), {"all": 1}, axes=((width, 5, r), (1, 2, 0)))
    sizes = {"receptance": ("r", keys), "key": ("k", keys), "value": ("v", values), "gate": ("g", values)}
    return [
        same(f"{ours}.first_mix", f"{theirs}.x_proj.0.mu", width),
        same(f"{ours}.shift_down.weight", f"{theirs}.x_proj.0.linear.weight", 5 * r, width),
        WeightRule((up,), (their_up,)),
        same(f"{ours}.shift_mix", f"{theirs}.x_bias", 5, width),
        *(
            same(f"{ours}.{name}.weight", f"{theirs}.{short}_proj.linear.weight", out, width)
            for name, (short, out) in sizes.items()
        ),
        *_low_rank(f"{ours}.decay_projection", f"{theirs}.w_proj.linear", width, layer["decay_rank"], keys),
        same(f"{ours}.bonus", f"{theirs}.bonus", H, K),
        *_output(ours, theirs, width, values),
    ]


def _mlp_rules(ours: str, theirs: str, width: int, mlp: dict[str, Any]) -> list[WeightRule]:
    """Channel mixing; with a receptance keys and it have a name of their own for the projection."""
    key, mix = ("key.linear", "key.mu") if mlp["receptance"] else ("key", "x_k")
    rules = [
        same(f"{ours}.key_mix", f"{theirs}.{mix}", width),
        same(f"{ours}.key.weight", f"{theirs}.{key}.weight", mlp["hidden"], width),
        same(f"{ours}.value.weight", f"{theirs}.value.weight", width, mlp["hidden"]),
    ]
    if mlp["receptance"]:
        rules.append(same(f"{ours}.receptance_mix", f"{theirs}.receptance.mu", width))
        rules.append(same(f"{ours}.receptance.weight", f"{theirs}.receptance.linear.weight", width, width))
    return rules


def _rules(config: DecoderConfig, *, mixer: Callable[[str, str, int, Layer], list[WeightRule]]) -> list[WeightRule]:
    D = config.width
    rules = head_rules(config, "model.embeddings.weight", "model.norm.weight")
    rules.append(same("norm.bias", "model.norm.bias", D))
    rules += _norm("embedding_norm", "model.layers.0.pre_norm", D)
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        rules += [
            *_norm(f"{ours}.mixer_norm", f"{theirs}.attn_norm", D),
            *_norm(f"{ours}.mlp_norm", f"{theirs}.ffn_norm", D),
            *mixer(f"{ours}.mixer", f"{theirs}.attn", D, layer),
            *_mlp_rules(f"{ours}.mlp", f"{theirs}.ffn", D, layer.mlp),
        ]
    return rules


def _rwkv4_mixer_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    D, mixed = layer["inner"], ("key", "value", "receptance")
    return [
        *(same(f"{ours}.{n}_mix", f"{theirs}.time_mix_{n}", width, as_shape=(1, 1, width)) for n in mixed),
        *(same(f"{ours}.{n}.weight", f"{theirs}.{n}.weight", D, width) for n in mixed),
        same(f"{ours}.decay.weight", f"{theirs}.time_decay", D),
        same(f"{ours}.bonus", f"{theirs}.time_first", D),
        same(f"{ours}.output.weight", f"{theirs}.output.weight", width, D),
    ]


def _rwkv4_rules(config: DecoderConfig) -> list[WeightRule]:
    D = config.width
    rules = head_rules(config, "rwkv.embeddings.weight", "rwkv.ln_out.weight", "head.weight")
    rules.append(same("norm.bias", "rwkv.ln_out.bias", D))
    rules += _norm("embedding_norm", "rwkv.blocks.0.pre_ln", D)
    for i, layer in enumerate(layers_of(config)):
        ours, theirs, hidden = f"blocks.{i}", f"rwkv.blocks.{i}", layer.mlp["hidden"]
        mlp, place = f"{ours}.mlp", f"{theirs}.feed_forward"
        rules += [
            *_norm(f"{ours}.mixer_norm", f"{theirs}.ln1", D),
            *_norm(f"{ours}.mlp_norm", f"{theirs}.ln2", D),
            *_rwkv4_mixer_rules(f"{ours}.mixer", f"{theirs}.attention", D, layer),
            same(f"{mlp}.key_mix", f"{place}.time_mix_key", D, as_shape=(1, 1, D)),
            same(f"{mlp}.receptance_mix", f"{place}.time_mix_receptance", D, as_shape=(1, 1, D)),
            same(f"{mlp}.key.weight", f"{place}.key.weight", hidden, D),
            same(f"{mlp}.value.weight", f"{place}.value.weight", D, hidden),
            same(f"{mlp}.receptance.weight", f"{place}.receptance.weight", D, D),
        ]
    return rules


RWKV4 = ModelFamily("rwkv", "RwkvForCausalLM", _rwkv4, _their_rwkv4, _rwkv4_rules)
RWKV6 = ModelFamily("rwkv6", "RWKV6ForCausalLM", _rwkv6, _their_rwkv6, partial(_rules, mixer=_rwkv6_rules))
RWKV7 = ModelFamily("rwkv7", "RWKV7ForCausalLM", _rwkv7, _their_rwkv7, partial(_rules, mixer=_rwkv7_rules))
