"""Scans and the mechanisms built on them on one thread of a CPU, float32: CPU milliseconds.

`python benchmarks/mechanisms_cpu.py [--only ROW ...] [--write [FOLDER]]`. The runs of a row take turns, forwards and backwards; of each the
least and the median are kept. CPU time of one thread, since other work on the machine moves it less than the clock on the wall.
The token loops beside `rwkv4` and `slstm` are transformers' own and the formula of the paper in PyTorch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor

import flashmix

Runs = dict[str, Callable[[], Any]]
T, H, K = 2048, 8, 64


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def decay(*shape: int) -> Tensor:
    return -torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def keys() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`q, k, v, beta, log_decay` of 8 heads of 64 channels."""
    q, k = flashmix.l2_norm(draw(2, 1, T, H, K))
    return q, k, draw(1, T, H, K), decay(1, T, H).neg(), decay(1, T, H)


def scans() -> Runs:
    x, g = draw(1, 4096, 2560), decay(1, 4096, 2560)
    z = torch.complex(x, x.flip(1))
    turning = torch.complex(g, 3 * g)
    return {"scan 1x4096x2560": lambda: flashmix.scan(x, g), "the same, complex": lambda: flashmix.scan(z, turning)}


def selective() -> Runs:
    found: Runs = {}
    for tokens, channels in ((2048, 1536), (1024, 4096)):
        u, dt = draw(1, tokens, channels), decay(1, tokens, channels).neg()
        A, B, C = decay(channels, 16), draw(1, tokens, 1, 16), draw(1, tokens, 1, 16)
        leaves = [t.requires_grad_() for t in (u, dt, A, B, C)]
        run = partial(flashmix.selective_scan, *(t.detach() for t in leaves))
        found[f"selective_scan 1x{tokens}x{channels}"] = run
        if tokens == 2048:
            found["the same, with backward"] = lambda leaves=leaves: torch.autograd.grad(  # type: ignore[misc]
                flashmix.selective_scan(*leaves)[0].sum(), leaves
            )
    return found


def rules() -> Runs:
    q, k, v, beta, g = keys()
    return {
        "gated_deltanet 1x2048x8x64": lambda: flashmix.gated_deltanet(q, k, v, beta, g),
        "preconditioned_gated_deltanet": lambda: flashmix.preconditioned_gated_deltanet(q, k, v, beta, g, beta, g),
    }


def slots() -> Runs:
    q, k, v, _, _ = keys()
    s = draw(1, T, H, 64)
    return {"abc 1x2048x8x64, 64 slots": lambda: flashmix.abc(q, k, v, s)}


def memories() -> Runs:
    q, k, *_ = keys()
    v, write, forget = draw(1, T, H, 128), draw(1, T, H), decay(1, T, H)
    return {"mlstm 1x2048, 8 heads 64/128": lambda: flashmix.mlstm(q, k, v, write, forget)}


def averages() -> Runs:
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    k, v, w, u = draw(1, T, 768), draw(1, T, 768), draw(768), draw(768)
    return {
        "rwkv4 1x2048x768": lambda: flashmix.rwkv4(k, v, -w.exp(), u),
        "rwkv4, transformers' loop": lambda: rwkv_linear_attention_cpu(w, u, k, v),
    }


def slstm_loop(gates: tuple[Tensor, ...], recurrent: Tensor) -> Tensor:
    """2405.04517, equations 8 to 17, token after token; gates `[B, T, H, K]`, recurrent weights `[4, H, K, K]`."""
    shape = gates[0][:, 0].shape
    y, c, n, m = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), torch.full(shape, -torch.inf)
    outputs = []
    for t in range(gates[0].shape[1]):
        i, f, z, o = (gate[:, t] + torch.einsum("bhk,hjk->bhj", y, R) for gate, R in zip(gates, recurrent, strict=True))
        forget = torch.nn.functional.logsigmoid(f) + m
        m = torch.maximum(forget, i)
        c = torch.exp(forget - m) * c + torch.exp(i - m) * torch.tanh(z)
        n = torch.exp(forget - m) * n + torch.exp(i - m)
        y = torch.sigmoid(o) * c / n
        outputs.append(y)
    return torch.stack(outputs, 1)


def recurrent() -> Runs:
    gates = tuple(draw(4, 1, T, 4, 192))
    weights = draw(4, 4, 192, 192) / 192
    return {
        "slstm 1x2048x768, 4 heads": lambda: flashmix.slstm(*gates, weights),
        "slstm, token loop": lambda: slstm_loop(gates, weights),
    }


# the runs of a row, and how often each is timed
ROWS: dict[str, tuple[Callable[[], Runs], int]] = {
    "scan": (scans, 10),
    "selective_scan": (selective, 8),
    "preconditioned": (rules, 60),
    "abc": (slots, 16),
    "mlstm": (memories, 30),
    "rwkv4": (averages, 6),
    "slstm": (recurrent, 4),
}


def measure(row: str) -> list[dict[str, Any]]:
    make, repeats = ROWS[row]
    runs = make()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 2):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            runs[name]()
            if turn > 1:
                times[name].append(1e3 * (time.process_time() - start))
    found = []
    for name, values in times.items():
        values.sort()
        found.append({"row": row, "run": name, "least_ms": values[0], "median_ms": values[len(values) // 2]})
        print(f"{name:36} least {values[0]:9.2f}  median {values[len(values) // 2]:9.2f} ms of one thread", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--write", nargs="?", type=Path, const=timing.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [entry for row in options.only for entry in measure(row)]
    if options.write:
        print(timing.write_results("mechanisms_cpu", found, options.write, {"milliseconds": "CPU time of one thread"}))


if __name__ == "__main__":
    main()
