"""One token at a time on a GPU: the gated delta step and the step of a whole layer, beside flash-linear-attention if it is there.

`python benchmarks/decode.py [--write [FOLDER]] [--tiles] [--peer-most B] [--batches 1,64]`: H = 32 heads of 128 by 128 (bfloat16 operands).

- graph: microseconds of the GPU a call, between events around a graph of calls that take turns over states larger than the L2.
- eager: microseconds a call with the host, from the first of many calls to the end of the last.
- copy: the states' bytes (read and written) by the graph's time, as a fraction of what a large copy moves on this card.

A peer that breaks (its step has died of an illegal access at a batch of 256) would take the process with it, so it runs up to
`--peer-most`. `--tiles` measures candidates of the tables in `recurrence/step/triton_gpu.py` and `delta_net_step/triton_gpu.py`.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import timing
import torch
from torch import Tensor

import flashmix
from flashmix.ops.delta_net_step import triton_gpu as delta_net
from flashmix.ops.delta_net_step.call import DeltaNetStepCall
from flashmix.ops.recurrence.step import triton_gpu as step
from flashmix.ops.recurrence.step.call import StepCall

HEADS, WIDTH = 32, 4
Calls = list[Callable[[], Any]]  # the same call on sets of tensors that take turns


def graph_time(calls: Calls, repeats: int = 25) -> float:
    """Microseconds of the GPU a call, in a graph of all of them."""
    graph = timing.graph_of(calls)
    times = []
    for _ in range(3 + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeats // 2] * 1e3 / len(calls)


def eager_time(calls: Calls, least: int = 200, repeats: int = 7) -> float:
    """Microseconds a call, host and GPU: the median over runs of at least `least` calls."""
    rounds, times = -(-least // len(calls)), []
    for _ in range(1 + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / (rounds * len(calls)))
    return sorted(times[1:])[repeats // 2] * 1e6


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    x = torch.empty(1 << 30, device="cuda")
    y = torch.empty_like(x)
    return 2 * x.nbytes / (timing.cuda_medians({"copy": lambda: y.copy_(x)})["copy"] * 1e-3)


def sets(bytes_each: int) -> int:
    """How many sets of tensors take turns: more than any L2 holds, within reason."""
    return max(2, min(64, (256 << 20) // bytes_each))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def step_tensors(B: int, D: int, dtype: torch.dtype) -> dict[str, Tensor]:
    q, k, v = (normal(B, 1, HEADS, D) for _ in range(3))
    gates = {"beta": torch.rand(B, 1, HEADS, device="cuda"), "log_decay": -torch.rand(B, 1, HEADS, device="cuda")}
    return {"q": q, "k": flashmix.l2_norm(k), "v": v, "state": normal(B, HEADS, D, D, dtype=dtype), **gates}


def step_calls(B: int, D: int, dtype: torch.dtype) -> Calls:
    def call(x: dict[str, Tensor]) -> Callable[[], Tensor]:
        return lambda: flashmix.delta_rule_step(**x)

    count = sets(B * HEADS * D * D * dtype.itemsize)
    return [call(step_tensors(B, D, dtype)) for _ in range(count)]


def layer_tensors(B: int, D: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    C = 3 * HEADS * D
    x = {"qkv": normal(B, C), "strength": normal(B, HEADS), "conv_state": normal(B, WIDTH - 1, C)}
    x |= {"state": normal(B, HEADS, D, D, dtype=dtype), "conv_weight": normal(C, WIDTH), "decay": normal(B, HEADS)}
    x |= {"A_log": normal(HEADS), "dt_bias": normal(HEADS), "norm_weight": normal(D), "gate": normal(B, HEADS, D)}
    return x


def layer_calls(B: int, D: int) -> Calls:
    def call(x: dict[str, Any]) -> Callable[[], Tensor]:
        return lambda: flashmix.delta_net_step(**x, heads=HEADS)

    return [call(layer_tensors(B, D)) for _ in range(sets(B * HEADS * D * D * 4))]


def peer() -> Any:
    """What flash-linear-attention offers for these, or None."""
    try:
        from fla.modules import FusedRMSNormGated, ShortConvolution
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    except ImportError:
        return None
    return fused_recurrent_gated_delta_rule, ShortConvolution, FusedRMSNormGated


def peer_step_calls(B: int, D: int) -> Calls:
    recurrent = peer()[0]

    def call(x: dict[str, Tensor]) -> Callable[[], Any]:
        gates = {"beta": x["beta"], "g": x["log_decay"]}
        options = {"initial_state": x["state"], "output_final_state": True, "state_v_first": True}
        return lambda: recurrent(x["q"], x["k"], x["v"], **gates, **options)

    return [call(step_tensors(B, D, torch.float32)) for _ in range(sets(B * HEADS * D * D * 4))]


def peer_layer_calls(B: int, D: int) -> Calls:
    """The calls of its GatedDeltaNet layer between the projections, for one token with a cache."""
    recurrent, Convolution, Norm = peer()
    inner = HEADS * D
    convolutions = [Convolution(inner, WIDTH, activation="silu", device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    norm = Norm(D, device="cuda", dtype=torch.bfloat16)

    def call(x: dict[str, Tensor], pasts: list[Tensor]) -> Callable[[], Any]:
        parts = [part.contiguous() for part in x["qkv"][:, None].chunk(3, -1)]
        strength, decay, gate = x["strength"][:, None], x["decay"][:, None], x["gate"][:, None]

        def run() -> Tensor:
            mixed = [
                c(x=p, cache=past, output_final_state=True)[0]
                for c, p, past in zip(convolutions, parts, pasts, strict=True)
            ]
            q, k, v = (t.unflatten(-1, (HEADS, D)) for t in mixed)
            o, _ = recurrent(
                q=q, k=k, v=v, g=decay, beta=strength, initial_state=x["state"], output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["dt_bias"],
                use_beta_sigmoid_in_kernel=True, state_v_first=True,
            )  # fmt: skip
            return norm(o, gate)

        return run

    found = []
    for _ in range(sets(B * HEADS * D * D * 4)):
        pasts = [normal(B, inner, WIDTH) for _ in range(3)]
        found.append(call(layer_tensors(B, D), pasts))
    return found


def measure(name: str, B: int, calls: Calls, state_bytes: int, ceiling: float) -> dict[str, Any]:
    gpu = graph_time(calls)
    fraction = 2 * B * state_bytes / (gpu * 1e-6) / ceiling
    row = {
        "what": name,
        "B": B,
        "graph_us": round(gpu, 2),
        "eager_us": round(eager_time(calls), 2),
        "copy": round(fraction, 3),
    }
    print(
        "{what:34} B {B:5}  graph {graph_us:9.2f} us  eager {eager_us:9.2f} us  {copy:6.1%} of copy".format(**row),
        flush=True,
    )
    return row


def run(most: int, batches: list[int]) -> list[dict[str, Any]]:
    ceiling = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {ceiling / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = [
        {"what": "copy", "TB/s": round(ceiling / 1e12, 3), "gpu": torch.cuda.get_device_name()}
    ]
    D = 128
    for B in batches:
        for dtype in (torch.float32, torch.bfloat16):
            size = HEADS * D * D * dtype.itemsize
            name = f"delta_rule_step, {str(dtype).removeprefix('torch.')} state"
            rows.append(measure(name, B, step_calls(B, D, dtype), size, ceiling))
        rows.append(measure("delta_net_step", B, layer_calls(B, D), HEADS * D * D * 4, ceiling))
        if peer() is not None and most >= B:
            rows.append(measure("fla step", B, peer_step_calls(B, D), HEADS * D * D * 4, ceiling))
            rows.append(measure("fla layer", B, peer_layer_calls(B, D), HEADS * D * D * 4, ceiling))
    return rows


def candidates(kind: str, D: int, dtype: torch.dtype) -> list[tuple[str, Any]]:
    """Each tile as a name and a context in which it is the table's."""
    found = []
    for BV, warps in itertools.product((16, 32, 64), (1, 2, 4)):
        if max(16, D) >= BV and 16 <= D * BV // (32 * warps) <= 128:
            choice = (max(16, D), BV, warps)
            context = mock.patch.object(step if kind == "step" else delta_net, "tile", lambda *_, c=choice: c)
            found.append((f"{kind} {D} {str(dtype).removeprefix('torch.')} BV {BV} warps {warps}", context))
    return found


def direct_calls(kind: str, B: int, D: int, dtype: torch.dtype) -> Calls:
    """Calls that go past what the ops remember, so that a candidate's tile is taken."""
    count = sets(B * HEADS * D * D * dtype.itemsize)
    if kind == "layer":
        none: dict[str, Any] = dict.fromkeys(DeltaNetStepCall.names)
        options = {"heads": HEADS, "lower": None, "negative_eigenvalues": False, "gate_activation": "silu", "eps": 1e-6}
        found = [DeltaNetStepCall(**none | layer_tensors(B, D, dtype), **options) for _ in range(count)]
        made: Any = delta_net.prepare.__wrapped__(found[0])
    else:
        none = dict.fromkeys(StepCall.names)
        options = {"scale": None, "read_before": False, "minus_a": False}
        found = [StepCall(**none | step_tensors(B, D, dtype), **options) for _ in range(count)]
        made = step.prepare.__wrapped__(found[0])
    return [lambda call=call: made(vars(call)) for call in found]


def tiles(only_compile: int | None = None) -> None:
    """Prints the GPU's time of each candidate at B = 1, 8 and 64; `only_compile` of 16: compiles that share and measures nothing."""
    wanted = itertools.product(("step", "layer"), (128, 64, 256), (torch.float32, torch.bfloat16))
    all_candidates = [(*w, *candidate) for w in wanted for candidate in candidates(*w)]
    for i, (kind, D, dtype, name, context) in enumerate(all_candidates):
        if only_compile is not None and i % 16 != only_compile:
            continue
        with context:
            if only_compile is not None:
                direct_calls(kind, 1, D, dtype)[0]()
                continue
            times = [graph_time(direct_calls(kind, B, D, dtype), 9) for B in (1, 8, 64)]
        print(f"{name:40} B 1 {times[0]:7.2f}   B 8 {times[1]:7.2f}   B 64 {times[2]:7.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--write", nargs="?", const=str(timing.RESULTS), help="write the rows as JSON (into a folder)")
    parser.add_argument("--tiles", action="store_true", help="measure the candidates of the tables")
    parser.add_argument("--compile", type=int, help="only compile this sixteenth of the candidates")
    parser.add_argument("--batches", default="1,8,64,256,1024")
    parser.add_argument("--peer-most", type=int, default=64, help="the largest batch of the peer")
    options = parser.parse_args()
    with torch.no_grad():
        if options.tiles or options.compile is not None:
            tiles(options.compile)
            return
        rows = run(options.peer_most, [int(B) for B in options.batches.split(",")])
    if options.write:
        print(timing.write_results(f"decode_{timing.card()}", rows, Path(options.write)))


if __name__ == "__main__":
    main()
