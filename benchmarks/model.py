"""Whole models of about 1.4 billion parameters on a GPU: a training step, generation, memory, beside the models of other libraries.

`python benchmarks/model.py [--rows gated_deltanet,...] [--contenders flashmix,fla,transformers] [--steps 8] [--graph] [--generate]`

Each contender of each row has a process of its own, so that one failure costs nothing, and a Triton cache of its own, empty at first:
"first step" is from the finished model to the end of its first step, with all that it compiles. The rows of a contender take their first
steps at once, for these are work of the CPU, and are then timed one after the other. `--warm N` lets N processes compile a
small model of each row of flash-linear-attention into one shared cache while the others are measured, for its autotuning takes minutes;
they end after `--warm-limit` seconds, and its first step is not shown. `--tuning-ms` is what its autotuner then times a variant for.
A step is forward, backward and a fused AdamW on bfloat16 parameters; MFU counts 6 floating-point operations a parameter and token and
those of attention's matrix products, at 989.5 TFLOP/s. `--graph` times the whole step as one CUDA graph as well, `--generate` prompts and
tokens after them, flashmix's with and without a CUDA graph. `--table` prints what each module keeps for its backward, `--profile`
the kernels.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import timing
import torch
from model_contenders import CONTENDERS, ROWS, Contender, Sizes, mixers
from torch import Tensor, nn

PEAK = 989.5e12  # floating-point operations a second of an H200's bfloat16 matrix products
TINY = Sizes(width=64, depth=4, heads=2, mlp_width=96, vocabulary=128)


# ---- one contender of one row, in a process of its own ---------------------------------------------------------------------------------


class Worker:
    """Measures one model; each finding is a line of JSON on stdout as soon as it is known."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.cuda = options, torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.sizes = Sizes() if self.cuda else TINY
        if options.depth:
            self.sizes = Sizes(depth=options.depth) if self.cuda else TINY
        torch.manual_seed(0)
        if options.keep:
            from flashmix.op import recompute

            recompute.LEAST.clear()
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.contender: Contender = CONTENDERS[options.contender](
            options.row, self.sizes, device=self.device, dtype=dtype
        )
        model = self.contender.model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=self.cuda, capturable=self.cuda and options.graph
        )
        self.started = False
        self.parameters = sum(p.numel() for p in model.parameters())
        self.say(parameters=self.parameters, notes=list(self.contender.notes))

    def say(self, **found: Any) -> None:
        print(json.dumps(found), flush=True)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def data(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        shape = rows, tokens + 1
        found = torch.randint(1, self.sizes.vocabulary, shape, generator=generator, device=self.device)  # 0 is padding
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.contender.loss(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def work(self, rows: int, tokens: int) -> float:
        """Floating-point operations of a step: 6 a parameter and token, and attention's, causal, three times the forward's."""
        attention = sum(mixer == "attention" for mixer in mixers(self.options.row, self.sizes))
        return rows * tokens * (6.0 * self.parameters + attention * 6.0 * tokens * self.sizes.width)

    def train(self, rows: int, tokens: int) -> None:
        data = self.data(rows, tokens)
        self.wait()
        start = time.perf_counter()
        first = self.step(*data)
        self.wait()
        spent = time.perf_counter() - start
        self.my_turn()
        self.step(*data)
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times, last = self.timed(lambda: self.step(*data))
        seconds = median(times) / 1e3
        found = {
            "step_ms": round(seconds * 1e3, 2),
            "all_ms": [round(t, 1) for t in times],
            "tokens_per_second": round(rows * tokens / seconds),
            "mfu": round(self.work(rows, tokens) / seconds / PEAK, 4),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.cuda else None,
            "first_step_s": None if self.options.shared_cache else round(spent, 1),
            "losses": [round(float(first), 4), round(float(last), 4)],
        }
        self.say(kind=f"train {rows} x {tokens}", **found)

    def train_captured(self, rows: int, tokens: int) -> None:
        """The step as one CUDA graph."""
        data = self.data(rows, tokens)
        torch.cuda.empty_cache()
        graph, start = torch.cuda.CUDAGraph(), time.perf_counter()
        with torch.cuda.graph(graph):
            loss = self.step(*data)
        spent = time.perf_counter() - start
        graph.replay()
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        times, _ = self.timed(graph.replay)
        seconds = median(times) / 1e3
        self.say(
            kind=f"train as one graph {rows} x {tokens}",
            step_ms=round(seconds * 1e3, 2),
            all_ms=[round(t, 1) for t in times],
            tokens_per_second=round(rows * tokens / seconds),
            mfu=round(self.work(rows, tokens) / seconds / PEAK, 4),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
            capture_s=round(spent, 2),
            loss=round(float(loss), 4),
        )

    def timed(self, call: Callable[[], Any]) -> tuple[list[float], Any]:
        """Milliseconds of some calls, and the last result."""
        marks, last = [self.mark()], None
        for _ in range(self.options.steps):
            last = call()
            marks.append(self.mark())
        self.wait()
        return [self.between(a, b) for a, b in pairwise(marks)], last

    def my_turn(self) -> None:
        """Waits until every row of the contender has taken its first step or ended, and the rows before this one are timed."""
        folder = self.options.turns
        if folder is None or self.started:
            return
        self.started = True
        self.optimizer.zero_grad(set_to_none=True)
        if self.cuda:
            torch.cuda.empty_cache()  # the others want the memory
        (folder / self.options.row).touch()
        until = time.perf_counter() + self.options.turns_limit
        while len(list(folder.glob("*"))) < self.options.turns_of and time.perf_counter() < until:
            time.sleep(0.05)
        self.turn = open(folder.with_suffix(".lock"), "w")  # noqa: SIM115 (held until the process ends)
        fcntl.flock(self.turn, fcntl.LOCK_EX)

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        """Milliseconds between two marks."""
        return a.elapsed_time(b) if self.cuda else (b - a) * 1e3

    @torch.no_grad()
    def generate(self, rows: int, prompt: int, count: int) -> None:
        """The prompt and the first token, and each token after it; memory beside the parameters and the optimiser's state."""
        model = self.contender.model.eval()
        tokens, _ = self.data(rows, prompt)
        found: dict[str, Any] = {}
        for name, call in self.contender.generators.items():
            found[name] = self.generate_by(name, call, tokens, count)
        model.train()
        first, *others = found.values()
        if any(not torch.equal(first, other) for other in others):
            self.say(failed=f"the tokens of {' and '.join(found)} differ, {rows} x {prompt}")

    def generate_by(self, name: str, call: Callable[[Tensor, int], Any], tokens: Tensor, count: int) -> Tensor:
        """Times one way of continuing `tokens`; its new tokens."""
        rows, prompt = tokens.shape
        call(tokens, 8)
        before = torch.cuda.memory_allocated() if self.cuda else 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times, new = {}, tokens
        for number in (1, count + 1):
            self.wait()
            start = time.perf_counter()
            new = call(tokens, number)
            self.wait()
            times[number] = time.perf_counter() - start
        token = (times[count + 1] - times[1]) / count
        self.say(
            kind=f"generate {rows} x {prompt} + {count}" + (f", {name}" if name else ""),
            prompt_ms=round(times[1] * 1e3, 1),
            prompt_tokens_per_second=round(rows * prompt / times[1]),
            token_ms=round(token * 1e3, 2),
            tokens_per_second=round(rows / token),
            more_gib=round((torch.cuda.max_memory_allocated() - before) / 2**30, 2) if self.cuda else None,
        )
        return new

    def table(self, rows: int, tokens: int) -> None:
        """What the modules of the second block, and those outside blocks, keep for the backward: bytes per token, by name."""
        self.step(*self.data(rows, tokens))  # what is made once
        with kept_by(self.contender.model) as kept:
            loss = self.contender.loss(*self.data(rows, tokens))
        found = {name: round(size / (rows * tokens), 1) for name, size in kept.items() if size}
        del loss
        shown = {name: size for name, size in found.items() if ".0." not in name + "."}
        parts = {name: size for name, size in shown.items() if not any(f".{i}." in f"{name}." for i in range(2, 99))}
        self.say(kind=f"kept {rows} x {tokens}", total=round(sum(found.values())), bytes_per_token=parts)

    def profile(self, rows: int, tokens: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        data = self.data(rows, tokens)
        self.step(*data)
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self.step(*data)
            self.wait()
        rows_of = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)[:45]
        table = [[round(row.self_device_time_total / 1e3, 3), row.count, row.key[:110]] for row in rows_of]
        self.say(kind="profile", total_ms=round(sum(r.self_device_time_total for r in trace.key_averages()) / 1e3, 2))
        for row in table:
            self.say(profile=row)

    def run(self) -> None:
        options = self.options
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
        if not self.cuda:
            shapes = [(rows, min(tokens, 64)) for rows, tokens in shapes]
        if (
            options.warm_worker
        ):  # code for several sequences, then for one, which is a number that Triton specialises for
            for rows in (2, 1):
                self.train(rows, 2048 if self.cuda else 16)
            return
        first, *others = shapes  # what is worth most comes first
        captured: Any = self.train_captured if options.graph and self.cuda else None
        jobs: list[Any] = [lambda: self.train(*first)]
        if options.profile:
            jobs.append(lambda: self.profile(*first))
        if captured:
            jobs.append(lambda: captured(*first))
        jobs += [lambda shape=shape: self.train(*shape) for shape in others]
        if options.table:
            jobs.append(lambda: self.table(1, 2048 if self.cuda else 16))
        if options.generate:
            jobs.append(lambda: self.generate(1, *((2048, 64) if self.cuda else (16, 3))))
            jobs.append(lambda: self.generate(16, *((2048, 64) if self.cuda else (16, 3))))
        if captured:
            jobs += [lambda shape=shape: captured(*shape) for shape in others]
        for job in jobs:
            try:
                job()
            except Exception as error:
                self.say(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()


@contextmanager
def kept_by(model: nn.Module) -> Iterator[dict[str, int]]:
    """Within, bytes that autograd keeps, by the innermost module whose forward was running; a storage counts once, parameters do not."""
    stack, kept, handles = ["(model)"], defaultdict(int), []
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            alive.append(x.detach())
            kept[stack[-1]] += x.untyped_storage().nbytes()
        return x

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name or "(model)": stack.append(name)))
        handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield kept
    finally:
        for handle in handles:
            handle.remove()


# ---- all of them ------------------------------------------------------------------------------------------------------------------------


def command(options: argparse.Namespace, row: str, contender: str, *more: str) -> list[str]:
    flags = [f"--{name}" for name in ("table", "profile", "generate", "graph", "keep") if getattr(options, name)]
    numbers = [
        f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("steps", "shapes", "depth", "tuning-ms")
    ]
    return [sys.executable, __file__, "--row", row, "--contender", contender, *numbers, *flags, *more]


def warm(options: argparse.Namespace, jobs: list[tuple[str, str]], cache: str) -> list[subprocess.Popen[bytes]]:
    """Processes that compile the peers' kernels; each takes the variants of an autotuned kernel in an order of its own."""
    peers = [job for job in jobs if job[1] == "fla"]
    started = []
    for index in range(options.warm if peers else 0):
        row, contender = peers[index % len(peers)]
        more = ["--warm-worker", str(index + 1), "--depth", "4", "--steps", "1"]
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        environment["FLA_CACHE_RESULTS"] = "0"  # the variants were not timed: no choice among them is to be stored
        nowhere = subprocess.DEVNULL
        started.append(
            subprocess.Popen(
                ["nice", *command(options, row, contender, *more)], stdout=nowhere, stderr=nowhere, env=environment
            )
        )
    return started


def ended(processes: list[subprocess.Popen[bytes]], until: float) -> None:
    """Waits for the processes, at most until that time; ends those that are not done."""
    for process in processes:
        try:
            process.wait(max(0.0, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measured(
    options: argparse.Namespace,
    rows: list[str],
    contender: str,
    cache: str | None,
    write: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """The findings of the rows of a contender, as far as each came; `write` is given those so far whenever there are more."""
    limit = options.fla_timeout if contender == "fla" and options.fla_timeout else options.timeout
    with tempfile.TemporaryDirectory() as place:
        turns = Path(place) / "turns"
        turns.mkdir()
        more = ["--turns", str(turns), "--turns-of", str(len(rows)), "--turns-limit", str(limit / 2)]
        more += ["--shared-cache"] if cache else []
        running, start = {}, time.perf_counter()
        for row in rows:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache or str(Path(place) / row)}
            out, err = paths = Path(place) / f"{row}.out", Path(place) / f"{row}.err"
            with open(out, "w") as told, open(err, "w") as errors:
                process = subprocess.Popen(
                    command(options, row, contender, *more), stdout=told, stderr=errors, env=environment
                )
            running[row] = process, paths
        ended_after: dict[str, float] = {}

        def found() -> list[dict[str, Any]]:
            spent = time.perf_counter() - start
            return [
                findings(row, contender, process.poll(), paths, ended_after.get(row, spent))
                for row, (process, paths) in running.items()
            ]

        told_so_far = 0
        while len(ended_after) < len(rows):
            spent = time.perf_counter() - start
            for row, (process, _) in running.items():
                if row not in ended_after and (process.poll() is not None or spent > limit):
                    ended_after[row] = spent
                    process.kill()
                    process.wait()
                    (turns / row).touch()  # nobody waits for it
            told = sum(out.stat().st_size for _, (out, _) in running.values())
            if told > told_so_far:
                told_so_far = told
                write(found())
            time.sleep(0.1)
        write(last := found())
        return last


def findings(row: str, contender: str, status: int | None, paths: tuple[Path, Path], seconds: float) -> dict[str, Any]:
    """What a worker has said in its lines of JSON, and why it ended early."""
    texts = [path.read_text() for path in paths]
    found: dict[str, Any] = {"row": row, "contender": contender, "seconds": round(seconds, 1)}
    for line in texts[0].splitlines():
        if line.startswith("{") and line.endswith("}"):
            part = json.loads(line)
            if "kind" in part:
                found[part.pop("kind")] = part
            elif "profile" in part:
                found.setdefault("kernels", []).append(part["profile"])
            elif "failed" in part:
                found.setdefault("failed", []).append(part["failed"])
            else:
                found |= part
    if status:
        last = texts[1].strip().splitlines()[-1:] or [f"status {status}"]
        found.setdefault("failed", []).append(
            f"ended by its limit of {seconds:.0f} s" if status == -9 else last[0][:300]
        )
    return found


def show(found: dict[str, Any]) -> None:
    print(
        f"== {found['row']}, {found['contender']}: {found.get('parameters', 0) / 1e9:.3f} billion, {found['seconds']} s"
    )
    for name, value in found.items():
        if name == "kernels":
            for row in value[:14]:
                print("  ", *row)
        elif isinstance(value, dict) and "bytes_per_token" in value:
            print(f"  {name}: {value['total']} bytes a token; the second block and the rest:")
            for module, size in value["bytes_per_token"].items():
                print(f"    {size:>10} {module}")
        elif isinstance(value, dict):
            print(f"  {name}:", ", ".join(f"{key} {x}" for key, x in value.items() if key != "all_ms"))
        elif name in ("failed", "notes") and value:
            print(f"  {name}: {value}")
    sys.stdout.flush()


def write(options: argparse.Namespace, before: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    if options.out or torch.cuda.is_available():
        about = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
        timing.write_results("model", [*before, *found], options.out, about)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--shapes", default="8x2048,1x32768", help="rows x tokens of the steps")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--depth", type=int, default=0, help="layers, if not 24")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a contender")
    parser.add_argument("--fla-timeout", type=float, help="seconds for one of flash-linear-attention, if not --timeout")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile the peers' kernels beforehand")
    parser.add_argument("--warm-limit", type=float, default=300, help="seconds for them, from the start")
    parser.add_argument("--warm-cache", type=Path, help="a folder for what they compile, which stays")
    parser.add_argument("--tuning-ms", type=int, default=0, help="milliseconds for a variant of the peers' autotuning")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--graph", action="store_true", help="time the step as one CUDA graph, too")
    parser.add_argument("--keep", action="store_true", help="flashmix keeps all for the backward, recomputes nothing")
    parser.add_argument("--out", type=Path, help="a folder for the results (default: benchmarks/results)")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--warm-worker", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shared-cache", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns-of", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--turns-limit", type=float, default=60, help=argparse.SUPPRESS)
    return parser.parse_args()


def compile_only(number: int) -> None:
    """Lets Triton's autotuner compile variants without timing them, in an order of this process's own."""
    import random

    from triton.runtime.autotuner import Autotuner, Config

    original = Autotuner.prune_configs

    def shuffled(self: Any, kwargs: Any) -> list[Config]:
        return random.Random(number).sample(found := original(self, kwargs), len(found))

    def compiled(self: Any, *args: Any, config: Config, **meta: Any) -> list[float]:
        try:
            self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        except Exception:  # a variant that does not fit
            return [float("inf")] * 3
        return [float(config.num_stages)] * 3  # the smallest is run

    Autotuner.prune_configs, Autotuner._bench = shuffled, compiled  # type: ignore[method-assign]


def tuned_in(milliseconds: int) -> None:
    """Lets Triton's autotuner time a variant for that long, in place of its 125 milliseconds."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    times = {"warmup": max(1, milliseconds // 4), "rep": milliseconds}
    Autotuner.do_bench = property(lambda self: lambda call, quantiles: do_bench(call, quantiles=quantiles, **times))  # type: ignore[assignment]


def main() -> None:
    options = arguments()
    if options.row:
        if options.warm_worker:
            compile_only(options.warm_worker)
        elif options.tuning_ms and options.contender == "fla":
            tuned_in(options.tuning_ms)
        Worker(options).run()
        return
    jobs = [(row, who) for who in options.contenders.split(",") for row in options.rows.split(",")]
    jobs = [job for job in jobs if job[1] != "transformers" or job[0] == "transformer"]
    jobs.sort(key=lambda job: job[1] == "fla")  # last, so that its kernels compile meanwhile
    results: list[dict[str, Any]] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        cache = str(options.warm_cache or place)
        compiling = warm(options, jobs, cache)
        try:
            for contender in dict.fromkeys(who for _, who in jobs):
                rows = [row for row, who in jobs if who == contender]
                if contender == "fla":
                    ended(compiling, start + options.warm_limit)
                shared = cache if contender == "fla" and (options.warm or options.warm_cache) else None
                found = measured(options, rows, contender, shared, partial(write, options, results))
                for one in found:
                    show(one)
                results += found
        finally:
            ended(compiling, 0.0)


if __name__ == "__main__":
    main()
