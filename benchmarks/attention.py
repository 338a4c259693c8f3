"""Softmax attention on a GPU beside torch's flash and cuDNN backends: `python benchmarks/attention.py [--write] [--tune PHASE DIM ...]`.

TFLOP/s, bfloat16: 4 T^2 H D B operations forward (half when causal), 2.5 times that backward; medians of runs that take turns,
with a cold L2 cache. Before anything is timed our results are compared with torch's. `--tune` measures the candidates
below for one phase (forward, keys, queries) and head dims, once, and prints them: what is fastest becomes a row of
`flashmix/ops/attention/triton_gpu/table.py`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import timing
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashmix import softmax_attention
from flashmix.gpu import device as gpu
from flashmix.gpu.arch import triton_version
from flashmix.ops.attention.call import AttentionCall
from flashmix.ops.attention_cache import KVCache, attention_with_cache
from flashmix.ops.rotary.op import rotary_table

# head dim, tokens, batch, heads, causal
ROWS = (
    (64, 4096, 4, 32, True), (64, 16384, 1, 32, True), (64, 16384, 1, 32, False), (80, 16384, 1, 16, True),
    (96, 16384, 1, 16, True), (128, 4096, 4, 16, True), (128, 4096, 4, 16, False), (128, 16384, 1, 16, True),
    (128, 16384, 1, 16, False), (192, 16384, 1, 16, True), (256, 4096, 4, 8, True), (256, 16384, 1, 8, True),
)  # fmt: skip
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Row = tuple[int, int, int, int, bool]


def flops(row: Row) -> float:
    dim, tokens, batch, heads, causal = row
    return 4 * tokens**2 * heads * dim * batch / (2 if causal else 1)


def tensors(row: Row) -> list[Tensor]:
    dim, tokens, batch, heads, _ = row
    return [torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def torchs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    turned = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal).transpose(1, 2)


def gradients(o: Tensor, leaves: list[Tensor], flow: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(o, leaves, flow, retain_graph=True)


def check(name: str, found: Tensor, wanted: Tensor) -> None:
    """No speed-up over a wrong result."""
    error = ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
    if not error < 1e-2:
        print(f"{name} is wrong: {error:.1e} from torch's", flush=True)


def compare(row: Row) -> dict[str, Any]:
    """TFLOP/s of each side, forward and backward."""
    *inputs, flow = tensors(row)
    leaves = [x.requires_grad_() for x in inputs]
    causal = row[4]
    forward: dict[str, Callable[[], Any]] = {}
    backward: dict[str, Callable[[], Any]] = {}

    def add(name: str, run: Callable[[], Tensor], backend: Any) -> None:
        try:
            with backend():
                o = run()
                found = gradients(o, leaves, flow)
        except RuntimeError as error:
            print(f"{name} cannot run {row}: {str(error).splitlines()[0][:100]}")
            return
        outputs[name] = (o, *found)

        def once() -> None:
            with torch.no_grad(), backend():
                run()

        def back() -> None:
            with backend():
                gradients(outputs[name][0], leaves, flow)

        forward[name], backward[name] = once, back

    outputs: dict[str, tuple[Tensor, ...]] = {}
    add("ours", lambda: softmax_attention(*leaves, causal=causal, impl="triton")[0], nullcontext)
    for name, backend in BACKENDS.items():
        add(name, lambda: torchs(*leaves, causal=causal), lambda backend=backend: sdpa_kernel(backend))
    for other in ("flash", "cudnn"):
        if other in outputs:
            for what, found, wanted in zip(("o", "dq", "dk", "dv"), outputs["ours"], outputs[other], strict=True):
                check(f"{row} {what}", found, wanted)
            break
    result: dict[str, Any] = dict(zip(("dim", "tokens", "batch", "heads", "causal"), row, strict=True))
    for kind, runs, work in (("forward", forward, flops(row)), ("backward", backward, 2.5 * flops(row))):
        for name, ms in timing.cuda_medians(runs).items():
            result[f"{name}_{kind}"] = round(work / ms / 1e9, 1)
    return result


def features(dim: int, heads: int) -> dict[str, float]:
    """Milliseconds forward of each feature alone, and of torch's backends, at 1 x 16384 x heads x dim, causal."""
    q, k, v = (torch.randn(1, 16384, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    slopes, gates = torch.rand(heads, device="cuda"), torch.rand(1, 16384, heads, device="cuda")
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "sink": {"sink": torch.randn(heads, device="cuda")},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": slopes},
        "weak alibi": {"alibi_slopes": slopes * 1e-4},
        "decay": {"log_decay": -gates},
        "weak decay": {"log_decay": gates * -1e-4},
        "dropout": {"dropout_p": 0.1},
    }
    runs = {
        name: lambda extra=extra: softmax_attention(q, k, v, causal=True, impl="triton", **extra)
        for name, extra in options.items()
    }

    def torchs_run(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            torchs(q, k, v, True)

    runs |= {f"torch {name}": lambda backend=backend: torchs_run(backend) for name, backend in BACKENDS.items()}
    with torch.no_grad():
        return {f"{dim} channels, {name}": ms for name, ms in timing.cuda_medians(runs).items()}


def windows() -> dict[str, float]:
    """Milliseconds forward of a window of 1024 at 1 x 32768 x 16 x 128, and without one."""
    long = [torch.randn(1, 32768, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    runs = {
        "full 32768": lambda: softmax_attention(*long, causal=True, impl="triton"),
        "window 1024 of 32768": lambda: softmax_attention(*long, causal=True, window=(1023, 0), impl="triton"),
    }
    with torch.no_grad():
        return timing.cuda_medians(runs)


def packed() -> dict[str, float]:
    """TFLOP/s of 64 packed sequences of 64..4096 tokens (log-uniform), and of a dense batch of the same number of tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.rand(64, generator=generator) * 4.158883 + 4.158883).long()
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    total, found = int(lengths.sum()), {}
    work = {
        "packed": 2.0 * 16 * 128 * float((lengths.double() ** 2).sum()),
        "dense": 2.0 * 16 * 128 * (total // 2048) * 2048**2,
    }
    shapes = {"packed": (1, total), "dense": (total // 2048, 2048)}
    for name, shape in shapes.items():
        *leaves, flow = (torch.randn(*shape, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in leaves]
        extra = {"cu_seqlens": cu} if name == "packed" else {}

        def run(leaves: list[Tensor] = leaves, extra: dict[str, Any] = extra) -> Tensor:
            return softmax_attention(*leaves, causal=True, impl="triton", **extra)[0]

        o = run()
        runs = {"forward": run, "backward": lambda o=o, leaves=leaves, flow=flow: gradients(o, leaves, flow)}
        for kind, ms in timing.cuda_medians(runs).items():
            found[f"{name} {kind}"] = round(work[name] * (2.5 if kind == "backward" else 1) / ms / 1e9, 1)
    return found


CANDIDATES = {
    "forward": {
        64: ((64, 128, 4, 2), (128, 64, 4, 3), (64, 64, 4, 3)),
        96: ((128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3)),
        128: ((64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 4, 2)),
        192: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 4, 3)),
        256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)),
    },
    "keys": {
        64: ((128, 64, 4, 2), (128, 64, 4, 1), (128, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2)),
        96: ((64, 64, 4, 2), (128, 64, 4, 1), (128, 64, 4, 2), (64, 128, 8, 2)),
        128: ((64, 64, 4, 2), (64, 128, 8, 2), (128, 64, 4, 1)),
    },
    "keys alone": {
        192: ((64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 1)),
        256: ((64, 64, 4, 2), (32, 128, 8, 2), (64, 64, 4, 1)),
    },
    "values": {
        192: ((64, 128, 8, 2), (64, 64, 4, 2), (64, 128, 8, 1), (128, 64, 4, 1)),
        256: ((64, 128, 8, 2), (32, 128, 8, 3), (64, 128, 8, 1)),
    },
    "queries": {
        64: ((64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3)),
        128: ((64, 64, 4, 2), (128, 64, 8, 3), (64, 64, 4, 3)),
        192: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 1)),
        256: ((64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 8, 2)),
    },
}


def phase_run(phase: str, dim: int, tokens: int, tiles: tuple[int, ...]) -> Callable[[], Any]:
    """One launch of a phase with these tiles at 4 x tokens x 16, causal."""
    from flashmix.ops.attention.triton_gpu import backward_keys, spec
    from flashmix.ops.attention.triton_gpu.backward_queries import QueryResults, launch_queries
    from flashmix.ops.attention.triton_gpu.forward import attention_forward
    from flashmix.ops.attention.triton_gpu.table import AttentionConfig

    torch.manual_seed(0)
    q, k, v, flow = tensors((dim, tokens, 4, 16 if dim < 256 else 8, True))
    nothing = dict.fromkeys(("sink", "alibi_slopes", "log_decay", "seed", "packing", "packing_k", "left", "softcap"))
    call = AttentionCall(q, k, v, scale=dim**-0.5, right=0, dropout_p=0.0, return_lse=False, **nothing)
    level, delta = (torch.zeros(call.rows, device="cuda") for _ in range(2))
    x = spec.BackwardInputs(q, k, v, flow, level, None, delta, None, decay=None, seed=None, table=None)

    def run() -> None:
        with mock.patch.object(spec, "config_for", lambda *about: AttentionConfig(*tiles)):
            if phase == "forward":
                attention_forward(call, *spec.spec_of(call, phase), (None, None))
            elif phase in ("keys", "keys alone", "values"):
                with mock.patch.object(backward_keys, "phases_of_keys", lambda *about: (phase,)):
                    backward_keys.attention_backward_keys(call, x)
            else:
                launch_queries(phase, call, x, QueryResults(torch.empty_like(q), None, None))

    return run


def warm(job: tuple[str, int, tuple[int, ...]]) -> str:
    """Compiles a candidate (into the cache that all processes share)."""
    phase, dim, tiles = job
    try:
        phase_run(phase, dim, 256, tiles)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:80]}"
    return ""


def tune(phases: list[str], dims: list[int], processes: int) -> list[dict[str, Any]]:
    """TFLOP/s of every candidate of the phases."""
    jobs = [
        (phase, dim, tiles)
        for phase, dim in itertools.product(phases, dims)
        if (dim > 128) == (phase in ("keys alone", "values")) or phase in ("forward", "queries")
        for tiles in CANDIDATES[phase][next(most for most in CANDIDATES[phase] if dim <= most)]
    ]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        problems = dict(zip(jobs, pool.map(warm, jobs), strict=True))
    share = {"forward": 1.0, "keys": 2.0, "keys alone": 1.5, "values": 1.0, "queries": 1.5}
    rows = []
    for (phase, dim), group in itertools.groupby(jobs, lambda job: job[:2]):
        runs = {
            str(tiles): phase_run(phase, dim, 4096, tiles) for *about, tiles in group if not problems[(*about, tiles)]
        }
        work = flops((dim, 4096, 4, 16 if dim < 256 else 8, True)) * share[phase]
        for tiles, ms in sorted(timing.cuda_medians(runs, repeats=7).items(), key=lambda item: item[1]):
            rows.append({"phase": phase, "dim": dim, "tiles": tiles, "tflops": round(work / ms / 1e9, 1)})
            print(*rows[-1].values(), flush=True)
    print(*(f"{job}: {problem}" for job, problem in problems.items() if problem), sep="\n")
    return rows


def decode(batch: int, tokens: int, rotary: bool = False, page_size: int = 0, new: int = 1) -> float:
    """Microseconds of `new` tokens per sequence, 32 query heads on 8, head dim 128, after `tokens` in the cache; CUDA graph."""
    heads = {"heads": 8, "dim_qk": 128, "device": "cuda", "dtype": torch.bfloat16}
    cache = KVCache.contiguous(batch, tokens + 128, **heads)
    if page_size:
        table = torch.randperm(batch * (tokens // page_size + 1), device="cuda").view(batch, -1).int()
        cache = KVCache.paged(table.numel(), page_size, table, **heads)
    for held in (cache.keys, cache.values):
        held.normal_()
    q, k, v = (torch.randn(batch, new, h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8))
    table = rotary_table(tokens + 256, 128, device="cuda") if rotary else None

    def step() -> None:
        cache.lengths.fill_(tokens - new)
        attention_with_cache(q, cache, k, v, rotary=table, impl="triton")

    with torch.no_grad():
        graph = timing.graph_of([step])
    return timing.cuda_medians({"step": graph.replay}, repeats=11)["step"] * 1e3


def short_queries(batch: int, tokens: int, new: int) -> float:
    """Microseconds of the Gluon forward, which splits no keys, for `new` queries after `tokens`; the heads of `decode`, CUDA graph."""
    q, k, v = (
        torch.randn(batch, t, h, 128, device="cuda", dtype=torch.bfloat16)
        for t, h in ((new, 32), (tokens, 8), (tokens, 8))
    )
    with torch.no_grad():
        graph = timing.graph_of([lambda: softmax_attention(q, k, v, causal=True, impl="gluon")])
    return timing.cuda_medians({"step": graph.replay}, repeats=11)["step"] * 1e3


def drafted() -> dict[str, float]:
    """Several new tokens at a time: the split kernels of decoding, and the Gluon forward."""
    found = {}
    for batch, tokens in ((1, 8192), (16, 8192), (16, 65536), (128, 8192)):
        for new in (1, 2, 4, 8):
            found[f"drafted {new} of {batch} x {tokens} us"] = decode(batch, tokens, new=new)
            if gpu.hopper_refuses(torch.device("cuda"), torch.bfloat16, (torch.bfloat16,)) is None:
                found[f"drafted {new} of {batch} x {tokens} in Gluon us"] = short_queries(batch, tokens, new)
    return found


def decoding() -> dict[str, float]:
    """Share of the card's copy rate that decoding reaches on the cache's bytes, and its microseconds."""
    x = torch.empty(1 << 30, device="cuda", dtype=torch.int8)
    y = torch.empty_like(x)
    rate = 2 * x.numel() / timing.cuda_medians({"copy": lambda: y.copy_(x)})["copy"] / 1e3  # bytes a microsecond
    found = {"copy TB/s": rate / 1e6}
    for batch in (1, 16, 128):
        for tokens in (8192, 65536):
            us = decode(batch, tokens)
            found[f"decode {batch} x {tokens} us"] = us
            found[f"decode {batch} x {tokens} share of copy"] = batch * tokens * 8 * 128 * 4 / us / rate
    found["decode 16 x 8192 with rotary us"] = decode(16, 8192, rotary=True)
    for page_size in (16, 128):
        found[f"decode 16 x 65536 pages of {page_size} us"] = decode(16, 65536, page_size=page_size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the results as dated JSON")
    parser.add_argument("--tune", nargs="+", metavar=("PHASE", "DIM"), help="phases (comma-separated), then head dims")
    parser.add_argument("--rows", type=int, nargs="*", help="only these rows of the table")
    parser.add_argument("--extras", action="store_true", help="features and packing too")
    parser.add_argument("--processes", type=int, default=8, help="how many compile at a time (--tune)")
    parser.add_argument("--decode", action="store_true", help="decoding too")
    parser.add_argument("--drafted", action="store_true", help="several new tokens at a time too")
    chosen = parser.parse_args()
    if chosen.tune:
        tune(chosen.tune[0].split(","), [int(dim) for dim in chosen.tune[1:]], chosen.processes)
        return
    print(gpu.target(torch.device("cuda")))
    rows = []
    for row in ROWS if chosen.rows is None else [ROWS[i] for i in chosen.rows]:
        rows.append(compare(row))
        print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if chosen.extras or chosen.decode or chosen.drafted:
        found: dict[str, float] = features(128, 16) | features(64, 32) | windows() | packed() if chosen.extras else {}
        found |= (decoding() if chosen.decode else {}) | (drafted() if chosen.drafted else {})
        print(*(f"{name}: {value:.3f}" for name, value in found.items()), sep="\n", flush=True)
        rows += [{"what": name, "value": value} for name, value in found.items()]
    if chosen.write:
        timing.write_results(
            f"attention_{timing.card()}", rows, more={"gpu": torch.cuda.get_device_name(), "triton": triton_version()}
        )


if __name__ == "__main__":
    main()
