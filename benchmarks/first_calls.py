"""Seconds of the first call of each row-wise op and scan on a GPU, and with its backward: a process of its own, an empty compile cache.

    python benchmarks/first_calls.py [--at-once 4] [--only rms_norm,swiglu]

The clock starts when torch has started (a context, a matrix product, a backward from a given gradient, for which torch imports
sympy) and flashmix is imported. It runs over the import of triton, the compilation of every kernel of the call, and the call.
One process comes before all others and is not counted: what it reads from disk stays in memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mechanisms_gpu
import torch
from timing import card, write_results
from torch import Tensor

import flashmix

Call = Callable[[], Tensor | tuple[Tensor, ...]]


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def calls() -> dict[str, Callable[[], Call]]:
    """Of each op by name: what makes its inputs and gives the call."""

    def of(op: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Callable[[], Call]:
        def make() -> Call:
            inputs = [leaf(*shape) for shape in shapes]
            return lambda: op(*inputs, **options)

        return make

    def gated(op: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], Call]:
        return of(lambda x, gate, *rest: op(x, *rest, gate=gate), shapes[0], *shapes)

    def rotary() -> Call:
        q, k, table = leaf(2, 512, 32, 128), leaf(2, 512, 8, 128), flashmix.rotary_table(512, 128, device="cuda")
        return lambda: flashmix.rotary_qk(q, k, *table)

    def head() -> Call:
        hidden, weight, target = leaf(512, 256), leaf(32000, 256), torch.zeros(512, dtype=torch.int64, device="cuda")
        return lambda: flashmix.linear_cross_entropy(hidden, weight, target)

    def loss() -> Call:
        logits, target = leaf(512, 32000), torch.zeros(512, dtype=torch.int64, device="cuda")
        return lambda: flashmix.cross_entropy(logits, target)

    def step() -> Call:
        inner = 32 * 128
        shapes = {"qkv": (1, 3 * inner), "strength": (1, 32), "decay": (1, 32), "conv_state": (1, 3, 3 * inner)}
        shapes |= {"conv_weight": (3 * inner, 4), "A_log": (32,), "dt_bias": (32,), "norm_weight": (128,)}
        tensors: dict[str, Any] = {
            name: leaf(*shape).detach() for name, shape in (shapes | {"gate": (1, 32, 128)}).items()
        }
        tensors["state"] = leaf(1, 32, 128, 128, dtype=torch.float32).detach()
        return lambda: flashmix.delta_net_step(**tensors, heads=32)

    def mechanism(row: str, side: str = "flashmix") -> Callable[[], Call]:
        def make() -> Call:
            x, run = mechanisms_gpu.ROWS[row][0](side)
            leaves = {name: t.requires_grad_() for name, t in x.items()}
            return lambda: mechanisms_gpu.first(run(**leaves))

        return make

    row, heads = (512, 4096), (512, 16, 128)
    qkv = ((2, 512, 2048),) * 3 + ((2048, 4),) * 3
    return {
        "rms_norm": of(flashmix.rms_norm, row, row[1:]),
        "gated rms_norm": gated(flashmix.rms_norm, heads, heads[2:]),
        "layer_norm": of(flashmix.layer_norm, row, row[1:], row[1:]),
        "l2_norm": of(flashmix.l2_norm, heads),
        "rotary_qk": lambda: rotary(),
        "swiglu": of(flashmix.swiglu, (512, 11008), (512, 11008)),
        "short_conv": of(lambda x, w: flashmix.short_conv(x, w)[0], (2, 512, 4096), (4096, 4)),
        "short_conv_qkv": of(lambda *t: flashmix.short_conv_qkv(*t)[:3], *qkv),
        "token_shift": of(lambda x: flashmix.token_shift(x)[0], (2, 512, 4096)),
        "softplus_decay": of(flashmix.softplus_decay, (2, 512, 32, 128), (32,), (32, 128)),
        "bounded_decay": of(flashmix.bounded_decay, (2, 512, 32, 128), (32,), (32, 128)),
        "write_strength": of(flashmix.write_strength, (2, 512, 32)),
        "cross_entropy": lambda: loss(),
        "linear_cross_entropy": lambda: head(),
        "delta_net_step": lambda: step(),
        "selective_scan": mechanism("selective_scan 8x2048x4096", "flashmix auto"),
        **{
            name.split()[0]: mechanism(name)
            for name in reversed(mechanisms_gpu.ROWS)
            if not name.startswith("selective_scan")
        },
    }


def first(name: str) -> tuple[float, float]:
    """Of the forward, and of both, in the process of one op."""
    call = calls()[name]()
    started = leaf(256, 256)
    torch.autograd.backward([started @ started], [torch.ones_like(started)])
    torch.cuda.synchronize()
    start = time.perf_counter()
    got = call()
    torch.cuda.synchronize()
    forward = time.perf_counter() - start
    results = [t for t in ((got,) if isinstance(got, Tensor) else got) if t.requires_grad]
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])
    torch.cuda.synchronize()
    return forward, time.perf_counter() - start


def in_a_process(name: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--first", name]
        done = subprocess.run(
            command, env={**os.environ, "TRITON_CACHE_DIR": folder}, capture_output=True, text=True, check=True
        )
    forward, both = done.stdout.split()[-2:]
    return float(forward), float(both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(calls()))
    parser.add_argument("--at-once", type=int, default=4, help="processes")
    parser.add_argument("--first", default="", help="this op, in this process")
    options = parser.parse_args()
    if options.first:
        print(*first(options.first))
        return
    names = options.only.split(",")
    in_a_process(names[0])
    with ThreadPoolExecutor(options.at_once) as pool:
        found = []
        for name, (forward, both) in zip(names, pool.map(in_a_process, names), strict=True):
            found.append({"op": name, "forward_s": round(forward, 2), "both_s": round(both, 2)})
            print(f"{name:22} forward {forward:.2f} s, with its backward {both:.2f} s", flush=True)
    about = {"gpu": torch.cuda.get_device_name(), "processes_at_once": options.at_once}
    print(write_results(f"first_calls_{card()}", found, more=about))


if __name__ == "__main__":
    main()
