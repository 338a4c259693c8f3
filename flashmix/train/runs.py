"""Begin a run, go on with one, or load the model of one: what ties the run folder, the model and the loop together."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

import flashmix
from flashmix.models import Decoder, DecoderConfig, presets
from flashmix.train import checkpoint, data
from flashmix.train.loop import Trainer
from flashmix.train.run_folder import RunError, RunFolder, TrainConfig, read_json, reason, write_json
from flashmix.train.tokens import Tokens


def begin(config: TrainConfig, folder: RunFolder) -> Trainer:
    """A new run in `folder`: reads the texts, makes the model from the seed, writes the settings down."""
    config.check()
    config = replace(config, threads=config.threads or torch.get_num_threads())
    torch.set_num_threads(config.threads or 1)
    _check_device(config.device)
    tokens = Tokens.from_file(config.tokenizer) if config.tokenizer else Tokens()
    folder.create()
    if config.tokenizer:
        _copy(config.tokenizer, folder.tokenizer)
    corpus = data.prepare(config.text, config.held_out, tokens, folder)
    torch.manual_seed(config.seed)
    model = Decoder(presets.preset(config.preset, vocab_size=tokens.vocabulary))
    versions = {"flashmix": flashmix.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    write_json(folder.config, {"versions": versions, "train": config.to_dict(), "model": model.config.to_dict()})
    return Trainer(config, folder, model, corpus)


def resume(folder: RunFolder, changes: dict[str, Any]) -> Trainer:
    """The run in `folder` at its last checkpoint, bit for bit where it was, with the settings in `changes` replaced.

    Raises RunError: a change to a setting that would make it another run, or a damaged folder.
    """
    settings = folder.read_config()
    before = TrainConfig.from_dict(settings["train"])
    for name, value in changes.items():
        old = getattr(before, name)
        if name not in MAY_CHANGE and value != old:
            raise RunError(
                f"--{name.replace('_', '-')} belongs to the run and stays {old!r} when it is resumed, got {value!r}"
            )
    config = replace(before, **changes)
    config.check()
    torch.set_num_threads(config.threads or torch.get_num_threads())
    _check_device(config.device)
    corpus = data.open_corpus(folder, _tokens_of(folder))
    torch.manual_seed(config.seed)
    trainer = Trainer(config, folder, _model_of(folder, settings), corpus)
    trainer.resume()
    if config != before:
        write_json(folder.config, {**settings, "train": config.to_dict()})
    return trainer


def load(folder: RunFolder, device: str) -> tuple[Decoder, Tokens]:
    """The model of a run as of its last checkpoint, and its tokens."""
    _check_device(device)
    model = _model_of(folder, folder.read_config())
    state = checkpoint.load(folder.checkpoint)
    try:
        model.load_state_dict(state.model)
    except RuntimeError as error:
        raise RunError(f"{folder.checkpoint} does not fit the model in {folder.config}") from error
    return model.to(device).eval(), _tokens_of(folder)


def _tokens_of(folder: RunFolder) -> Tokens:
    return Tokens.from_file(folder.tokenizer) if folder.tokenizer.exists() else Tokens()


def _model_of(folder: RunFolder, settings: dict[str, Any]) -> Decoder:
    try:
        return Decoder(DecoderConfig.from_dict(settings["model"]))
    except (TypeError, ValueError, KeyError) as error:
        raise RunError(f"{folder.config} describes no model of this version: {error}") from error


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error


def _copy(source: str, target: Path) -> None:
    try:
        contents = Path(source).read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {source}: {reason(error)}") from error
    with written_whole(target) as file:
        file.write(contents)
