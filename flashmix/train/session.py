"""A run from the outside: begin one, resume one, or load its model."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import flashmix
from flashmix.models import Decoder, DecoderConfig
from flashmix.train import checkpoint, data, shards
from flashmix.train.dataset import Dataset, open_dataset
from flashmix.train.folder import RunError, RunFolder, TrainConfig, write_json, written_whole
from flashmix.train.log import package
from flashmix.train.loop import Trainer
from flashmix.train.ranks import Ranks
from flashmix.train.sizes import initial_model
from flashmix.train.tokens import Tokens

# The settings that may change when a run is resumed; with any other it would be another run.
MAY_CHANGE = {"steps", "context", "threads", "device", "compile", "checkpoint_activations"}
MAY_CHANGE |= {"eval_every", "save_every", "keep", "log_every", "log"}


def begin(config: TrainConfig, folder: RunFolder, ranks: Ranks | None = None) -> Trainer:
    """A new run in `folder`: it reads the texts, makes the model from the seed and writes the settings."""
    config.check()
    ranks = ranks or Ranks()
    _check_log(config, ranks)
    config = replace(
        config, threads=config.threads or torch.get_num_threads(), device=config.device or default_device()
    )
    ranks.check(config)
    ranks.start(config)
    _set_up(config)
    if config.init_from and not (config.tokenizer or config.data):
        its = RunFolder(config.init_from).tokenizer
        config = replace(config, tokenizer=str(its) if its.exists() else None)
    dataset: Dataset | None = None
    if config.data is None:
        tokens = Tokens.from_file(config.tokenizer) if config.tokenizer else Tokens()
    else:
        config = replace(config, data=str(Path(config.data).absolute()))
        dataset, tokens, _ = open_dataset(str(config.data), config.held_out)
    model = initial_model(config, tokens.vocabulary)
    if config.dtype == "float64":
        model.double()
    written = ranks.on_first(lambda: _write(config, folder, tokens, model))
    ranks.together(lambda: _check_seen(folder))
    corpus = dataset or ranks.together(lambda: written or data.open_corpus(folder, tokens))
    return Trainer(config, folder, model, corpus, ranks)


def _check_log(config: TrainConfig, ranks: Ranks) -> None:
    """Raises RunError, before texts are read: what measurements are written with is not installed."""
    if config.log is not None and ranks.first:
        package(config.log)


def _write(config: TrainConfig, folder: RunFolder, tokens: Tokens, model: Decoder) -> data.Corpus | None:
    """Writes the texts and the settings of a new run into its folder; of tokens elsewhere only what they are."""
    folder.create()
    try:
        if tokens.definition is not None:
            with written_whole(folder.tokenizer) as file:
                file.write(tokens.definition.encode())
        corpus = None if config.data else data.prepare(config.text, config.held_out, tokens, folder)
    except RunError:
        folder.release()
        with contextlib.suppress(OSError):
            folder.path.rmdir()  # only if nothing is in it
        raise
    versions = {"flashmix": flashmix.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    settings: dict[str, Any] = {"versions": versions, "train": config.to_dict(), "model": model.config.to_dict()}
    if config.data is not None:
        settings["data"] = open_dataset(config.data, config.held_out)[2]
    write_json(folder.config, settings)
    return corpus


def _check_seen(folder: RunFolder) -> None:
    """Raises RunError: the first rank has written the run, but this one does not see it."""
    if not folder.config.exists():
        raise RunError(
            f"{folder.path} must be a folder that all ranks see: there is no {folder.config.name} in it here"
        )


def resume(folder: RunFolder, changes: dict[str, Any], ranks: Ranks | None = None) -> Trainer:
    """The run in `folder` at its last checkpoint, bit for bit, with the settings in `changes` replaced.

    Raises RunError: a change to a setting that would make it another run, or a damaged folder.
    """
    ranks = ranks or Ranks()
    folder.check_used()
    if ranks.first:
        folder.acquire()
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
    _check_log(config, ranks)
    ranks.check(config)
    ranks.start(config)
    _set_up(config)
    corpus: data.Corpus | Dataset
    if config.data is not None:
        path, plan = config.data, settings.get("data")
        corpus = ranks.together(lambda: open_dataset(path, config.held_out, plan)[0])
    else:
        ranks.on_first(lambda: data.verify(folder))
        corpus = ranks.together(lambda: data.open_corpus(folder, _tokens_of(folder)))
    model = _model_of(folder, settings)
    model.checkpoint_activations = config.checkpoint_activations
    trainer = Trainer(config, folder, model.double() if config.dtype == "float64" else model, corpus, ranks)
    trainer.resume()
    if config != before and ranks.first:
        write_json(folder.config, {**settings, "train": config.to_dict()})
    return trainer


def load(folder: RunFolder, device: str | None = None, which: str = "last") -> tuple[Decoder, Tokens]:
    """The model of a run as of its last checkpoint, "best", or that of a step, and its tokens."""
    device = device or default_device()
    check_device(device)
    model = _model_of(folder, folder.read_config())
    shards_of_run = shards.newest(folder) if which == "last" else None
    if shards_of_run is not None:
        shards.restore(shards_of_run, Ranks(), model)
        return model.to(device).eval(), _tokens_of(folder)
    path = checkpoint.find(folder, which)
    state = checkpoint.load(path)
    try:
        model.load_state_dict(state.model)
    except RuntimeError as error:
        raise RunError(f"{path} does not fit the model in {folder.config}") from error
    return model.to(device).eval(), _tokens_of(folder)


def load_draft(folder: RunFolder, device: str | None, tokens: Tokens) -> Decoder:
    """The model of a run, to draft for a model with `tokens`. Raises RunError: its tokenizer is another one."""
    draft, others = load(folder, device)
    if others.definition != tokens.definition:
        raise RunError(f"--draft {folder.path} must have the tokenizer of the run, got another one")
    return draft


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _set_up(config: TrainConfig) -> None:
    check_device(str(config.device))
    torch.set_num_threads(config.threads or torch.get_num_threads())
    torch.manual_seed(config.seed)


def _tokens_of(folder: RunFolder) -> Tokens:
    return Tokens.from_file(folder.tokenizer) if folder.tokenizer.exists() else Tokens()


def _model_of(folder: RunFolder, settings: dict[str, Any]) -> Decoder:
    try:
        return Decoder(DecoderConfig.from_dict(settings["model"]))
    except (TypeError, ValueError, KeyError) as error:
        raise RunError(f"{folder.config} describes no model of this version: {error}") from error


def check_device(name: str) -> None:
    """Raises RunError unless tensors can be made on the device of this name."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise RunError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error
