"""The models of flash-linear-attention: one block for all, and a record of data for each mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashmix.checkpoints.families.attention import decoder_of
from flashmix.checkpoints.families.fla_mixers import (
    Options,
    delta_rules,
    gla_rules,
    gsa_rules,
    hgrn2_rules,
    kda_rules,
    retnet_rules,
)
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
from flashmix.checkpoints.rules import ConversionError, WeightRule, same
from flashmix.models.config import DecoderConfig, LayerConfig

FIXED_EPS = 1e-5  # of the norms that their code calls without an eps


@dataclass(frozen=True)
class FlaMixer:
    """A mixer: `options` of ours from a configuration, its `theirs` from a layer of ours, the `rules` of its weights."""

    mixer: str
    options: Callable[[Config, int], Options]
    theirs: Callable[[Layer, DecoderConfig], dict[str, Any]]
    rules: Callable[[str, str, int, Layer], list[WeightRule]]


def _hidden(config: Config) -> int:
    """Hidden channels of the MLP."""
    told = config.get("intermediate_size")
    if told is not None:
        return int(told)
    channels = int(config["hidden_size"] * (config.get("hidden_ratio") or 4) * 2 / 3)
    return -(-channels // 256) * 256


def _attention(config: Config, told: Config) -> LayerConfig:
    """A layer of softmax attention, `told` by the configuration or by its `attn`."""
    heads = told["num_heads"]
    refuse(told, qkv_bias=False)
    options = {"heads": heads, "kv_heads": told.get("num_kv_heads") or heads, "window": told.get("window_size")}
    options |= {"base": float(told.get("rope_theta") or 10000.0)}
    if told.get("qk_norm"):
        options |= {"qk_norm": True, "eps": FIXED_EPS}
    return LayerConfig("attention", options)


def _ours(config: Config, *, mixer: FlaMixer) -> DecoderConfig:
    (depth, _) = need(config, "num_hidden_layers", "hidden_size")
    refuse(config, attnres_block_size=None, elementwise_affine=True)
    if config.get("hidden_act", "swish") not in ("swish", "silu"):
        refuse(config, hidden_act="swish")
    attn = config.get("attn") or {}
    layers = []
    for index in range(depth):
        if index in attn.get("layers", ()):
            layers.append(_attention(config, attn))
        else:
            layers.append(LayerConfig(mixer.mixer, mixer.options(config, index)))
    eps = config.get("norm_eps", 1e-6)
    return decoder_of(config, layers, norm_eps=eps, mlp_width=_hidden(config))


def _told_of(layer: Layer) -> dict[str, Any]:
    """The other way."""
    told = {"num_heads": layer["heads"], "num_kv_heads": layer["kv_heads"], "window_size": layer["window"]}
    return told | {"rope_theta": layer["base"], "qkv_bias": False}


def _theirs(config: DecoderConfig, *, mixer: FlaMixer) -> dict[str, Any]:
    layers = layers_of(config)
    plain: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(layers),
        "intermediate_size": layers[0].mlp["hidden"],
        "hidden_act": "swish",
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
    }
    full = [index for index, layer in enumerate(layers) if layer.mixer == "attention"]
    if full and mixer.mixer != "attention":
        plain["attn"] = {"layers": full, **_told_of(layers[full[0]])}
    return plain | mixer.theirs(first_of(config, mixer.mixer), config)


def _rules(config: DecoderConfig, *, mixer: FlaMixer) -> list[WeightRule]:
    rules = head_rules(config, "model.embeddings.weight", "model.norm.weight")
    D = config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        of_mixer = mixer.rules if layer.mixer == mixer.mixer else _attention_rules
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.attn_norm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.mlp_norm.weight", D),
            *of_mixer(f"{ours}.mixer", f"{theirs}.attn", D, layer),
            *mlp_rules(f"{ours}.mlp", f"{theirs}.mlp", D, layer.mlp["hidden"]),
        ]
    return rules


def _attention_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    return attention_rules(ours, theirs, width, layer)


def _delta(config: Config) -> Options:
    """What the layers of the delta rules have in common."""
    heads, head_dim = need(config, "num_heads", "head_dim")
    eps = config.get("norm_eps", 1e-6)
    options = {"heads": heads, "head_dim": head_dim, "value_heads": config.get("num_v_heads") or heads, "eps": eps}
    options["value_dim"] = int(head_dim * config.get("expand_v", 2.0))
    options["conv_width"] = _conv_width(config, True)
    return options | {"negative_eigenvalues": config.get("allow_neg_eigval", False)}


def _their_delta(layer: Layer) -> dict[str, Any]:
    return {
        "num_heads": layer["heads"],
        "head_dim": layer["head_dim"],
        "expand_v": layer["value_dim"] / layer["head_dim"],
        **_their_conv(layer),
        "allow_neg_eigval": layer["negative_eigenvalues"],
    }


def _gated_deltanet(config: Config, index: int) -> Options:
    gate = {"swish": "silu"}.get(config.get("output_gate_activation", "swish"), config.get("output_gate_activation"))
    return _delta(config) | {"output_gate": gate if config.get("use_gate", True) else "none"}


def _their_gated_deltanet(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    gate = {"use_gate": layer["output_gate"] != "none", "num_v_heads": layer["value_heads"]}
    if layer["output_gate"] == "sigmoid":
        gate["output_gate_activation"] = "sigmoid"
    return _their_delta(layer) | gate


def _deltanet(config: Config, index: int) -> Options:
    refuse(config, use_beta=True, use_output_norm=True)
    width, heads = need(config, "hidden_size", "num_heads")
    keys, values = (round(width * config.get(name, 1.0)) // heads for name in ("expand_k", "expand_v"))
    told = {**config, "head_dim": keys, "expand_v": values / keys, "num_v_heads": heads}
    options = _delta(told) | {"qk_norm": config.get("qk_norm", "l2")}
    return options | {
        "qk_activation": config.get("qk_activation", "silu"),
        "output_gate": "silu" if config.get("use_gate", False) else "none",
    }


def _their_deltanet(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    plain = _their_delta(layer)
    del plain["head_dim"]
    return plain | {
        "expand_k": layer["heads"] * layer["head_dim"] / config.width,
        "expand_v": layer["heads"] * layer["value_dim"] / config.width,
        "qk_norm": layer["qk_norm"],
        "qk_activation": layer["qk_activation"],
        "use_gate": layer["output_gate"] != "none",
    }


def _kda(config: Config, index: int) -> Options:
    lower = config.get("lower_bound")
    if config.get("safe_gate") and lower is None:
        raise ConversionError("the configuration must have lower_bound with safe_gate, got nothing")
    return _delta({"expand_v": 1.0, **config}) | {"lower": lower}


def _their_kda(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    lower = {"lower_bound": layer["lower"], "safe_gate": layer["lower"] is not None}
    return _their_delta(layer) | lower | {"num_v_heads": layer["value_heads"]}


def _comba(config: Config, index: int) -> Options:
    gate = "sigmoid" if config.get("use_output_gate", True) else "none"
    return _delta(config) | {"output_gate": gate, "normalise_last": True}


def _their_comba(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    gate = {"use_output_gate": layer["output_gate"] != "none", "num_v_heads": layer["value_heads"]}
    return _their_delta(layer) | gate


def _deltaproduct(config: Config, index: int) -> Options:
    gate = "silu" if config.get("use_output_gate", True) else "none"
    steps = {"steps": config.get("num_householder", 1), "forget": config.get("use_forget_gate", False)}
    return _delta(config) | {"output_gate": gate} | steps


def _their_deltaproduct(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    gate = {"use_output_gate": layer["output_gate"] != "none", "use_forget_gate": layer["forget"]}
    return _their_delta(layer) | gate | {"num_householder": layer["steps"]}


def _shared(config: Config, keys: float, values: float) -> Options:
    """Heads of the layers whose keys and values may be shared; the factors stand for `expand_k` and `expand_v`."""
    refuse(config, clamp_min=None, feature_map="swish" if config.get("model_type") == "gsa" else None)
    width, heads = need(config, "hidden_size", "num_heads")
    return {
        "heads": heads,
        "kv_heads": config.get("num_kv_heads") or heads,
        "head_dim": round(width * config.get("expand_k", keys)) // heads,
        "value_dim": round(width * config.get("expand_v", values)) // heads,
        "conv_width": _conv_width(config),
        "eps": config.get("norm_eps", 1e-6),
    }


def _conv_width(config: Config, default: bool = False) -> int:
    """Tokens of the short convolution, 0 where there is none."""
    return int(config.get("conv_size", 4)) if config.get("use_short_conv", default) else 0


def _their_conv(layer: Layer) -> dict[str, Any]:
    return {"use_short_conv": bool(layer["conv_width"]), "conv_size": layer["conv_width"] or 4}


def _gated(config: Config) -> Options:
    return {"output_gate": "silu" if config.get("use_output_gate", True) else "none"}


def _their_gated(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    return _their_shared(layer, config) | {"use_output_gate": layer["output_gate"] != "none"}


def _their_shared(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    return {
        "num_heads": layer["heads"],
        "num_kv_heads": layer["kv_heads"],
        "expand_k": layer["heads"] * layer["head_dim"] / config.width,
        "expand_v": layer["heads"] * layer["value_dim"] / config.width,
        **_their_conv(layer),
    }


def _gla(config: Config, index: int) -> Options:
    return _shared(config, 0.5, 1.0) | _gated(config)


def _retnet(config: Config, index: int) -> Options:
    return _shared(config, 1.0, 2.0) | _gated(config) | {"conv_width": 0}  # their model never has one


def _gsa(config: Config, index: int) -> Options:
    refuse(config, use_output_gate=False, use_norm=True, gate_logit_normalizer=8, clamp_max=None)
    return _shared(config, 1.0, 1.0) | {"slots": config.get("num_slots") or 64, "eps": FIXED_EPS}


def _their_gsa(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    return _their_shared(layer, config) | {"num_slots": layer["slots"]}


def _hgrn2(config: Config, index: int) -> Options:
    width, depth = need(config, "hidden_size", "num_hidden_layers")
    ratio = config.get("expand_ratio", 128)
    heads = config.get("num_heads") or width // ratio
    if (config.get("expand_ratio") or width // heads) * heads != width:
        raise ConversionError("no decoder of flashmix has an HGRN-2 with keys of another width than values")
    options: Options = {"heads": heads, "conv_width": _conv_width(config)}
    options["eps"] = FIXED_EPS * (width // heads)  # their output is smaller by the root of that
    if config.get("use_lower_bound", True):
        if 0 in (config.get("attn") or {}).get("layers", ()):
            raise ConversionError("no decoder of flashmix has learned lower bounds with softmax attention first")
        options |= {"layers": depth, "layer": index}
    return options


def _their_hgrn2(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    heads = layer["heads"]
    bounds = {"use_lower_bound": layer["layers"] is not None}
    return {"num_heads": heads, "expand_ratio": config.width // heads, **bounds, **_their_conv(layer)}


def _transformer(config: Config, index: int) -> Options:
    return dict(_attention(config, config).options)


def _their_transformer(layer: Layer, config: DecoderConfig) -> dict[str, Any]:
    return _told_of(layer) | {"qk_norm": layer["qk_norm"]}


MIXERS_OF_FLA = {
    "gated_deltanet": FlaMixer("gated_deltanet", _gated_deltanet, _their_gated_deltanet, delta_rules),
    "delta_net": FlaMixer("deltanet", _deltanet, _their_deltanet, delta_rules),
    "gated_deltaproduct": FlaMixer("deltaproduct", _deltaproduct, _their_deltaproduct, delta_rules),
    "comba": FlaMixer("comba", _comba, _their_comba, delta_rules),
    "kda": FlaMixer("kda", _kda, _their_kda, kda_rules),
    "gla": FlaMixer("gla", _gla, _their_gated, gla_rules),
    "retnet": FlaMixer("retnet", _retnet, _their_gated, retnet_rules),
    "gsa": FlaMixer("gsa", _gsa, _their_gsa, gsa_rules),
    "hgrn2": FlaMixer("hgrn2", _hgrn2, _their_hgrn2, hgrn2_rules),
    "transformer": FlaMixer("attention", _transformer, _their_transformer, _attention_rules),
}
CLASSES = {
    "gated_deltanet": "GatedDeltaNet",
    "delta_net": "DeltaNet",
    "gated_deltaproduct": "GatedDeltaProduct",
    "comba": "Comba",
    "kda": "KDA",
    "gla": "GLA",
    "retnet": "RetNet",
    "gsa": "GSA",
    "hgrn2": "HGRN2",
    "transformer": "Transformer",
}
FLA = tuple(
    ModelFamily(
        name,
        f"{CLASSES[name]}ForCausalLM",
        partial(_ours, mixer=mixer),
        partial(_theirs, mixer=mixer),
        partial(_rules, mixer=mixer),
        ignored=(r"\.rotary\.inv_freq$",),
        written={"fuse_norm": True} if name in ("gla", "retnet") else {},  # on which the name of their norm depends
    )
    for name, mixer in MIXERS_OF_FLA.items()
)
