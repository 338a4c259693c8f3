"""xLSTM of transformers, as the 7B model has it: blocks of mLSTM and a gated MLP."""

from __future__ import annotations

from math import ceil
from typing import Any

from flashmix.checkpoints.families.attention import common_config, decoder_of
from flashmix.checkpoints.family import Config, Layer, ModelFamily, first_of, head_rules, layers_of, need, refuse
from flashmix.checkpoints.rules import WeightRule, joined, same
from flashmix.models.config import DecoderConfig, LayerConfig


def _xlstm(config: Config) -> DecoderConfig:
    refuse(config, use_bias=False, weight_mode="single", add_out_norm=True)
    heads, width = need(config, "num_heads", "hidden_size")
    depth = config.get("num_hidden_layers") or need(config, "num_blocks")[0]
    multiple, eps = config.get("ffn_round_up_to_multiple_of", 64), config.get("norm_eps", 1e-6)
    options = {
        "heads": heads,
        "head_dim": int(width * config.get("qk_dim_factor", 0.5)) // heads,
        "value_dim": int(width * config.get("v_dim_factor", 1.0)) // heads,
        "gate_cap": config.get("gate_soft_cap", 15.0),
        "eps": eps,
        "divisor_eps": config.get("eps", 1e-6),
    }
    hidden = ceil(width * config.get("ffn_proj_factor", 2.667) / multiple) * multiple
    given = {"mlp_width": hidden, "norm_eps": eps, "logit_softcap": config.get("output_logit_soft_cap", 30.0)}
    return decoder_of(config, depth * [LayerConfig("mlstm", options)], **given)


def _their_xlstm(config: DecoderConfig) -> dict[str, Any]:
    layer, plain = first_of(config, "mlstm"), common_config(config, None)
    for name in ("rms_norm_eps", "hidden_act", "intermediate_size"):
        del plain[name]
    return plain | {
        "num_blocks": len(config.layers),
        "embedding_dim": config.width,
        "num_heads": layer["heads"],
        "qk_dim_factor": layer["heads"] * layer["head_dim"] / config.width,
        "v_dim_factor": layer["heads"] * layer["value_dim"] / config.width,
        "gate_soft_cap": layer["gate_cap"],
        "norm_eps": layer["eps"],
        "eps": layer["divisor_eps"],
        "ffn_proj_factor": layer.mlp["hidden"] / config.width,
        "ffn_round_up_to_multiple_of": 1,
        "output_logit_soft_cap": config.logit_softcap,
    }


def _mixer_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    H, key, value = layer["heads"], layer["heads"] * layer["head_dim"], layer["heads"] * layer["value_dim"]
    project = {"q": key, "k": key, "v": value, "ogate_preact": value}
    gates = {f"{theirs}.{name}": H for name in ("igate_preact", "fgate_preact")}
    return [
        joined(f"{ours}.qkvg.weight", {f"{theirs}.{name}.weight": rows for name, rows in project.items()}, width),
        joined(f"{ours}.gates.weight", {f"{name}.weight": rows for name, rows in gates.items()}, width),
        joined(f"{ours}.gates.bias", {f"{name}.bias": rows for name, rows in gates.items()}),
        same(f"{ours}.norm_weight", f"{theirs}.multihead_norm.weight", value),
        same(f"{ours}.output.weight", f"{theirs}.out_proj.weight", width, value),
    ]


def _rules(config: DecoderConfig) -> list[WeightRule]:
    rules, D = head_rules(config, "backbone.embeddings.weight", "backbone.out_norm.weight"), config.width
    for i, layer in enumerate(layers_of(config)):
        ours, theirs, hidden = f"blocks.{i}", f"backbone.blocks.{i}", layer.mlp["hidden"]
        up = {f"{theirs}.ffn.{name}.weight": hidden for name in ("proj_up_gate", "proj_up")}
        rules += [
            same(f"{ours}.mixer_norm.weight", f"{theirs}.norm_mlstm.weight", D),
            same(f"{ours}.mlp_norm.weight", f"{theirs}.norm_ffn.weight", D),
            *_mixer_rules(f"{ours}.mixer", f"{theirs}.mlstm_layer", D, layer),
            joined(f"{ours}.mlp.gate_up.weight", up, D),
            same(f"{ours}.mlp.down.weight", f"{theirs}.ffn.proj_down.weight", D, hidden),
        ]
    return rules


XLSTM = ModelFamily("xlstm", "xLSTMForCausalLM", _xlstm, _their_xlstm, _rules)
