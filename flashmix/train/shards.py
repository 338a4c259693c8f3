"""The checkpoint of a run over several ranks: a folder of shards, by torch.distributed.checkpoint, that any number of ranks can read.

`checkpoint/step-N` is complete or absent: it is written under another name and then renamed. It holds torch's shards and their index, a
file of generators for each rank, and `state.json` with the step, the position in the text and a SHA-256 of every file. The two newest
are kept. The index is a pickle: read only checkpoints from where you would run code from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashmix.train.checkpoint import put_random_state, random_state
from flashmix.train.data import BLOCK, hash_block
from flashmix.train.folder import RunError, RunFolder, read_json, reason, write_json
from flashmix.train.optimizer import Updates
from flashmix.train.ranks import Ranks

KEPT = 2
STATE = "state.json"


def newest(folder: RunFolder) -> Path | None:
    """The newest complete checkpoint of several ranks; None where one process has written a later one, or there is none."""
    found = sorted(folder.shards.glob("step-*"), key=step_of) if folder.shards.exists() else []
    whole = [path for path in found if (path / STATE).exists() and not path.name.endswith(".partial")]
    if not whole or (folder.checkpoint.exists() and folder.checkpoint.stat().st_mtime > whole[-1].stat().st_mtime):
        return None
    return whole[-1]


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    number = path.name.split("-")[-1].split(".")[0]
    return int(number) if number.isdigit() else -1


def save(folder: RunFolder, ranks: Ranks, place: tuple[int, int], updates: Updates, keep: int) -> None:
    """Writes the checkpoint of a step at a position, each rank its part; when it returns on any rank it is complete."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    step, position = place
    path = folder.shards / f"step-{step}"
    partial = path.with_name(path.name + ".partial")

    def make_folder() -> None:
        with refusals(folder.shards):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    ranks.on_first(make_folder)
    weights, moments = get_state_dict(updates.model, updates.adamw)

    def write() -> dict[str, list[str]]:
        with refusals(partial):
            torch.save(random_state(), partial / f"random-{ranks.rank}.pt")
            try:
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=partial)
            except dcp.api.CheckpointException as error:
                raise RunError(f"cannot write {partial}: {first_line(error)}") from error
            return {file.name: hashes(file) for file in own_files(partial, ranks.rank)}

    made = ranks.gathered(ranks.together(write))

    def finish() -> None:
        checksums = {name: found for part in made for name, found in part.items()}
        state = {"step": step, "position": position, "ranks": ranks.count, "sha256": checksums}
        write_json(partial / STATE, state)
        with refusals(path):
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
            sync(folder.shards)
        forget(folder, max(KEPT, keep))

    ranks.on_first(finish)


def own_files(path: Path, rank: int) -> list[Path]:
    """The files that a rank has written: torch's shards have its number; the first has the index as well."""
    names = [*path.glob(f"__{rank}_*"), path / f"random-{rank}.pt"]
    return [*names, path / ".metadata"] if rank == 0 else names


def hashes(path: Path) -> list[str]:
    """The SHA-256 of each block of a file."""
    return [hash_block(path, start) for start in range(0, max(1, path.stat().st_size), BLOCK)]


def sync(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of all ranks on the first, on its CPU; nothing on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    found: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(found)


def forget(folder: RunFolder, keep: int) -> None:
    """Removes all but the newest checkpoints, and the file of one process, which is older than they."""
    found = sorted((p for p in folder.shards.glob("step-*") if not p.name.endswith(".partial")), key=step_of)
    for path in found[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.checkpoint.unlink()


@contextlib.contextmanager
def refusals(path: Path) -> Any:
    """Raises RunError in place of the operating system's errors."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}; older checkpoints are untouched") from error


def verified(path: Path) -> dict[str, Any]:
    """The state of a checkpoint. Raises RunError: a file of it is missing, or a single bit has changed."""
    state = read_json(path / STATE)
    if not isinstance(state, dict) or not {"step", "position", "ranks", "sha256"} <= set(state):
        raise RunError(f"{path / STATE} is damaged: it must hold the step, the position and the checksums")
    for name, wanted in state["sha256"].items():
        try:
            found = hashes(path / name)
        except OSError as error:
            raise RunError(f"cannot read {path / name}: {reason(error)}") from error
        if found != wanted:
            raise RunError(f"{path / name} is damaged: it has another checksum than in {STATE}")
    return state


def restore(path: Path, ranks: Ranks, into: Updates | nn.Module) -> dict[str, Any]:
    """Puts the checkpoint into a model, or a model and its optimiser, however many ranks wrote it; returns its state.

    Raises RunError: it is damaged, or belongs to another model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

    state = ranks.together(lambda: verified(path))
    model, optimizer = (into.model, into.adamw) if isinstance(into, Updates) else (into, None)
    wanted: dict[str, Any] = {}
    if optimizer is None:
        wanted["model"] = get_model_state_dict(model)
    else:
        wanted["model"], wanted["optimizer"] = get_state_dict(model, optimizer)

    def read() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads all parts
                dcp.load(wanted, checkpoint_id=path, no_dist=not ranks.several)
        except Exception as error:  # torch, pickle and the planner each have their own
            raise RunError(f"the checkpoint {path} does not fit the model: {first_line(error)}") from error

    ranks.together(read)
    if optimizer is None:
        model.load_state_dict(wanted["model"])
        return state
    set_state_dict(model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
    if state["ranks"] == ranks.count:
        put_random_state(torch.load(path / f"random-{ranks.rank}.pt", weights_only=True))
    return state


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
