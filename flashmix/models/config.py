"""The configuration of a model: its sizes and one list of layers of any kinds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import nn

from flashmix.layer.mixer import Mixer
from flashmix.mechanisms.registry import mixers
from flashmix.modules import MLPS, LayerNorm, RMSNorm, SwiGLU
from flashmix.op.checks import check_choice

MIXERS: dict[str, type[Mixer[Any]]] = mixers()
NORMS: dict[str, Callable[..., RMSNorm | LayerNorm]] = {
    "rms": RMSNorm,
    "unit_offset_rms": partial(RMSNorm, unit_offset=True),
    "layer": LayerNorm,
}

# The types that an option may have, by its annotation in the layer's constructor, and their name in errors.
TYPES: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a string"),
    "dict": (dict, "a dict"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "tuple": (tuple, "a list of whole numbers"),
}


def _check_type(name: str, value: object, annotation: str) -> None:
    """Raises TypeError unless `value` fits `annotation` ("int | None", "tuple[int, int]", ...)."""
    allowed, text = TYPES[annotation.split(" ")[0].split("[")[0]]
    if value is None and annotation.endswith("None"):
        return
    if not isinstance(value, allowed) or (isinstance(value, bool) and allowed is not bool):
        raise TypeError(f"{name} must be {text}, got {value!r}")


def _check_options(kind: str, built: type, options: Mapping[str, Any], given: Sequence[str]) -> None:
    """Raises ValueError or TypeError unless these are options of the class, whose parameters `given` come from elsewhere."""
    parameters = inspect.signature(built.__init__).parameters  # type: ignore[misc]
    known = {name: p for name, p in parameters.items() if name not in ("self", "device", "dtype", *given)}
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{name} is not an option of {kind}, which takes {', '.join(known)}")
        _check_type(name, value, known[name].annotation)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise ValueError(f"{name} must be given for {kind}, got nothing")


@dataclass(frozen=True)
class LayerConfig:
    """One layer: the name of its mixer (a key of `MIXERS`) and the options of that class, without `width`, and its MLP.

    Attributes:
        mixer: a key of `MIXERS`.
        options: of that class, by name.
        mlp: the "kind" of the MLP, a key of `flashmix.modules.MLPS` or "none", and the options of that class; None: a SwiGLU of the
            model's `mlp_width`.
        norm_after: whether the norms are on the outputs of mixer and MLP instead of on their inputs, as in OLMo-2.

    Example:
        >>> LayerConfig("attention", {"heads": 4, "window": 128}).to_dict()
        {'mixer': 'attention', 'heads': 4, 'window': 128}
    """

    mixer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mlp: Mapping[str, Any] | None = None
    norm_after: bool = False

    def __post_init__(self) -> None:
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()}
        object.__setattr__(self, "options", options)

    def to_dict(self) -> dict[str, Any]:
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()}
        own: dict[str, Any] = {} if self.mlp is None else {"mlp": dict(self.mlp)}
        if self.norm_after:
            own["norm_after"] = True
        return {"mixer": self.mixer, **plain, **own}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerConfig:
        options = dict(values)
        if "mixer" not in options:
            raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, got nothing")
        own = {name: options.pop(name) for name in ("mlp", "norm_after") if name in options}
        return cls(options.pop("mixer"), options, **own)

    def build(self, width: int, **placement: Any) -> Mixer[Any]:
        """The layer; `placement` is `device` and `dtype`."""
        return MIXERS[self.mixer](width, **self.options, **placement)

    def build_mlp(self, width: int, mlp_width: int | None, **placement: Any) -> nn.Module | None:
        """The MLP, None where the layer has none; `mlp_width` is the model's."""
        if self.mlp is None:
            return SwiGLU(width, mlp_width, **placement)
        options = dict(self.mlp)
        kind = options.pop("kind")
        return None if kind == "none" else MLPS[kind](width, **options, **placement)

    def reads_shared(self) -> str | None:
        """The option that makes this layer read the values of an earlier one (`Mixer.shares`), None if it is not set."""
        option = MIXERS[self.mixer].shares if self.mixer in MIXERS else None
        return option if option is not None and self.options.get(option) else None

    def check(self, width: int) -> None:
        """Raises ValueError or TypeError, naming the option, unless the layer can be built."""
        check_choice("mixer", self.mixer, *MIXERS)
        _check_options(self.mixer, MIXERS[self.mixer], self.options, ["width"])
        self.build(width, device="meta")
        _check_type("norm_after", self.norm_after, "bool")
        if self.mlp is None:
            return
        _check_type("mlp", self.mlp, "dict")
        kind = self.mlp.get("kind")
        check_choice("mlp.kind", kind, "none", *MLPS)
        if kind != "none":
            options = {name: value for name, value in self.mlp.items() if name != "kind"}
            try:
                _check_options(str(kind), MLPS[str(kind)], options, ["dim"])
                self.build_mlp(width, None, device="meta")
            except (TypeError, ValueError) as error:
                raise type(error)(f"mlp.{error}") from None


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only language model.

    Attributes:
        vocab_size: number of tokens.
        width: channels of the residual stream.
        layers: one `LayerConfig` per block, from the embedding up.
        mlp_width: hidden channels of each block's SwiGLU; None: `8/3 width`, rounded up to a multiple of 32.
        tied: whether the head is the embedding.
        norm: of the inputs of mixers, MLPs and the head: a key of `NORMS`, "rms", "unit_offset_rms" (`1 + weight` scales) or "layer".
        norm_eps: of these norms.
        embedding_norm: whether the embedded tokens are normalised before the first block, as in RWKV.
        embedding_scale: None, or the factor of the embedded tokens, as in Gemma.
        logit_softcap: None, or logits are bounded to `c tanh(logits / c)`.

    Raises:
        ValueError, TypeError: a field is invalid; the message names it, as in `layers[2].heads must be ...`.

    Example:
        >>> delta = LayerConfig("gated_deltanet", {"heads": 4})
        >>> near = LayerConfig("attention", {"heads": 4, "window": 128})
        >>> config = DecoderConfig(vocab_size=256, width=64, layers=[delta, delta, near])
        >>> DecoderConfig.from_dict(config.to_dict()) == config
        True
    """

    vocab_size: int
    width: int
    layers: Sequence[LayerConfig]
    mlp_width: int | None = None
    tied: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-6
    embedding_norm: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        for entry in fields(self):
            if entry.name != "layers":
                value = getattr(self, entry.name)
                _check_type(entry.name, value, str(entry.type))
                if isinstance(value, (int, float)) and not isinstance(value, bool) and not value > 0:
                    raise ValueError(f"{entry.name} must be positive, got {value}")
        check_choice("norm", self.norm, *NORMS)
        self._check_layers()

    def _check_layers(self) -> None:
        checked: list[LayerConfig] = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, LayerConfig):
                raise TypeError(f"layers[{index}] must be a LayerConfig, got {type(layer).__name__}")
            option = layer.reads_shared()
            if option and all(earlier.mixer != layer.mixer for earlier in checked):
                raise ValueError(f"layers[{index}].{option} must be false: no {layer.mixer} layer comes before it")
            if layer in checked:
                continue
            try:
                layer.check(self.width)
            except (TypeError, ValueError) as error:
                raise type(error)(f"layers[{index}].{error}") from None
            checked.append(layer)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as JSON holds them."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {**values, "layers": [layer.to_dict() for layer in self.layers]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderConfig:
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"{name} is not a field of DecoderConfig, which has {', '.join(known)}")
        for name in ("vocab_size", "width", "layers"):
            if name not in values:
                raise ValueError(f"{name} must be given, got nothing")
        layers = []
        for index, layer in enumerate(values["layers"]):
            if not isinstance(layer, Mapping):
                raise TypeError(f"layers[{index}] must be a dict, got {type(layer).__name__}")
            try:
                layers.append(LayerConfig.from_dict(layer))
            except ValueError as error:
                raise ValueError(f"layers[{index}].{error}") from None
        return cls(**{**values, "layers": layers})
