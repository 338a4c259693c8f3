"""The scan on a CPU or a GPU: `python benchmarks/scan.py [--threads 2] [--selective] [--write]`, milliseconds beside a large copy's.

On a CPU float32, on a GPU bfloat16 with decays in float32; forward, and forward with backward. The bound is the bytes of all operands
and results at the speed of a copy: x, g and h forward; with the backward also g, h and dh again, dx and dg. Peers where they install: FLA's
chunked and recurrent HGRN, which take `log f` and compute the same. Before anything is timed the result is checked in float64.
`--selective`: instead the selective scan on a Hopper GPU, Gluon's kernels and Triton's in turns, forward, backward and both; before, their
gradients are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import timing
import torch
from torch import Tensor

from flashmix import scan, selective_scan
from flashmix.ops.scan.definition import scan as define

CPU = ((1, 4096, 2560), (1, 2048, 512), (8, 512, 768))
SELECTIVE = ((8, 2048, 4096), (32, 512, 4096))
GPU = ((8, 4096, 4096), (1, 131072, 512), (1, 16384, 4096), (64, 512, 2048))
Run = Callable[[Tensor, Tensor], Tensor]


def peers() -> dict[str, Run]:
    try:
        from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
    except ImportError:
        return {}
    return {
        "fla chunked": lambda x, g: chunk_hgrn(x, g)[0],
        "fla recurrent": lambda x, g: fused_recurrent_hgrn(x, g)[0],
    }


def check(x: Tensor, g: Tensor) -> None:
    """The first tokens and channels against the definition, to twice the rounding of the dtype."""
    part = (slice(0, 1), slice(0, 300), slice(0, 64))
    want, _ = define(x[part].double(), g[part].double())
    have = scan(x, g)[0][part].double()
    error = ((have - want).norm() / want.norm()).item()
    if error > 2 * torch.finfo(x.dtype).eps:
        raise SystemExit(f"the scan is wrong: relative error {error:.1e}")


def copy_rate(device: str) -> float:
    """GB/s of a large copy, read and write."""
    x = torch.empty(1 << (28 if device == "cuda" else 25), device=device)
    y = torch.empty_like(x)
    medians = timing.cuda_medians if device == "cuda" else timing.medians
    return 2 * x.nbytes / medians({"copy": lambda: y.copy_(x)})["copy"] / 1e6


def with_backward(run: Run, leaves: tuple[Tensor, Tensor], d_h: Tensor) -> None:
    torch.autograd.grad(run(*leaves), leaves, d_h)


def rows(device: str) -> list[dict[str, Any]]:
    found, rate = [], copy_rate(device)
    medians = timing.cuda_medians if device == "cuda" else timing.medians
    for shape in GPU if device == "cuda" else CPU:
        torch.manual_seed(0)
        x = torch.randn(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
        g = -torch.rand(shape, device=device)
        check(x, g)
        leaves, d_h = (x.clone().requires_grad_(), g.clone().requires_grad_()), torch.randn_like(x)
        runs: dict[str, Run] = {"flashmix": lambda x, g: scan(x, g)[0], **peers()}
        forward = medians({name: partial(run, x, g) for name, run in runs.items()})
        both = medians({name: partial(with_backward, run, leaves, d_h) for name, run in runs.items()})
        first = 2 * x.nbytes + g.nbytes
        bounds = [first / rate / 1e6, (first + 3 * x.nbytes + 2 * g.nbytes) / rate / 1e6]
        for name in runs:
            for pass_, times, bound in (("forward", forward, bounds[0]), ("forward and backward", both, bounds[1])):
                row = {
                    "shape": "x".join(map(str, shape)),
                    "pass": pass_,
                    "run": name,
                    "ms": times[name],
                    "bound_ms": bound,
                }
                print(
                    f"{row['shape']:>14} {pass_:>20} {name:>14} {times[name]:9.3f} ms  {bound / times[name]:.0%} of a copy's speed"
                )
                found.append(row)
    return found


def selective_inputs(batch: int, tokens: int, width: int, states: int = 16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = {name: torch.randn(batch, tokens, width, **half) for name in ("u", "dt", "z")}
    x |= {name: torch.randn(batch, tokens, states, **half) for name in ("B", "C")}
    rates = torch.arange(1.0, states + 1, device="cuda").expand(width, states)
    weights = torch.randn(2, width, device="cuda")
    return x | {"dt": x["dt"] - 3, "A": -rates.contiguous(), "D": weights[0], "dt_bias": weights[1]}


def selective_forward(impl: str, leaves: dict[str, Tensor]) -> Tensor:
    return selective_scan(**leaves, softplus=True, impl=impl)[0]


def selective_backward(impl: str, leaves: dict[str, Tensor], d_y: Tensor, y: Tensor | None = None) -> list[Tensor]:
    """The gradients; without `y` the forward is run first."""
    y = selective_forward(impl, leaves) if y is None else y
    return list(torch.autograd.grad(y, list(leaves.values()), d_y, retain_graph=True))


def selective_rows() -> list[dict[str, Any]]:
    found = []
    for shape in SELECTIVE:
        leaves = {name: t.requires_grad_() for name, t in selective_inputs(*shape).items()}
        d_y = torch.randn_like(leaves["u"])
        plain = {name: t.detach() for name, t in leaves.items()}
        runs: dict[str, Callable[[], Any]] = {}
        gradients = {}
        for impl in ("triton", "gluon"):
            y = selective_forward(impl, leaves)
            gradients[impl] = selective_backward(impl, leaves, d_y, y)
            runs[f"{impl} forward"] = partial(selective_forward, impl, plain)
            runs[f"{impl} backward"] = partial(selective_backward, impl, leaves, d_y, y)
            runs[f"{impl} forward and backward"] = partial(selective_backward, impl, leaves, d_y)
        for name, want, have in zip(leaves, gradients["triton"], gradients["gluon"], strict=True):
            error = ((have.double() - want.double()).norm() / want.double().norm()).item()
            print(f"gradient of {name}: the two differ by {error:.1e}")
            if not error < torch.finfo(torch.bfloat16).eps:
                raise SystemExit("the kernels differ by more than a rounding step of bfloat16")
        for name, ms in timing.cuda_medians(runs).items():
            impl, pass_ = name.split(" ", 1)
            found.append({"shape": "x".join(map(str, shape)), "pass": pass_, "run": impl, "ms": ms})
            print(f"{found[-1]['shape']:>14} {pass_:>20} {impl:>14} {ms:9.3f} ms")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--selective", action="store_true", help="the selective scan by Gluon and by Triton")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = selective_rows() if options.selective else rows(device)
    if options.write:
        print(timing.write_results("selective_scan" if options.selective else f"scan_{device}", found))


if __name__ == "__main__":
    main()
