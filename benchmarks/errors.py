"""Errors of every implementation against the definition in float64: outputs and gradients of the same inputs, rounded to the dtype.

`python benchmarks/errors.py [--device cuda] [--dtype bfloat16] [--rows "gated delta rule" ...] [--out FILE.json]`. An error is the root of
the mean square of the differences over that of the reference. "float32, rounded" is the definition evaluated in float32 and its results
rounded to the dtype: what is left to gain. The definitions are loops over tokens on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor

from flashmix.op.choose import explain
from flashmix.selftest.check import Results, Trial, evaluate, public
from flashmix.selftest.definitions import DEFINITIONS

T, H, K, D = 512, 2, 128, 256
# The op of a row, the arguments that it takes beside its first ones, and its options.
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "linear attention": ("linear_attention", "q k v", {}),
    "one decay per token (Mamba-2)": ("linear_attention", "q k v by_token", {}),
    "one per channel (GLA)": ("linear_attention", "q k v by_channel", {}),
    "delta rule": ("delta_rule", "q k v beta", {}),
    "gated delta rule": ("delta_rule", "q k v beta by_token", {}),
    "KDA": ("delta_rule", "q k v beta by_channel", {}),
    "DPLR (RWKV-7)": ("dplr", "q k v a b by_channel", {}),
    "softmax attention, causal": ("softmax_attention", "q k v", {"causal": True}),
    "scan": ("scan", "x log_decay", {}),
    "selective scan": ("selective_scan", "u dt A B C", {}),
    "short convolution": ("short_conv", "x weight", {}),
    "RMS norm": ("rms_norm", "x", {}),
}
WIDE = {"beta", "log_decay", "dt", "A"}  # float32 with 16-bit inputs


def inputs(names: str) -> dict[str, Tensor]:
    """The arguments of a row in float64: keys of length 1, decays that keep half of a state for 50 tokens and more."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    key = torch.nn.functional.normalize(normal(1, T, H, K), dim=-1)
    drawn: dict[str, Callable[[], Tensor]] = {
        "q": lambda: normal(1, T, H, K),
        "k": lambda: key,
        "v": lambda: normal(1, T, H, K),
        "a": lambda: -key,
        "b": lambda: key * uniform(1, T, H, 1),
        "beta": lambda: uniform(1, T, H),
        "by_token": lambda: -0.028 * uniform(1, T, H),
        "by_channel": lambda: -0.028 * uniform(1, T, H, K),
        "x": lambda: normal(1, T, D),
        "log_decay": lambda: -0.028 * uniform(1, T, D),
        "u": lambda: normal(1, T, D),
        "dt": lambda: 0.1 * uniform(1, T, D),
        "A": lambda: -1 - uniform(D, 16),
        "B": lambda: normal(1, T, 16),
        "C": lambda: normal(1, T, 16),
        "weight": lambda: normal(D, 4),
    }
    return {"log_decay" if name.startswith("by_") else name: drawn[name]() for name in names.split()}


def errors_of(found: Results, exact: Results) -> dict[str, float]:
    """The relative error of the output, and the largest one of a gradient."""

    def relative(name: str) -> float:
        want = exact[name].double()
        return float((found[name].double() - want).square().mean().sqrt() / want.square().mean().sqrt())

    return {
        "output": relative("result 1"),
        "gradient": max(relative(name) for name in exact if name.startswith("gradient")),
    }


def measure(row: str, dtype: torch.dtype, device: str) -> dict[str, dict[str, float]]:
    """The errors of a row by implementation."""
    op, names, options = ROWS[row]
    given = {name: t.float() if name in WIDE else t.to(dtype) for name, t in inputs(names).items()}
    exact, plain = (
        evaluate(partial(DEFINITIONS[op], **options), {n: t.to(wide) for n, t in given.items()}, dtype, True)
        for wide in (torch.float64, torch.float32)
    )
    call = {name: t.to(device) for name, t in given.items()}
    run = partial(public, Trial(op, dtype, T))
    asked = {name: t.detach().requires_grad_() for name, t in call.items()}
    taken = [
        impl for impl, reason in explain(partial(run, "auto"), **asked, **options).reasons.items() if reason is None
    ]
    found = {impl: evaluate(partial(run, impl, **options), call, dtype, True) for impl in taken}
    rounded = {
        name: t.to(given[name.removeprefix("gradient of ")].dtype if " of " in name else dtype)
        for name, t in plain.items()
    }
    return {impl: errors_of(results, exact) for impl, results in (found | {"float32, rounded": rounded}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for dtype in given.dtype:
        for row in given.rows:
            found = measure(row, getattr(torch, dtype), given.device)
            rows.append({"row": row, "dtype": dtype, "errors": found})
            print(
                f"{dtype} {row}: "
                + ", ".join(f"{i} {e['output']:.2e} / {e['gradient']:.2e}" for i, e in found.items()),
                flush=True,
            )
    if given.out:
        timing.write_json(given.out, rows, {"card": timing.card()})


if __name__ == "__main__":
    main()
