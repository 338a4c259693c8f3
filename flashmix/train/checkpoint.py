"""A checkpoint: everything that a run needs to continue bit for bit, in one file that is complete or absent."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.train.folder import RunError, reason, written_whole


@dataclass
class Checkpoint:
    """The state after `step` optimiser steps: weights, optimiser, random generators, and how many tokens were read."""

    step: int
    position: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    random: dict[str, Any]


def random_state() -> dict[str, Any]:
    """The state of torch's generators, on the CPU and on each GPU in use."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def put_random_state(state: dict[str, Any]) -> None:
    """Puts back what `random_state` gave; of as many GPUs as there were."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def capture(step: int, position: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Checkpoint:
    return Checkpoint(step, position, model.state_dict(), optimizer.state_dict(), random_state())


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts the state of `checkpoint` into `model`, `optimizer` and torch's generators.

    Raises RunError: the checkpoint belongs to another model.
    """
    try:
        model.load_state_dict(checkpoint.model)
        optimizer.load_state_dict(checkpoint.optimizer)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"the checkpoint does not fit the model: {str(error).splitlines()[0]}") from error
    put_random_state(checkpoint.random)


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Writes under a temporary name, then renames: `path` is the old checkpoint or the new one, and always complete."""
    with written_whole(path) as file:
        torch.save(vars(checkpoint), file)


def load(path: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint onto `device`; no code from the file is run.

    Raises RunError: the file is missing, cut short, or a single bit of it has changed (torch.load alone misses that).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise zipfile.BadZipFile(f"checksum of {broken}")
        checkpoint = Checkpoint(**torch.load(path, map_location=device, weights_only=True))
    except OSError as error:
        raise RunError(f"cannot read the checkpoint {path}: {reason(error)}") from error
    except Exception as error:  # zipfile, pickle and torch each have their own exceptions for a damaged file
        raise RunError(
            f"the checkpoint {path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error
    checkpoint.random = {
        "cpu": checkpoint.random["cpu"].cpu(),
        "cuda": [state.cpu() for state in checkpoint.random["cuda"]],
    }
    return checkpoint
