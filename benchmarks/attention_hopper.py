"""Attention on a Hopper GPU: Gluon kernels beside Triton's and cuDNN's, the rows of docs/attention_speed.md.

TFLOP/s over visible pairs of a query and a key, bfloat16: 2 (K + V) operations a pair and query head forward, 2 (3 K + 2 V) backward.
Medians of runs that take turns with a cold L2 cache; before anything is timed results are compared. FlashAttention-4 takes part with
`--fa4`, where its package is installed (`flash_attn.cute`). `python benchmarks/attention_hopper.py --processes 14 --host --write`.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timing
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmix import Packing, softmax_attention
from flashmix.gpu.arch import triton_version

BF16 = torch.bfloat16
PACKED = 2048  # tokens of each packed sequence


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


ROWS = (
    *(Row(64, T, 16384 // T, 32, causal) for T in (4096, 8192, 16384) for causal in (True, False)),
    *(Row(dim, 16384, 1, 16, causal) for dim in (80, 96) for causal in (True, False)),
    *(Row(128, T, 16384 // T, 16, causal) for T in (4096, 8192, 16384) for causal in (True, False)),
    *(Row(192, 16384, 1, 16, causal) for causal in (True, False)),
    *(Row(256, T, 16384 // T, 8, causal) for T in (4096, 16384) for causal in (True, False)),
    Row(192, 8192, 2, 16, dim_v=128),
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
        options["softcap"] = 30.0
    if row.feature == "packed":
        options["cu_seqlens"] = Packing.from_lengths([PACKED] * (T // PACKED), device="cuda")
    return [x.requires_grad_() for x in (q, k, v)], flow, options


def cudnn(leaves: list[Tensor], causal: bool) -> Tensor:
    q, k, v = [x.transpose(1, 2) for x in leaves]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def fa4(leaves: list[Tensor], row: Row) -> Tensor:
    attend = importlib.import_module("flash_attn.cute").flash_attn_func
    window = (row.window - 1, 0) if row.window else (None, None)
    softcap = 30.0 if row.feature == "softcap" else 0.0
    found = attend(*leaves, causal=row.causal, window_size=window, softcap=softcap)
    return found[0] if isinstance(found, tuple) else found


def runs_of(row: Row, leaves: list[Tensor], options: dict[str, Any], with_fa4: bool) -> dict[str, Any]:
    """Each side's forward, and the context that it runs in."""
    runs: dict[str, Any] = {
        impl: (lambda impl=impl: softmax_attention(*leaves, **options, impl=impl)[0], nullcontext)
        for impl in ("gluon", "triton")
    }
    if row.plain:
        runs["cudnn"] = (lambda: cudnn(leaves, row.causal)), partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    if with_fa4 and (row.plain or row.window or row.feature == "softcap"):
        runs["fa4"] = (lambda: fa4(leaves, row)), nullcontext
    return runs


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


def measure(row: Row, repeats: int, with_fa4: bool) -> dict[str, Any]:
    """TFLOP/s of each side, forward and backward."""
    leaves, flow, options = inputs_of(row)
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}
    results: dict[str, tuple[Tensor, ...]] = {}

    def once(run: Callable[[], Tensor], context: Any) -> None:
        with torch.no_grad(), context():
            run()

    def back(o: Tensor, context: Any) -> None:
        with context():
            torch.autograd.grad(o, leaves, flow, retain_graph=True)

    for name, (run, context) in runs_of(row, leaves, options, with_fa4).items():
        try:
            with context():
                o = run()
                results[name] = (o.detach(), *torch.autograd.grad(o, leaves, flow, retain_graph=True))
        except (RuntimeError, ValueError) as problem:
            print(f"{name} cannot run {row.name}: {str(problem).splitlines()[0][:100]}", flush=True)
            continue
        forward[name], backward[name] = partial(once, run, context), partial(back, o, context)
    for name, found in results.items():
        for what, got, wanted in zip(("o", "dq", "dk", "dv"), found, results["triton"], strict=True):
            if not error(got, wanted) < 2e-2:  # no speed-up over a wrong result
                print(f"{row.name}: {what} of {name} is {error(got, wanted):.1e} from Triton's", flush=True)
    del results
    measured: dict[str, Any] = {"row": row.name}
    for kind, runs in (("forward", forward), ("backward", backward)):
        if repeats:
            for name, ms in timing.cuda_medians(runs, repeats=repeats).items():
                measured[f"{name}_{kind}"] = round(row.operations(kind == "backward") / ms / 1e9, 1)
    return measured


def compiled(row: Row) -> None:
    """Compiles a row's kernels into the cache that all processes share."""
    measure(replace(row, tokens=2 * PACKED if row.feature == "packed" else 512, batch=1), 0, False)


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
    parser.add_argument("--fa4", action="store_true", help="FlashAttention-4 too")
    parser.add_argument("--processes", type=int, default=0, help="how many rows compile at a time, before")
    parser.add_argument("--host", action="store_true", help="the host's time too")
    parser.add_argument("--write", action="store_true", help="write the results as dated JSON")
    chosen = parser.parse_args()
    rows = chosen_rows(chosen.rows)
    if chosen.processes:
        with ProcessPoolExecutor(chosen.processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compiled, rows))
    found = []
    for row in rows:
        found.append(measure(row, chosen.repeats, chosen.fa4))
        print(*(f"{name} {value}" for name, value in found[-1].items()), flush=True)
    if chosen.host:
        for dim in (64, 128, 192):
            found.append(host_times(dim))
            print(found[-1], flush=True)
    if chosen.write:
        more = {"gpu": torch.cuda.get_device_name(), "triton": triton_version()}
        print(timing.write_results("attention_hopper_all_h200", found, more=more))


if __name__ == "__main__":
    main()
