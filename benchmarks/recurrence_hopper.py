"""The recurrence on a Hopper GPU: our kernels in Gluon and in Triton, FlashQLA's and flash-linear-attention's (FLA), which take turns.

    python benchmarks/recurrence_hopper.py [--only gated_delta_rule:0,kda] [--fla gated_delta_rule:0] [--warm 8] [--no-peer]
    python benchmarks/recurrence_hopper.py --kernels | --layer | --host | --first

Medians with a cold L2 cache, the host's time hidden behind an idle GPU (`timing.cuda_medians`), after all sides were compared with the
float32 result. Where FLA refuses its backward on this Triton, because it may be compiled wrong, that is timed with the refusal lifted
and not compared. `--kernels`: milliseconds of each of our kernels. `--layer`: a whole Gated DeltaNet layer, forward + backward.
`--host`: microseconds of the host for a call. `--first`: seconds of the first forward + backward in a fresh process with an empty
compile cache. `--warm N` compiles first, each side of each row in a process of its own, FLA's candidates dealt out to `--shares`
processes, so many at a time; `--compile` does so and nothing else. `--tuning 15` lets FLA's autotuner measure each candidate for 15 ms.
With FlashQLA installed, `FLA_FLASH_QLA=0` keeps FLA from calling it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import timing
import torch
from recurrence_gpu import chosen, errors, guard, reference, versions, wrong
from recurrence_peers import flash_qla, flash_qla_takes, installed, quick_tuning, with_flash_qla, within
from recurrence_rows import RULES, Row, Tensors, bounds, gradients, message, ours, peers, tensors
from torch import Tensor

from flashmix.layers import GatedDeltaNet

ROWS = (
    *(
        Row("gated_delta_rule", *sizes)
        for sizes in ((4, 8192, 16, 64), (1, 32768, 16, 64), (1, 32768, 2, 8), (8, 4096, 16, 16))
    ),
    *(Row("gated_delta_rule", 4, 8192, 16, 16, *widths) for widths in ((64, 64), (256, 256), (96, 80))),
    Row("kda", 8, 4096, 16, 16),
    Row("kda", 1, 8192, 96, 96),
    *(Row(rule, 8, 4096, 16, 16) for rule in ("delta_rule", "simple_gla", "retention", "gla", "rwkv7")),
    Row("rwkv7", 8, 4096, 16, 16, 64, 64),
    *(Row("gated_delta_rule", 8, 4096, 16, 16, *widths) for widths in ((128, 64), (64, 128))),
    *(
        Row("simple_gla", *sizes, 128, 64) for sizes in ((8, 4096, 16, 16), (4, 4096, 1, 80))
    ),  # the latter Mamba-2's of 2.7B
    Row("retention", 8, 4096, 16, 16, 64, 128),
    Row("simple_gla", 8, 2048, 8, 16, 256, 256),  # of xLSTM-7B's mLSTM, whose values of 512 channels are two heads
)
WIDTH, KEY_HEADS, VALUE_HEADS, CHANNELS, TOKENS = 2048, 16, 32, 128, 8192  # of the layer


def fla_name(row: Row) -> str:
    """FLA refuses its backward with a decay per token on this Triton; with tilelang it has another for the delta rule."""
    refused = RULES[row.rule].gate == "token" and not (row.rule == "gated_delta_rule" and installed("tilelang"))
    return "fla lifted" if refused else "fla"


def sides(row: Row, options: argparse.Namespace) -> dict[str, Callable[[Tensors], Tensor]]:
    """Who computes a row: what `impl="auto"` takes, Triton's kernels, the peers."""
    found = {"flashmix": partial(_ours, row)}
    if not options.no_triton:
        found["triton"] = lambda x: ours(row, x, "triton")
    if not options.no_peer and flash_qla_takes(row):
        found["flashqla"] = flash_qla
    if not options.no_peer and options.fla != "none" and row in chosen(options.fla, ROWS):
        found[fla_name(row)] = lambda x: peers(row, x)
    return found


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Errors and times of all sides of a row."""
    x = tensors(row)
    do = torch.randn_like(x["v"])
    wanted = reference(row, x, do)
    found: dict[str, Any] = {**asdict(row), "bound_ms": [round(ms, 4) for ms in bounds(row, x)]}
    forward: dict[str, Callable[[], Any]] = {}
    both: dict[str, Callable[[], Any]] = {}
    for name, run in sides(row, options).items():
        found[name] = {}
        try:
            with guard(name), within(options.limit):
                own = errors(row, gradients(run, x, do), wanted)
        except Exception as error:  # a peer may raise anything; the row says what
            found[name]["failed"] = message(error)
            continue
        found[name]["errors"] = own
        forward[name] = _forward(run, x)
        both[name] = _both(name, run, x, do)
    found["wrong"] = wrong(found["flashmix"]["errors"], {})
    for kind, runs in (("forward", forward), ("both", both)):
        for name, ms in timing.cuda_medians(runs, repeats=options.repeats, warmup=2).items():
            found[name][f"{kind}_ms"] = round(ms, 4)
    return found


def _ours(row: Row, x: Tensors) -> Tensor:
    return ours(row, x, "auto")


def _forward(run: Callable[[Tensors], Tensor], x: Tensors) -> Callable[[], Any]:
    def call() -> None:
        with torch.no_grad():
            run(x)

    return call


def _both(name: str, run: Callable[[Tensors], Tensor], x: Tensors, do: Tensor) -> Callable[[], Any]:
    def call() -> None:
        with guard(name):
            gradients(run, x, do)

    return call


def line(found: dict[str, Any]) -> str:
    """A row in one line."""
    name = Row(**{key: found[key] for key in Row.__dataclass_fields__}).name
    if "failed" in found or "skipped" in found:
        return f"{name}: {found.get('failed') or found['skipped']}"
    parts = [f"{name:42}"]
    for side in ("flashmix", "triton", "flashqla", "fla", "fla lifted"):
        if side in found:
            times = (
                found[side].get("failed") or f"{found[side].get('forward_ms', '-')} / {found[side].get('both_ms', '-')}"
            )
            parts.append(f"{side} {times} |")
    return " ".join(parts) + (f" WRONG {found['wrong']}" if found["wrong"] else "")


def layers(options: argparse.Namespace) -> dict[str, torch.nn.Module]:
    """The layer, ours and the peer's, of the same sizes; the peer's with FlashQLA, and as it is where `--fla` names no rows."""
    sizes: dict[str, Any] = {
        "heads": KEY_HEADS,
        "value_heads": VALUE_HEADS,
        "head_dim": CHANNELS,
        "value_dim": CHANNELS,
    }
    found: dict[str, torch.nn.Module] = {"flashmix": GatedDeltaNet(WIDTH, **sizes)}
    if options.no_peer:
        return {name: layer.to("cuda", torch.bfloat16) for name, layer in found.items()}
    try:
        peer: dict[str, Any] = {"expand_v": 1, "head_dim": CHANNELS, "num_heads": KEY_HEADS, "num_v_heads": VALUE_HEADS}
        if installed("flash_qla"):
            found["fla with FlashQLA"] = with_flash_qla(WIDTH, peer)
        if not options.fla:
            kind = "fla" if installed("tilelang") else "fla lifted"
            found[kind] = importlib.import_module("fla.layers").GatedDeltaNet(WIDTH, **peer)
    except ImportError as error:
        print(message(error))
    return {name: layer.to("cuda", torch.bfloat16) for name, layer in found.items()}


def layer_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and forward + backward of the layer over one sequence, with all gradients."""
    x = torch.randn(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn_like(x)
    found: dict[str, Any] = {
        "layer": "GatedDeltaNet",
        "tokens": TOKENS,
        "width": WIDTH,
        "heads": [KEY_HEADS, VALUE_HEADS],
    }
    runs: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "both": {}}
    for name, layer in layers(options).items():

        def forward(layer: torch.nn.Module = layer) -> Tensor:
            with torch.no_grad():
                return layer(x)

        def both(name: str = name, layer: torch.nn.Module = layer) -> None:
            with guard(name):
                o = layer(x)
                torch.autograd.grad(o[0] if isinstance(o, tuple) else o, [x, *layer.parameters()], do)

        found[name] = {"parameters": sum(p.numel() for p in layer.parameters())}
        try:
            with within(options.limit):
                both()
        except Exception as error:
            found[name]["failed"] = message(error)
            continue
        runs["forward"][name], runs["both"][name] = forward, both
    if options.share:
        return []
    for kind, own in runs.items():
        for name, ms in timing.cuda_medians(own, repeats=options.repeats).items():
            found[name][f"{kind}_ms"] = round(ms, 4)
    print(found)
    return [found]


def kernel_rows(rows: list[Row]) -> list[dict[str, Any]]:
    """Milliseconds of each of our kernels in a forward + backward: medians of 8 calls, by torch's profiler."""
    found = []
    for row in rows:
        x = tensors(row)
        call = _both("flashmix", partial(_ours, row), x, torch.randn_like(x["v"]))
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(8):
                call()
            torch.cuda.synchronize()
        times: dict[str, list[float]] = {}
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times.setdefault(event.name[:60], []).append(event.device_time / 1e3)
        entry: dict[str, Any] = {**asdict(row), "kernels": {}}
        for name, own in times.items():
            launches = len(own) // 8
            of_launch = [sorted(own[i::launches])[4] for i in range(launches)] if launches else own
            entry["kernels"][name] = [round(ms, 4) for ms in of_launch]
        print(row.name, {name: ms for name, ms in entry["kernels"].items() if sum(ms) > 0.005}, flush=True)
        found.append(entry)
        torch.cuda.empty_cache()
    return found


def host_rows() -> list[dict[str, Any]]:
    """Microseconds until a call returns to the host, while the GPU still works on earlier ones: medians of 40."""
    found = []
    for row in (Row("gated_delta_rule", 1, 2048, 4, 4), Row("kda", 1, 2048, 4, 4), Row("simple_gla", 1, 2048, 4, 4)):
        x = tensors(row)
        do = torch.randn_like(x["v"])
        run = partial(_ours, row)
        calls = {"forward": _forward(run, x), "both": _both("flashmix", run, x, do)}
        entry: dict[str, Any] = {**asdict(row)}
        for kind, call in calls.items():
            times = []
            for _ in range(60):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
                torch.cuda.synchronize()
            entry[f"{kind}_host_us"] = round(sorted(times[20:])[20] * 1e6, 1)
        print(entry)
        found.append(entry)
    return found


def first_row(row: Row) -> float:
    """Seconds of the first forward + backward in this process, after torch has started."""
    x = tensors(row)
    do = torch.randn_like(x["v"])
    warm = torch.ones(8, 8, device="cuda", requires_grad=True)
    torch.autograd.grad(warm @ warm, warm, torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
    start = time.perf_counter()
    gradients(partial(_ours, row), x, do)
    torch.cuda.synchronize()
    return round(time.perf_counter() - start, 2)


def first_rows() -> list[dict[str, Any]]:
    """The same in fresh processes, with an empty compile cache and again with what is in it then."""
    found = []
    for name in ("gated_delta_rule:3", "kda:0", "simple_gla:0"):
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("empty cache", "warm cache"):
                command = [sys.executable, __file__, "--only", name, "--first-here"]
                env = {**os.environ, "TRITON_CACHE_DIR": cache}
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                found.append({"row": name, "cache": kind, "seconds": done.stdout.strip() or done.stderr[-300:]})
                print(found[-1], flush=True)
    return found


def compile_rows(rows: list[Row], options: argparse.Namespace) -> None:
    """Runs each side of each row once, each in a process of its own, so many at a time; with `--layer` the layers too."""
    common = [sys.executable, __file__, "--tuning", str(options.tuning)]

    def run(job: tuple[str, list[str]]) -> str:
        start = time.perf_counter()
        done = subprocess.run([*common, *job[1]], capture_output=True, text=True)
        return f"{job[0]} {time.perf_counter() - start:.0f} s {done.stderr[-200:] if done.returncode else ''}"

    jobs: list[tuple[str, list[str]]] = []
    for row in rows:
        name = f"{row.rule}:{[r for r in ROWS if r.rule == row.rule].index(row)}"
        for side in sides(row, options):
            job = ["--only", name, "--fla", name, "--side", side]
            parts = options.shares if side.startswith("fla ") or side == "fla" else 1
            jobs += [(f"{name} {side}", [*job, *_share(i, parts)]) for i in range(parts)]
    if options.layer:
        job = ["--layer", *(("--fla", "none") if options.fla else ())]
        jobs += [(f"layer {i}", [*job, "--share", f"{i}/{options.shares}"]) for i in range(options.shares)]
    jobs.sort(key=lambda job: "flashmix" in job[1])  # the peers take longest
    with ThreadPoolExecutor(options.warm) as pool:
        for text in pool.map(run, jobs):
            print("warm", text, flush=True)


def _share(index: int, count: int) -> list[str]:
    return ["--share", f"{index}/{count}"] if count > 1 else []


def compile_side(row: Row, side: str, options: argparse.Namespace) -> None:
    x = tensors(row)
    with guard(side):
        gradients(sides(row, options)[side], x, torch.randn_like(x["v"]))
    torch.cuda.synchronize()


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
        timing.write_results(options.name, found, options.out, versions())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rules, or rows of them (kda:1), separated by commas")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-triton", action="store_true")
    parser.add_argument(
        "--fla", default="", help="rows for flash-linear-attention, as for --only, or none; all without"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, help="rows that would start later are skipped")
    parser.add_argument("--limit", type=int, default=0, help="seconds of the first call of each side")
    parser.add_argument("--warm", type=int, metavar="N", help="first compile in N processes")
    parser.add_argument("--compile", action="store_true", help="and nothing else")
    parser.add_argument("--side", help="only run this side of each row once")
    parser.add_argument(
        "--shares", type=int, default=1, metavar="N", help="processes that compile FLA's candidates of a row"
    )
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--tuning", type=int, default=100, metavar="MS", help="for each candidate of FLA's autotuner")
    parser.add_argument("--out", type=Path, help="folder of the JSON")
    parser.add_argument("--name", default=f"recurrence_hopper_{timing.card()}", help="of the JSON, after the date")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--first-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = chosen(options.only, ROWS)
    share = options.share and tuple(int(part) for part in options.share.split("/"))
    quick_tuning(options.tuning, share)
    if options.side:
        for row in rows:
            compile_side(row, options.side, options)
    elif options.first_here:
        print(first_row(rows[0]))
    elif options.compile:
        compile_rows(rows, options)
    elif options.share:
        layer_rows(options)
    elif options.kernels or options.layer or options.host or options.first:
        kinds = (
            ("kernels", lambda: kernel_rows(rows)),
            ("layer", lambda: layer_rows(options)),
            ("host", host_rows),
            ("first", first_rows),
        )
        for kind, run in kinds:
            if getattr(options, kind):
                timing.write_results(f"{options.name}_{kind}", run(), options.out, versions())
    else:
        if options.warm:
            compile_rows(rows, options)
        compare(rows, options)


if __name__ == "__main__":
    main()
