"""A small run, and what the tests of training do with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from flashmix.train import data, session
from flashmix.train.folder import RunFolder, TrainConfig
from flashmix.train.loop import Trainer

SIZES = {"steps": 8, "batch_tokens": 192, "seq_len": 64, "warmup": 2, "held_out": 0.2, "eval_tokens": 256}
EVERY = {"eval_every": 4, "save_every": 4, "log_every": 1}
SMALL = TrainConfig(preset="hybrid_nano", threads=1, device="cpu", **SIZES, **EVERY)


def losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


def train_in_parts(config: TrainConfig, path: Path, stops: list[int]) -> RunFolder:
    """Trains, stopped after each of `stops` steps and resumed from the disk."""
    folder = RunFolder(path)
    trainer = session.begin(config, folder)
    for stop in stops:
        interrupt_after(trainer, stop)
        assert not trainer.run() and trainer.step == stop
        torch.randn(5)  # other use of the random generator in between
        trainer = session.resume(folder, {})
        assert trainer.step == stop
    assert trainer.run()
    return folder


def interrupt_after(trainer: Trainer, step: int) -> None:
    """Sends Ctrl-C in the middle of step `step`."""
    original = trainer.loss_of

    def loss_of(batch: data.Batch) -> torch.Tensor:
        if trainer.step == step - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(batch)

    trainer.loss_of = loss_of  # type: ignore[method-assign]
