"""A family of models in another library: its configuration and weights beside those of a decoder, and the pieces that families share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashmix.checkpoints.rules import ConversionError, WeightRows, WeightRule, joined, same
from flashmix.models.config import MIXERS, DecoderConfig, LayerConfig

Config = Mapping[str, Any]


@dataclass(frozen=True)
class ModelFamily:
    """One `model_type`.

    Attributes:
        name: the `model_type`.
        architecture: the class of the model, for `config.json`.
        ours: the decoder of a configuration of theirs; raises ConversionError where there is none.
        theirs: the configuration that `ours` makes this decoder of, if there is one at all.
        rules: where the weights of a decoder are in theirs.
        renames: patterns of names in files of theirs and what stands for them in the rules.
        ignored: patterns of weights in files of theirs that no decoder has.
        also: further values of `model_type`.
        written: values of a configuration of theirs with which its model has the names that the rules write.
        nested: None, or the key of `config.json` under which the language model's own configuration may be.
    """

    name: str
    architecture: str
    ours: Callable[[Config], DecoderConfig]
    theirs: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], list[WeightRule]]
    renames: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    also: tuple[str, ...] = ()
    nested: str | None = None
    written: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder with every option given, defaults included."""

    mixer: str
    options: dict[str, Any]
    mlp: dict[str, Any]
    norm_after: bool

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


def layers_of(config: DecoderConfig) -> list[Layer]:
    """The layers with every option given; None only where a layer has no other value for it."""
    return [_resolved(layer, config) for layer in config.layers]


def _resolved(layer: LayerConfig, config: DecoderConfig) -> Layer:
    built = layer.build(config.width, device="meta")
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(MIXERS[layer.mixer].__init__).parameters.items():
        if name in ("self", "width", "device", "dtype"):
            continue
        value = layer.options.get(name, parameter.default)
        made = getattr(built, name, None)
        options[name] = made if value is None and isinstance(made, (int, float, str, tuple)) else value
    if options.get("rotary", 0) is None:
        options["rotary"] = options["head_dim"]
    mlp = layer.build_mlp(config.width, config.mlp_width, device="meta")
    if layer.mlp is not None and layer.mlp["kind"] != "swiglu":
        given = dict(layer.mlp)
    else:
        given = {"kind": "swiglu", "hidden": mlp.down.in_features}  # type: ignore[union-attr]
    if given["kind"] in MLP_DEFAULTS:
        given = MLP_DEFAULTS[given["kind"]] | given
    return Layer(layer.mixer, options, given, layer.norm_after)


def _defaults(built: type) -> dict[str, Any]:
    parameters = inspect.signature(built.__init__).parameters  # type: ignore[misc]
    empty = inspect.Parameter.empty
    return {n: p.default for n, p in parameters.items() if p.default is not empty and n not in ("device", "dtype")}


def same_decoder(one: DecoderConfig, other: DecoderConfig) -> bool:
    """Whether both describe the same decoder."""
    fields = ("vocab_size", "width", "tied", "norm", "norm_eps", "embedding_norm", "embedding_scale", "logit_softcap")
    return layers_of(one) == layers_of(other) and all(getattr(one, n) == getattr(other, n) for n in fields)


def need(config: Config, *names: str) -> tuple[Any, ...]:
    """The values of these names in a configuration, which must have them."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ConversionError(f"the configuration must have {', '.join(missing)}, got nothing")
    return tuple(config[name] for name in names)


def refuse(config: Config, **wanted: Any) -> None:
    """Raises ConversionError where a configuration has a value that no decoder has; one that is absent is as wanted."""
    wrong = [f"{name} = {config[name]!r}" for name, value in wanted.items() if config.get(name, value) != value]
    if wrong:
        raise ConversionError(f"no decoder of flashmix has {', '.join(wrong)}")


def rotary_of(config: Config, head_dim: int, whole: float = 1.0) -> dict[str, Any]:
    """The options of attention for the rotary embedding of a configuration, whose channels are rotated by `whole` if it does not say."""
    told = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = told.get("rope_type", told.get("type", "default"))
    base: Any = told.get("rope_theta", config.get("rope_theta", 10000.0))
    fraction: Any = told.get("partial_rotary_factor", config.get("partial_rotary_factor", whole))
    options: dict[str, Any] = {"base": float(base), "rotary": int(head_dim * fraction)}
    if kind == "default":
        return options
    if kind not in SCALING_NAMES:
        raise ConversionError(f"no decoder of flashmix has rope_type = {kind!r}")
    refuse(told, mscale=None, mscale_all_dim=None)
    names = SCALING_NAMES[kind]
    values = {ours: told[theirs] for ours, theirs in names.items() if told.get(theirs) is not None}
    if "trained" in names and "trained" not in values:
        values["trained"] = config.get("max_position_embeddings")
    return {**options, "scaling": {"kind": kind, **values}}


# The values of a rotary scaling, ours and theirs.
SCALING_NAMES = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "trained": "original_max_position_embeddings",
        "slow": "low_freq_factor",
        "fast": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "trained": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "attention": "attention_factor",
        "whole": "truncate",
    },
}


def rope_parameters(layer: Layer) -> dict[str, Any]:
    """`rope_parameters` of a layer of softmax attention."""
    told: dict[str, Any] = {"rope_type": "default", "rope_theta": layer["base"]}
    if layer["rotary"] != layer["head_dim"]:
        told["partial_rotary_factor"] = layer["rotary"] / layer["head_dim"]
    if layer["scaling"] is not None:
        values = dict(layer["scaling"])
        kind = told["rope_type"] = values.pop("kind")
        names = SCALING_NAMES.get(kind, {})
        if not set(values) <= set(names):
            raise ConversionError(f"no family has the rotary scaling {kind!r}")
        told |= {names[name]: value for name, value in values.items()}
    return told


def first_of(config: DecoderConfig, mixer: str) -> Layer:
    """The first layer of this mixer; raises ConversionError where there is none."""
    found = next((layer for layer in layers_of(config) if layer.mixer == mixer), None)
    if found is None:
        raise ConversionError(f"it has no layer of {mixer}")
    return found


def head_rules(config: DecoderConfig, embedding: str, norm: str, head: str = "lm_head.weight") -> list[WeightRule]:
    """Embedding, last norm and head."""
    V, D = config.vocab_size, config.width
    rules = [same("embedding.weight", embedding, V, D), same("norm.weight", norm, D)]
    return rules if config.tied else [*rules, same("head.weight", head, V, D)]


def attention_rules(ours: str, theirs: str, width: int, layer: Layer) -> list[WeightRule]:
    """Softmax attention; a gate is in theirs beside the query of each head."""
    heads, kv_heads, D = layer["heads"], layer["kv_heads"], layer["head_dim"]
    q, kv = heads * D, kv_heads * D
    gate = {"gate": D} if layer["gated"] else {}
    parts = (
        WeightRows(f"{theirs}.q_proj.weight", (q * (1 + len(gate)), width), {"q": D, **gate}, repeat=heads),
        WeightRows(f"{theirs}.k_proj.weight", (kv, width), {"k": kv}),
        WeightRows(f"{theirs}.v_proj.weight", (kv, width), {"v": kv}),
    )
    segments = {"q": q, "k": kv, "v": kv} | ({"gate": q} if gate else {})
    rules = [
        WeightRule((WeightRows(f"{ours}.qkvg.weight", (sum(segments.values()), width), segments),), parts),
        same(f"{ours}.output.weight", f"{theirs}.o_proj.weight", width, q),
    ]
    if layer["output_bias"]:
        rules.append(same(f"{ours}.output.bias", f"{theirs}.o_proj.bias", width))
    if layer["qk_norm"]:
        sizes = {"q": q, "k": kv} if layer["joint_qk_norm"] else {"q": D, "k": D}
        rules += [same(f"{ours}.{n}_norm.weight", f"{theirs}.{n}_norm.weight", size) for n, size in sizes.items()]
    return rules


def mlp_rules(ours: str, theirs: str, width: int, hidden: int, alias: str | None = None) -> list[WeightRule]:
    """A gated MLP without biases; `alias` is another name for `theirs` in files."""
    gate, up = f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"
    others = {name: name.replace(theirs, alias) for name in (gate, up)} if alias else {}
    down = f"{theirs}.down_proj.weight"
    return [
        joined(f"{ours}.gate_up.weight", {gate: hidden, up: hidden}, width, aliases=others),
        same(f"{ours}.down.weight", down, width, hidden, aliases=[down.replace(theirs, alias)] if alias else []),
    ]


def expert_rules(
    ours: str,
    theirs: str,
    width: int,
    mlp: Mapping[str, Any],
    names: tuple[str, str, str],
    shared: str,
    router: str = "gate",
) -> list[WeightRule]:
    """A mixture of experts; `names` are gate, up and down of one of theirs, `shared` and `router` the names of these parts."""
    count, hidden = mlp["experts"], mlp["hidden"]
    gate_name, up_name, down_name = names
    many: list[WeightRows] = []
    rows: dict[str, int] = {}
    for e in range(count):
        for name in (gate_name, up_name):
            many.append(WeightRows(f"{theirs}.experts.{e}.{name}.weight", (hidden, width), {f"{name} {e}": hidden}))
            rows[f"{name} {e}"] = hidden
    downs = {f"down {e}": width for e in range(count)}
    each = tuple(
        WeightRows(f"{theirs}.experts.{e}.{down_name}.weight", (width, hidden), {f"down {e}": width})
        for e in range(count)
    )
    fused = (count, 2 * hidden, width), (count, width, hidden)
    rules = [
        same(f"{ours}.router.weight", f"{theirs}.{router}.weight", count, width),
        WeightRule(
            (WeightRows(f"{ours}.gate_up", fused[0], rows),),
            tuple(many),
            others=((WeightRows(f"{theirs}.experts.gate_up_proj", fused[0], rows),),),
        ),
        WeightRule(
            (WeightRows(f"{ours}.down", fused[1], downs),),
            each,
            others=((WeightRows(f"{theirs}.experts.down_proj", fused[1], downs),),),
        ),
    ]
    if mlp["balance"]:
        rules.append(same(f"{ours}.balance", f"{theirs}.{router}.e_score_correction_bias", count))
    if mlp["shared"]:
        rules += mlp_rules(f"{ours}.shared", f"{theirs}.{shared}", width, mlp["shared"])
    if mlp["shared_gate"]:
        rules.append(same(f"{ours}.shared_gate.weight", f"{theirs}.{shared}_gate.weight", 1, width))
    return rules


def _mlp_defaults() -> dict[str, dict[str, Any]]:
    from flashmix.modules import MLPS

    return {kind: _defaults(built) for kind, built in MLPS.items() if kind != "swiglu"}


MLP_DEFAULTS = _mlp_defaults()
