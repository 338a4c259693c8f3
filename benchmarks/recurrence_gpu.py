"""The recurrence on a GPU beside flash-linear-attention, if it is there: `python benchmarks/recurrence_gpu.py [--only NAME[,NAME]]`.

Before a row is timed our output and gradients are compared with the float32 result of the portable implementation for one sequence and
one key head (with its value heads), and so are the peer's: over a wrong result no speed-up is printed. Then medians, with a
cold L2 cache, of forward and of forward + backward; the memory that forward + backward needs beside its inputs; and the
fraction of the bound, the larger of bytes / 4.28 TB/s and FLOPs / 790 TFLOP/s (an H200), forward and backward each with its own.
What a peer cannot run is written into its row.

`--warm N` first compiles every row in N processes at a time. `--lift` also times the peer's backward where it refuses because
this Triton may compile it wrong (no speed-up is made of that). `--merge FILES` joins the JSON of parts. `--table` measures
candidates of `triton_gpu/table.py`, kernel by kernel; `--first-call` times a fresh process.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from os import environ
from pathlib import Path
from typing import Any
from unittest import mock

import timing
import torch
from recurrence_rows import ROWS, RULES, Row, Tensors, bounds, gradients, message, ours, peers, tensors
from torch import Tensor

LIMITS = {"o": 1e-2}  # of the relative error; of gradients:
LIMIT = 3e-2
PACKAGES = ("triton", "fla-core", "flash-linear-attention", "tilelang", "flash-qla")
PEERS = ("fla", "fla bounded", "fla lifted")


@contextmanager
def lifted() -> Iterator[None]:
    """Within, the peer's backward runs with a Triton with which it refuses to, for wrong results: its time may count, they do not."""
    module = importlib.import_module("fla.ops.common.chunk_o")
    with mock.patch.object(module, "TRITON_ABOVE_3_7_1", True):
        yield


def sides(row: Row, options: argparse.Namespace) -> dict[str, Callable[[Tensors], Tensor]]:
    """Who computes a row."""
    found = {"flashmix": lambda x: ours(row, x)}
    if not options.no_peer:
        found["fla"] = lambda x: peers(row, x)
    if not options.no_peer and options.bounded and row.rule in ("kda", "rwkv7"):
        found["fla bounded"] = lambda x: peers(row, x, True)
    if not options.no_peer and options.lift and RULES[row.rule].gate == "token":
        found["fla lifted"] = lambda x: peers(row, x)
    return found


def guard(side: str) -> AbstractContextManager[None]:
    return lifted() if side == "fla lifted" else nullcontext()


def group(row: Row, name: str, t: Tensor) -> Tensor:
    """Of the last sequence the last key head, or its value heads: they depend on nothing else."""
    if t.dim() == 1:
        return t[-(row.HV // row.H) :]
    return t[-1:, :, -(t.shape[2] // row.H) :]


def reference(row: Row, x: Tensors, do: Tensor) -> Tensors:
    """Output and gradients of `group` in float32."""
    part = Row(row.rule, 1, row.T, 1, row.HV // row.H, row.K, row.V)
    own = {name: group(row, name, t.detach()).float().requires_grad_(t.requires_grad) for name, t in x.items()}
    return gradients(lambda y: ours(part, y, "portable"), own, group(row, "do", do).float())


def errors(row: Row, found: Tensors, wanted: Tensors) -> dict[str, float]:
    """Relative errors of those that were found."""
    parts = {name: (group(row, name, t).float(), wanted[name]) for name, t in found.items()}
    return {name: float(f"{((a - b).norm() / b.norm()).item():.2e}") for name, (a, b) in parts.items()}


def wrong(own: dict[str, float], peer: dict[str, float]) -> list[str]:
    """Names whose error is past the limit, and past twice the peer's (itself within the limit) where that is larger."""
    limits = {name: max(LIMITS.get(name, LIMIT), 2 * min(peer.get(name, 0.0), LIMIT)) for name in own}
    return [name for name, error in own.items() if not error <= limits[name]]


def median(run: Callable[[], Any], milliseconds: int) -> float:
    from triton.testing import do_bench

    return round(do_bench(run, warmup=10, rep=milliseconds, return_mode="median"), 4)


def peak(run: Callable[[], Any]) -> float:
    """GiB that a run needs beside what is there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)


def one_side(
    row: Row, run: Callable[[Tensors], Tensor], x: Tensors, do: Tensor, wanted: Tensors, forward_only: bool
) -> dict[str, Any]:
    """Errors, times and memory of one implementation; what it cannot run as its message."""
    found: dict[str, Any] = {"errors": {}}

    def forward() -> Tensor:
        with torch.no_grad():
            return run(x)

    def both() -> Tensors:
        return gradients(run, x, do)

    steps: list[tuple[str, str, Callable[[], Any]]] = [
        ("forward", "errors", lambda: errors(row, {"o": forward()}, wanted)),
        ("forward", "forward_ms", lambda: median(forward, 60)),
        ("both", "errors", lambda: errors(row, both(), wanted)),
        ("both", "both_ms", lambda: median(both, 100)),
        ("both", "both_peak_gib", lambda: peak(both)),
    ]
    start = time.perf_counter()
    for kind, name, step in steps[: 2 if forward_only else None]:
        try:
            found[name] = step()
        except Exception as error:  # a peer may raise anything; the row says what
            found["failed"] = {kind: message(error)}
            break
        torch.cuda.empty_cache()
    found["seconds"] = round(time.perf_counter() - start, 1)
    return found


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """All sides of a row, the fractions of the bound, and the ratios where our results are right."""
    x = tensors(row)
    do = torch.randn_like(x["v"])
    wanted = reference(row, x, do)
    bound = dict(zip(("forward", "both"), bounds(row, x), strict=True))
    found: dict[str, Any] = {**asdict(row), "bound_ms": {kind: round(ms, 4) for kind, ms in bound.items()}}
    for name, run in sides(row, options).items():
        with guard(name):
            found[name] = one_side(row, run, x, do, wanted, options.forward)
        for kind, ms in bound.items():
            if f"{kind}_ms" in found[name]:
                found[name][f"{kind}_of_bound"] = round(ms / found[name][f"{kind}_ms"], 3)
    own, other = found["flashmix"], found.get("fla", {})
    found["wrong"] = wrong(own["errors"], other.get("errors", {}))
    for kind in bound:
        if not found["wrong"] and f"{kind}_ms" in own and f"{kind}_ms" in other:
            found[f"{kind}_speedup"] = round(other[f"{kind}_ms"] / own[f"{kind}_ms"], 3)
    return found


def line(found: dict[str, Any]) -> str:
    """A row in one line, and a line for each thing that went wrong."""
    name = Row(**{key: found[key] for key in Row.__dataclass_fields__}).name
    if "skipped" in found or "failed" in found:
        return f"{name}: " + (found.get("skipped") or found["failed"])
    text = [f"{name:46}"]
    for kind in ("forward", "both"):
        text.append(
            f"{kind} {found['flashmix'].get(f'{kind}_ms', '-'):>8} ms {found['flashmix'].get(f'{kind}_of_bound', 0):5.0%} of bound"
        )
        for other in PEERS:
            if other in found:
                text.append(f"{other} {found[other].get(f'{kind}_ms', '-'):>8}")
        text.append(f"{found.get(f'{kind}_speedup', '-'):>6}x |")
    text.append("GiB " + " / ".join(str(found[s].get("both_peak_gib", "-")) for s in ("flashmix", "fla") if s in found))
    text.append(f"err {max(found['flashmix']['errors'].values(), default=0):.1e}")
    lines = [" ".join(text)]
    if found["wrong"]:
        lines.append(f"  WRONG, no speed-up: {found['wrong']} of {found['flashmix']['errors']}")
    lines += [f"  {s} failed: {found[s]['failed']}" for s in ("flashmix", *PEERS) if "failed" in found.get(s, {})]
    return "\n".join(lines)


def chosen(only: str, rows: Iterable[Row] = ROWS) -> list[Row]:
    """Rows of the rules that are named; of `rule:i` only its i-th row."""
    found = []
    for name in only.split(",") if only else RULES:
        rule, _, number = name.partition(":")
        if rule not in RULES:
            raise SystemExit(f"no rule {rule}; there are: {', '.join(RULES)}")
        own = [row for row in rows if row.rule == rule]
        if number and int(number) >= len(own):
            raise SystemExit(f"{rule} has rows 0 to {len(own) - 1}, got {number}")
        found += [own[int(number)]] if number else own
    return found


def versions() -> dict[str, Any]:
    """What the results depend on."""
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def warm(rows: list[Row], options: argparse.Namespace) -> None:
    """Compiles what the rows need, each kind of kernel in a process of its own. The peer tunes itself later, undisturbed."""
    kinds = {(row.rule, row.H, row.HV, row.K, row.V): row for row in rows}
    flags = [
        flag
        for flag in ("--no-peer", "--forward", "--bounded", "--lift")
        if getattr(options, flag[2:].replace("-", "_"))
    ]

    def compile_one(row: Row) -> str:
        number = [r for r in ROWS if r.rule == row.rule].index(row)
        command = [sys.executable, __file__, "--only", f"{row.rule}:{number}", "--compile", *flags]
        done = subprocess.run(command, capture_output=True, text=True, env={**environ, "FLA_CACHE_RESULTS": "0"})
        return f"{row.name}: {done.stdout.strip() or done.stderr[-300:]}"

    start = time.perf_counter()
    with ThreadPoolExecutor(options.warm) as pool:
        for text in pool.map(compile_one, kinds.values()):
            print("warm", text, flush=True)
    print(f"warm in {time.perf_counter() - start:.0f} s", flush=True)


def compile_row(row: Row, options: argparse.Namespace) -> None:
    """One run of all sides."""
    x = tensors(row)
    do = torch.randn_like(x["v"])
    for name, run in sides(row, options).items():
        start = time.perf_counter()
        try:
            with guard(name):
                with torch.no_grad():
                    run(x)
                if not options.forward:
                    gradients(run, x, do)
            torch.cuda.synchronize()
            print(name, f"{time.perf_counter() - start:.0f} s;", end=" ")
        except Exception as error:
            print(name, message(error)[:100], end="; ")


def compare(rows: list[Row], options: argparse.Namespace) -> None:
    """Measures rows until the time is over; the JSON is written after each."""
    start, found = time.perf_counter(), []
    for row in rows:
        if options.seconds and time.perf_counter() - start > options.seconds:
            found.append({**asdict(row), "skipped": f"no time left of {options.seconds} s"})
        else:
            try:
                found.append(measure(row, options))
            except Exception as error:
                found.append({**asdict(row), "failed": message(error)})
        torch.cuda.empty_cache()
        print(line(found[-1]), flush=True)
        path = timing.write_results(options.name, found, options.out, versions())
    print(path)


def merge(files: list[Path], options: argparse.Namespace) -> None:
    """Joins parts that were measured on the same: of a row that is there twice the later, unless it was skipped or failed."""
    parts = [json.loads(file.read_text()) for file in files]
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        if any(
            part["measured_on"].get(name) != parts[0]["measured_on"].get(name) for name in ("gpu", "torch", *PACKAGES)
        ):
            raise SystemExit(
                f"parts differ in what they were measured on: {part['measured_on']}, {parts[0]['measured_on']}"
            )
        for found in part["rows"]:
            key = json.dumps([found.get(name) for name in Row.__dataclass_fields__])
            if key not in rows or "skipped" in rows[key] or not ("skipped" in found or "failed" in found):
                rows[key] = found
    for found in rows.values():
        print(line(found))
    print(timing.write_results(options.name, list(rows.values()), options.out, parts[0]["measured_on"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="rules, or rows of them (kda:1), separated by commas: " + ", ".join(RULES)
    )
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--bounded", action="store_true", help="the peer's kernels for bounded decays too (kda, rwkv7)")
    parser.add_argument(
        "--lift", action="store_true", help="time the peer's backward where it refuses, too; no speed-up is made of it"
    )
    parser.add_argument("--forward", action="store_true", help="no backward")
    parser.add_argument("--seconds", type=float, help="rows that would start later are skipped")
    parser.add_argument("--warm", type=int, metavar="N", help="first compile in N processes")
    parser.add_argument("--compile", action="store_true", help="only run each row once")
    parser.add_argument("--out", type=Path, help="folder of the JSON")
    parser.add_argument("--name", default=f"recurrence_gpu_{timing.card()}", help="of the JSON, after the date")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--table", action="store_true", help="candidates of the table of tiles; --only names kernels")
    parser.add_argument("--first-call", action="store_true")
    options = parser.parse_args()
    if options.table or options.first_call:
        import recurrence_gpu_table as other

        found = (
            other.table(options.only, options.seconds, options.warm)
            if options.table
            else other.first_call(not options.no_peer)
        )
        print(timing.write_results(options.name, found, options.out, versions()))
        return
    if options.merge:
        merge(options.merge, options)
        return
    rows = chosen(options.only)
    if options.compile:
        for row in rows:
            compile_row(row, options)
        return
    if options.warm:
        warm(rows, options)
    compare(rows, options)


if __name__ == "__main__":
    main()
