"""Rows of `compare.py`: calls of flashmix's public names at the sizes of docs/*_speed.md, and small calls for the host's time.

A case makes its tensors once and times its parts ("forward", "both" of them, "backward" alone) over them. Makers run under
`torch.device(...)` and a fixed seed, so that both checkouts compute with the same numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import recurrence_rows
import torch
from torch import Tensor

import flashmix

BF16, WIDE = torch.bfloat16, torch.float32
Run = Callable[[], Any]
Call = Callable[..., Any]
IMPORT = "import time, torch; start = time.perf_counter(); import flashmix; print(time.perf_counter() - start)"
# head dim, tokens, batch, heads, causal
ATTENTION = (
    (64, 4096, 4, 32, True), (64, 16384, 1, 32, True), (64, 16384, 1, 32, False), (80, 16384, 1, 16, True),
    (96, 16384, 1, 16, True), (128, 4096, 4, 16, True), (128, 4096, 4, 16, False), (128, 16384, 1, 16, True),
    (128, 16384, 1, 16, False), (192, 16384, 1, 16, True), (256, 4096, 4, 8, True), (256, 16384, 1, 8, True),
)  # fmt: skip
CPU_RECURRENCE = ((1, 2048, 8, 64), (1, 4096, 4, 128), (4, 512, 4, 64))


@dataclass(frozen=True)
class Part:
    """What is timed: `run` makes `calls` calls. Kinds: "device" (time of the device), "host" (time until the call returns, without
    waiting for a GPU) and "value" (`run` returns milliseconds itself).
    """

    run: Run
    kind: str = "device"
    calls: int = 1


@dataclass(frozen=True)
class Case:
    """Names of the parts and what makes them. A case that is not `precompiled` needs much memory and no kernel of its own."""

    parts: tuple[str, ...]
    make: Callable[[], dict[str, Part]]
    precompiled: bool = True


Cases = dict[str, Case]


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def quiet(run: Run) -> Run:
    return torch.no_grad()(run)


def results_of(got: Any) -> list[Tensor]:
    """The tensors that a call returns, without the states that it was not asked for."""
    return [t for t in (got if isinstance(got, tuple) else (got,)) if t is not None]


def trained(call: Call, inputs: Sequence[Tensor], kind: str = "device") -> dict[str, Part]:
    """Forward without gradients, and forward + backward to all inputs that ask for gradients (all of them where none does)."""
    if not any(t.requires_grad for t in inputs):
        inputs = [t.requires_grad_() for t in inputs]
    leaves = [t for t in inputs if t.requires_grad]
    flows: list[Tensor] = []

    def both() -> None:
        results = results_of(call(*inputs))
        if not flows:
            flows.extend(torch.randn_like(y) for y in results)
        torch.autograd.grad(results, leaves, flows)

    return {"forward": Part(quiet(lambda: call(*inputs)), kind), "both": Part(both, kind)}


def op(call: Call, *shapes: tuple[int, ...], kind: str = "device", dtype: torch.dtype = BF16) -> Case:
    """A case of normal inputs of these shapes."""
    return Case(("forward", "both"), lambda: trained(call, [normal(*shape, dtype=dtype) for shape in shapes], kind))


def untrained(make: Callable[[], Part], part: str, precompiled: bool = True) -> Case:
    return Case((part,), lambda: {part: make()}, precompiled)


def graph(calls: list[Run]) -> Part:
    """A CUDA graph of the calls, without gradients."""
    with torch.no_grad():
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return Part(graph.replay, calls=len(calls))


# The recurrence


def recurrence(row: recurrence_rows.Row, impl: str = "auto", strength: float = 1.0, **made: Any) -> Case:
    """A row of `recurrence_gpu.py`, its decays times `strength`."""

    def make() -> dict[str, Part]:
        x = recurrence_rows.tensors(row, **made)
        if strength != 1:
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


# Attention


def attention(row: tuple[int, int, int, int, bool]) -> Case:
    dim, tokens, batch, heads, causal = row

    def make() -> dict[str, Part]:
        flow, *leaves = (normal(batch, tokens, heads, dim) for _ in range(4))
        leaves = [x.requires_grad_() for x in leaves]
        run = partial(flashmix.softmax_attention, *leaves, causal=causal)
        return {"forward": Part(quiet(run)), "backward": backward(run, leaves, flow)}

    return Case(("forward", "backward"), make)


def backward(run: Call, leaves: list[Tensor], flow: Tensor) -> Part:
    held: list[Tensor] = []

    def back() -> None:
        if not held:
            held.append(run()[0])
        torch.autograd.grad(held[0], leaves, flow, retain_graph=True)

    return Part(back)


def features(dim: int, heads: int) -> Case:
    """Forward of each feature alone at 1 x 16384, causal."""
    names = ("plain", "sink", "softcap", "alibi", "weak alibi", "decay", "weak decay", "dropout")

    def make() -> dict[str, Part]:
        q, k, v = (normal(1, 16384, heads, dim) for _ in range(3))
        slopes, gates = torch.rand(heads), torch.rand(1, 16384, heads)
        options: tuple[dict[str, Any], ...] = (
            {}, {"sink": torch.randn(heads)}, {"softcap": 30.0}, {"alibi_slopes": slopes}, {"alibi_slopes": slopes * 1e-4},
            {"log_decay": -gates}, {"log_decay": gates * -1e-4}, {"dropout_p": 0.1},
        )  # fmt: skip
        run = partial(flashmix.softmax_attention, q, k, v, causal=True)
        return {name: Part(quiet(partial(run, **own))) for name, own in zip(names, options, strict=True)}

    return Case(names, make)


def windows() -> dict[str, Part]:
    run = partial(flashmix.softmax_attention, *(normal(1, 32768, 16, 128) for _ in range(3)), causal=True)
    return {"full": Part(quiet(run)), "window 1024": Part(quiet(partial(run, window=(1023, 0))))}


def packed(dense: bool) -> dict[str, Part]:
    """64 packed sequences of 64 to 4096 tokens (log-uniform), or a dense batch of as many tokens."""
    generator = torch.Generator("cpu").manual_seed(0)
    lengths = torch.exp(torch.rand(64, generator=generator, device="cpu") * 4.158883 + 4.158883).long()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    shape = (int(lengths.sum()) // 2048, 2048) if dense else (1, int(lengths.sum()))
    flow, *leaves = (normal(*shape, 16, 128) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    run = partial(flashmix.softmax_attention, *leaves, causal=True, cu_seqlens=None if dense else starts)
    return {"forward": Part(quiet(run)), "backward": backward(run, leaves, flow)}


def cached(batch: int, tokens: int, rotary: bool = False, page_size: int = 0) -> Part:
    """One new token a sequence, 32 query heads on 8, head dim 128, after `tokens` in the cache, in a graph."""
    if page_size:
        pages = torch.randperm(batch * (tokens // page_size + 1)).view(batch, -1).int()
        cache = flashmix.KVCache.paged(pages.numel(), page_size, pages, 8, 128, device="cuda", dtype=BF16)
    else:
        cache = flashmix.KVCache.contiguous(batch, tokens + 128, 8, 128, device="cuda", dtype=BF16)
    for held in (cache.keys, cache.values):
        held.normal_()
    q, k, v = (normal(batch, 1, h, 128) for h in (32, 8, 8))
    table = flashmix.rotary_table(tokens + 256, 128, device="cuda") if rotary else None

    def step() -> None:
        cache.lengths.fill_(tokens - 1)
        flashmix.attention_with_cache(q, cache, k, v, rotary=table)

    return graph([step])


def gpu_attentions() -> Cases:
    cases = {
        f"attention dim {d}, {t} tokens, {b} x {h} {'causal' if c else 'full'}": attention((d, t, b, h, c))
        for d, t, b, h, c in ATTENTION
    }
    cases |= {f"attention features dim {dim}": features(dim, heads) for dim, heads in ((128, 16), (64, 32))}
    cases["attention 32768 tokens"] = Case(("full", "window 1024"), windows)
    for name in ("packed", "dense"):
        cases[f"attention {name}"] = Case(("forward", "backward"), partial(packed, name == "dense"))
    for batch in (1, 16, 128):
        for tokens in (8192, 65536):
            make = partial(cached, batch, tokens)
            cases[f"attention decode {batch} x {tokens}"] = untrained(make, "graph", batch * tokens < 2**19)
    cases["attention decode 16 x 8192 rotary"] = untrained(partial(cached, 16, 8192, True), "graph")
    for size in (16, 128):
        make = partial(cached, 16, 65536, page_size=size)
        cases[f"attention decode 16 x 65536 pages of {size}"] = untrained(make, "graph")
    return cases


def cpu_attentions(heads: int = 8, dim: int = 64) -> Cases:
    """The rows of `attention_cpu.py`."""

    def make(tokens: int, impl: str, names: Sequence[str]) -> dict[str, Part]:
        every: dict[str, Any] = {"sink": torch.zeros(heads), "alibi_slopes": torch.rand(heads)}
        every |= {"softcap": 30.0, "log_decay": -torch.rand(1, tokens, heads), "window": (255, 0)}
        run = partial(flashmix.softmax_attention, causal=True, impl=impl, **{name: every[name] for name in names})
        return trained(lambda *x: run(*x)[0], [normal(1, tokens, heads, dim, dtype=WIDE) for _ in range(3)])

    features = ("sink", "softcap", "alibi_slopes", "log_decay")
    wanted: dict[str, tuple[int, str, tuple[str, ...]]] = {
        "auto": (4096, "auto", ()),
        "portable": (4096, "portable", ()),
    }
    wanted |= {name: (2048, "portable", (name,)) for name in (*features, "window")} | {
        "all": (2048, "portable", features)
    }
    return {
        f"attention 1 x {tokens} x {heads} x {dim} {name}": Case(
            ("forward", "both"), partial(make, tokens, impl, names)
        )
        for name, (tokens, impl, names) in wanted.items()
    }


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
