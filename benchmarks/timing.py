"""The one way benchmarks measure: medians of interleaved runs, the machine's own ceiling beside them, results as dated JSON."""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))


def medians(runs: dict[str, Callable[[], Any]], repeats: int = 16, warmup: int = 4) -> dict[str, float]:
    """Median milliseconds of each run. The runs take turns, so that what disturbs the machine disturbs all of them.

    Every other turn goes backwards, so `repeats` is even: in one order a run always finds the caches as the same other run leaves them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(warmup + repeats):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            run()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: sorted(values)[len(values) // 2] * 1e3 for name, values in times.items()}


def cuda_medians(
    runs: dict[str, Callable[[], Any]], repeats: int = 15, warmup: int = 3, ahead: bool = True
) -> dict[str, float]:
    """Median milliseconds of each run on the GPU, between events. The runs take turns in random order; each starts with a cold L2 cache.

    In one order a run would always follow the same other: at its power limit a card is slower after one that uses more.

    The GPU idles first, for half a millisecond and half as long again as the host took for the last run of the warm-up, so that the
    host is ahead of it and its own time is not measured. Without `ahead` it does not, as in `triton.testing.do_bench`: where the host
    needs longer than the GPU, its time is what is found.
    """
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    cycles = dict.fromkeys(runs, 1_000_000)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    order, turns = list(runs), random.Random(0)
    for turn in range(warmup + repeats):
        turns.shuffle(order)
        for name in order:
            run = runs[name]
            flush.zero_()
            if ahead:
                torch.cuda._sleep(cycles[name])
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begun = time.perf_counter()
            run()
            end.record()
            if turn >= warmup:
                events[name].append((start, end))
            else:
                cycles[name] = 1_000_000 + min(100_000_000, int(3e9 * (time.perf_counter() - begun)))  # at up to 2 GHz
    torch.cuda.synchronize()
    times = {name: sorted(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}
    return {name: values[len(values) // 2] for name, values in times.items()}


def graph_of(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, after each has run once."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def card() -> str:
    """The GPU, as files of results are named for it: "h100", "h200", or the last word of its name; else "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().lower().split()
    return next((word for word in words if re.fullmatch(r"[a-z]+\d+", word)), words[-1])


def matrix_product_rate(size: int = 2048) -> float:
    """GFLOP/s of one large float32 matrix product: the ceiling of everything that is made of matrix products."""
    x = torch.randn(size, size)
    return 2 * size**3 / medians({"product": lambda: x @ x}, repeats=7)["product"] / 1e6


def write_json(path: Path, rows: list[dict[str, Any]], more: dict[str, Any] | None = None) -> Path:
    """Writes the rows and what they were measured on (and `more` of that) under a temporary name, then renames the file."""
    from flashmix.gpu.arch import cpu_name  # here, so that the timers above work beside any version of flashmix

    about = {"machine": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__, **(more or {})}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"measured_on": about, "rows": rows}, indent=1) + "\n")
    os.replace(partial, path)
    return path


def write_results(
    name: str, rows: list[dict[str, Any]], folder: Path | None = None, more: dict[str, Any] | None = None
) -> Path:
    """Writes `<date>_<name>.json` as `write_json` does."""
    return write_json((folder or RESULTS) / f"{datetime.date.today().isoformat()}_{name}.json", rows, more)
