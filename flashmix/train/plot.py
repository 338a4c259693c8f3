"""The loss curve of a run and the accuracies of an evaluation, drawn from what was measured."""

from __future__ import annotations

import statistics
from typing import IO, Any

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


def draw_accuracy(results: dict[str, Any], file: IO[bytes]) -> None:
    """Draws a PNG file with one panel per task: accuracy over size, one line per model; dashed: the largest size trained on."""
    shown = [name for name in results["settings"]["tasks"] if any(c["task"] == name for c in results["cells"])]
    columns = min(2, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(5 * columns, 3.4 * rows + 0.8), layout="constrained")
    for index, name in enumerate(shown):
        _draw_task(figure.add_subplot(rows, columns, index + 1), name, results)
    handles = {
        label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(file, format="png", dpi=120)


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
