"""Rows of `compare.py`: calls of flashmix's public names at the sizes of docs/*_speed.md, and small calls for the host's time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import recurrence_rows
import torch
from compare_attention import cpu_attentions, gpu_attentions
from compare_case import BF16, WIDE, Call, Case, Cases, Part, Run, graph, normal, op, quiet, trained, untrained
from torch import Tensor

import flashmix

IMPORT = "import time, torch; start = time.perf_counter(); import flashmix; print(time.perf_counter() - start)"
CPU_RECURRENCE = ((1, 2048, 8, 64), (1, 4096, 4, 128), (4, 512, 4, 64))


# The recurrence


def recurrence(row: recurrence_rows.Row, impl: str = "auto", strength: float = 1.0, **made: Any) -> Case:
    """A row of `recurrence_gpu.py`, its decays times `strength`."""

    def make() -> dict[str, Part]:
        x = recurrence_rows.tensors(row, **made)
        if strength != 1 and recurrence_rows.RULES[row.rule].gate in ("token", "channel"):
            x["g"].data.mul_(strength)
        names = list(x)
        return trained(lambda *t: recurrence_rows.ours(row, dict(zip(names, t, strict=True)), impl), list(x.values()))

    return Case(("forward", "both"), make)


def gpu_recurrences() -> Cases:
    cases = {f"recurrence {row.name}": recurrence(row) for row in recurrence_rows.ROWS}
    for rule in ("kda", "gla", "rwkv7"):
        row = recurrence_rows.Row(rule, 8, 4096, 16, 16)
        cases[f"recurrence {row.name} decays to -3"] = recurrence(row, strength=30.0)
    return cases


def cpu_recurrences() -> Cases:
    """The rows of `recurrence.py` and one size of the other rules, in C ("auto", where it is compiled) and in plain PyTorch."""
    cases: Cases = {}
    for impl in ("auto", "portable"):
        for rule in recurrence_rows.RULES:
            documented = rule in ("gated_delta_rule", "kda")
            for B, T, H, D in CPU_RECURRENCE if documented else CPU_RECURRENCE[-1:]:
                row = recurrence_rows.Row(rule, B, T, H, H, D, D)
                cases[f"recurrence {row.name} {impl}"] = recurrence(row, impl, device="cpu", dtype=WIDE, strength=10.0)
    return cases


def step_tensors(B: int, H: int, D: int, state: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
    q, k, v = (normal(B, 1, H, D, dtype=dtype) for _ in range(3))
    gates = {"beta": torch.rand(B, 1, H), "log_decay": -torch.rand(B, 1, H)}
    return {"q": q, "k": flashmix.l2_norm(k), "v": v, "state": normal(B, H, D, D, dtype=state), **gates}


def layer_tensors(B: int, H: int, D: int, dtype: torch.dtype, width: int = 4) -> dict[str, Any]:
    own = partial(normal, dtype=dtype)
    C = 3 * H * D
    x = {"qkv": own(B, C), "strength": own(B, H), "conv_state": own(B, width - 1, C), "conv_weight": own(C, width)}
    x |= {"state": normal(B, H, D, D, dtype=WIDE), "decay": own(B, H), "A_log": own(H), "dt_bias": own(H)}
    return {**x, "norm_weight": own(D), "gate": own(B, H, D), "heads": H}


def step_runs(op: Call, tensors: Callable[[], dict[str, Any]], count: int) -> list[Run]:
    return [partial(op, **tensors()) for _ in range(count)]


def gpu_steps() -> Cases:
    """One token in a graph of calls that take turns over states larger than the L2 cache."""
    cases: Cases = {}

    def add(name: str, op: Call, B: int, tensors: Callable[[], dict[str, Any]], state_bytes: int) -> None:
        count = max(2, min(64, (256 << 20) // (B * state_bytes)))
        cases[f"{name}, batch {B}"] = untrained(lambda: graph(step_runs(op, tensors, count)), "graph", B < 256)

    for B in (1, 8, 64, 256, 1024):
        for state in (WIDE, BF16):
            name = f"delta_rule_step {str(state).removeprefix('torch.')} state"
            tensors = partial(step_tensors, B, 32, 128, state, BF16)
            add(name, flashmix.delta_rule_step, B, tensors, 32 * 128 * 128 * state.itemsize)
    for B in (1, 64):
        add("delta_net_step", flashmix.delta_net_step, B, partial(layer_tensors, B, 32, 128, BF16), 32 * 128 * 128 * 4)
    return cases


# Row-wise ops, convolutions, losses


def rotated(shape: tuple[int, ...], kind: str = "device", dtype: torch.dtype = BF16) -> Case:
    def make() -> dict[str, Part]:
        table = flashmix.rotary_table(shape[1], shape[3], device=torch.get_default_device())
        call = partial(flashmix.rotary_qk, cos=table[0], sin=table[1])
        return trained(call, [normal(*shape, dtype=dtype) for _ in range(2)], kind)

    return Case(("forward", "both"), make)


def convolution(batch: int, tokens: int, channels: int, sequences: int = 0) -> Case:
    """Of width 4; with `sequences`, of so many packed ones of equal lengths."""

    def make() -> dict[str, Part]:
        starts = torch.arange(0, tokens + 1, tokens // sequences) if sequences else None
        packing = flashmix.Packing(starts, tokens) if sequences else None
        call = partial(flashmix.short_conv, cu_seqlens=packing)
        return trained(call, [normal(batch, tokens, channels), normal(channels, 4)])

    return Case(("forward", "both"), make)


def decay(x: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    return flashmix.softplus_decay(x, A_log.float(), dt_bias.float())


def summed(x: Tensor, weight: Tensor, residual: Tensor) -> Any:
    return flashmix.rms_norm(x, weight, residual=residual, return_residual=True)


def row_wise() -> Cases:
    wide, heads = (32768, 4096), (32768, 16, 128)
    cases = {
        "rms_norm": op(flashmix.rms_norm, wide, wide[1:]),
        "rms_norm of a sum": op(summed, wide, wide[1:], wide),
        "layer_norm": op(flashmix.layer_norm, wide, wide[1:], wide[1:]),
        "gated rms_norm": op(lambda x, w, g: flashmix.rms_norm(x, w, gate=g), heads, heads[2:], heads),
        "l2_norm": op(flashmix.l2_norm, heads),
        "rotary_qk": rotated((4, 8192, 32, 128)),
        "swiglu": op(flashmix.swiglu, (32768, 11008), (32768, 11008)),
        "softplus_decay": op(decay, (4, 8192, 32, 128), (32,), (32, 128)),
        "token_shift": op(flashmix.token_shift, (4, 8192, 4096)),
        "short_conv_qkv": op(flashmix.short_conv_qkv, *((4, 8192, 2048),) * 3, *((2048, 4),) * 3),
    }
    for sizes in ((4, 8192, 4096), (64, 512, 2048), (1024, 32, 4096), (1, 32768, 4096, 32)):
        cases["short_conv " + "x".join(map(str, sizes))] = convolution(*sizes)
    return cases


def losses(tokens: int = 16384, width: int = 2048, vocabulary: int = 128256) -> Cases:
    def cross_entropy() -> dict[str, Part]:
        leaf, target = normal(tokens, vocabulary).requires_grad_(), torch.randint(vocabulary, (tokens,))

        def both(overwrite: bool) -> None:
            torch.autograd.grad(flashmix.cross_entropy(leaf, target, overwrite_logits=overwrite), leaf)

        forward = Part(quiet(lambda: flashmix.cross_entropy(leaf, target)))
        return {"forward": forward, "both": Part(lambda: both(False)), "overwriting": Part(lambda: both(True))}

    def head(frozen: bool) -> Part:
        hidden, weight = normal(tokens, width).div_(width**0.5), normal(vocabulary, width)
        target = torch.randint(vocabulary, (tokens,))
        leaves = [hidden.requires_grad_()] + ([] if frozen else [weight.requires_grad_()])
        return Part(lambda: torch.autograd.grad(flashmix.linear_cross_entropy(hidden, weight, target), leaves))

    return {
        "cross_entropy": Case(("forward", "both", "overwriting"), cross_entropy),
        "linear_cross_entropy": untrained(lambda: head(False), "both"),
        "linear_cross_entropy frozen head": untrained(lambda: head(True), "both"),
    }


# The host's time of small calls, and of the import


def hosts(dtype: torch.dtype) -> Cases:
    """Small calls: on a GPU the time until they return."""

    def small(call: Call, *shapes: tuple[int, ...]) -> Case:
        return op(call, *shapes, kind="host", dtype=dtype)

    def step(call: Call, make: Callable[[], dict[str, Any]]) -> Case:
        return untrained(lambda: Part(partial(call, **make()), "host"), "call")

    def mixed(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        return flashmix.gated_deltanet(q, k, v, beta.sigmoid(), -log_decay.abs())[0]

    qkv, row = ((1, 64, 4, 64),) * 3, (16, 128)
    cases = {
        "delta_rule_step": step(flashmix.delta_rule_step, partial(step_tensors, 1, 32, 128, WIDE, dtype)),
        "delta_net_step": step(flashmix.delta_net_step, partial(layer_tensors, 1, 32, 128, dtype)),
        "l2_norm": small(flashmix.l2_norm, (1, 16, 128)),
        "rms_norm": small(flashmix.rms_norm, row, row[1:]),
        "gated rms_norm": small(lambda x, w, g: flashmix.rms_norm(x, w, gate=g), row, row[1:], row),
        "layer_norm": small(flashmix.layer_norm, row, row[1:], row[1:]),
        "rotary_qk": rotated((1, 16, 4, 64), "host", dtype),
        "swiglu": small(flashmix.swiglu, row, row),
        "token_shift": small(flashmix.token_shift, (1, 16, 128)),
        "short_conv": small(flashmix.short_conv, (1, 16, 128), (128, 4)),
        "softplus_decay": small(decay, (1, 16, 4, 64), (4,), (4, 64)),
        "write_strength": small(flashmix.write_strength, (1, 16, 4)),
        "softmax_attention": small(lambda q, k, v: flashmix.softmax_attention(q, k, v, causal=True), *qkv),
        "gated_deltanet": small(mixed, *qkv, (1, 64, 4), (1, 64, 4)),
    }
    return {f"host {name}": case for name, case in cases.items()}


def imported() -> float:
    """Milliseconds of `import flashmix` beyond torch's own, in a fresh process that sees this worker's checkout."""
    command = [sys.executable, "-c", IMPORT]
    folder = tempfile.gettempdir()  # -c looks for modules in the current folder first
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=dict(os.environ))
    return float(done.stdout) * 1e3


def cases(device: str) -> Cases:
    own: Cases = {"import flashmix": untrained(lambda: Part(imported, "value"), "fresh process", False)}
    if device == "cpu":
        return cpu_recurrences() | cpu_attentions() | hosts(WIDE) | own
    return gpu_recurrences() | gpu_steps() | gpu_attentions() | row_wise() | losses() | hosts(BF16) | own
