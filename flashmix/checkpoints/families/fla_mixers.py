"""Rules of the weights of flash-linear-attention's mixers."""

from __future__ import annotations

from typing import Any

from flashmix.checkpoints.family import Layer
from flashmix.checkpoints.rules import WeightRows, WeightRule, joined, same

Options = dict[str, Any]
COMBA = {"closeness": "decay", "correction": "D"}


def _delta_sizes(layer: Layer) -> dict[str, int]:
    """Rows of queries, keys and values."""
    steps = layer.options.get("steps", 1)
    keys = layer["heads"] * layer["head_dim"]
    return {"q": keys, "k": steps * keys, "v": steps * layer["value_heads"] * layer["value_dim"]}


def _qkv_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """The projection and the convolution of queries, keys and values; the output's norm and projection."""
    sizes = _delta_sizes(layer)
    values = layer["value_heads"] * layer["value_dim"]
    rules = [
        joined(f"{ours}.qkv.weight", {f"{theirs}.{name}_proj.weight": rows for name, rows in sizes.items()}, width),
        same(f"{ours}.norm.weight", f"{theirs}.o_norm.weight", layer["value_dim"]),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, values),
    ]
    return rules + _convolution_rules(ours, theirs, sizes, layer)


def _convolution_rules(ours: str, theirs: str, sizes: dict[str, int], layer: Layer) -> list[WeightRule]:
    """The convolution over all of these rows; theirs has one for each."""
    W = layer["conv_width"]
    if not W:
        return []
    parts = tuple(WeightRows(f"{theirs}.{n}_conv1d.weight", (rows, 1, W), {n: rows}) for n, rows in sizes.items())
    return [WeightRule((WeightRows(f"{ours}.convolution.weight", (sum(sizes.values()), W), sizes),), parts)]


def delta_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """DeltaNet, Gated DeltaNet, Comba, Gated DeltaProduct."""
    rules, HV = _qkv_rules(ours, theirs, width, layer), layer["value_heads"]
    strengths, b, a = layer.options.get("steps", 1) * HV, f"{theirs}.b_proj.weight", f"{theirs}.a_proj.weight"
    if layer["output_gate"] != "none":
        rules.append(same(f"{ours}.gate.weight", f"{theirs}.g_proj.weight", HV * layer["value_dim"], width))
    if layer.mixer == "deltanet":
        return [*rules, same(f"{ours}.strength.weight", b, HV, width)]
    if layer.mixer == "comba":
        rules += [same(f"{ours}.{n}", f"{theirs}.{t}", layer["heads"]) for n, t in COMBA.items()]
    decays = layer.options.get("forget", True)
    rows = {b: strengths} | ({a: HV} if decays else {})
    rules.append(joined(f"{ours}.strength_and_decay.weight", rows, width))
    if decays:
        rules += [same(f"{ours}.decay.{name}", f"{theirs}.{name}", HV) for name in ("A_log", "dt_bias")]
    return rules


def kda_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """KDA."""
    HV, K, V = layer["value_heads"], layer["head_dim"], layer["value_dim"]
    return [
        *_qkv_rules(ours, theirs, width, layer),
        same(f"{ours}.strength.weight", f"{theirs}.b_proj.weight", HV, width),
        same(f"{ours}.decay_projection.down.weight", f"{theirs}.f_proj.0.weight", V, width),
        same(f"{ours}.decay_projection.up.weight", f"{theirs}.f_proj.1.weight", HV * K, V),
        same(f"{ours}.decay.A_log", f"{theirs}.A_log", HV),
        same(f"{ours}.decay.dt_bias", f"{theirs}.dt_bias", HV, K, as_shape=(HV * K,)),
        same(f"{ours}.gate.down.weight", f"{theirs}.g_proj.0.weight", V, width),
        same(f"{ours}.gate.up.weight", f"{theirs}.g_proj.1.weight", HV * V, V),
        same(f"{ours}.gate.up.bias", f"{theirs}.g_proj.1.bias", HV * V),
    ]


def _shared_sizes(layer: Layer) -> dict[str, int]:
    """Rows of queries, of shared keys and of shared values."""
    H, KV, K, V = layer["heads"], layer["kv_heads"], layer["head_dim"], layer["value_dim"]
    return {"q": H * K, "k": KV * K, "v": KV * V}


def _named(theirs: str, sizes: dict[str, int]) -> dict[str, int]:
    return {f"{theirs}.{name}_proj.weight": rows for name, rows in sizes.items()}


def _gated_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """GLA and RetNet, but for the decay: the norm has one of two names."""
    values = layer["heads"] * layer["value_dim"]
    gated, sizes = layer["output_gate"] != "none", _shared_sizes(layer)
    norms = [f"{theirs}.g_norm_swish_gate.weight", f"{theirs}.g_norm.weight"]
    norm, other = norms if gated else norms[::-1]
    rows = sizes | ({"g": values} if gated else {})
    return [
        *_convolution_rules(ours, theirs, sizes, layer),
        joined(f"{ours}.qkvg.weight", _named(theirs, rows), width),
        same(f"{ours}.norm.weight", norm, layer["value_dim"], aliases=[other]),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, values),
    ]


def gla_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """GLA."""
    keys, rank = layer["kv_heads"] * layer["head_dim"], layer["rank"]
    return [
        *_gated_rules(ours, theirs, width, layer),
        same(f"{ours}.decay_projection.down.weight", f"{theirs}.gk_proj.0.weight", rank, width),
        same(f"{ours}.decay_projection.up.weight", f"{theirs}.gk_proj.1.weight", keys, rank),
        same(f"{ours}.decay_projection.up.bias", f"{theirs}.gk_proj.1.bias", keys),
    ]


def retnet_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """RetNet."""
    return _gated_rules(ours, theirs, width, layer)


def gsa_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """GSA."""
    values = layer["heads"] * layer["value_dim"]
    sizes = _shared_sizes(layer)
    rows = sizes | {"f": layer["kv_heads"] * layer["slots"]}
    return [
        *_convolution_rules(ours, theirs, sizes, layer),
        joined(f"{ours}.qkvf.weight", _named(theirs, rows), width),
        same(f"{ours}.norm.weight", f"{theirs}.g_norm.weight", values),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, values),
    ]


def hgrn2_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """HGRN-2; the lower bounds of all layers are the first one's in ours and the model's in theirs."""
    sizes = {"q": width, "f": width, "i": width}
    rules = [
        *_convolution_rules(ours, theirs, sizes, layer),
        joined(f"{ours}.qfv.weight", _named(theirs, sizes), width),
        same(f"{ours}.norm.weight", f"{theirs}.g_norm.weight", width),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, width),
    ]
    if layer["layers"] is not None and layer["layer"] == 0:
        rules.append(same(f"{ours}.lower_bounds", "model.lower_bounds", layer["layers"], width))
    return rules
