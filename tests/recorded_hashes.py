"""Recorded hashes: every bit that flashmix computes, as one SHA-256 a result, to show that a refactoring changes none.

    python tests/recorded_hashes.py record FILE.json [--device cuda] [--only REGEX] [--workers N] [--seconds S] [--resume]
    python tests/recorded_hashes.py compare A.json B.json

Run it from the root of the checkout that is to be recorded; the script itself may lie in another one. The cases are in
`recorded_*.py`; they use public names only. A key of the file is "case|implementation|dtype|result", its value the hash of
the tensor's dtype, shape and bytes, or the error that the call raised. Hashes of two machines, or of two versions of torch or
triton, are not comparable; `compare` says so.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a waiting thread leaves its core to other processes

import torch
from recorded_engines import attention_jobs, cache_jobs, delta_net_step_jobs, recurrence_jobs, segmented_jobs, step_jobs
from recorded_jobs import DTYPES, Job
from recorded_models import module_jobs
from recorded_ops import (
    convolution_jobs,
    distillation_jobs,
    elementwise_jobs,
    loss_jobs,
    named_jobs,
    norm_jobs,
    rotary_jobs,
)
from torch import Tensor

import flashmix

SHOWN = 50  # different keys that `compare` prints
THREADS = 2


@functools.lru_cache(1)
def jobs(device: str) -> list[Job]:
    """All jobs that have a dtype on the device, those that take long first."""
    found: list[Job] = [
        *segmented_jobs(),
        *module_jobs(),
        *attention_jobs(),
        *recurrence_jobs(),
        *named_jobs(),
        *step_jobs(),
        *delta_net_step_jobs(),
        *cache_jobs(),
        *norm_jobs(),
        *elementwise_jobs(),
        *convolution_jobs(),
        *rotary_jobs(),
        *loss_jobs(),
        *distillation_jobs(),
    ]
    names = [job.name for job in found]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return [job for job in found if job.dtypes_on(device)]


def hashed(value: object) -> str:
    """The first 16 hex digits of the SHA-256 of a tensor's dtype, shape and bytes, or of the text of anything else."""
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
    digest = hashlib.sha256(f"{value.dtype} {list(value.shape)}".encode())
    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def flattened(name: str, value: object) -> Iterator[tuple[str, object]]:
    """The tensors and numbers in tuples, lists, dicts and dataclasses, each with its path."""
    if value is None:
        return
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flattened(f"{name}.{key}" if name else str(key), part)
    else:
        yield name, value


def described(error: Exception) -> str:
    """The name of an exception and the first line of its message."""
    return f"error: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def record_job(job: Job, short: str, device: str) -> dict[str, str]:
    """The hashes of every implementation of a job in one dtype."""
    dtype = DTYPES[short]
    try:
        implementations = job.implementations(dtype, device)
    except Exception as error:
        return {f"{job.name}|explain|{short}|call": described(error)}
    found = {f"{job.name}|explain|{short}|implementations": " ".join(implementations)}
    for implementation in implementations:
        prefix = f"{job.name}|{implementation}|{short}|"
        try:
            torch.manual_seed(0)
            results = dict(flattened("", job.results(dtype, device, implementation)))
            found |= {prefix + name: hashed(value) for name, value in results.items()}
        except Exception as error:
            found[prefix + "call"] = described(error)
            if os.environ.get("RECORDED_TRACEBACKS"):
                traceback.print_exc()
    return found


def record_jobs(names: list[str], short: str, device: str) -> tuple[dict[str, str], float]:
    """The hashes of the jobs of these names, and the seconds they took."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # torch.empty gives NaN: unwritten memory is the same each time
    start, by_name = time.perf_counter(), {job.name: job for job in jobs(device)}
    found: dict[str, str] = {}
    for name in names:
        found |= record_job(by_name[name], short, device)
        if device == "cuda":
            torch.cuda.empty_cache()
    return found, time.perf_counter() - start


def planned(device: str, only: str, known: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """The names of the jobs to run by group and dtype; jobs of a group share kernels, so that one process takes them all."""
    groups: dict[tuple[str, str], list[str]] = {}
    done = {tuple(key.split("|")[:3:2]) for key in known}
    for job in jobs(device):
        for short in job.dtypes_on(device) if re.search(only, job.name) else ():
            if (job.name, short) not in done:
                groups.setdefault((job.group, short), []).append(job.name)
    return groups


def record(path: Path, device: str, only: str, workers: int, seconds: float, resume: bool) -> None:
    """Runs the jobs whose names match and writes their hashes, also where the time is over before all have run."""
    found: dict[str, str] = json.loads(path.read_text())["hashes"] if resume and path.exists() else {}
    groups = planned(device, only, found)
    print(
        f"{sum(map(len, groups.values()))} jobs in {len(groups)} groups of {flashmix.__file__} on {device}", flush=True
    )
    start, left = time.perf_counter(), len(groups)

    def add(group: tuple[str, str], result: tuple[dict[str, str], float]) -> None:
        nonlocal left
        left -= 1
        found.update(result[0])
        errors = sum(value.startswith("error") for value in result[0].values())
        now = time.perf_counter() - start
        print(
            f"{now:7.1f} s  {' '.join(group)}: {len(result[0])} results, {errors} errors, {result[1]:.1f} s", flush=True
        )

    if workers == 1:
        for group, names in groups.items():
            if time.perf_counter() - start < seconds:
                add(group, record_jobs(names, group[1], device))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            waiting = {pool.submit(record_jobs, names, group[1], device): group for group, names in groups.items()}
            started = as_completed(waiting)
            while waiting and time.perf_counter() - start < seconds:
                future = next(started)
                add(waiting.pop(future), future.result())
            for future in [future for future in waiting if not future.cancel()]:
                add(waiting[future], future.result())
    content = {"machine": machine(device), "hashes": dict(sorted(found.items()))}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=0) + "\n")
    temporary.replace(path)
    print(f"{len(found)} results in {time.perf_counter() - start:.0f} s, {left} groups left out: {path}")


def machine(device: str) -> dict[str, Any]:
    """What the bits depend on besides the code."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    name = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return {
        "device": f"{device}: {name}",
        "torch": torch.__version__,
        "triton": version,
        "interpreted": interpreted,
        "python": platform.python_version(),
        "threads": THREADS,
    }


def compare(first: Path, second: Path) -> int:
    """Prints in what two recordings differ; 0 where they are the same."""
    a, b = (json.loads(path.read_text()) for path in (first, second))
    for name, value in a["machine"].items():
        if b["machine"].get(name) != value:
            print(f"other machine: {name} is {value} in A, {b['machine'].get(name)} in B")
    left, right = a["hashes"], b["hashes"]
    both = left.keys() & right.keys()
    different = sorted(key for key in both if left[key] != right[key])
    only_a, only_b = sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys())
    print(
        f"equal {len(both) - len(different)}, different {len(different)}, only in A {len(only_a)}, only in B {len(only_b)}"
    )
    for title, keys in (("different", different), ("only in A", only_a), ("only in B", only_b)):
        for key in keys[:SHOWN]:
            print(f"{title}: {key}: {left.get(key, '-')} {right.get(key, '-')}")
    return 1 if different or only_a or only_b else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--device", default="cpu")
    recording.add_argument("--only", default="", metavar="REGEX", help="cases whose names match")
    recording.add_argument("--workers", type=int, default=1, help="processes")
    recording.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no group of cases after that time"
    )
    recording.add_argument("--resume", action="store_true", help="keep what the file has and record the rest")
    comparing = commands.add_parser("compare")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.a, given.b)
    record(given.file, given.device, given.only, given.workers, given.seconds, given.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main())
