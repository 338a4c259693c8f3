"""Two checkouts of flashmix against each other, row by row: `python benchmarks/compare.py OLD_ROOT NEW_ROOT [--device cuda]`.

Two workers, each with one checkout on its path, hold the same tensors and are timed in turns (A, B, B, A, ...): only one works at a
time, so that what disturbs the machine disturbs both. A row is the median over the rounds of each side; the ratio B / A, the median
of the ratios of each round's two turns; and the spread, the median distance of those from it. Rows over the limit are measured once more
with fresh workers and twice the rounds; what counts is the second measurement, and the JSON has the first ratio too.

The limit of a row is `--limit` for the ratio, in milliseconds of the device (cold L2 cache) or of a CPU; of a "host" row, the time
until a small call returns, it is `--host-limit` microseconds. Memory that a part needs at its peak is compared as well.
On a GPU `--compilers` processes of each side first run every case once, so that the compile cache holds all kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import timing

SECONDS = 0.025  # of a turn, about: a disturbance that lasts longer slows both turns of a round
SLOW = 50.0  # milliseconds from which on five rounds are enough
Answer = dict[str, Any]


# A worker: reads requests, writes answers, a line of JSON each


class Bench:
    """Within a worker: the case that is open, and how its parts are timed."""

    def __init__(self, device: str, threads: int) -> None:
        import torch

        self.torch, self.device, self.gpu = torch, device, device == "cuda"
        if not self.gpu:
            torch.set_num_threads(threads)
        import compare_rows

        self.cases = compare_rows.cases(device)
        self.open_parts: dict[str, Any] = {}

    def about(self) -> Answer:
        import flashmix

        torch = self.torch
        found: Answer = {"flashmix": flashmix.__file__, "torch": torch.__version__, "threads": torch.get_num_threads()}
        found["rows"] = {name: [list(case.parts), case.precompiled] for name, case in self.cases.items()}
        return found | ({"gpu": torch.cuda.get_device_name()} if self.gpu else {})

    def wait(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def open(self, name: str, parts: list[str]) -> Answer:
        """Makes the case and runs these parts until it is warm: its milliseconds, about, and the MiB that it needs at its peak."""
        self.torch.manual_seed(0)
        with self.torch.device(self.device):
            self.open_parts = self.cases[name].make()
        return {"parts": {part: self.warm(part) for part in parts}}

    def warm(self, name: str) -> Answer:
        part, cuda = self.open_parts[name], self.torch.cuda
        found: Answer = {"kind": part.kind}
        try:
            for turn in range(1 if part.kind == "value" else 4):
                self.wait()
                if self.gpu and turn == 2:
                    cuda.reset_peak_memory_stats()
                    before = cuda.memory_allocated()
                start = time.perf_counter()
                part.run()
                self.wait()
                found["ms"] = (time.perf_counter() - start) * 1e3
                if self.gpu and turn == 2:
                    found["mib"] = round((cuda.max_memory_allocated() - before) / 2**20, 2)
        except Exception as error:
            found["error"] = message(error)
        return found

    def time(self, name: str, repeats: int) -> Answer:
        part = self.open_parts[name]
        gc.disable()
        try:
            if part.kind == "value":
                return {"ms": median(part.run() for _ in range(repeats))}
            if part.kind == "host":
                return {"ms": self.host_time(part, repeats)}
            timer = timing.cuda_medians if self.gpu else timing.medians
            return {"ms": timer({"run": part.run}, repeats, warmup=int(repeats > 1))["run"] / part.calls}
        finally:
            gc.enable()

    def host_time(self, part: Any, repeats: int, calls: int = 25) -> float:
        """Milliseconds until a call returns: the median of `repeats` loops of `calls`, which start when the GPU is idle."""
        times = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                part.run()
            times.append((time.perf_counter() - start) / calls)
        return median(times) * 1e3

    def close(self) -> Answer:
        self.open_parts = {}
        gc.collect()
        if self.gpu:
            self.torch.cuda.empty_cache()
        return {}


def serve(device: str, threads: int) -> None:
    """Answers until there are no more requests. What others print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench(device, threads)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = getattr(bench, what)(*arguments)
        except Exception as error:
            answer = {"error": message(error)}
        print(json.dumps(answer), file=answers, flush=True)


def message(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


# The parent


class Worker:
    """A process that sees one checkout. It is started again after it died or its GPU context broke."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.root, self.options = root, options
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", self.options.device]
        command += ["--threads", str(self.options.threads)]
        own = {"PYTHONPATH": str(self.root), "PYTHONHASHSEED": "0"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | own, **pipes)

    def stop(self) -> None:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def ask(self, what: str, *arguments: Any) -> Answer:
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps([what, *arguments]), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or "null")
        except BrokenPipeError:
            answer = None
        if answer is None or re.search(r"CUDA error|Triton Error", json.dumps(answer)):
            self.stop()
            answer = answer or {"error": f"the worker ended with {self.process.returncode}"}
            self.start()
        return answer


def compile_all(roots: tuple[Path, Path], wanted: dict[str, list[str]], options: argparse.Namespace) -> None:
    """Runs every case once in each checkout, in as many processes as there are compilers; errors come again where rows are timed."""

    def drain(root: Path, jobs: queue.SimpleQueue[tuple[str, list[str]]]) -> None:
        worker = Worker(root, options)
        with contextlib.suppress(queue.Empty):
            while True:
                worker.ask("open", *jobs.get_nowait())
                worker.ask("close")
        worker.stop()

    start, threads = time.perf_counter(), []
    for root in roots:
        jobs: queue.SimpleQueue[tuple[str, list[str]]] = queue.SimpleQueue()
        for case in wanted.items():
            jobs.put(case)
        threads += [threading.Thread(target=drain, args=(root, jobs)) for _ in range(options.compilers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"compiled {len(wanted)} cases of both in {time.perf_counter() - start:.0f} s", flush=True)


def repeats_of(kind: str, ms: float) -> int:
    """How often a part runs in a round (of a host part: loops of 25 calls)."""
    if kind == "value":
        return 1
    each = ms * 25 if kind == "host" else ms + 0.6  # the flush of the cache, and a start ahead of the GPU
    return max(2 if ms < SLOW else 1, min(100, int(SECONDS * 1e3 / each) // 2 * 2))


def compare_part(sides: list[Worker], name: str, warm: list[Answer], rounds: int) -> Answer:
    """Rounds of one part, in turns; the row without its name."""
    kind, ms = warm[0]["kind"], min(answer["ms"] for answer in warm)
    times: tuple[list[float], list[float]] = ([], [])
    repeats = repeats_of(kind, ms)
    for turn in range(rounds if ms < SLOW else min(rounds, 5)):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            answer = sides[side].ask("time", name, repeats)
            if "error" in answer:
                return {"errors": {"AB"[side]: answer["error"]}}
            times[side].append(answer["ms"])
    ratios = [b / a for a, b in zip(*times, strict=True)]
    found: Answer = {"kind": kind, "a_ms": median(times[0]), "b_ms": median(times[1]), "ratio": median(ratios)}
    found["spread"] = median(abs(ratio - found["ratio"]) for ratio in ratios)
    found["error"] = 1.9 * found["spread"] / len(ratios) ** 0.5  # standard error of the median, were the ratios normal
    found["more_us"] = median(b - a for a, b in zip(*times, strict=True)) * 1e3
    found["rounds_ms"] = times
    if all("mib" in answer for answer in warm):
        found |= {"a_mib": warm[0]["mib"], "b_mib": warm[1]["mib"]}
    return found


def compare_case(sides: list[Worker], name: str, parts: list[str], rounds: int) -> list[Answer]:
    """The rows of the wanted parts of a case."""
    opened = [side.ask("open", name, parts) for side in sides]
    rows: list[Answer] = []
    for part in parts:
        warm = [{"error": own["error"]} if "error" in own else own["parts"][part] for own in opened]
        errors = {side: own["error"] for side, own in zip("AB", warm, strict=True) if "error" in own}
        found = {"errors": errors} if errors else compare_part(sides, part, warm, rounds)
        rows.append({"case": name, "part": part, **found})
    for side in sides:
        side.ask("close")
    return rows


def over(row: Answer, options: argparse.Namespace) -> bool:
    """Whether B costs more time or memory than the limits allow."""
    if "errors" in row:
        return False
    if row.get("b_mib", 0) > options.limit * row.get("a_mib", 0) + 1:
        return True
    if row["kind"] == "host":
        return row["more_us"] > options.host_limit
    return row["ratio"] > options.limit


def line(row: Answer, options: argparse.Namespace) -> str:
    name = f"{row['case']}, {row['part']}"
    if "errors" in row:
        return f"{name:66} " + "; ".join(f"{side} failed: {text}" for side, text in row["errors"].items())
    text = f"{name:66} {row['a_ms']:10.4f} {row['b_ms']:10.4f}   {row['ratio']:.3f} ± {row['spread']:.3f}"
    if row.get("b_mib", 0) > options.limit * row.get("a_mib", 0) + 1:
        text += f"  memory {row['a_mib']} -> {row['b_mib']} MiB"
    return text + ("  OVER" if over(row, options) else "") + ("  noisy" if noisy(row, options) else "")


def noisy(row: Answer, options: argparse.Namespace) -> bool:
    """Whether the rounds differ too much to tell a ratio of 1 from the limit (of a host row: a difference of 0 from its own)."""
    if "errors" in row:
        return False
    if row["kind"] == "host":
        return row["error"] * row["a_ms"] * 1e3 > options.host_limit
    return row["error"] > options.limit - 1


def run(roots: tuple[Path, Path], options: argparse.Namespace) -> None:
    """The whole comparison; the JSON is written after each case."""
    sides = [Worker(root, options) for root in roots]
    abouts = [side.ask("about") for side in sides]
    for root, about in zip(roots, abouts, strict=True):
        if root.resolve() not in Path(about.get("flashmix", "/")).resolve().parents:
            raise SystemExit(f"the worker of {root} imports another flashmix: {about}")
    names, about = (
        abouts[0].pop("rows"),
        {key: abouts[0][key] for key in ("torch", "threads", "gpu") if key in abouts[0]},
    )
    wanted = {name: [p for p in parts if re.search(options.only, f"{name}, {p}")] for name, (parts, _) in names.items()}
    wanted = {name: parts for name, parts in wanted.items() if parts}
    if options.list:
        print(*(f"{name}, {part}" for name, parts in wanted.items() for part in parts), sep="\n")
    else:
        about |= {"a": commit(roots[0]), "b": commit(roots[1]), "rounds": options.rounds, "only": options.only}
        if options.device == "cuda":
            compile_all(roots, {name: parts for name, parts in wanted.items() if names[name][1]}, options)
        measure(sides, wanted, options, about)
    for side in sides:
        side.stop()


def measure(sides: list[Worker], wanted: dict[str, list[str]], options: argparse.Namespace, about: Answer) -> None:
    """Times all rows, then those over the limit again; prints and writes them."""
    start, rows, default = time.perf_counter(), [], f"{time.strftime('%Y-%m-%d')}_compare_{options.device}.json"
    path = options.out or timing.RESULTS / default
    print(f"{'row':66} {'A ms':>10} {'B ms':>10}   B / A ± spread")
    for name, parts in wanted.items():
        for row in compare_case(sides, name, parts, options.rounds):
            rows.append(row)
            print(line(row, options), flush=True)
        timing.write_json(path, rows, about)
    again = [row for row in rows if over(row, options)]
    if again:
        print(f"\n{len(again)} over the limit, once more:")
        for side in sides:
            side.stop()
            side.start()
    for row in again:
        (second,) = compare_case(sides, row["case"], [row["part"]], 2 * options.rounds)
        first = row["ratio"]
        row.clear()
        row |= {**second, "first_ratio": first}
        print(line(row, options), flush=True)
    bad = [row for row in rows if over(row, options)]
    failed = sum("errors" in row for row in rows)
    print(
        f"\n{len(rows)} rows in {time.perf_counter() - start:.0f} s, {len(bad)} over the limit"
        f" and {sum(noisy(row, options) for row in rows)} too noisy to tell"
        f" ({options.limit}; of host rows {options.host_limit} us), {failed} failed"
    )
    print(timing.write_json(path, rows, about | {"over": len(bad)}))


def commit(root: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", type=Path, nargs="*", metavar="ROOT", help="the old checkout, then the new one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="a regular expression that names of rows match")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1.02, help="of B / A")
    parser.add_argument("--host-limit", type=float, default=1.0, help="of B - A of a host row, in microseconds")
    parser.add_argument("--out", type=Path, help="the JSON's file")
    parser.add_argument("--list", action="store_true", help="only print the names of the rows")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU's rows")
    parser.add_argument("--compilers", type=int, default=max(1, (os.cpu_count() or 2) // 3), help="processes a side")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.device, options.threads)
        return
    if len(options.roots) != 2:
        parser.error("two checkouts are compared: OLD_ROOT NEW_ROOT")
    sys.path.insert(0, str(options.roots[1].resolve()))  # the JSON names the machine as the new checkout does
    run((options.roots[0].resolve(), options.roots[1].resolve()), options)


if __name__ == "__main__":
    main()
