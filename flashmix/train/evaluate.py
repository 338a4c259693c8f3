"""`flashmix eval`: it trains small models on the tasks of `tasks.py`, scores them, and keeps a table, a plot and the numbers.

A cell is one task, one model and one seed. Each finished cell is written at once, so that a stopped evaluation can be resumed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flashmix
from flashmix.models import Decoder, DecoderConfig, Size
from flashmix.train.contenders import contender, memory
from flashmix.train.folder import LockedFolder, RunError, TrainConfig, read_json, write_json, written_whole
from flashmix.train.loop import learning_rate, stop_on_interrupt
from flashmix.train.optimizer import make_optimizer
from flashmix.train.plot import draw_accuracy, draw_places, draw_states
from flashmix.train.progress import Progress
from flashmix.train.session import check_device, default_device
from flashmix.train.tasks import TASKS, Task

DEFAULT_MODELS = (
    "transformer",
    "linear_attention",
    "mamba2+state_dim=8",
    "deltanet",
    "deltanet+negative_eigenvalues",
    "deltaproduct",
    "rwkv7",
)
PARTS = 8  # of a sequence, by which answers are scored where a task has places
# The settings that may change when an evaluation is resumed: more cells, or how they are computed. Others would make cells incomparable.
MAY_CHANGE = {"tasks", "models", "seeds", "threads", "device"}


@dataclass(frozen=True)
class EvalConfig:
    """The settings of one evaluation; where `steps` or `lr` is None, each task has its own. Every cell trains for all its steps."""

    tasks: tuple[str, ...] = tuple(TASKS)
    models: tuple[str, ...] = DEFAULT_MODELS
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    batch_tokens: int = 1024
    lr: float | None = None
    examples: int = 128
    width: int = 64
    depth: int = 2
    head_dim: int = 16
    window: int = 16
    threads: int | None = None
    device: str | None = None

    def check(self) -> None:
        """Raises RunError for a setting that cannot be."""
        for name in ("steps", "batch_tokens", "examples", "width", "depth", "head_dim", "window", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise RunError(f"--lr must be positive and finite, got {self.lr}")
        for name in ("tasks", "models", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise RunError(
                    f"--{name} must name one or more, none twice, got {' '.join(map(str, values)) or 'none'}"
                )
        for task in self.tasks:
            if task not in TASKS:
                raise RunError(f"--tasks must be of {', '.join(TASKS)}, got {task!r}")
        for name in self.models:
            self.model(name, 2)

    def model(self, name: str, vocab_size: int) -> DecoderConfig:
        """The configuration of a model by its name. Raises RunError: there is none of this name."""
        try:
            return contender(name, vocab_size, Size(self.width, self.depth, self.head_dim, self.window))
        except (TypeError, ValueError) as error:
            raise RunError(f"--models: {name}: {error}") from error

    def cells(self) -> Iterator[tuple[str, str, int]]:
        """Task, model and seed of each cell, in the order in which they are computed."""
        return ((task, model, seed) for seed in self.seeds for task in self.tasks for model in self.models)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> EvalConfig:
        unknown = sorted(set(settings) - {field.name for field in fields(cls)})
        if unknown:
            raise RunError(f"results.json has settings that this version does not know: {', '.join(unknown)}")
        plain: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()}
        return cls(**plain)


class EvalFolder(LockedFolder):
    """The files of one evaluation: `results.json` (settings and cells), `table.md` and plots, each where there is something to draw."""

    kind = "evaluation"
    name = "folder"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "results.json")
        self.results = self.settings
        self.table = self.path / "table.md"
        self.plots = {"accuracy": draw_accuracy, "states": draw_states, "places": draw_places}

    def read(self) -> dict[str, Any]:
        self.check_used()
        results = read_json(self.results)
        if not isinstance(results, dict) or not {"versions", "settings", "models", "cells"} <= set(results):
            raise RunError(f"{self.results} is damaged: it must hold 'versions', 'settings', 'models' and 'cells'")
        return results

    def write(self, results: dict[str, Any]) -> None:
        """Writes the numbers first, then the table."""
        write_json(self.results, results)
        with written_whole(self.table) as file:
            file.write(make_table(results).encode())

    def draw(self, results: dict[str, Any]) -> None:
        """Writes the plots that there is something for."""
        for name, draw in self.plots.items():
            figure = draw(results)
            if figure is not None:
                with written_whole(self.path / f"{name}.png") as file:
                    figure.savefig(file, format="png", dpi=120)


@dataclass(frozen=True)
class Score:
    """The result of a cell: accuracy by size, the last training loss (None: it was not finite), and the seconds it took.

    `places`: by size, the accuracy of answers that stand in each part of the sequence (None: there are none), where the task has places.
    """

    accuracy: dict[int, float]
    loss: float | None
    seconds: float
    places: dict[int, list[float | None]] | None = None

    def as_json(self) -> dict[str, Any]:
        """Sizes are strings, as JSON has them; without places where there are none."""
        found = asdict(self)
        for name in ("accuracy", "places"):
            values = found.pop(name)
            if values is not None:
                found[name] = {str(size): value for size, value in values.items()}
        return found


def run_cell(
    task: Task, model: DecoderConfig, seed: int, config: EvalConfig, stopped: Callable[[], bool], progress: Progress
) -> Score | None:
    """Trains `model` on `task` from `seed` and scores it; None if it was stopped before the end."""
    start, device = time.perf_counter(), torch.device(config.device or "cpu")
    steps = config.steps or task.steps
    plan = TrainConfig(steps=steps, lr=config.lr or task.lr, warmup=min(20, steps), final_lr=0.02, weight_decay=0.1)
    torch.manual_seed(seed)
    decoder = Decoder(model).to(device)
    optimizer = make_optimizer(decoder, plan)
    text = torch.Generator().manual_seed(seed)
    losses: list[Tensor] = []
    for step in range(steps):
        if stopped():
            return None
        tokens, targets = task.batch(size_at(step, steps, task.train), config.batch_tokens, text)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, plan)
        loss = decoder(tokens.to(device), targets=targets.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), plan.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses = [*losses, loss.detach()][-len(task.train) :]  # of the last round of sizes
        progress.update()
    last = torch.stack(losses).mean().item()
    accuracy: dict[int, float] = {}
    places: dict[int, list[float | None]] = {}
    for size in task.test:
        if stopped():
            return None
        accuracy[size], places[size] = score(decoder, task, size, config.examples)
    spent = time.perf_counter() - start
    return Score(accuracy, last if math.isfinite(last) else None, spent, places if task.place else None)


def size_at(step: int, steps: int, sizes: tuple[int, ...]) -> int:
    """The size to train on: the sizes take turns, and larger ones are added evenly over the first half of the steps.

    Example:
        >>> [size_at(step, 8, (1, 5)) for step in range(8)]
        [1, 1, 1, 1, 1, 5, 1, 5]
    """
    joined = min(len(sizes), 1 + 2 * step * (len(sizes) - 1) // steps)
    return sizes[step % joined]


@torch.no_grad()
def score(model: Decoder, task: Task, size: int, examples: int) -> tuple[float, list[float | None]]:
    """The fraction of targets that the model's likeliest token equals, on the same sequences for every model; and the same by parts."""
    device = model.embedding.weight.device
    text = torch.Generator().manual_seed(1_000_003 * size)
    tokens, targets = task.draw(size, examples, text)
    scored, rows, right = task.scored(targets), max(1, 16384 // tokens.shape[1]), []
    for part, wanted in zip(tokens.split(rows), targets.split(rows), strict=True):
        right.append(model(part.to(device)).argmax(dim=-1).cpu() == wanted)
    hits = torch.cat(right)[scored]
    place = torch.zeros(tokens.shape) if task.place is None else task.place(tokens)
    of = (place[scored] * PARTS).long()
    counts, found = of.bincount(minlength=PARTS).tolist(), of[hits].bincount(minlength=PARTS).tolist()
    return hits.double().mean().item(), [hit / n if n else None for hit, n in zip(found, counts, strict=True)]


class Evaluation:
    """The cells of a configuration; some may be done already."""

    def __init__(self, config: EvalConfig, folder: EvalFolder, results: dict[str, Any]) -> None:
        self.config, self.folder, self.results = config, folder, results

    @property
    def left(self) -> list[tuple[str, str, int]]:
        done = {(cell["task"], cell["model"], cell["seed"]) for cell in self.results["cells"]}
        return [cell for cell in self.config.cells() if cell not in done]

    def run(self) -> bool:
        """Computes the cells that are left and draws the plots; True if all are done, False if it was stopped before."""
        try:
            return self._run()
        finally:
            self.folder.draw(self.results)

    def _run(self) -> bool:
        config, left = self.config, self.left
        steps = sum(config.steps or TASKS[task].steps for task, _, _ in left)
        with stop_on_interrupt() as stopped, Progress(steps) as progress:
            for task, model, seed in left:
                progress.show(label=f"{task} {model}")
                found = run_cell(
                    TASKS[task], config.model(model, TASKS[task].vocab_size), seed, config, stopped, progress
                )
                if found is None:
                    return False
                self.results["cells"].append({"task": task, "model": model, "seed": seed, **found.as_json()})
                self.folder.write(self.results)
                scores = "  ".join(f"{size}: {value:.2f}" for size, value in found.accuracy.items())
                progress.say(f"{task:<7} {model:<42} {scores}  ({found.seconds:.0f} s)")
        return True


def begin(config: EvalConfig, folder: EvalFolder) -> Evaluation:
    """A new evaluation in `folder`."""
    config.check()
    config = replace(
        config, threads=config.threads or torch.get_num_threads(), device=config.device or default_device()
    )
    _set_up(config)
    folder.create()
    versions = {"flashmix": flashmix.__version__, "torch": torch.__version__}
    return _with(config, folder, {"versions": versions, "settings": {}, "models": {}, "cells": []})


def resume(folder: EvalFolder, changes: dict[str, Any]) -> Evaluation:
    """The evaluation in `folder` with its finished cells; `changes` may add tasks, models and seeds.

    Raises RunError: a change to a setting that would make cells incomparable, or a damaged folder.
    """
    folder.check_used()
    folder.acquire()
    results = folder.read()
    before = EvalConfig.from_dict(results["settings"])
    for name, value in changes.items():
        old = getattr(before, name)
        if name not in MAY_CHANGE and value != old:
            raise RunError(f"--{name.replace('_', '-')} belongs to the evaluation and stays {old!r}, got {value!r}")
    for name in ("tasks", "models", "seeds"):  # new ones are added to the old ones
        if name in changes:
            changes[name] = tuple(dict.fromkeys((*getattr(before, name), *changes[name])))
    config = replace(before, **changes)
    config.check()
    _set_up(config)
    return _with(config, folder, results)


def _with(config: EvalConfig, folder: EvalFolder, results: dict[str, Any]) -> Evaluation:
    for name in config.models:
        state, grows = memory(config.model(name, 2))
        results["models"][name] = {"state": state, "attention": grows}
    results["settings"] = asdict(config)
    folder.write(results)
    return Evaluation(config, folder, results)


def _set_up(config: EvalConfig) -> None:
    check_device(str(config.device))
    torch.set_num_threads(config.threads or torch.get_num_threads())


def make_table(results: dict[str, Any]) -> str:
    """The accuracies as tables in Markdown, one per task: the mean over the seeds and, for several seeds, the range."""
    text = []
    for name in results["settings"]["tasks"]:
        cells = [cell for cell in results["cells"] if cell["task"] == name]
        if not cells:
            continue
        task = TASKS[name]
        head = [f"{size}{'' if size <= max(task.train) else ' *'}" for size in task.test]
        text.append(f"{task.title} (a guess: {task.chance:.2f})\n")
        text.append(f"| {name}, by {task.unit} | state | {' | '.join(head)} | seconds |")
        text.append("|---" * (len(head) + 3) + "|")
        for model in results["settings"]["models"]:
            mine = [cell for cell in cells if cell["model"] == model]
            if mine:
                shown = [_shown([cell["accuracy"][str(size)] for cell in mine]) for size in task.test]
                seconds = statistics.mean(cell["seconds"] for cell in mine)
                text.append(f"| {model} | {_state(results['models'][model])} | {' | '.join(shown)} | {seconds:.0f} |")
        text.append("")
    return "\n".join([*text, "\\* more than it was trained on. State: numbers that the recurrent layers keep.", ""])


def _shown(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f}–{max(values):.2f})"


def _state(model: dict[str, Any]) -> str:
    parts = [f"{model['state']:,}"] * (model["state"] > 0) + ["all keys and values"] * model["attention"]
    return " + ".join(parts)
