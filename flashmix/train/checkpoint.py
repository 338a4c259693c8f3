"""A checkpoint: everything that a run needs to continue bit for bit, in one file that is complete or absent."""

from __future__ import annotations

import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashmix.train.folder import RunError, RunFolder, reason, written_whole
from flashmix.train.optimizer import Updates


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


def capture(step: int, position: int, updates: Updates) -> Checkpoint:
    return Checkpoint(step, position, updates.weights(), updates.state(), random_state())


def restore(checkpoint: Checkpoint, updates: Updates) -> None:
    """Puts the state of `checkpoint` into the model, its optimiser and torch's generators.

    Raises RunError: the checkpoint belongs to another model.
    """
    try:
        updates.load(checkpoint.model, checkpoint.optimizer)
    except (RuntimeError, ValueError, KeyError) as error:
        raise RunError(f"the checkpoint does not fit the model: {str(error).splitlines()[0]}") from error
    put_random_state(checkpoint.random)


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Writes under a temporary name, then renames: `path` is the old checkpoint or the new one, and always complete."""
    with written_whole(path) as file:
        torch.save(vars(checkpoint), file)


def keep_earlier(folder: RunFolder, step: int, count: int) -> None:
    """Gives the checkpoint of a step a second name, that of its step, and forgets all but the last `count` of these."""
    if count > 1:
        try:
            folder.earlier.mkdir(exist_ok=True)
            path = folder.earlier / f"step-{step}.pt"
            path.unlink(missing_ok=True)
            link_or_copy(folder.checkpoint, path)
        except OSError as error:
            raise RunError(f"cannot write {folder.earlier}: {reason(error)}") from error
    found = earlier_steps(folder)
    for old in found[: max(0, len(found) - count)] if count > 1 else found:
        (folder.earlier / f"step-{old}.pt").unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """The file under a second name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        partial = target.with_name(target.name + ".partial")
        shutil.copyfile(source, partial)
        os.replace(partial, target)


def earlier_steps(folder: RunFolder) -> list[int]:
    """The steps of the checkpoints that are kept under the names of their steps, in order."""
    names = [path.stem.removeprefix("step-") for path in folder.earlier.glob("step-*.pt")]
    return sorted(int(name) for name in names if name.isdigit())


def find(folder: RunFolder, which: str) -> Path:
    """The file of a checkpoint: "last", "best", or a step. Raises RunError: there is no such checkpoint."""
    if which == "last":
        return folder.checkpoint
    path = folder.best if which == "best" else folder.earlier / f"step-{which}.pt"
    if not path.exists():
        steps = ["best"] * folder.best.exists() + [str(step) for step in earlier_steps(folder)]
        raise RunError(f"--checkpoint must be {' or '.join(['last', *steps])} of {folder.path}, got {which}")
    return path


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
