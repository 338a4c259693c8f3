"""The loss curve of a run, drawn from its measurements."""

from __future__ import annotations

from matplotlib.figure import Figure

from flashmix.train.run_folder import RunFolder, written_whole


def draw_loss_curve(folder: RunFolder) -> None:
    """Draws `loss.png`: bits per byte over steps, of each training step, their running mean, and held out."""
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
    axes.set(xlabel="step", ylabel="bits per byte", title=folder.path.name)
    axes.grid(alpha=0.3)
    axes.legend()
    with written_whole(folder.loss_curve) as file:
        figure.savefig(file, format="png", dpi=120)


def running_mean(values: list[float], keep: float) -> list[float]:
    """The exponential running mean, without the pull of its start: `keep` of the old, `1 - keep` of the new."""
    means, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        means.append(mean / weight)
    return means
