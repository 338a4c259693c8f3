"""Conversion of folders of weights between flashmix and other libraries, and their loading into a decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmix.checkpoints.engine import Conversion
from flashmix.checkpoints.families import FAMILIES
from flashmix.checkpoints.family import ModelFamily, same_decoder
from flashmix.checkpoints.files import INDEX, Planned, WeightFiles, write_weights
from flashmix.checkpoints.rules import ConversionError, Report, WeightRule, same
from flashmix.models.config import DecoderConfig
from flashmix.models.decoder import Decoder
from flashmix.op.checks import check_choice
from flashmix.train.folder import write_json

OURS = "flashmix"
PREFIX = "decoder."  # of the decoder in a transformers model of ours
CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "max_position_embeddings")


def convert(source: str | Path, out: str | Path | None = None, *, to: str | None = None) -> Report:
    """Converts a folder of another library's weights to flashmix's, or one of flashmix's back.

    The result has `config.json`, safetensors files and the tokenizer's files; `flashmix.hf.FlashmixForCausalLM` or `load` read the
    one, the other library the other. No number changes: there and back gives the same bits. Weights are read through a memory map and
    written one matrix after the other; every file has its name only once it is whole, `config.json` last.

    Args:
        source: a folder with `config.json` and safetensors files.
        out: the folder to be made; it may exist if it is empty. None: everything is checked and nothing written.
        to: the family (`model_type`) to convert a folder of flashmix's to; default the one that it came from.

    Returns:
        What was mapped to what. `print` shows it.

    Raises:
        ConversionError: the family is unknown, the model has no counterpart, or weights are unknown, missing or of another shape,
            all of them listed.

    Example:
        >>> import tempfile
        >>> from flashmix.models import Decoder, preset
        >>> folder = tempfile.mkdtemp()
        >>> save(Decoder(preset("transformer_nano")), f"{folder}/ours")
        >>> convert(f"{folder}/ours", f"{folder}/llama", to="llama").numbers == convert(f"{folder}/llama").numbers
        True
    """
    folder = Path(source)
    values = _read_config(folder)
    back = values.get("model_type") == OURS
    if back:
        config = _ours(values)
        family, target = _family_of(config, values, to)
    elif to not in (None, OURS):
        raise ConversionError(f"to must be {OURS!r} or None for a folder of another library, got {to!r}")
    else:
        family, config = read_family(values)
        target = _our_values(config, values)
    conversion = open_weights(folder, family, config, back=back)
    report = conversion.report(family.name, back)
    if out is not None:
        place = _empty(Path(out))
        conversion.write(place, "" if back else PREFIX)
        for path in sorted(folder.iterdir()):
            if (
                path.is_file()
                and path.suffix not in (".safetensors", ".bin", ".pt")
                and path.name not in ("config.json", INDEX)
            ):
                shutil.copyfile(path, place / path.name)
        write_json(place / "config.json", target)
    return report


def load(source: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of a folder of any family, or of flashmix's own.

    Args:
        source: a folder with `config.json` and safetensors files.
        device: of the parameters.
        dtype: of the parameters; None: as the files have each.

    Raises:
        ConversionError: as in `convert`.
    """
    folder = Path(source)
    values = _read_config(folder)
    if values.get("model_type") == OURS:
        family, config = None, _ours(values)
    else:
        family, config = read_family(values)
    model = Decoder(config, device=device)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in open_weights(folder, family, config):
        tensors[name].data = tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True)
    return model


def save(model: Decoder, out: str | Path) -> None:
    """Writes a decoder as a folder of flashmix's: `config.json` and safetensors files, as `convert` makes them.

    Args:
        model: the decoder.
        out: the folder to be made; it may exist if it is empty.

    Raises:
        ConversionError: the folder has files.

    Example:
        >>> import tempfile
        >>> from flashmix.models import preset
        >>> folder = tempfile.mkdtemp()
        >>> save(Decoder(preset("gla_nano")), folder)
        >>> load(folder).config == preset("gla_nano")
        True
    """
    place = _empty(Path(out))
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tied:
        del weights["head.weight"]
    groups = [[Planned(PREFIX + name, tuple(tensor.shape), tensor.dtype)] for name, tensor in weights.items()]
    tensors = list(weights.values())
    write_weights(place, groups, lambda index: [tensors[index].cpu()])
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    write_json(place / "config.json", _our_values(model.config, {"dtype": dtype}))


def _empty(place: Path) -> Path:
    """The folder, made if it is not there."""
    if place.exists() and any(place.iterdir()):
        raise ConversionError(f"{place} must be an empty folder or none, got one with files")
    place.mkdir(parents=True, exist_ok=True)
    return place


def open_weights(folder: Path, family: ModelFamily | None, config: DecoderConfig, *, back: bool = False) -> Conversion:
    """The weights of a folder in the other format; without a family those of ours as they are."""
    shapes = {name: tuple(tensor.shape) for name, tensor in _weights(config).items()}
    ours = family is None or back
    rules: list[WeightRule] = (
        [same(n, n, *shape) for n, shape in shapes.items()] if family is None else family.rules(config)
    )
    made = {part.name for rule in rules for part in rule.ours}
    if made != set(shapes):
        wrong = ", ".join(sorted(made ^ set(shapes)))
        raise ConversionError(
            f"the rules of {family.name if family else OURS} must have every weight once, got {wrong}"
        )
    renames, ignored = ((f"^{PREFIX}".replace(".", r"\."), ""),), ()
    if family is not None and not back:
        renames, ignored = family.renames, family.ignored  # type: ignore[assignment]
    if config.tied:
        ignored = (*ignored, r"^head\.weight$" if ours else r"^(lm_)?head\.weight$")  # type: ignore[assignment]
    return Conversion(WeightFiles(folder), rules, back=ours, renames=renames, ignored=ignored)


def _weights(config: DecoderConfig) -> dict[str, Tensor]:
    """Names and shapes of a decoder's weights, without numbers."""
    weights = Decoder(config, device="meta").state_dict()
    if config.tied:
        del weights["head.weight"]
    return weights


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("it is no dict")
    except FileNotFoundError as error:
        raise ConversionError(f"{folder} must be a folder with a config.json, got none there") from error
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} must be a configuration: {type(error).__name__}: {error}") from error
    return values


def read_family(values: Mapping[str, Any]) -> tuple[ModelFamily, DecoderConfig]:
    """The family of a configuration of theirs, and the decoder."""
    kind = values.get("model_type")
    family = next((family for family in FAMILIES.values() if kind in (family.name, *family.also)), None)
    if family is None:
        raise ConversionError(f"model_type must be one of {OURS}, {', '.join(FAMILIES)}, got {kind!r}")
    if family.nested is not None and family.nested in values:
        values = values[family.nested]
    return family, family.ours(values)


def _ours(values: Mapping[str, Any]) -> DecoderConfig:
    if not isinstance(values.get("architecture"), dict):
        raise ConversionError("config.json must have architecture, got nothing")
    return DecoderConfig.from_dict(values["architecture"])


def _our_values(config: DecoderConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of ours; it keeps theirs for the way back."""
    carried = {name: values[name] for name in CARRIED if values.get(name) is not None}
    return {
        "architectures": ["FlashmixForCausalLM"],
        "model_type": OURS,
        "architecture": config.to_dict(),
        "tie_word_embeddings": config.tied,
        **carried,
        **({"converted_from": dict(values)} if "model_type" in values else {}),
    }


def _language_model(family: ModelFamily, values: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model alone, of a model that can do more."""
    if family.nested is None or family.nested not in values:
        return dict(values)
    return dict(values[family.nested]) | {"architectures": [family.architecture], "model_type": family.name}


def _family_of(config: DecoderConfig, values: Mapping[str, Any], to: str | None) -> tuple[ModelFamily, dict[str, Any]]:
    """The family to go back to, and its `config.json`: the one that ours was made of, or one that `theirs` makes."""
    before = values.get("converted_from") or {}
    if before and (to is None or read_family(before)[0].name == to):
        family, known = read_family(before)
        if same_decoder(known, config):
            return family, _language_model(family, before) | dict(family.written)
    if to is None:
        raise ConversionError("to must name a family for a model that does not come from one, got None")
    check_choice("to", to, *FAMILIES)
    family = FAMILIES[to]
    try:
        target = family.theirs(config)
        fits = same_decoder(family.ours(target), config)
    except ConversionError as error:
        raise ConversionError(f"this decoder is no {to}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"this decoder is no {to}") from error
    if not fits:
        raise ConversionError(f"this decoder is no {to}: a model of that family would have other layers")
    carried = {name: values[name] for name in CARRIED if values.get(name) is not None}
    return family, {"architectures": [family.architecture], "model_type": family.name, **target, **carried}
