"""Attention on a Hopper GPU: Gluon kernels beside Triton's and cuDNN's, the rows of docs/attention_speed.md.

TFLOP/s over visible pairs of a query and a key, bfloat16: 2 (K + V) operations a pair and query head forward, 2 (3 K + 2 V) backward.
Medians of runs that take turns with a cold L2 cache; before anything is timed results are compared with Triton's, or with cuDNN's.
`python benchmarks/attention_hopper.py --processes 14 --host --first --write`. `--sides auto cudnn fa4` times what a call takes by
itself and FlashAttention-4, where its package is installed (`flash_attn.cute`); its backward is the faster one, which is not deterministic.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timing
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmix import Packing, softmax_attention
from flashmix.gpu.arch import triton_version
from flashmix.ops.attention.call import LEAST_CHANNELS_CAUSAL, LEAST_TOKENS_CAUSAL

BF16 = torch.bfloat16
PACKED = 2048  # tokens of each packed sequence
SOFTCAP = 30.0
SIDES = ("gluon", "triton", "cudnn", "auto", "fa4")
FIRST = """
import sys, time, torch
from attention_hopper import Row, inputs_of
from flashmix import softmax_attention
x = torch.randn(64, 64, device="cuda", requires_grad=True)
torch.autograd.grad(x @ x, x, x.detach())
torch.cuda.synchronize()
leaves, flow, options = inputs_of(Row(int(sys.argv[1]), 4096, 1, 16))
start = time.perf_counter()
o = softmax_attention(*leaves, **options, impl="gluon")[0]
torch.cuda.synchronize()
middle = time.perf_counter()
torch.autograd.grad(o, leaves, flow)
torch.cuda.synchronize()
print(middle - start, time.perf_counter() - middle)
"""


@dataclass(frozen=True)
class Row:
    """One size; `feature`: "sink", "gate", "slopes", "softcap" or "packed"."""

    dim: int
    tokens: int
    batch: int
    heads: int
    causal: bool = True
    dim_v: int = 0
    heads_k: int = 0
    window: int = 0
    feature: str = ""

    @property
    def name(self) -> str:
        size = f"{self.dim}" if not self.dim_v else f"{self.dim} and {self.dim_v}"
        heads = f"{self.heads}" if not self.heads_k else f"{self.heads} on {self.heads_k}"
        more = f" window of {self.window}" if self.window else f" {self.feature}" if self.feature else ""
        return f"{size}, {self.tokens}, {self.batch}, {heads} {'causal' if self.causal else 'full'}{more}"

    @property
    def values(self) -> int:
        return self.dim_v or self.dim

    @property
    def plain(self) -> bool:
        return not self.window and not self.feature

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of a head."""
        T = PACKED if self.feature == "packed" else self.tokens
        rows = self.batch * self.tokens // T
        if self.window:
            W = min(self.window, T)
            return rows * (W * (W + 1) // 2 + (T - W) * W)
        return rows * (T * (T + 1) // 2 if self.causal else T * T)

    def operations(self, backward: bool) -> float:
        K, V = self.dim, self.values
        return 2.0 * self.pairs * self.heads * (3 * K + 2 * V if backward else K + V)


TOKENS, MASKS = (4096, 8192, 16384), (True, False)
ROWS = (
    *(Row(64, T, 16384 // T, 32, causal) for T in TOKENS for causal in MASKS),
    *(Row(dim, T, 16384 // T, 16, causal) for dim in (80, 96) for T in TOKENS[1:] for causal in MASKS),
    *(Row(128, T, 16384 // T, 16, causal) for T in TOKENS for causal in MASKS),
    *(Row(192, T, 16384 // T, 16, causal) for T in TOKENS[1:] for causal in MASKS),
    *(Row(256, T, 16384 // T, 8, causal) for T in TOKENS for causal in MASKS),
    *(Row(192, 8192, 2, 16, causal, dim_v=128) for causal in MASKS),
    Row(128, 8192, 1, 64, heads_k=8),
    Row(128, 32768, 1, 16, window=1024),
    *(Row(128, 16384, 1, 16, feature=feature) for feature in ("sink", "gate", "slopes", "softcap")),
    Row(128, 32768, 1, 16, feature="packed"),
    *(Row(64, 16384, 1, 32, feature=feature) for feature in ("sink", "gate", "softcap")),
    Row(64, 32768, 1, 32, feature="packed"),
)


def inputs_of(row: Row) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """q, k and v, what flows back, and the options of a row."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=BF16)

    B, T, H = row.batch, row.tokens, row.heads
    q, k = random(B, T, H, row.dim), random(B, T, row.heads_k or H, row.dim)
    v, flow = random(B, T, row.heads_k or H, row.values), random(B, T, H, row.values)
    options: dict[str, Any] = {"causal": row.causal}
    if row.window:
        options["window"] = (row.window - 1, 0)
    if row.feature == "sink":
        options["sink"] = torch.randn(H, device="cuda")
    if row.feature == "gate":
        options["log_decay"] = -torch.rand(B, T, H, device="cuda")
    if row.feature == "slopes":
        options["alibi_slopes"] = torch.rand(H, device="cuda")
    if row.feature == "softcap":
        options["softcap"] = SOFTCAP
    if row.feature == "packed":
        options["cu_seqlens"] = Packing.from_lengths([PACKED] * (T // PACKED), device="cuda")
    return [x.requires_grad_() for x in (q, k, v)], flow, options


def cudnn(leaves: list[Tensor], causal: bool) -> Tensor:
    q, k, v = [x.transpose(1, 2) for x in leaves]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def fa4(leaves: list[Tensor], row: Row, options: dict[str, Any]) -> Tensor:
    """FlashAttention-4's output; a sink is what it calls a learnable one."""
    module = importlib.import_module("flash_attn.cute")
    given: dict[str, Any] = {"causal": row.causal, "window_size": options.get("window", (None, None))}
    given["softcap"] = options.get("softcap", 0.0)
    if "sink" in options:
        given["learnable_sink"] = options["sink"]
    if row.feature == "packed":
        cu = options["cu_seqlens"].cu_seqlens.to(torch.int32)
        given |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": PACKED, "max_seqlen_k": PACKED}
        found = module.flash_attn_varlen_func(*[x[0] for x in leaves], **given)
    else:
        found = module.flash_attn_func(*leaves, **given)
    o = found[0] if isinstance(found, tuple) else found
    return o.unsqueeze(0) if row.feature == "packed" else o


def runs_of(row: Row, leaves: list[Tensor], options: dict[str, Any], sides: Sequence[str]) -> dict[str, Any]:
    """The forward of each side that takes the row, and the context that it runs in; the others are compared with the first."""
    runs: dict[str, Any] = {}
    if row.plain:
        runs["cudnn"] = (lambda: cudnn(leaves, row.causal)), partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    for impl in ("triton", "gluon", "auto"):
        runs[impl] = (lambda impl=impl: softmax_attention(*leaves, **options, impl=impl)[0], nullcontext)
    if row.feature not in ("gate", "slopes"):
        runs["fa4"] = (lambda: fa4(leaves, row, options)), nullcontext
    wanted = "triton" if "triton" in sides else next(iter(runs))
    return {name: runs[name] for name in dict.fromkeys((wanted, *runs)) if name in sides or name == wanted}


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def measure(row: Row, repeats: int, sides: Sequence[str], both: bool = True) -> dict[str, Any]:
    """TFLOP/s of each side, forward and (if `both`) backward."""
    leaves, flow, options = inputs_of(row)
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    wanted: tuple[Tensor, ...] = ()
    measured: dict[str, Any] = {"row": row.name}

    def once(run: Callable[[], Tensor], context: Any) -> None:
        with torch.no_grad(), context():
            run()

    def back(o: Tensor, context: Any) -> None:
        with context():
            torch.autograd.grad(o, leaves, flow, retain_graph=True)

    for name, (run, context) in runs_of(row, leaves, options, sides).items():
        try:
            with context():
                o = run()
                gradients = torch.autograd.grad(o, leaves, flow, retain_graph=True) if both else ()
                found = (o.detach(), *gradients)
        except Exception as problem:  # another library may raise anything; the row says what
            measured[f"{name}_failed"] = (str(problem).splitlines() or [type(problem).__name__])[0][:100]
            continue
        if not wanted:
            wanted = found
        for what, got, right in zip(("o", "dq", "dk", "dv"), found, wanted, strict=False):
            if not error(got, right) < 2e-2:  # no speed-up over a wrong result
                measured[f"{name}_wrong"] = f"{what} is {error(got, right):.1e} away"
        if name in sides and f"{name}_wrong" not in measured:
            forward[name], backward[name] = partial(once, run, context), partial(back, o, context)
    for kind, runs in (("forward", forward), ("backward", backward)):
        if repeats and (both or kind == "forward"):
            for name, ms in timing.cuda_medians(runs, repeats=repeats).items():
                measured[f"{name}_{kind}"] = round(row.operations(kind == "backward") / ms / 1e9, 1)
    return measured


def compiled(task: tuple[Row, str, bool]) -> None:
    """Compiles what one side launches for a row, forward and (if both) backward, into the cache that all processes share."""
    row, side, both = task
    leaves, flow, options = inputs_of(row)
    run, context = runs_of(row, leaves, options, (side,))[side]
    with suppress(Exception), context():  # `measure` tells what failed
        o = run()
        if both:
            torch.autograd.grad(o, leaves, flow)


def compile_all(rows: Sequence[Row], sides: Sequence[str], processes: int, both: bool = True) -> None:
    """Compiles all kernels at once, in so many processes; code is the same for every length and batch.

    The length chooses whose kernels a causal call of few channels takes.
    """
    tasks: dict[tuple[Row, str, bool], None] = {}
    for row in rows:
        least = (
            2 * PACKED if row.feature == "packed" else LEAST_TOKENS_CAUSAL if row.dim < LEAST_CHANNELS_CAUSAL else 512
        )
        small = replace(row, tokens=min(row.tokens, least), batch=1)
        tasks |= {(small, side, both): None for side in runs_of(small, [], {}, sides) if side != "cudnn"}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, tasks))


def first_call(dim: int) -> dict[str, float]:
    """Seconds of the first forward and of its backward in a fresh process with an empty compile cache, after torch has started."""
    with tempfile.TemporaryDirectory() as cache:
        folders = (os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", ""))
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(folders)}
        command = [sys.executable, "-c", FIRST, str(dim)]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return {
        f"first {name}, {dim} channels, s": round(float(t), 2)
        for name, t in zip(("forward", "backward"), said, strict=True)
    }


def host_times(dim: int, tokens: int = 128, heads: int = 8) -> dict[str, float]:
    """Microseconds of the host: a call without and with a graph, its backward by itself, both; the best of six means."""
    leaves, flow, options = inputs_of(Row(dim, tokens, 1, heads))
    detached = [x.detach() for x in leaves]

    def run() -> Any:
        return softmax_attention(*leaves, **options)

    o = run()[0]
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: softmax_attention(*detached, **options),
        "forward with a graph": run,
        "backward": lambda: torch.autograd.grad(o, leaves, flow, retain_graph=True),
        "both": lambda: torch.autograd.grad(run()[0], leaves, flow),
    }
    found = {}
    for name, call in calls.items():
        best = float("inf")
        for _ in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(300):
                call()
            best = min(best, (time.perf_counter() - start) / 300)
        found[f"host {name}, {dim} channels, us"] = round(best * 1e6, 1)
    return found


def chosen_rows(numbers: Sequence[int] | None) -> list[Row]:
    return list(ROWS) if numbers is None else [ROWS[i] for i in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", help="only these, numbered as in ROWS")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES[:3], help="who is timed")
    parser.add_argument("--processes", type=int, default=0, help="how many rows compile at a time, before")
    parser.add_argument("--forward", action="store_true", help="the forward alone")
    parser.add_argument("--host", action="store_true", help="the host's time too")
    parser.add_argument("--first", action="store_true", help="the first call with an empty compile cache too")
    parser.add_argument("--write", action="store_true", help="write the results as dated JSON")
    chosen = parser.parse_args()
    rows = chosen_rows(chosen.rows)
    if chosen.processes:
        compile_all(rows, chosen.sides, chosen.processes, not chosen.forward)
    name = f"attention_{'fa4' if 'fa4' in chosen.sides else 'hopper_all'}_{timing.card()}"
    more = {"gpu": torch.cuda.get_device_name(), "triton": triton_version()}
    found: list[dict[str, Any]] = []

    def note(result: dict[str, Any]) -> None:
        """Prints what was found, and writes all so far."""
        found.append(result)
        print(*(f"{key} {value}" for key, value in result.items()), flush=True)
        if chosen.write:
            timing.write_results(name, found, more=more)

    for row in rows:
        note(measure(row, chosen.repeats, chosen.sides, not chosen.forward))
    for dim in (64, 128, 192) if chosen.host else ():
        note(host_times(dim))
    for dim in (64, 128) if chosen.first else ():
        note(first_call(dim))


if __name__ == "__main__":
    main()
