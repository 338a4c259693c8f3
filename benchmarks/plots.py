"""Plots of the measurements in `benchmarks/results`: speed, memory, decoding and errors, each with the file that its numbers are from.

`python benchmarks/plots.py` draws those that README shows into `docs/plots`; `--all FOLDER` draws every plot, as `make docs` does.
A plot names the newest results of its kind in `PLOTS`; whoever commits newer ones changes the name there and runs the program.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
COMMITTED = Path(__file__).parent.parent / "docs" / "plots"
Json = dict[str, Any]
Draw = Callable[..., "Figure"]


@dataclass(frozen=True)
class Series:
    """What one colour stands for; lightness and hatching tell it apart in grey too."""

    label: str
    colour: str
    hatch: str = ""


GLUON = Series("flashmix, Gluon (Hopper)", "#123b7a")
TRITON = Series("flashmix, Triton", "#5b9bd9")
OURS = Series("flashmix", "#123b7a")
BFLOAT16 = Series("flashmix, bfloat16 state", "#5b9bd9")
FLA = Series("flash-linear-attention", "#f5b971", "///")
FLASH_QLA = Series("FlashQLA", "#c9c9c9", "...")
CUDNN = Series("cuDNN", "#f5b971", "///")
FLASH = Series("torch's flash", "#c9c9c9", "...")
FA4 = Series("FlashAttention-4", "#c9c9c9", "xx")
COMPILE = Series("torch.compile", "#c9c9c9", "...")
TRANSFORMERS = Series("transformers (PyTorch)", "#f5b971", "///")
C = Series("flashmix, C", "#5b9bd9")
PYTORCH = Series("flashmix, PyTorch", "#c9c9c9", "...")
ROUNDED = Series("the definition in float32, rounded", "#ffffff")
BOUND = Series("bound of the machine", "#ffffff")
PRODUCT = Series("one large matrix product", "#ffffff")
MATRIX_PRODUCT = {"NVIDIA H200": 790.0}  # TFLOP/s of 8192 x 8192 x 8192 in bfloat16 by torch, where it was measured

STYLE = {
    "svg.fonttype": "none",  # text stays text: small files, and the reader's own font
    "svg.hashsalt": "flashmix",  # the same numbers are the same file
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10.0,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.0,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
}


def bars(
    axes: Axes, groups: Sequence[str], values: Sequence[tuple[Series, Sequence[float | None]]], digits: int
) -> None:
    """Horizontal bars, one for each series in each group, the first group on top; a missing number leaves its place free."""
    height = 0.82 / len(values)
    for index, (series, numbers) in enumerate(values):
        places = [place + (index - (len(values) - 1) / 2) * height for place in range(len(groups))]
        found = [(place, number) for place, number in zip(places, numbers, strict=True) if number is not None]
        drawn = axes.barh(
            [place for place, _ in found],
            [number for _, number in found],
            height * 0.92,
            color=series.colour,
            hatch=series.hatch,
            edgecolor="#333333",
            linewidth=0.6,
            label=series.label,
        )
        axes.bar_label(drawn, [f"{number:.{digits}f}" for _, number in found], padding=3, fontsize=8)
    axes.set_yticks(range(len(groups)), groups)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.grid(axis="x", color="#e2e2e2")


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels that share the axis of groups; the legend belongs below them (`finish`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    grid = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(grid[0])


def finish(figure: Figure, axes: Sequence[Axes], title: str, unit: str, names: Sequence[str] = ()) -> Figure:
    """Title, names of the panels, the unit below each, and one legend for all."""
    figure.suptitle(title, fontsize=12)
    for panel, name in zip(axes, names, strict=False):
        panel.set_title(name)
    for panel in axes:
        panel.set_xlabel(unit)
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4), frameon=False, fontsize=9)
    return figure


def size_of(row: Json) -> str:
    """Batch, tokens and heads of a row of the recurrence's benchmark."""
    return f"{row['B']} × {row['T']:,} tokens\n{row['H']} key, {row['HV']} value heads"


def shape_of(row: Json) -> tuple[int, ...]:
    return (row["B"], row["T"], row["H"], row["HV"], row["K"], row["V"])


def number(row: Json | None, name: str) -> float | None:
    """A measured number, or None where it is missing."""
    return None if row is None else row.get(name)


def gated_deltanet(*measured: Json) -> Figure:
    """Ours and the peers; what several files have of a row is the later one's. The last file is the peers' where no other has them."""
    *own, before = measured
    found: dict[tuple[int, ...], Json] = {}
    for row in (row for file in own for row in file["rows"]):
        if row["rule"] == "gated_delta_rule" and (row["K"], row["V"]) == (128, 128):
            found[shape_of(row)] = found.get(shape_of(row), {}) | row
    earlier = {shape_of(row): row for row in before["rows"] if row["rule"] == "gated_delta_rule"}
    figure, axes = panels(2, 9.0, 4.6)
    for index, (panel, part) in enumerate(zip(axes, ("forward", "both"), strict=True)):
        values: list[tuple[Series, list[float | None]]] = [
            (GLUON, [number(row.get("flashmix"), f"{part}_ms") for row in found.values()]),
            (TRITON, [number(row.get("triton"), f"{part}_ms") for row in found.values()]),
            (FLASH_QLA, [number(row.get("flashqla"), f"{part}_ms") for row in found.values()]),
            (FLA, [number(row.get("fla", earlier[shape]["fla"]), f"{part}_ms") for shape, row in found.items()]),
            (BOUND, [row["bound_ms"][index] for row in found.values()]),
        ]
        there = [(series, numbers) for series, numbers in values if any(numbers)]
        bars(panel, [size_of(row) for row in found.values()], there, 2)
    title = "Gated DeltaNet, 128 channels a head, bfloat16, NVIDIA H200 (less is faster)"
    return finish(figure, axes, title, "milliseconds", ("forward", "forward + backward"))


def card(measured: Json) -> str:
    """The GPU of a file: `NVIDIA H100`."""
    about = measured["measured_on"]
    return " ".join(str(about.get("gpu", about.get("device"))).split()[:2])


def attention_rows(*measured: Json) -> dict[str, Json]:
    """TFLOP/s by what a row is: `128, 4096, 4, 16 causal` has 128 channels, 4 sequences of 4,096 tokens and 16 heads.

    What several files have of a row is the later one's; `gluon` is what a call takes by itself, under the name of the kernels.
    """
    found: dict[str, Json] = {}
    for row in (row for file in measured for row in file["rows"] if "row" in row):
        ours = {name.replace("gluon", "auto"): number for name, number in row.items() if name.startswith("gluon")}
        found[row["row"]] = found.get(row["row"], {}) | row | ours
    return found


def attention(*measured: Json) -> Figure:
    rows, on = attention_rows(*measured), card(measured[-1])
    sizes = [(dim, 16384, 32 if dim == 64 else 8 if dim == 256 else 16) for dim in (64, 80, 96, 128, 192, 256)]
    names = {
        f"{dim}, {tokens}, {16384 // tokens}, {heads} {mask}": f"{dim} channels, {mask}\n{16384 // tokens} × {tokens:,} tokens"
        for dim, tokens, heads in sizes
        for mask in ("causal", "full")
    }
    names = {name: text for name, text in names.items() if name in rows}
    figure, axes = panels(2, 9.0, 9.6)
    for panel, part in zip(axes, ("forward", "backward"), strict=True):
        sides = ((OURS, "auto"), (FA4, "fa4"), (CUDNN, "cudnn"))
        values = [(series, [rows[name].get(f"{key}_{part}") for name in names]) for series, key in sides]
        values = [(series, numbers) for series, numbers in values if any(numbers)]
        if on in MATRIX_PRODUCT:
            values.append((PRODUCT, [MATRIX_PRODUCT[on]] * len(names)))
        bars(panel, list(names.values()), values, 0)
    title = f"Softmax attention, 16 heads (of 64 channels: 32, of 256: 8), bfloat16, {on} (more is faster)"
    return finish(figure, axes, title, "TFLOP/s", ("forward", "backward"))


def decode(measured: Json) -> Figure:
    found = {(row["what"], row["B"]): row for row in measured["rows"] if "B" in row}
    groups = [(what, B) for what in ("step", "layer") for B in (1, 64)]
    ours = {"step": "delta_rule_step, float32 state", "layer": "delta_net_step"}
    text = {"step": "recurrence", "layer": "layer without\nits projections"}
    figure, axes = panels(2, 9.0, 3.8)
    for panel, part in zip(axes, ("graph_us", "eager_us"), strict=True):
        values = [
            (OURS, [found[ours[what], B][part] for what, B in groups]),
            (FLA, [found[f"fla {what}", B][part] for what, B in groups]),
        ]
        bars(panel, [f"{text[what]}, {B} sequence{'s' * (B > 1)}" for what, B in groups], values, 1)
    title = "One token of Gated DeltaNet, 32 heads of 128 × 128, NVIDIA H200 (less is faster)"
    return finish(figure, axes, title, "microseconds a call", ("in a CUDA graph", "called from Python"))


def by_rule(measured: Sequence[Json], shape: tuple[int, ...]) -> dict[str, Json]:
    """The rows of one shape by their rule; a later file has the last word."""
    return {row["rule"]: row for file in measured for row in file["rows"] if shape_of(row) == shape}


def peer(row: Json, name: str) -> float | None:
    """A number of flash-linear-attention's, where it refuses that of its code with the refusal lifted."""
    lifted = row.get("fla lifted", {}).get(name)
    return row["fla"].get(name) if row["fla"].get(name) is not None else lifted


def mechanisms(*measured: Json) -> Figure:
    """Triton's kernels and the peer are in the first files, those of `RULES`; what is in Gluon in the others."""
    shape = (8, 4096, 16, 16, 128, 128)
    found = by_rule(measured[: len(RULES)], shape)
    later = [{"rows": [*of["rows"], *of.get("forms of 128 channels", ())]} for of in measured[len(RULES) :]]
    gluon = {rule: row for rule, row in by_rule(later, shape).items() if rule in IN_GLUON}
    figure, axes = panels(2, 9.0, 7.6)
    for panel, part in zip(axes, ("forward", "both"), strict=True):
        ours = [(row.get("as it is") or row["flashmix"] if (row := gluon.get(rule)) else None) for rule in found]
        values = [
            (GLUON, [number(times, f"{part}_ms") for times in ours]),
            (TRITON, [row["flashmix"][f"{part}_ms"] for row in found.values()]),
            (FLA, [peer(row, f"{part}_ms") for row in found.values()]),
            (BOUND, [row["bound_ms"][part] for row in found.values()]),
        ]
        bars(panel, [rule.replace("_", " ") for rule in found], values, 2)
    title = "Mechanisms, 8 × 4,096 tokens, 16 heads of 128 channels, bfloat16, NVIDIA H200 (less is faster)"
    return finish(figure, axes, title, "milliseconds", ("forward", "forward + backward"))


def on_h100(*measured: Json) -> Figure:
    """What is in Gluon beside Triton's kernels; a later file has the last word."""
    found = {
        (row["rule"], *shape_of(row)): row
        for file in measured
        for row in file["rows"]
        if "forward_ms" in row["flashmix"]
    }
    found = dict(sorted(found.items()))
    names = [
        f"{row['rule'].replace('_', ' ')}, {row['B']} × {row['T']:,}\n{row['HV']} heads of {row['K']}"
        + (f", values of {row['V']}" if row["V"] != row["K"] else "")
        for row in found.values()
    ]
    figure, axes = panels(2, 9.0, 7.6)
    for panel, part in zip(axes, ("forward", "both"), strict=True):
        values = [
            (GLUON, [row["flashmix"][f"{part}_ms"] for row in found.values()]),
            (TRITON, [row["triton"][f"{part}_ms"] for row in found.values()]),
        ]
        bars(panel, names, values, 2)
    title = f"The recurrence on an {card(measured[-1])}, bfloat16 (less is faster)"
    return finish(figure, axes, title, "milliseconds", ("forward", "forward + backward"))


def memory(*measured: Json) -> Figure:
    found = by_rule(measured, (8, 4096, 16, 16, 128, 128))
    figure, axes = panels(1, 8.0, 5.4)
    values = [
        (TRITON, [row["flashmix"]["both_peak_gib"] for row in found.values()]),
        (FLA, [peer(row, "both_peak_gib") for row in found.values()]),
    ]
    bars(axes[0], [rule.replace("_", " ") for rule in found], values, 2)
    title = "Peak memory of forward + backward, 8 × 4,096 tokens, 16 heads of 128 channels, bfloat16"
    return finish(figure, axes, title, "GiB, inputs and gradients included")


def errors(*measured: Json) -> Figure:
    found = by_rule(measured, (8, 4096, 16, 16, 128, 128))
    figure, axes = panels(2, 9.0, 5.4)
    parts: list[Callable[[Json], float | None]] = [
        lambda of: of["errors"].get("o"),
        lambda of: max((e for name, e in of["errors"].items() if name != "o"), default=None),
    ]
    for panel, part in zip(axes, parts, strict=True):
        scaled = [
            (series, [None if (e := part(row[key])) is None else 1000 * e for row in found.values()])
            for series, key in ((TRITON, "flashmix"), (FLA, "fla"))
        ]
        bars(panel, [rule.replace("_", " ") for rule in found], scaled, 1)
    title = "Relative error against the float32 recurrence, bfloat16 inputs, NVIDIA H200 (less is better)"
    return finish(figure, axes, title, "thousandths", ("output", "worst gradient"))


def exact(measured: Json) -> Figure:
    """Errors against float64 by implementation, of the narrowest dtype of a file; torch's attention counts as plain PyTorch."""
    dtype = "bfloat16" if measured["measured_on"]["card"] != "cpu" else "float32"
    power, unit = (3, "thousandths") if dtype == "bfloat16" else (7, "ten-millionths")
    rows = [row for row in measured["rows"] if row["dtype"] == dtype]
    series = {"gluon": GLUON, "triton": TRITON, "native": C, "portable": PYTORCH, "float32, rounded": ROUNDED}
    figure, axes = panels(2, 9.0, 7.6)
    for panel, part in zip(axes, ("output", "gradient"), strict=True):
        values = [
            (shown, [None if (of := row["errors"].get(impl)) is None else of[part] * 10**power for row in rows])
            for impl, shown in series.items()
        ]
        bars(panel, [row["row"] for row in rows], [(shown, numbers) for shown, numbers in values if any(numbers)], 2)
    title = f"Relative error against the definition in float64, {dtype} (less is better)"
    return finish(figure, axes, title, unit, ("output", "worst gradient"))


def attention_length(*measured: Json) -> Figure:
    """TFLOP/s over tokens, with as many tokens in all."""
    rows, tokens = attention_rows(*measured), (4096, 8192, 16384)
    figure, axes = panels(2, 9.0, 3.8)
    for panel, part in zip(axes, ("forward", "backward"), strict=True):
        for series, key, marker in ((OURS, "auto", "o"), (FA4, "fa4", "s"), (CUDNN, "cudnn", "^")):
            found = [rows[f"128, {T}, {16384 // T}, 16 causal"][f"{key}_{part}"] for T in tokens]
            line = "--" if series.hatch else "-"
            panel.plot(
                tokens, found, line, color=series.colour, marker=marker, markeredgecolor="#333333", label=series.label
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(tokens, [f"{T:,}" for T in tokens])
        panel.set_ylim(0, 800)
        panel.grid(color="#e2e2e2")
    axes[0].set_ylabel("TFLOP/s")
    title = f"Causal attention over the length, 16,384 tokens in all, 16 heads of 128, {card(measured[-1])} (more is faster)"
    return finish(figure, axes, title, "tokens in a sequence", ("forward", "backward"))


def recurrence_length(*measured: Json) -> Figure:
    """The same tokens as eight sequences and as one."""
    short, long = (by_rule(measured, (B, 32768 // B, 16, 16, 128, 128)) for B in (8, 1))
    rules = [rule for rule in short if rule in long]
    figure, axes = panels(2, 9.0, 6.4)
    for panel, key in zip(axes, ("flashmix", "fla"), strict=True):
        few, many = (
            Series(f"{n} tokens", c, h) for n, c, h in (("8 × 4,096", "#5b9bd9", ""), ("1 × 32,768", "#f5b971", "///"))
        )
        rows = [
            (
                series,
                [
                    row["flashmix"]["both_ms"] if key == "flashmix" else peer(row, "both_ms")
                    for row in map(of.get, rules)
                ],
            )
            for series, of in ((few, short), (many, long))
        ]
        bars(panel, [rule.replace("_", " ") for rule in rules], rows, 1)
    title = "As many tokens in long sequences: forward + backward, 16 heads of 128, NVIDIA H200 (less is faster)"
    return finish(figure, axes, title, "milliseconds", ("flashmix, Triton", "flash-linear-attention"))


def decode_batch(measured: Json) -> Figure:
    """Time of a step over the number of sequences, beside the time in which a copy moves the same state."""
    from matplotlib.ticker import ScalarFormatter

    figure, axes = panels(1, 7.0, 4.0)
    lines = (
        (OURS, "delta_rule_step, float32 state", "-", "o"),
        (BFLOAT16, "delta_rule_step, bfloat16 state", "-", "s"),
        (FLA, "fla step", "--", "^"),
    )
    for series, what, line, marker in lines:
        found = [(row["B"], row["graph_us"]) for row in measured["rows"] if row["what"] == what]
        sizes, times = zip(*found, strict=True)
        label = "flashmix, float32 state" if series is OURS else series.label
        axes[0].plot(sizes, times, line, color=series.colour, marker=marker, markeredgecolor="#333333", label=label)
    full = [(row["B"], row["graph_us"] * row["copy"]) for row in measured["rows"] if row["what"] == lines[0][1]]
    axes[0].plot(*zip(*full, strict=True), ":", color="#333333", label="a copy of the float32 state")
    axes[0].set_xscale("log", base=2)
    axes[0].set_yscale("log")
    axes[0].xaxis.set_major_formatter(ScalarFormatter())
    axes[0].yaxis.set_major_formatter(ScalarFormatter())
    axes[0].set_ylabel("microseconds a step, in a graph")
    axes[0].grid(color="#e2e2e2")
    title = "One token of the delta rule, 32 heads of 128 × 128, H200 (less is faster)"
    return finish(figure, axes, title, "sequences")


def rowwise(*measured: Json) -> Figure:
    rows = [row for file in measured for row in file["rows"] if "flashmix_forward_of_copy" in row]
    figure, axes = panels(2, 9.0, 7.2)
    for panel, part in zip(axes, ("forward", "both"), strict=True):
        values = [
            (series, [None if (of := number(row, f"{key}_{part}_of_copy")) is None else 100 * of for row in rows])
            for series, key in ((OURS, "flashmix"), (FLA, "fla"), (COMPILE, "compile"))
        ]
        bars(panel, [f"{row['op']}\n{row['shape']}" for row in rows], values, 0)
        panel.axvline(100, color="#333333", linewidth=0.8, linestyle=":")
    title = "Row-wise ops, bfloat16, NVIDIA H200: share of the speed of a large copy (more is faster)"
    return finish(figure, axes, title, "per cent of the copy", ("forward", "forward + backward"))


def cpu(measured: Json) -> Figure:
    rows = [row for row in measured["rows"] if "transformers_forward_ms" in row]
    figure, axes = panels(2, 9.0, 3.2)
    for panel, part in zip(axes, ("forward", "forward_backward"), strict=True):
        values = [
            (OURS, [row[f"{part}_ms"] for row in rows]),
            (TRANSFORMERS, [row[f"transformers_{part}_ms"] for row in rows]),
        ]
        bars(panel, [row["shape"].replace("x", " × ") for row in rows], values, 0)
    title = "Gated DeltaNet on 2 CPU cores, float32 (less is faster)"
    return finish(figure, axes, title, "milliseconds", ("forward", "forward + backward"))


@dataclass(frozen=True)
class Plot:
    """A plot: what draws it, the files of `benchmarks/results` that it takes, and the sentence below it."""

    draw: Draw
    files: tuple[str, ...]
    caption: str

    @property
    def sources(self) -> str:
        return ", ".join(f"benchmarks/results/{file}" for file in self.files)


HOPPER = ("2026-11-22_recurrence_hopper_all_h200.json", "2026-11-29_recurrence_peers_h200.json")
ATTENTION = tuple(
    f"2026-11-28_attention_{name}_h200.json"
    for name in ("hopper_all", "fa4_later", "fa4_drawn", "fa4_first_max", "last")
)
IN_GLUON = {"gated_delta_rule", "delta_rule", "kda", "gla", "simple_gla", "retention"}  # of the files of these dates
GLUON_FILES = tuple(
    f"{day}_{kind}_h200.json"
    for day, kind in (
        ("2026-11-22", "recurrence_hopper_all"),
        ("2026-11-23", "recurrence_pairs_made"),
        ("2026-11-23", "recurrence_heads_of_64_and_256"),
    )
)
ON_H100 = tuple(f"2026-11-25_recurrence_{kind}_h100.json" for kind in ("tried", "final"))
RULES = tuple(f"2026-11-21_recurrence_gpu{kind}_h200.json" for kind in ("", "_rest", "_gated"))
ROWWISE = ("2026-11-21_rowwise_h200.json", "2026-11-21_convolution_and_losses_h200.json")
PLOTS = {
    "gated_deltanet": Plot(
        gated_deltanet,
        (*HOPPER, RULES[2]),
        "Medians with a cold L2 cache, the host's time hidden. Gluon and FlashQLA 0.1.3: in turns in one run of 2026-11-29; Triton: "
        "2026-11-22; flash-linear-attention 0.6.0 (with tilelang, the host's time included): 2026-11-21. The bound is the larger of "
        "necessary bytes / 4.28 TB/s and operations / 790 TFLOP/s.",
    ),
    "attention": Plot(
        attention,
        ATTENTION,
        "2026-11-28, FlashAttention-4 4.0.0b36 and cuDNN in turns with ours, in random order, medians, cold L2 cache, the card at its "
        "power limit: forward in one run, but ours and cuDNN of 192 channels and of 80 full in a later one; backward in one, 256 channels "
        "in two, 80, which FlashAttention-4 gets wrong, in one before.",
    ),
    "decode": Plot(
        decode,
        ("2026-11-21_decode_h200.json",),
        "2026-11-21. The layer between its projections: convolution, normalised keys, gates, the recurrence "
        "and the gated norm, one launch of flashmix.",
    ),
    "mechanisms": Plot(
        mechanisms,
        (*RULES, *GLUON_FILES),
        "Triton and flash-linear-attention 0.6.0: 2026-11-21, the host's time included; where flash-linear-attention refuses its "
        "backward on this Triton (simple GLA), its code with the refusal lifted was timed. Gluon: runs of 2026-11-22 and 23, the host's "
        "time hidden.",
    ),
    "on_h100": Plot(
        on_h100,
        ON_H100,
        "2026-11-25, runs that take turns, the host's time hidden. Rows of two runs are the later one's.",
    ),
    "memory": Plot(memory, RULES, "2026-11-21, the runs of the plot of mechanisms."),
    "errors": Plot(
        errors,
        RULES,
        "2026-11-21, one sequence of each row. The float64 definitions are compared in the tests, "
        "within the budget of the page on numerics.",
    ),
    "exact": Plot(
        exact,
        ("2026-11-26_errors_h100.json",),
        "2026-11-26, `python benchmarks/errors.py --device cuda` on an H100: 512 tokens, 2 heads of 128 channels (element by element: 256 "
        "channels), the same inputs for all. The definition is a loop over tokens.",
    ),
    "exact_cpu": Plot(
        exact,
        ("2026-11-26_errors_cpu.json",),
        "2026-11-26, `python benchmarks/errors.py` on a CPU: 512 tokens, 2 heads of 128 channels (element by element: 256 channels), "
        "the same inputs for all. The definition is a loop over tokens.",
    ),
    "attention_length": Plot(
        attention_length,
        ATTENTION[2:4],
        "2026-11-28, FlashAttention-4 4.0.0b36 and cuDNN in turns with ours, forward and backward in a run each.",
    ),
    "recurrence_length": Plot(
        recurrence_length, RULES, "2026-11-21. A long sequence is split into segments that are joined by one pass."
    ),
    "decode_batch": Plot(
        decode_batch, ("2026-11-20_decode_h200.json",), "2026-11-20, the run with the most batch sizes."
    ),
    "rowwise": Plot(
        rowwise, ROWWISE, "2026-11-21. Necessary bytes over time, over the copy's bytes over its time (4.23 TB/s)."
    ),
    "cpu": Plot(
        cpu,
        ("2026-11-21_recurrence_cpu.json",),
        "2026-11-21, AMD EPYC, batch × tokens × heads × channels, beside the PyTorch path of transformers.",
    ),
}
README = ("gated_deltanet", "attention", "decode")


def save(name: str, folder: Path, ending: str = "svg") -> Path:
    """Draws a plot into a folder; its sources stand in the picture's own description."""
    import matplotlib

    plot = PLOTS[name]
    with matplotlib.rc_context(STYLE):
        figure = plot.draw(*(json.loads((RESULTS / file).read_text()) for file in plot.files))
        target = folder / f"{name}.{ending}"
        described = {"Date": None, "Description": plot.sources} if ending == "svg" else None
        figure.savefig(target, metadata=described, dpi=120)
    if ending == "svg":  # trailing blanks of matplotlib's paths
        target.write_text("\n".join(line.rstrip() for line in target.read_text().splitlines()) + "\n")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Plots of benchmarks/results.")
    parser.add_argument(
        "--all", type=Path, metavar="FOLDER", help="every plot into this folder (default: README's into docs/plots)"
    )
    parser.add_argument("--png", action="store_true", help="PNG in place of SVG")
    args = parser.parse_args()
    folder = args.all or COMMITTED
    folder.mkdir(parents=True, exist_ok=True)
    for name in PLOTS if args.all else README:
        target = save(name, folder, "png" if args.png else "svg")
        print(f"{target}: {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
