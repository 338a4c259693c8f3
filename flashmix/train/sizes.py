"""The model that a run trains: a preset, sizes and mixers by name, or the model of another run or a converted checkpoint."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from flashmix.models import Decoder, DecoderConfig, LayerConfig, preset
from flashmix.models.config import MIXERS
from flashmix.train.folder import RunError, RunFolder, TrainConfig, read_json

MIXER = re.compile(r"(?:(\d+)\*)?([a-z0-9_]+)(?:\((.*)\))?")
WORDS = {"": True, "true": True, "false": False, "none": None}


def parsed(value: str) -> Any:
    """A number, true, false, none, or the text itself, which the layer then refuses in its own words."""
    if value in WORDS:
        return WORDS[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def mixers_of(pattern: str, heads: int | None) -> list[LayerConfig]:
    """The layers of a pattern, once: `[N*]MIXER[(OPTION=VALUE,...)]`, several with + between them; `heads` where a mixer takes them.

    Raises ValueError: the pattern is none, or names no mixer.

    Example:
        >>> [layer.to_dict() for layer in mixers_of("2*gated_deltanet+attention(window=64)", 4)][1:]
        [{'mixer': 'gated_deltanet', 'heads': 4}, {'mixer': 'attention', 'heads': 4, 'window': 64}]
    """
    layers = []
    for part in re.split(r"\+(?![^(]*\))", pattern):
        found = MIXER.fullmatch(part.strip())
        if found is None or found[2] not in MIXERS:
            raise ValueError(f"must be MIXERs like 3*gated_deltanet+attention, of {', '.join(MIXERS)}, got {part!r}")
        options: dict[str, Any] = {}
        for option in filter(None, (found[3] or "").split(",")):
            name, _, value = option.partition("=")
            options[name.strip()] = parsed(value.strip())
        known = inspect.signature(MIXERS[found[2]].__init__).parameters
        if heads is not None and "heads" in known:
            options = {"heads": heads, **options}
        layers += int(found[1] or 1) * [LayerConfig(found[2], options)]
    return layers


def model_config(config: TrainConfig, vocabulary: int) -> DecoderConfig:
    """The configuration of a new model: the preset with the sizes that are given in place of its own.

    Raises RunError: a setting cannot be.
    """
    try:
        base = preset(config.preset, vocab_size=vocabulary)
        width, depth = config.width or base.width, config.layers or len(base.layers)
        if config.mixers is not None:
            pattern = mixers_of(config.mixers, config.heads or max(1, width // 64))
        else:
            pattern = [_resized(layer, config.heads) for layer in base.layers]
        layers = [pattern[index % len(pattern)] for index in range(depth)]
        return DecoderConfig(vocabulary, width, layers, mlp_width=config.mlp_width or base.mlp_width, tied=config.tied)
    except (TypeError, ValueError) as error:
        name = "--mixers" if config.mixers is not None else "--preset"
        raise RunError(f"{name}: {error}") from error


def _resized(layer: LayerConfig, heads: int | None) -> LayerConfig:
    """A layer of a preset with another number of heads, whose channels follow from the width."""
    if heads is None or "heads" not in layer.options:
        return layer
    own = {name: value for name, value in layer.options.items() if name not in ("head_dim", "value_heads", "kv_heads")}
    return LayerConfig(layer.mixer, {**own, "heads": heads}, layer.mlp, layer.norm_after)


def initial_model(config: TrainConfig, vocabulary: int) -> Decoder:
    """The model that a run begins with; raises RunError where `--init-from` does not fit the tokens."""
    if config.init_from is None:
        return Decoder(model_config(config, vocabulary), checkpoint_activations=config.checkpoint_activations)
    model = pretrained(config.init_from)
    if model.config.vocab_size < vocabulary:
        model = grown(model, vocabulary)
    model.checkpoint_activations = config.checkpoint_activations
    return model.float()


def pretrained(path: str) -> Decoder:
    """The model of a run, or of a folder that `flashmix convert` or another library has written."""
    from flashmix.checkpoints import ConversionError, load
    from flashmix.train import session

    run = RunFolder(path)
    if run.config.exists() and (run.checkpoint.exists() or run.shards.exists()):
        return session.load(run, "cpu")[0].train()
    if not run.config.exists():
        raise RunError(f"--init-from must be a run or a converted checkpoint, got {path}, which has no config.json")
    if "train" in read_json(run.config):
        raise RunError(f"--init-from must be a run with a checkpoint, got {path}, which has none yet")
    try:
        return load(path)
    except ConversionError as error:
        raise RunError(f"--init-from: {error}") from error


@torch.no_grad()
def grown(model: Decoder, vocabulary: int) -> Decoder:
    """The model with more tokens; the rows of the new ones are the mean of the others."""
    values = model.config.to_dict() | {"vocab_size": vocabulary}
    larger = Decoder(DecoderConfig.from_dict(values), dtype=model.embedding.weight.dtype)
    state = model.state_dict()
    for name in ("embedding.weight", "head.weight"):
        more = state[name].mean(0, keepdim=True).expand(vocabulary - model.config.vocab_size, -1)
        state[name] = torch.cat([state[name], more])
    larger.load_state_dict(state)
    return larger
