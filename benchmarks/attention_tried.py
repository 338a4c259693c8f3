"""Attention's backward on Hopper as it is, and as `FLASHMIX_TRY_ATTENTION=1` asks for it: heads of two ways, programs that stay.

TFLOP/s as in `attention_hopper.py`, medians of runs in turns in one process with a cold L2 cache. Before a row is timed the gradients
of both are compared, and those of a second run must have the same bits. A row that is not causal has the same code in both: it says how far
equal code differs. Calls that go to Triton by themselves (short ones of 64 channels) are asked of these kernels too.
`python benchmarks/attention_tried.py --processes 14 --write`.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import timing
import torch
from attention_hopper import PACKED, Row, error, inputs_of
from torch import Tensor

from flashmix import softmax_attention
from flashmix.gpu.arch import triton_version
from flashmix.ops.attention import call as limits
from flashmix.ops.attention.gluon_hopper import backward_host
from flashmix.ops.attention.gluon_hopper.plan import Plans

ROWS = (
    *(Row(128, T, 16384 // T, 16) for T in (4096, 8192, 16384)),
    *(Row(64, T, 16384 // T, 32) for T in (4096, 8192, 16384)),
    *(Row(96, T, 16384 // T, 16) for T in (8192, 16384)),
    Row(128, 8192, 1, 64, heads_k=8),
    Row(128, 16384, 1, 8),
    Row(128, 32768, 1, 16, window=1024),
    Row(96, 32768, 1, 16, window=1024),
    Row(128, 32768, 1, 16, feature="packed"),
    Row(64, 32768, 1, 32, feature="packed"),
    Row(128, 16384, 1, 16, causal=False),
)
SIDES = {"off": False, "on": True}
FARTHEST = 1e-2  # gradients of one side from the other's: sums in another order, then rounded to bfloat16


class Sides:
    """The backward of a call by either side; each has its plans, as in a process of its own."""

    def __init__(self, row: Row) -> None:
        self.leaves, self.flow, options = inputs_of(row)
        self.plans = {name: Plans(backward_host.BackwardPlan) for name in SIDES}
        limits.LEAST_TOKENS_CAUSAL = 0
        self.o = softmax_attention(*self.leaves, **options, impl="gluon")[0]

    def gradients(self, side: str) -> tuple[Tensor, ...]:
        limits.TRY_ATTENTION, backward_host.PLANS = SIDES[side], self.plans[side]
        return torch.autograd.grad(self.o, self.leaves, self.flow, retain_graph=True)


def measure(row: Row, repeats: int) -> dict[str, Any]:
    """TFLOP/s of both sides."""
    sides, measured = Sides(row), {"row": row.name}
    off, on = sides.gradients("off"), sides.gradients("on")
    for name, found, wanted, again in zip(("dq", "dk", "dv"), on, off, sides.gradients("on"), strict=True):
        if not error(found, wanted) < FARTHEST:
            return measured | {"wrong": f"{name} is {error(found, wanted):.1e} away"}
        if not torch.equal(found, again):
            return measured | {"wrong": f"{name} differs from run to run"}
    runs: dict[str, Callable[[], Any]] = {name: partial(sides.gradients, name) for name in SIDES}
    times = timing.cuda_medians(runs, repeats=repeats)
    return measured | {f"{name}_backward": round(row.operations(True) / ms / 1e9, 1) for name, ms in times.items()}


def compiled(row: Row) -> None:
    """Compiles what both sides launch for a row into the cache that all processes share."""
    sides = Sides(row)
    for name in SIDES:
        sides.gradients(name)


def compile_all(processes: int) -> None:
    """Code is the same for every length and batch."""
    small = dict.fromkeys(replace(row, tokens=2 * PACKED if row.feature == "packed" else 512, batch=1) for row in ROWS)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, small))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--processes", type=int, default=0, help="how many rows compile at a time, before")
    parser.add_argument("--write", action="store_true", help="write the results as dated JSON")
    chosen = parser.parse_args()
    if chosen.processes:
        compile_all(chosen.processes)
    more = {"gpu": torch.cuda.get_device_name(), "triton": triton_version()}
    found: list[dict[str, Any]] = []
    for row in ROWS:
        found.append(measure(row, chosen.repeats))
        print(*(f"{key} {value}" for key, value in found[-1].items()), flush=True)
        if chosen.write:
            timing.write_results(f"attention_tried_{timing.card()}", found, more=more)


if __name__ == "__main__":
    main()
