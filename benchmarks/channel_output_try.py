"""The output backward of KDA and GLA: Gluon's kernel beside Triton's in one process, checked, then timed in turns.

    python benchmarks/channel_output_try.py [result.json] [--steps check:far:kda,sizes,kernels,host]

Steps, each written to the file as soon as it is done: `check:CASE:RULE` (small, against float64; without a case all), `kernels`
(milliseconds by events around the launches of the phase, and of both passes), `sizes` (8 x 4096 x 16: both kernels' gradients against each
other, 20 repeats of the same bits), `host`. Checks run side by side in processes fill the compile cache for the steps after them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import flashmix
from flashmix.ops.recurrence.gluon_hopper import BACKWARD, FORWARD, channel

START = time.time()
DEVICE = "cuda"
RESULTS: dict[str, Any] = {}


def say(name: str, value: Any) -> None:
    RESULTS[name] = value
    print(f"{time.time() - START:5.1f} s  {name}: {value}", flush=True)


@contextmanager
def tritons(wanted: bool) -> Iterator[None]:
    """Triton's kernel of the phase in place of Gluon's."""
    FORWARD.clear()  # launches that are made again know nothing of this
    BACKWARD.clear()
    if not wanted:
        yield
        return

    def output(run: Any, plan: Any, numbers: Any, made: Any, values: Any, found: Any) -> None:
        do, dr, nu, states, dstates = values
        inputs, scores, _ = made
        rows = len(inputs.rows)
        x = channel.ChunkValues((do, dr)[:rows], (nu,), states, dstates)
        keys = (found["q"], None)[:rows], (found["k"],)
        out = channel.KeyGradients(*keys, found.get("beta"), found["log_decay"], scores.A)
        run.plan.output(run.chunk_programs, scores, inputs, x, out, run.where, run.n)
        run.plan.pairs(run.chunk_programs, inputs, x, out, run.where, run.n)

    with mock.patch("flashmix.ops.recurrence.gluon_hopper.output_backward_of_channels", output):
        yield
    FORWARD.clear()
    BACKWARD.clear()


def inputs(kind: str, B: int, T: int, H: int, HV: int, K: int = 128, V: int = 128, **more: Any) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).bfloat16()

    x = {"q": unit(B, T, H, K), "k": unit(B, T, H, K), "v": normal(B, T, HV, V).bfloat16()}
    if kind == "kda":
        x["beta"] = torch.rand(B, T, HV, generator=generator, device=DEVICE)
    decay = -more.get("decay", 0.1) * torch.rand(B, T, HV, K, generator=generator, device=DEVICE)
    x["log_decay"] = decay.to(more.get("gate", torch.float32))
    lengths = more.get("lengths")
    found: dict[str, Any] = {"kind": kind, "x": x, "do": normal(B, T, HV, V).bfloat16(), "cu": None}
    if lengths:
        found["cu"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=DEVICE)
    return found


def run(given: dict[str, Any], impl: str = "gluon", dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    leaves = {n: (t if dtype is None else t.to(dtype)).detach().requires_grad_() for n, t in given["x"].items()}
    q, k, v, *rest = leaves.values()
    options = {"impl": impl, "cu_seqlens": given["cu"]}
    if given["kind"] == "kda":
        o, _ = flashmix.delta_rule(q, k, v, rest[0], rest[1], **options)
    else:
        o, _ = flashmix.linear_attention(q, k, v, rest[0], **options)
    grads = torch.autograd.grad(o, list(leaves.values()), given["do"].to(o.dtype))
    return dict(zip(leaves, grads, strict=True))


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


CASES: dict[str, dict[str, Any]] = {
    "ragged": {"B": 2, "T": 300, "H": 16, "HV": 16},
    "far": {"B": 1, "T": 200, "H": 16, "HV": 16, "decay": 3.0},
    "grouped": {"B": 1, "T": 130, "H": 2, "HV": 6},
    "narrow-packed": {"B": 1, "T": 237, "H": 2, "HV": 2, "K": 96, "V": 80, "lengths": (5, 0, 64, 65, 1, 33, 69)},
    "half-gates": {"B": 1, "T": 200, "H": 2, "HV": 2, "gate": torch.bfloat16},
}


def check(only: str = "", rule: str = "") -> None:
    """Errors against float64 beside those of Triton's kernel: more than 1.3 times as much, or past 8e-3, is wrong."""
    for name, sizes in CASES.items():
        for kind in ("kda", "gla"):
            if only not in ("", name) or rule not in ("", kind):
                continue
            given = inputs(kind, **sizes)
            exact = run(given, "portable", torch.float64)
            ours = run(given)
            with tritons(True):
                theirs = run(given)
            pairs = {n: (apart(ours[n], exact[n]), apart(theirs[n], exact[n])) for n in exact}
            wrong = [n for n, (a, b) in pairs.items() if not a < min(8e-3, max(1.3 * b, 1e-3))]
            text = " ".join(f"{n} {a:.1e}/{b:.1e}" for n, (a, b) in pairs.items())
            say(f"check {name} {kind}", f"{text} {'WRONG ' + str(wrong) if wrong else 'ok'}")


def sizes() -> None:
    for kind in ("kda", "gla"):
        given = inputs(kind, 8, 4096, 16, 16)
        first = run(given)
        same = all(all(torch.equal(first[n], t) for n, t in run(given).items()) for _ in range(20))
        with tritons(True):
            theirs = run(given)
        say(f"sizes {kind}", {"same bits": same} | {n: f"{apart(t, theirs[n]):.1e}" for n, t in first.items()})


def medians(calls: dict[str, Callable[[], Any]], repeats: int = 12) -> dict[str, float]:
    """Milliseconds by events, cold L2, calls in turns."""
    flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            flush.zero_()
            torch.cuda._sleep(1_000_000)  # the host is ahead
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:
                found[name].append(start.elapsed_time(end))
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


def recorded(given: dict[str, Any], names: tuple[str, ...], old: bool) -> dict[str, Callable[[], Any]]:
    """The launches of kernels of these names in a backward, to be made again (their memory is kept alive here)."""
    from flashmix.gpu.launch import Kernel

    found: dict[str, Callable[[], Any]] = {}
    original = Kernel.__call__

    def launch(self: Any, grid: int, *structs: Any) -> Any:
        name = self.kernel.fn.__name__
        if name in names:
            found[name + (" triton" if old else "")] = lambda: original(self, grid, *structs)
        return original(self, grid, *structs)

    with tritons(old), mock.patch.object(Kernel, "__call__", launch):
        run(given)
    return found


def kernels() -> None:
    phases = (
        "channel_output_kernel",
        "output_backward_kernel",
        "channel_pairs_backward_kernel",
        "state_backward_kernel",
    )
    for kind, row in (("kda", (8, 4096, 16, 16)), ("gla", (8, 4096, 16, 16))):
        given = inputs(kind, *row)
        calls = recorded(given, phases, False) | recorded(given, phases[:2], True)
        say(f"ms {kind} {row} kernels", medians(calls))
        new = medians({"both": lambda given=given: run(given)})
        with tritons(True):
            old = medians({"both": lambda given=given: run(given)})
        say(f"ms {kind} {row} forward + backward, new then old", [new["both"], old["both"]])


def host() -> None:
    given = inputs("kda", 1, 2048, 16, 16)
    x = given["x"]
    for name, call in (
        ("forward", lambda: flashmix.delta_rule(*x.values(), impl="gluon")),
        ("both", lambda: run(given)),
    ):
        times = []
        for _ in range(60):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
        say(f"host us {name}", round(statistics.median(times[20:]) * 1e6, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?")
    parser.add_argument("--steps", default="check,kernels,sizes,host")
    options = parser.parse_args()
    say("gpu", torch.cuda.get_device_name())
    steps: dict[str, Callable[..., None]] = {"check": check, "sizes": sizes, "kernels": kernels, "host": host}
    for step in options.steps.split(","):
        name, *arguments = step.split(":")
        try:
            steps[name](*arguments)
        except Exception as error:  # the steps after it are worth having
            say(f"{step} failed", repr(error)[:600])
        if options.out:
            with open(options.out, "w") as file:
                json.dump(RESULTS, file, indent=1)
    print(f"{time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
