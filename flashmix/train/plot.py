"""The loss curve of a run and the accuracies of an evaluation, drawn from what was measured."""

from __future__ import annotations

import math
import re
import statistics
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flashmix.train.folder import RunFolder, written_whole
from flashmix.train.tasks import TASKS


def draw_loss_curve(folder: RunFolder) -> None:
    """Draws `loss.png`: bits per byte of each training step, their running mean, and bits per byte of the held-out documents."""
    rows = folder.read_metrics()
    steps = [row["step"] for row in rows if "loss" in row]
    bits = [row["bits_per_byte"] for row in rows if "loss" in row]
    held_out = [(row["step"], row["held_out_bits_per_byte"]) for row in rows if "held_out_loss" in row]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, bits, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
    axes.plot(steps, running_mean(bits, 0.95), color="tab:blue", label="training, running mean")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", label="held out")
    if bits:
        axes.set_ylim(0, min(max(bits), 2.5 * sorted(bits)[len(bits) // 2]))
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_title(folder.path.name.encode(errors="replace").decode(), parse_math=False)  # $ and any byte in a name
    axes.grid(alpha=0.3)
    axes.legend()
    with written_whole(folder.loss_curve) as file:
        figure.savefig(file, format="png", dpi=120)


def running_mean(values: list[float], keep: float) -> list[float]:
    """The exponential running mean, `keep` of the old and `1 - keep` of the new, corrected for its start at 0."""
    means, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(mean / weight)
    return means


def draw_accuracy(results: dict[str, Any]) -> Figure:
    """One panel per task: accuracy over size, one line per model; dashed: the largest size trained on."""
    shown = [name for name in results["settings"]["tasks"] if any(c["task"] == name for c in results["cells"])]
    columns = min(2, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    lines = -(-len(results["settings"]["models"]) // 2)
    figure = Figure(figsize=(5 * columns, 3.4 * rows + 0.2 * lines), layout="constrained")
    for index, name in enumerate(shown):
        _draw_task(figure.add_subplot(rows, columns, index + 1), name, results)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def family(model: str) -> str:
    """The name of a model without its sizes.

    Example:
        >>> family("deltanet+heads=2+negative_eigenvalues/transformer+window=8")
        'deltanet+negative_eigenvalues/transformer'
    """
    return re.sub(r"\+\w+=\d+", "", model)


def draw_states(results: dict[str, Any]) -> Figure | None:
    """Recall over the size of the state, one line per model whatever its sizes; dashed: models that keep all keys and values."""
    task, models = TASKS["recall"], results["models"]
    size = str(max(task.train))
    means: dict[str, float] = {}
    for model in results["settings"]["models"]:
        cells = [c["accuracy"][size] for c in results["cells"] if (c["task"], c["model"]) == ("recall", model)]
        if cells:
            means[model] = statistics.mean(cells)
    if not any(models[model]["state"] for model in means):
        return None
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, name in enumerate(dict.fromkeys(map(family, means))):
        mine = [model for model in means if family(model) == name]
        color, marker = f"C{index}", "os^Dv"[index // 10 % 5]
        fixed = sorted((models[model]["state"], means[model]) for model in mine if not models[model]["attention"])
        if fixed:
            axes.plot(*zip(*fixed, strict=True), marker + "-", color=color, markersize=4, label=name)
        for model in mine:
            if models[model]["attention"]:
                axes.axhline(means[model], color=color, linestyle="--", linewidth=1, label=model)
    axes.set_xscale("log", base=2)
    axes.set(ylim=(-0.03, 1.03), xlabel="numbers in the recurrent states", ylabel=f"accuracy at {size} {task.unit}")
    axes.set_title("recall against the size of the state", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def draw_places(results: dict[str, Any]) -> Figure | None:
    """Heat maps, a panel a model: accuracy by the length of the haystack and the place of the needle in it; None without such cells."""
    cells = [cell for cell in results["cells"] if cell.get("places")]
    shown = [model for model in results["settings"]["models"] if any(cell["model"] == model for cell in cells)]
    if not shown:
        return None
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.6 * columns + 1, 2.2 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    task = TASKS[cells[0]["task"]]
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, model in zip(grid.flat, shown, strict=False):
        mine = [cell["places"] for cell in cells if cell["model"] == model]
        values = [[_mean([found[str(size)][part] for found in mine]) for size in task.test] for part in range(8)]
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="upper")
        axes.set_title(model, fontsize=7)
        axes.set_xticks(range(len(task.test)), [str(size) for size in task.test], fontsize=6)
        axes.set_yticks([-0.5, 3.5, 7.5], ["0", "½", "1"], fontsize=6)
        axes.axvline(
            sum(size <= max(task.train) for size in task.test) - 0.5, color="white", linestyle="--", linewidth=0.8
        )
    figure.supxlabel(f"length ({task.unit}); beyond the dashed line longer than in training", fontsize=8)
    figure.supylabel("place of the needle", fontsize=8)
    figure.colorbar(image, ax=grid, label="accuracy", shrink=0.8)
    return figure


def _mean(values: list[float | None]) -> float:
    """The mean of those that are numbers; NaN without any."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else math.nan


def _draw_task(axes: Axes, name: str, results: dict[str, Any]) -> None:
    task = TASKS[name]
    for index, model in enumerate(results["settings"]["models"]):
        cells = [cell for cell in results["cells"] if (cell["task"], cell["model"]) == (name, model)]
        if cells:
            means = [statistics.mean(cell["accuracy"][str(size)] for cell in cells) for size in task.test]
            axes.plot(task.test, means, "o-", color=f"C{index}", markersize=3, label=model)
    axes.axvline(max(task.train), color="gray", linestyle="--", linewidth=0.8)
    axes.axhline(task.chance, color="gray", linestyle=":", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(task.test, [str(size) for size in task.test])
    axes.set(ylim=(-0.03, 1.03), xlabel=task.unit, ylabel="accuracy")
    axes.set_title(task.title, fontsize=9)
    axes.grid(alpha=0.3)
