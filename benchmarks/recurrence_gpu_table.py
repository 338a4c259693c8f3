"""What `recurrence_gpu.py --table` and `--first-call` measure: candidates of the table of tiles, and a fresh process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from recurrence_rows import Row, gradients, message, ours, tensors

Tile = dict[str, int]


@dataclass(frozen=True)
class Candidates:
    """Tiles to try for the `fields` of the table (one value for each), and the kernels whose time they change, for decays so many
    times as strong as the benchmark's.
    """

    row: Row
    fields: tuple[str, ...]
    kernels: tuple[str, ...]
    tiles: tuple[tuple[Any, ...], ...]
    decay: float = 1.0


def tile(warps: int, stages: int = 1, **sizes: int) -> Tile:
    """The fields of a tile of the table."""
    return {**sizes, "warps": warps, "stages": stages}


def of_state(*choices: tuple[int, int, int], BK: int = 128) -> tuple[tuple[Tile], ...]:
    return tuple((tile(warps, stages, BK=BK, BV=BV),) for BV, warps, stages in choices)


def of_output(*choices: tuple[int, int, int, int]) -> tuple[tuple[Tile], ...]:
    return tuple((tile(warps, stages, BK=BK, BV=BV),) for BK, BV, warps, stages in choices)


def of_scores(*choices: tuple[int, int]) -> tuple[tuple[Tile], ...]:
    return tuple((tile(warps, BK=BK),) for BK, warps in choices)


def of_segments(*choices: tuple[int, int, int, int]) -> tuple[tuple[Any, ...], ...]:
    return tuple((*(tile(w, s, BK=128, BV=BV) for _ in range(3)), count) for BV, w, s, count in choices)


MANY, FEW = Row("gated_delta_rule", 4, 8192, 16, 64), Row("gated_delta_rule", 1, 32768, 2, 8)
CHANNEL, LOW_RANK = Row("kda", 8, 4096, 16, 16), Row("rwkv7", 8, 4096, 16, 16)
SLOTS = Row("gsa", 8, 4096, 16, 16)
WIDE, NARROW = (Row("gated_delta_rule", 4, 8192, 16, 16, D, D) for D in (256, 64))
STATE = ((64, 4, 2), (64, 4, 1), (64, 4, 3), (64, 8, 2), (128, 8, 2), (32, 4, 2))
OUTPUT = (
    (32, 128, 4, 1),
    (32, 128, 4, 2),
    (32, 64, 4, 1),
    (64, 64, 4, 1),
    (64, 64, 8, 1),
    (64, 128, 8, 1),
    (64, 128, 8, 2),
)
VALUES = ((32, 128, 4, 1), (32, 128, 8, 1), (32, 64, 4, 1), (32, 64, 8, 1), (16, 128, 4, 1), (32, 128, 4, 2))
PAIRS = ((32, 64, 4, 1), (16, 64, 4, 1), (32, 64, 8, 1), (16, 64, 8, 1), (32, 32, 8, 1))
SEGMENTS = ((64, 4, 2, 1), (64, 4, 2, 8), (64, 4, 2, 16), (64, 4, 2, 32), (32, 4, 2, 16), (128, 8, 2, 32))
CANDIDATES = {
    "scores": Candidates(MANY, ("scores",), ("scores_forward_kernel",), of_scores((64, 4), (128, 4), (64, 8), (128, 8), (64, 2))),
    "state": Candidates(MANY, ("state",), ("state_forward_kernel",), of_state(*STATE)),
    "state_backward": Candidates(MANY, ("state_backward",), ("state_backward_kernel",), of_state(*STATE)),
    "output": Candidates(MANY, ("output",), ("output_backward_kernel",), of_output(*OUTPUT)),
    "maps": Candidates(FEW, ("maps",), ("state_forward_kernel",), of_state((64, 4, 2), (64, 4, 3), (64, 4, 4))),
    "segments": Candidates(
        FEW, ("state", "maps", "state_backward", "segments"), ("state_", "segments_"), of_segments(*SEGMENTS)
    ),
    "channel_decay": Candidates(
        CHANNEL, ("decay",), ("decay_sums_kernel",), of_scores((64, 4), (128, 4), (32, 4), (64, 8), (64, 2))
    ),
    "channel_scores": Candidates(
        CHANNEL, ("scores",), ("scores_forward_kernel",), of_scores((32, 4), (32, 8), (16, 4), (16, 8))
    ),
    "channel_output": Candidates(CHANNEL, ("output",), ("output_backward_kernel",), of_output(*OUTPUT)),
    "channel_pairs": Candidates(CHANNEL, ("pairs",), ("channel_pairs_backward_kernel",), of_output(*PAIRS), 30.0),
    "values": Candidates(SLOTS, ("values",), ("value_output_kernel",), of_output(*VALUES)),
    "values_output": Candidates(SLOTS, ("output",), ("output_backward_kernel",), of_output(*OUTPUT)),
    "dplr_state": Candidates(LOW_RANK, ("state",), ("state_forward_kernel",), of_state(*STATE)),
    "dplr_state_backward": Candidates(LOW_RANK, ("state_backward",), ("state_backward_kernel",), of_state(*STATE)),
    "dplr_output": Candidates(LOW_RANK, ("output",), ("output_backward_kernel",), of_output(*OUTPUT)),
    "dplr_pairs": Candidates(LOW_RANK, ("pairs",), ("channel_pairs_backward_kernel",), of_output(*PAIRS), 30.0),
    "wide_state": Candidates(WIDE, ("state",), ("state_forward_kernel",), of_state(
        (32, 4, 2), (32, 4, 1), (64, 8, 1), (64, 4, 1), (32, 8, 2), (16, 4, 2), BK=256
    )),
    "wide_state_backward": Candidates(WIDE, ("state_backward",), ("state_backward_kernel",), of_state(
        (32, 4, 2), (32, 4, 1), (64, 8, 1), (64, 4, 1), (32, 8, 2), (16, 4, 2), BK=256
    )),
    "wide_output": Candidates(WIDE, ("output",), ("output_backward_kernel",), of_output(
        (32, 64, 4, 1), (32, 128, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (32, 128, 8, 1)
    )),
    "narrow_state": Candidates(NARROW, ("state",), ("state_forward_kernel",), of_state(
        (64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 2, 2), (16, 4, 2), BK=64
    )),
    "narrow_output": Candidates(NARROW, ("output",), ("output_backward_kernel",), of_output(
        (32, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (32, 64, 4, 2), (32, 64, 8, 1)
    )),
}  # fmt: skip


def kernel_times(run: Callable[[], Any], count: int = 5) -> dict[str, float]:
    """Milliseconds a run of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    times = ((event.key, event.self_device_time_total / count / 1e3) for event in found.key_averages())
    return {name: round(ms, 4) for name, ms in times if ms > 0}


def measure(
    wanted: Candidates, values: tuple[Any, ...] | None, x: Any, do: Any, first: dict[str, Any]
) -> dict[str, Any]:
    """Times of the kernels with `values` in the table (None: as it is) and how far results are from the `first`."""
    plans = importlib.import_module("flashmix.ops.recurrence.triton_gpu.plan")
    table = plans.tiles

    def replaced(*kind: Any) -> Any:
        own = table(*kind)
        found["tiles"] = changed or {name: getattr(own, name) for name in wanted.fields}
        tiles = {name: plans.Tile(**tile) if isinstance(tile, dict) else tile for name, tile in changed.items()}
        return own._replace(**tiles)

    changed = {} if values is None else dict(zip(wanted.fields, values, strict=True))
    found: dict[str, Any] = {"table": values is None, "tiles": changed}
    plans.cached_plan.cache_clear()
    try:
        with mock.patch.object(plans, "tiles", replaced):
            results = gradients(lambda y: ours(wanted.row, y), x, do)
            times = kernel_times(lambda: gradients(lambda y: ours(wanted.row, y), x, do))
    except Exception as error:  # a candidate may not fit
        return {**found, "failed": message(error)}
    finally:
        plans.cached_plan.cache_clear()
    first = first or results
    own = {name: ms for name, ms in times.items() if name.startswith(wanted.kernels)}
    apart = max(((t.float() - first[n].float()).norm() / first[n].float().norm()).item() for n, t in results.items())
    found |= {"kernels_ms": own, "ms": round(sum(own.values()), 4), "apart": float(f"{apart:.1e}")}
    return found if first is not results else {**found, "results": results}


def warm(names: list[str], processes: int) -> None:
    """Compiles all candidates, each kernel's in a process of its own."""

    def run(name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            script = str(Path(__file__).with_name("recurrence_gpu.py"))
            subprocess.run(
                [sys.executable, script, "--table", "--only", name, "--out", folder], stdout=subprocess.DEVNULL
            )

    start = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, names))
    print(f"warm in {time.perf_counter() - start:.0f} s", flush=True)


def table(only: str, seconds: float | None, processes: int | None = None) -> list[dict[str, Any]]:
    """The table's own tiles (*) first, then each candidate; kernels of `only`, until the time is over."""
    start, rows = time.perf_counter(), []
    names = only.split(",") if only else list(CANDIDATES)
    if unknown := set(names) - set(CANDIDATES):
        raise SystemExit(f"no candidates for {', '.join(sorted(unknown))}; there are: {', '.join(CANDIDATES)}")
    if processes:
        warm(names, processes)
    for name in names:
        wanted = CANDIDATES[name]
        x = tensors(wanted.row)
        if wanted.decay != 1.0:
            x["g"] = (x["g"].detach() * wanted.decay).requires_grad_()
        do = torch.randn_like(x["v"])
        first: dict[str, Any] = {}
        for values in (None, *wanted.tiles):
            if seconds and time.perf_counter() - start > seconds:
                found: dict[str, Any] = {"skipped": f"no time left of {seconds} s", "tiles": values}
            else:
                found = measure(wanted, values, x, do, first)
            first = found.pop("results", first)
            rows.append({"kernel": name, "on": wanted.row.name, **found})
            text = found.get("ms", found.get("failed", "skipped"))
            mark = "*" if found.get("table") else " "
            print(f"{name:20}{mark} {found['tiles']!s:100} {text} {found.get('apart', '')}", flush=True)
        del x, do, first
        torch.cuda.empty_cache()
    return rows


FIRST = """
import json, sys, time
begin = time.perf_counter()
import torch
x = torch.zeros(1, device="cuda", requires_grad=True)
torch.autograd.grad(x + 1, x, torch.ones_like(x))  # torch imports sympy for a gradient that is given: its start, not ours
torch.cuda.synchronize()
started = time.perf_counter()
def make(*shape):
    return torch.randn(shape, device="cuda")
def unit(x):
    return torch.nn.functional.normalize(x, dim=-1).bfloat16().requires_grad_()
q, k = unit(make(1, 4096, 16, 128)), unit(make(1, 4096, 16, 128))
v = make(1, 4096, 16, 128).bfloat16().requires_grad_()
beta, g = make(1, 4096, 16).sigmoid().requires_grad_(), (-make(1, 4096, 16).sigmoid()).requires_grad_()
torch.cuda.synchronize()
ready = time.perf_counter()
if sys.argv[1] == "flashmix":
    import flashmix
    call = lambda: flashmix.delta_rule(q, k, v, beta, g, impl="triton")[0]
else:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    call = lambda: chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta)[0]
imported = time.perf_counter()
o = call()
torch.cuda.synchronize()
forward = time.perf_counter()
found = {"torch_s": started - begin, "import_s": imported - ready, "forward_s": forward - imported}
try:
    torch.autograd.grad(o, (q, k, v, beta, g), torch.ones_like(o))
    torch.cuda.synchronize()
    found["backward_s"] = time.perf_counter() - forward
except Exception as error:
    found["failed"] = repr(error)[:200]
found["beyond_torch_s"] = time.perf_counter() - ready
print(json.dumps(found))
"""


def first_call(peer: bool) -> list[dict[str, Any]]:
    """Seconds of import, first forward and first backward of Gated DeltaNet in a fresh process, with an empty compile cache and
    then with what it left there.
    """
    rows = []
    paths = [str(Path(__file__).resolve().parent.parent), environ.get("PYTHONPATH", "")]
    for side in ("flashmix", "fla") if peer else ("flashmix",):
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("empty", "warm"):
                env = {**environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": ":".join(path for path in paths if path)}
                done = subprocess.run([sys.executable, "-c", FIRST, side], capture_output=True, text=True, env=env)
                row: dict[str, Any] = {"first_call": side, "cache": cache}
                try:
                    times = json.loads(done.stdout.splitlines()[-1])
                    row |= {name: round(s, 2) if isinstance(s, float) else s for name, s in times.items()}
                except (IndexError, ValueError):
                    row["failed"] = done.stderr[-300:]
                rows.append(row)
                print(row, flush=True)
    return rows
