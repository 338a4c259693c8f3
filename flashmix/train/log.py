"""Measurements for TensorBoard or Weights & Biases, where they are installed, beside the run's own `metrics.jsonl`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flashmix.train.folder import RunError, RunFolder

Log = Callable[[list[dict[str, Any]]], None]


def make_log(kind: str | None, folder: RunFolder) -> Log | None:
    """A function that takes rows of measurements, each with its step. Raises RunError: the package is not installed."""
    if kind is None:
        return None
    return {"tensorboard": tensorboard, "wandb": wandb}[kind](folder)


def package(kind: str) -> Any:
    """The package that writes the measurements. Raises RunError: it is not installed."""
    try:
        return importlib.import_module({"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[kind])
    except ImportError as error:
        raise RunError(f"--log {kind} must come with its package: pip install {kind}") from error


def tensorboard(folder: RunFolder) -> Log:
    """Into the folder `tensorboard` of the run."""
    library = package("tensorboard")
    writer = library.SummaryWriter(str(folder.path / "tensorboard"))

    def log(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, row["step"])
        writer.flush()

    return log


def wandb(folder: RunFolder) -> Log:
    """Into a run of Weights & Biases with the name of the folder; its own variables say which project, and whether it is online."""
    library = package("wandb")
    run: Any = library.init(name=folder.path.name, dir=str(folder.path), id=folder.path.name, resume="allow")

    def log(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            run.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    return log
