"""All that is checked and measured on a GPU, in one command and a given time.

    python benchmarks/card.py --out FOLDER [--jobs tests recurrence:240 ...] [--seconds 540] [--missing FOLDER/missing.txt] [--list]

A job is a command of this repository with the seconds that it may take (`NAME:SECONDS` gives it others); then it is interrupted, and ended
15 seconds later. Jobs that measure have the first GPU, one after the other. Jobs that check run beside them on the second one; on a
machine with one GPU they come first. Each job has a log in `--out`, and the benchmarks' JSON goes there too; a line a job is printed
when it ends.

With more GPUs, a command for each: `CUDA_VISIBLE_DEVICES=2 taskset -c 32-47 python benchmarks/card.py ...` has a GPU and 16 processors
to itself.

GPU tests that were not reached are listed in `missing.txt`; `--missing` runs these alone. The compile cache is `--out`/../triton, so that
a second command finds what the first one compiled. Peers (flash-linear-attention, FlashAttention-4, FlashQLA) are measured where
they can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))
WORKERS = 14  # of tests on one card
GRACE = 15  # seconds that a job has to end when it is asked to
PASSED = re.compile(r"(?:PASSED|SKIPPED|XFAIL) (tests/\S.*?)(?: <- .*)?\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """`{out}` is the folder of results, `{cores}` the processors of the host, `{workers}` as many of them as may test on one card."""

    command: str
    seconds: int
    measures: bool = True
    folder: str = "."
    switches: tuple[str, ...] = ()  # environment variables that are set to 1


TRIED: tuple[str, ...] = ()  # kernels that serve only where they are asked for
JOBS = {
    # checks
    "doctor": Job("python -m flashmix doctor --check", 120, False),
    "tests": Job(
        "python -m pytest -m gpu -vv --tb=short -p no:cacheprovider -n {workers} --dist load --maxschedchunk 2 tests",
        500,
        False,
    ),
    "fuzz": Job("python -W ignore -m fuzz --device cuda --few --workers {cores} --seconds 300", 340, False, "tests"),
    "errors": Job("python benchmarks/errors.py --device cuda --out {out}/errors.json", 150, False),
    # measurements
    "recurrence": Job("python benchmarks/recurrence_hopper.py --warm {cores}", 420),
    "recurrence_kernels": Job("python benchmarks/recurrence_hopper.py --kernels", 120),
    "recurrence_layer": Job("python benchmarks/recurrence_hopper.py --layer", 120),
    "recurrence_host": Job("python benchmarks/recurrence_hopper.py --host --first", 120),
    "attention": Job("python benchmarks/attention_hopper.py --processes {cores} --host --first --write", 300),
    "attention_peers": Job(
        "python benchmarks/attention_hopper.py --processes {cores} --sides auto cudnn fa4 --write", 300
    ),
    "decode": Job("python benchmarks/decode.py --write", 120),
    "decode_attention": Job("python benchmarks/attention.py --rows 0 --decode --drafted --write", 120),
    "scan": Job("python benchmarks/scan.py --write", 60),
    "selective": Job("python benchmarks/scan.py --selective --write", 60),
    "mechanisms": Job("python benchmarks/mechanisms_gpu.py --out {out}/mechanisms.json", 240),
    "rowwise": Job("python benchmarks/rowwise.py", 120),
    "first_calls": Job("python benchmarks/first_calls.py --at-once 8", 120),
    "transformers": Job("python benchmarks/transformers_h200.py --limit 140 --write", 160),
    "model": Job("python benchmarks/model.py --graph --generate --warm 8", 400),
    "distributed": Job(
        "torchrun --nproc-per-node {gpus} benchmarks/distributed.py --parts check collectives exchange ops model million bits"
        " --out {out}/distributed.json",
        400,
    ),
}


def gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def run_job(name: str, job: Job, seconds: float, device: str, options: argparse.Namespace) -> str:
    """Runs a job, ends what is left of it after `seconds`, and says in a line how it went."""
    words = {
        "out": options.out,
        "cores": max(1, CORES - 2),
        "workers": max(1, min(CORES - 2, WORKERS)),
        "gpus": len(gpus()),
    }
    command = [part.format(**words) for part in shlex.split(job.command)]
    if command[0] == "python":
        command[0] = sys.executable
    if name == "tests" and options.missing:
        command = [*command[:-1], f"@{options.missing.resolve()}"]
    path = f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    cache = os.environ.get("TRITON_CACHE_DIR", str(options.out.parent / "triton"))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": device,
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": cache,
        "BENCHMARK_RESULTS": str(options.out),
        **dict.fromkeys(job.switches, "1"),
    }
    begun = time.monotonic()
    with (options.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT / job.folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended = f"exit status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that tests say what failed until then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ended = f"ended after its {seconds:.0f} s"
    return f"{name}: {ended}, {time.monotonic() - begun:.0f} s"


def write_missing(out: Path, wanted: Path | None) -> str:
    """Writes the GPU tests that the log of `tests` has no result of that counts into `missing.txt`, whole again if it fails."""
    if wanted:
        ids = wanted.read_text().split("\n")
    else:
        listed = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider", "tests"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
        ).stdout
        ids = [line for line in listed.split("\n") if "::" in line]
    done = set(PASSED.findall((out / "tests.log").read_text()))
    left = [one for one in ids if one and one not in done]
    part = out / "missing.txt.part"
    part.write_text("\n".join(left))
    part.replace(out / "missing.txt")
    return f"tests: {len(ids) - len(left)} of {len(ids)} passed or were skipped, {len(left)} failed or were not reached"


def run_lane(names: Sequence[tuple[str, int]], device: str, end: float, options: argparse.Namespace) -> None:
    """Runs the jobs of a lane one after the other, as far as the time goes."""
    for name, seconds in names:
        left = end - time.monotonic()
        if left < 5:
            print(f"{name}: not begun, the time is up", flush=True)
            continue
        everything = ",".join(gpus()) if name == "distributed" else device
        print(run_job(name, JOBS[name], min(seconds, left), everything, options), flush=True)
        if name == "tests":
            print(write_missing(options.out, options.missing), flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="a folder for logs and results")
    parser.add_argument(
        "--jobs", nargs="+", default=list(JOBS), metavar="NAME[:SECONDS]", help="in this order; default: all"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="for all")
    parser.add_argument("--missing", type=Path, metavar="FILE", help="only these GPU tests, a line each")
    parser.add_argument("--list", action="store_true", help="print the jobs, run nothing")
    options = parser.parse_args()
    options.chosen = [
        (name, int(limit or JOBS[name].seconds if name in JOBS else 0))
        for name, _, limit in (item.partition(":") for item in options.jobs)
    ]
    unknown = [name for name, _ in options.chosen if name not in JOBS]
    if unknown:
        parser.error(f"no such job: {', '.join(unknown)}; there are {', '.join(JOBS)}")
    if not options.list and options.out is None:
        parser.error("--out FOLDER is needed")
    return options


def main() -> None:
    options = parsed()
    if options.list:
        for name, seconds in options.chosen:
            print(f"{name:20} {seconds:4} s  {'measures' if JOBS[name].measures else 'checks'}  {JOBS[name].command}")
        return
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    devices = gpus()
    if not devices:
        raise SystemExit("card.py: no GPU is here")
    end = time.monotonic() + options.seconds
    checks = [item for item in options.chosen if not JOBS[item[0]].measures]
    measurements = [item for item in options.chosen if JOBS[item[0]].measures]
    if len(devices) == 1:
        run_lane(checks + measurements, devices[0], end, options)
        return
    lanes = [(measurements, devices[0]), (checks, devices[1])]
    threads = [threading.Thread(target=run_lane, args=(names, device, end, options)) for names, device in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
