"""Softmax attention on the CPU, and the memory of the losses: `python benchmarks/attention_cpu.py [--threads 2] [--write]`.

Causal 1 x 4096 x 8 x 64, float32: beside torch's scaled_dot_product_attention; what a window saves; what each feature costs
over the same call without it, through our own implementation. Then the peak memory, beside inputs and gradients, of forward and
backward of attention with everything at 4k, 8k and 16k tokens, and of linear_cross_entropy 4096 x 512 x 50257, each in a process of
its own (whose imports take some 190 MiB for a moment, which no peak here is below).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import timing
import torch
from torch import Tensor

from flashmix import linear_cross_entropy, softmax_attention

B, T, H, D = 1, 4096, 8, 64


def features(tokens: int) -> dict[str, dict[str, object]]:
    """The features alone and all together, as options."""
    every: dict[str, object] = {
        "sink": torch.zeros(H, requires_grad=True),
        "softcap": 30.0,
        "alibi_slopes": torch.rand(H, requires_grad=True),
        "log_decay": (-torch.rand(B, tokens, H)).requires_grad_(),
    }
    return {name: {name: value} for name, value in every.items()} | {"all": every}


def leaves(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, tokens, H, D, requires_grad=True) for _ in range(3)]


def runs(call: Callable[[], Tensor], x: list[Tensor], do: Tensor) -> dict[str, Callable[[], object]]:
    def forward() -> None:
        with torch.no_grad():
            call()

    return {"forward": forward, "both": lambda: torch.autograd.grad(call(), x, do)}


def measure_attention() -> list[dict[str, object]]:
    x = leaves(T)
    do = torch.randn_like(x[0])

    def ours(impl: str = "portable", **options: object) -> Tensor:
        return softmax_attention(*x, causal=True, impl=impl, **options)[0]

    def torchs() -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in x)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    if (ours() - torchs()).abs().max() > 1e-4:
        raise SystemExit("the two disagree")
    calls: dict[str, Callable[[], Tensor]] = {
        "torch": torchs,
        "auto": lambda: ours("auto"),
        "plain": ours,
        "window 256": lambda: ours(window=(255, 0)),
    }
    calls |= {name: (lambda options=options: ours(**options)) for name, options in features(T).items()}
    found = {}
    for which in ("forward", "both"):
        found[which] = timing.medians({name: runs(call, x, do)[which] for name, call in calls.items()}, repeats=9)
    return [{"call": name, "forward_ms": found["forward"][name], "both_ms": found["both"][name]} for name in calls]


def peak_of(what: str, tokens: int) -> float:
    """MiB that a call takes at its peak, beside its inputs and gradients."""
    if what == "attention":
        x, options = leaves(tokens), features(tokens)["all"]
        kept = [*x, *(t for t in options.values() if isinstance(t, Tensor))]

        def call() -> Tensor:
            return softmax_attention(*x, causal=True, **options)[0].sum()
    else:
        hidden, weight = torch.randn(tokens, 512, requires_grad=True), torch.randn(50257, 512, requires_grad=True)
        kept, target = [hidden, weight], torch.randint(50257, (tokens,))

        def call() -> Tensor:
            return linear_cross_entropy(hidden, weight, target)

    torch.autograd.grad(sum(t.sum() for t in kept), kept)  # brings in what autograd needs
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    own = pages * resource.getpagesize() + sum(t.numel() * t.element_size() for t in kept)
    torch.autograd.grad(call(), kept)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - own) / 2**20


def in_a_process(what: str, tokens: int, threads: int) -> float:
    command = [sys.executable, __file__, "--peak", what, str(tokens), "--threads", str(threads)]
    return float(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--peak", nargs=2, metavar=("WHAT", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(json.dumps(peak_of(options.peak[0], int(options.peak[1]))))
        return
    rows = measure_attention()
    plain = next(row for row in rows if row["call"] == "plain")
    print(f"{'call':14}{'forward ms':>12}{'both ms':>10}{'of plain':>10}{'both':>8}")
    for row in rows:
        row["forward_of_plain"], row["both_of_plain"] = (row[k] / plain[k] for k in ("forward_ms", "both_ms"))  # type: ignore[operator]
        print(
            f"{row['call']:14}{row['forward_ms']:12.1f}{row['both_ms']:10.1f}{row['forward_of_plain']:10.2f}{row['both_of_plain']:8.2f}"
        )
    for what, tokens in (
        ("attention", 4096),
        ("attention", 8192),
        ("attention", 16384),
        ("linear_cross_entropy", 4096),
    ):
        peak = in_a_process(what, tokens, options.threads)
        rows.append({"peak of": what, "tokens": tokens, "mib": peak})
        print(f"peak of {what}, {tokens} tokens: {peak:.0f} MiB")
    if options.write:
        print(timing.write_results("attention_cpu", rows))


if __name__ == "__main__":
    main()
