"""Ops, collectives and a model over several GPUs: `torchrun --nproc-per-node 2 benchmarks/distributed.py --out FILE.json [--parts ...]`.

`--parts` are of check, collectives, exchange, ops, model, million, bits, fla (default: the first five). `fla` compares with
flash-linear-attention's context parallelism, where that is installed; `--kinds` leaves rows of ops out. Each row is written to the file
as it is done and printed by rank 0; a failure of a row prints its traceback and the next row follows, and a row that stands still for
`--patience` seconds ends the process. `python benchmarks/distributed.py --warm` first fills Triton's cache for two ranks, `--jobs`
processes at a time: then no row waits for a compiler.

Times are medians of GPU events, of the slowest rank in each run; ranks are aligned before each run, and their hosts are ahead. Efficiency
is the time on one GPU over (ranks x the time on all of them), for the same row of tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from distributed_cases import CUT, KINDS, LAYOUTS, ROWS, Operands, chosen, operands_of, outputs, taken, with_gradients
from distributed_fla import ROWS as FLA_ROWS
from distributed_fla import fill_cache as compile_fla
from distributed_fla import fla
from distributed_model import bits, fill_cache, million, model, own_mesh
from torch import Tensor

from flashmix import Packing
from flashmix.parallel.join import join, join_backward
from flashmix.parallel.shard import Link
from flashmix.selftest.budget import spend

PARTS = ("check", "collectives", "exchange", "ops", "model", "million", "bits", "fla")
NODE = (42e9, 35e-6)  # assumed between nodes: bytes a second and GPU, seconds a collective


class Runs(NamedTuple):
    """The times of runs of the slowest rank each, the longest time of a host, and how often memory was asked of the driver."""

    times: list[float]
    host: float
    allocations: int

    @property
    def median(self) -> float:
        return sorted(self.times)[len(self.times) // 2]


class Bench:
    """One rank's measurements: the device, the group, the rows so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cuda = options.device == "cuda"
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.hosts: Any = dist.new_group(backend="gloo")
        self.group: Any = dist.group.WORLD
        self.device = f"cuda:{torch.cuda.current_device()}" if self.cuda else "cpu"
        self.token = torch.zeros(1, device=self.device)
        self.alone = own_mesh(self)
        self.rows: dict[str, Any] = {}
        self.deadline = time.monotonic() + options.patience
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() > self.deadline:
                print(f"rank {self.rank}: a row stood still for {self.options.patience} s", flush=True)
                for frame in sys._current_frames().values():
                    traceback.print_stack(frame, limit=12)
                os._exit(3)

    def row(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measures one row, and writes and prints it on rank 0; ranks agree whether it failed."""
        self.deadline = time.monotonic() + self.options.patience
        start = time.monotonic()
        try:
            found, failed = measure(), ""
        except Exception:
            found, failed = {}, traceback.format_exc(limit=-6)
            print(f"FAILED {name} on rank {self.rank}\n{failed}", flush=True)  # at once: the other ranks may be waiting
        gc.enable()  # after a failure in the middle of `milliseconds`
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, failed, group=self.hosts)
        if self.rank == 0:
            self.rows[name] = {"failed": [r for r, text in enumerate(every) if text]} if any(every) else found
            print(f"{name}: {json.dumps(self.rows[name])}   [{time.monotonic() - start:.1f} s]", flush=True)
            self.write()

    def write(self) -> None:
        path = Path(self.options.out)
        before = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        about = {"torch": torch.__version__, "ranks": self.ranks, "date": time.strftime("%Y-%m-%d")}
        about["device"] = torch.cuda.get_device_name() if self.cuda else "cpu"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"measured_on": about, "rows": {**before["rows"], **self.rows}}, indent=1))
        os.replace(partial, path)

    def slowest(self, value: float) -> float:
        return self.slowest_of([value])[0]

    def slowest_of(self, values: list[float]) -> list[float]:
        """Each value on the rank where it is largest."""
        x = torch.tensor(values, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.tolist()

    def milliseconds(self, run: Callable[[], Any], repeats: int = 7, warmup: int = 2) -> Runs:
        """Runs after which all ranks wait for one another; the device waits at first for as long as the host takes, twice over."""
        times, hosts, ahead, before = [], [], 8_000_000, 0
        gc.disable()  # of Python's: it would hold up a host for longer than the device waits
        for turn in range(warmup + repeats):
            if turn == warmup:
                before = self._allocations()
            if self.cuda:
                torch.cuda._sleep(ahead)
            dist.all_reduce(self.token)  # after which all ranks begin
            start = time.perf_counter()
            if self.cuda:
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                run()
                events[1].record()
                hosts.append((time.perf_counter() - start) * 1e3)
                torch.cuda.synchronize()
                spent = events[0].elapsed_time(events[1])
            else:
                run()
                spent = (time.perf_counter() - start) * 1e3
                hosts.append(spent)
            if turn >= warmup:
                times.append(spent)
            else:
                ahead = max(8_000_000, min(400_000_000, int(4e6 * hosts[-1])))  # cycles, at up to 2 GHz
        gc.enable()
        found = [round(x, 4) for x in self.slowest_of(times)]
        host, allocations = self.slowest_of([max(hosts[warmup:]), self._allocations() - before])
        return Runs(found, round(host, 3), int(allocations))

    def _allocations(self) -> int:
        """How often torch's allocator asked the driver for memory."""
        return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if self.cuda else 0

    def peak(self, run: Callable[[], Any], operands: Operands) -> float:
        """GiB at most allocated by a run, its operands included, on the rank with most."""
        if not self.cuda:
            return 0.0
        others = torch.cuda.memory_allocated() - sum(x.numel() * x.element_size() for x in operands.values())
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return round(self.slowest((torch.cuda.max_memory_allocated() - others) / 2**30), 3)


def layout(name: str, total: int, ranks: int) -> dict[str, Any]:
    """The arguments of `Packing.shard`; "uneven" has a short range, and two that lie apart on the last rank."""
    if name != "uneven":
        return {"order": name}
    cuts = [0, total // 5, *(total // 5 + (i + 1) * (total * 3 // 5) // ranks for i in range(ranks)), total]
    owners = [ranks - 1, *range(ranks), 0]
    return {"ranges": [(owner, a, b) for owner, a, b in zip(owners, cuts, cuts[1:], strict=False)]}


# ---- parts -----------------------------------------------------------------------------------------------------------------------------


def check(bench: Bench) -> None:
    """Every kind of op over the ranks within the budget of one GPU: outputs and gradients of bfloat16, against float64."""
    dtype = torch.bfloat16
    for kind in bench.options.kinds or KINDS:
        for order, lengths in layouts_of(kind, bench.cuda):
            bench.row(
                f"check {kind}, {order}, {sum(lengths)} tokens",
                lambda kind=kind, order=order, n=lengths: checked(bench, kind, order, n, dtype),
            )


def layouts_of(kind: str, cuda: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The orders and lengths of the checks of a kind."""
    return (*LAYOUTS, *(CUT.get(kind, ()) if cuda else ()))


def checked(bench: Bench, kind: str, order: str, lengths: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The largest share of the budget that any result spends; raises where one is over it."""
    heads, D = (4, 128) if bench.cuda else (2, 16)
    whole = Packing.from_lengths(list(lengths), device=bench.device)
    shard = whole.shard(bench.group, **layout(order, sum(lengths), bench.ranks))
    operands = operands_of(kind, sum(lengths), heads, D, bench.device, dtype)
    flow = torch.randn_like(outputs(kind, operands, whole))
    dist.broadcast(flow, 0)
    want = with_gradients(kind, {n: x.double() for n, x in operands.items()}, whole, flow.double())
    base = with_gradients(kind, operands, whole, flow)
    have = with_gradients(kind, taken(kind, operands, shard), shard, shard.take(flow))
    again = with_gradients(kind, taken(kind, operands, shard), shard, shard.take(flow))
    if not all(torch.equal(a, b) for a, b in zip(have, again, strict=True)):
        raise AssertionError("a second run has other bits")
    names, shares = ["output", *operands], {}
    for name, got, exact, plain in zip(names, have, want, base, strict=True):
        if name in KINDS[kind].shared:
            got = shard.sum(got)
        else:
            exact, plain = shard.take(exact), shard.take(plain)
        shares[name] = max((s.share for s in spend(got, exact, plain, dtype)), default=0.0) if got.numel() else 0.0
    worst = max(shares, key=lambda name: shares[name])
    if not shares[worst] <= 1:
        raise AssertionError(f"{worst} spends {shares[worst]:.3g} of its budget on rank {bench.rank}: {shares}")
    return {"share of the budget": round(bench.slowest(shares[worst]), 3), "of": worst}


def collectives(bench: Bench) -> None:
    """Latency and bandwidth of both collectives: bytes are those that a rank receives from others."""
    for name in ("all_to_all", "all_gather"):
        bench.row(name, lambda name=name: curve(bench, name))


def curve(bench: Bench, name: str) -> dict[str, Any]:
    sizes = [2**n for n in (range(16, 29, 2) if bench.cuda else (10, 12))]
    times = {}
    for size in sizes:  # received from others
        share = size // (bench.ranks - 1)
        own = torch.zeros(share * (bench.ranks if name == "all_to_all" else 1), dtype=torch.uint8, device=bench.device)
        got = torch.empty(share * bench.ranks, dtype=torch.uint8, device=bench.device)
        run = dist.all_to_all_single if name == "all_to_all" else dist.all_gather_into_tensor
        times[size] = bench.milliseconds(lambda run=run, got=got, own=own: run(got, own), repeats=11).median
    small, large = sizes[0], sizes[-1]
    rate = (large - small) / max(1e-9, times[large] - times[small]) * 1e3
    return {"ms by bytes": times, "GB/s": round(rate / 1e9, 1), "us at least": round(times[small] * 1e3, 1)}


def exchange(bench: Bench) -> None:
    for heads in (16, 64):
        bench.row(f"join alone, {heads} heads", lambda heads=heads: joins(bench, heads))


def joins(bench: Bench, heads: int, D: int = 128) -> dict[str, Any]:
    """The exchange and fold of one sequence over the ranks: maps forward, gradients backward; microseconds."""
    shard = Packing.from_lengths([64 * bench.ranks], device=bench.device).shard(bench.group)
    shapes = {name: torch.Size((heads, D, D)) for name in "NM"}
    like = torch.zeros(1, device=bench.device)
    N = torch.rand(heads, D, D, device=bench.device)
    link, last = Link(bench.rank, 0), bench.ranks - 1
    own: Any = {"N": {link: N} if bench.rank < last else {}, "M": {link: N} if 0 < bench.rank < last else {}}

    def fold(M: Tensor, S: Tensor, N: Tensor) -> Tensor:
        return M @ S + N

    M = join(shard, own, shapes, fold, True, like)[1]
    D_own = {link: N} if bench.rank > 0 else {}
    forward = bench.milliseconds(lambda: join(shard, own, shapes, fold, True, like), repeats=21).median
    backward = bench.milliseconds(
        lambda: join_backward(shard, D_own, M, shapes, lambda m, e: m.mT @ e, like), repeats=21
    ).median
    return {"forward us": forward * 1e3, "backward us": backward * 1e3, "bytes of a state": N.numel() * 4}


def ops(bench: Bench) -> None:
    """The table: one GPU, its half of the tokens, and all GPUs."""
    T, D = (bench.options.tokens, 128) if bench.cuda else (512, 16)
    for kind, heads in chosen(ROWS, bench.options):
        for turn in range(bench.options.times):
            name = f"{kind}, {heads} heads" + (f", again {turn}" if turn else "")
            bench.row(name, lambda kind=kind, heads=heads: efficiency(bench, kind, heads, T, D))


def efficiency(bench: Bench, kind: str, heads: int, T: int, D: int) -> dict[str, Any]:
    P = bench.ranks
    heads = heads if bench.cuda else 2
    whole = Packing.from_lengths([T], device=bench.device)
    shard = whole.shard(bench.group, order=KINDS[kind].order)
    operands = operands_of(kind, T, heads, D, bench.device, torch.bfloat16)
    own = {n: x.clone() for n, x in taken(kind, operands, shard).items()}
    half = {n: x if n in KINDS[kind].shared else x[:, : T // P].clone() for n, x in operands.items()}
    found: dict[str, Any] = {}
    for name, its, packing in (("one", operands, None), ("part", half, None), ("all", own, shard)):
        found |= {f"{key} {name}": value for key, value in times(bench, kind, its, packing).items()}
        its.clear()
        if name == "one":
            operands = {}
        gc.collect()
    for key in ("forward", "both"):
        found[f"efficiency {key}"] = round(found[f"{key} one"] / (P * found[f"{key} all"]), 3)
        found[f"weak {key}"] = round(found[f"{key} part"] / found[f"{key} all"], 3)
    found["memory"] = round(found["GiB all"] / max(1e-9, found["GiB one"]), 3)
    return found


def times(bench: Bench, kind: str, operands: Operands, packing: Any) -> dict[str, Any]:
    with torch.no_grad():
        flow = torch.randn_like(outputs(kind, operands, packing))
        forward = bench.milliseconds(lambda: outputs(kind, operands, packing))
    both = bench.milliseconds(lambda: with_gradients(kind, operands, packing, flow), repeats=5)
    memory = bench.peak(lambda: with_gradients(kind, operands, packing, flow), operands)
    found = {"forward": forward.median, "both": both.median, "GiB": memory}
    if packing is None:
        return found
    return found | {"forward runs": forward, "both runs": both}  # as lists: times, the host's, allocations


def predict(rows: dict[str, Any], ranks: int) -> None:
    """Weak scaling of the recurrences by the volumes of docs/distributed.md, printed as a prediction."""
    rate = rows.get("all_to_all", {})
    if "GB/s" not in rate:
        return
    node = rate["GB/s"] * 1e9, rate["us at least"] * 1e-6
    for kind, heads in ROWS[:6]:
        row = rows.get(f"{kind}, {heads} heads", {})
        if "both all" not in row:
            continue
        shown = []
        for P in (8, 64, 256, 1024):
            beta, alpha = node if P <= 8 else NODE
            m = s = 4 * heads * 128 * 128
            share = (P - 1) / P * max(1.0, P / heads)
            seconds = 4 * alpha + share * (m + s + 2 * s) / beta  # two all-to-alls each way
            known = 2 * node[1] + (2 * s / node[0])  # in the time that was measured
            total = row["both all"] + (seconds - known) * 1e3
            shown.append(f"{P}: {row['both part'] / total:.2f} ({share * (m + 3 * s) / 2**20:.1f} MiB)")
        print(f"PREDICTION, weak scaling forward + backward, {kind}, {heads} heads: " + ", ".join(shown), flush=True)


@contextmanager
def environment(options: argparse.Namespace) -> Iterator[Bench]:
    bench = Bench(options)
    dist.all_reduce(bench.token)
    while options.after is not None and not os.path.exists(options.after):
        bench.deadline = time.monotonic() + options.patience
        time.sleep(0.1)
    try:
        yield bench
    finally:
        bench.deadline = time.monotonic() + 30
        dist.destroy_process_group()


# ---- filling Triton's cache ------------------------------------------------------------------------------------------------------------


def warm(options: argparse.Namespace) -> None:
    """A process for each row, `--jobs` of them at a time, so that the kernels of all rows are compiled before any is timed."""
    waiting = [f"{kind}:check" for kind in options.kinds or KINDS if "check" in options.parts]
    waiting += [f"{kind}:{heads}" for kind, heads in chosen(ROWS, options) if "ops" in options.parts]
    waiting = [f"{name}:model" for name in ("million", "bits") if name in options.parts] + waiting
    if "fla" in options.parts:
        waiting += [f"{kind}:fla {heads} {n} 12" for kind, heads in chosen(FLA_ROWS, options) for n in range(12)]
    cards = torch.cuda.device_count() if options.device == "cuda" else 1
    start, number = time.monotonic(), 0
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            command = [sys.executable, "-X", "faulthandler", __file__, "--warm-one", waiting[0]]
            command += ["--device", options.device, "--tokens", str(options.tokens)]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(number % max(1, cards)), "OMP_NUM_THREADS": "1"}
            running[waiting.pop(0)] = subprocess.Popen(command, env=environment)
            number += 1
        for job, process in [*running.items()]:
            if process.poll() is not None:
                del running[job]
                print(f"warmed {job}: status {process.returncode}, {time.monotonic() - start:.1f} s", flush=True)
        time.sleep(0.05)


def warm_one(options: argparse.Namespace) -> None:
    """The kernels of one row, or of the checks of a kind: those of one GPU, and those of each of two ranks."""
    kind, _, what = options.warm_one.partition(":")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if what == "model":
        fill_cache(kind, options.device, as_rank)
    elif what.startswith("fla"):
        compile_fla(kind, *map(int, what.split()[1:]))
    elif what == "check":
        for order, lengths in layouts_of(kind, options.device == "cuda"):
            compile_op(kind, lengths, order, 4, options)
    else:
        compile_op(kind, (8192 if what == "64" else options.tokens,), KINDS[kind].order, int(what), options)
    if options.device == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    time.sleep(0.1)  # a thread of torch that lets go of its last tensor at the end of Python aborts the process


def compile_op(kind: str, lengths: tuple[int, ...], order: str, heads: int, options: argparse.Namespace) -> None:
    heads, D = (heads, 128) if options.device == "cuda" else (2, 16)
    whole = Packing.from_lengths(list(lengths), device=options.device)
    operands = operands_of(kind, sum(lengths), heads, D, options.device, torch.bfloat16)
    flow = torch.randn_like(outputs(kind, operands, whole))
    if len(lengths) == 1:
        with_gradients(kind, operands, None, flow)
        half = {n: x if n in KINDS[kind].shared else x[:, : lengths[0] // 2].clone() for n, x in operands.items()}
        with_gradients(kind, half, None, flow[:, : lengths[0] // 2])
    with_gradients(kind, operands, whole, flow)
    for rank in range(2):
        with as_rank(rank) as group:
            shard = whole.shard(group, **layout(order, sum(lengths), 2))
            with_gradients(kind, taken(kind, operands, shard), shard, shard.take(flow))


@contextmanager
def as_rank(rank: int, ranks: int = 2) -> Iterator[Any]:
    """This process as one of several ranks, which receives zeros."""
    names = ("get_rank", "get_world_size", "all_to_all_single")
    plain = {name: getattr(dist, name) for name in names}

    def nothing(output: Tensor, *others: Any, **options: Any) -> None:
        output.zero_()

    for name, stub in zip(names, (lambda group=None: rank, lambda group=None: ranks, nothing), strict=True):
        setattr(dist, name, stub)
    try:
        yield dist.group.WORLD
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="distributed.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:5]))
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="of ops, default: all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=65536, help="of a row of the table")
    parser.add_argument("--patience", type=float, default=60, help="seconds for one row")
    parser.add_argument("--rows", nargs="+", help="KIND:HEADS of the table, in place of --kinds")
    parser.add_argument("--times", type=int, default=1, help="that each row of ops is measured")
    parser.add_argument("--after", help="a file: nothing is measured before it is there")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--jobs", type=int, default=32, help="of --warm: processes at a time")
    parser.add_argument("--warm-one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm_one:
        return warm_one(options)
    if options.warm:
        return warm(options)
    parts = {"check": check, "collectives": collectives, "exchange": exchange, "ops": ops, "model": model}
    parts |= {"million": million, "bits": bits, "fla": fla}
    with environment(options) as bench:
        for name in options.parts:
            parts[name](bench)
        if bench.rank == 0:
            predict(bench.rows, bench.ranks)


if __name__ == "__main__":
    main()
