"""The recurrence on the CPU beside transformers' own torch path: `python benchmarks/recurrence.py [--threads 2] [--write]`.

Gated DeltaNet, float32, one process: forward, forward and backward, the same with a decay a channel (KDA), one decode step, and
peak memory. Needs the extra `hf` (transformers' `torch_chunk_gated_delta_rule` of qwen3_next). Before anything is timed both
sides are checked against the definition in float64.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable

import timing
import torch
from torch import Tensor

from flashmix import delta_rule, l2_norm
from flashmix.ops.recurrence import definition

SHAPES = ((1, 2048, 8, 64), (1, 4096, 4, 128), (4, 512, 4, 64))


def inputs(B: int, T: int, H: int, D: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = {
        "q": torch.randn(B, T, H, D),
        "k": l2_norm(torch.randn(B, T, H, D)),
        "v": torch.randn(B, T, H, D),
        "beta": torch.rand(B, T, H),
        "head_decay": -torch.rand(B, T, H),
        "channel_decay": -torch.rand(B, T, H, D),
    }
    return {name: t.requires_grad_() for name, t in x.items()}


def flops(B: int, T: int, H: int, D: int, chunk: int = 64) -> int:
    """Products of the chunked forward: q and k with k, T with R, scores with nu (C D each), and three with the state (D D each)."""
    return 2 * B * T * H * (4 * chunk * D + 3 * D * D)


def with_backward(run: Callable[[], Tensor], leaves: list[Tensor], do: Tensor) -> None:
    torch.autograd.grad(run(), leaves, do)


def check(ours: Tensor, theirs: Tensor, x: dict[str, Tensor]) -> None:
    """No speed-up over a wrong result: both agree with the definition to float32 rounding over the first tokens."""
    n = 200
    first = {name: t.detach()[:1, :n].double() for name, t in x.items()}
    exact, _ = definition.delta_rule(first["q"], first["k"], first["v"], first["beta"], first["head_decay"])
    for name, o in (("flashmix", ours), ("transformers", theirs)):
        error = ((o[:1, :n].double() - exact).norm() / exact.norm()).item()
        if error > 1e-5:
            raise SystemExit(f"{name} is wrong: relative error {error:.1e}")


def compare(
    shape: tuple[int, int, int, int], rate: float, peer: Callable[..., tuple[Tensor, Tensor]]
) -> dict[str, object]:
    x = inputs(*shape)
    do = torch.randn_like(x["v"])
    keys = [x[name] for name in ("q", "k", "v", "beta")]
    head, channel = x["head_decay"], x["channel_decay"]

    def ours() -> Tensor:
        return delta_rule(*keys, head)[0]

    def kda() -> Tensor:
        return delta_rule(*keys, channel)[0]

    def theirs() -> Tensor:
        return peer(x["q"], x["k"], x["v"], head, x["beta"])[0]

    with torch.no_grad():
        check(ours(), theirs(), x)
        forward = timing.medians({"flashmix": ours, "transformers": theirs, "kda": kda})
    both = timing.medians(
        {
            "flashmix": lambda: with_backward(ours, [*keys, head], do),
            "transformers": lambda: with_backward(theirs, [*keys, head], do),
            "kda": lambda: with_backward(kda, [*keys, channel], do),
        },
        repeats=10,
    )
    return {
        "shape": "x".join(map(str, shape)),
        "forward_ms": forward["flashmix"],
        "transformers_forward_ms": forward["transformers"],
        "forward_speedup": forward["transformers"] / forward["flashmix"],
        "forward_backward_ms": both["flashmix"],
        "transformers_forward_backward_ms": both["transformers"],
        "forward_backward_speedup": both["transformers"] / both["flashmix"],
        "fraction_of_matrix_rate": flops(*shape) / forward["flashmix"] / 1e6 / rate,
        "kda_forward_ms": forward["kda"],
        "kda_forward_backward_ms": both["kda"],
        "kda_over_head_forward": forward["kda"] / forward["flashmix"],
        "kda_over_head_forward_backward": both["kda"] / both["flashmix"],
    }


def decode_step(H: int = 8, D: int = 64) -> dict[str, object]:
    """Microseconds of one token through the op, and of the same arithmetic written out."""
    x = {name: t.detach() for name, t in inputs(1, 1, H, D).items()}
    S = torch.randn(1, H, D, D)
    q, k, v = (x[name].view(H, 1, D) for name in ("q", "k", "v"))

    def arithmetic() -> Tensor:
        decayed = S.view(H, D, D) * x["head_decay"].exp().view(H, 1, 1)
        u = (v - k @ decayed) * x["beta"].view(H, 1, 1)
        return q @ torch.baddbmm(decayed, k.mT, u)

    def op() -> Tensor:
        return delta_rule(x["q"], x["k"], x["v"], x["beta"], x["head_decay"], initial_state=S, return_state=True)[0]

    with torch.no_grad():
        times = timing.medians({"op": op, "arithmetic": arithmetic}, repeats=2000, warmup=200)
    return {
        "shape": f"step 1x1x{H}x{D}",
        "step_us": times["op"] * 1e3,
        "arithmetic_us": times["arithmetic"] * 1e3,
        "beyond_us": (times["op"] - times["arithmetic"]) * 1e3,
    }


MEMORY_PROBE = """
import sys, torch
from flashmix import delta_rule, l2_norm
torch.set_num_threads(2)

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

def extra(T):
    x = [torch.randn(1, T, 4, 64) for _ in range(3)] + [torch.rand(1, T, 4), -torch.rand(1, T, 4)]
    x[1] = l2_norm(x[1])
    x = [t.requires_grad_() for t in x]
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = kib("VmRSS")
    delta_rule(*x)[0].sum().backward()
    return kib("VmHWM") - before

extra(64)
print(extra(int(sys.argv[1])))
"""


def memory(T: int) -> dict[str, object]:
    """MiB that forward and backward of 1xTx4x64 need at their peak beyond the inputs, gradients included, in a fresh process (Linux)."""
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(T)], check=True, capture_output=True, text=True
    ).stdout
    return {"shape": f"memory 1x{T}x4x64", "extra_mib": int(out) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="also write benchmarks/results/<date>_recurrence_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as peer

    rate = timing.matrix_product_rate()
    print(f"float32 matrix product: {rate:.0f} GFLOP/s on {arguments.threads} threads\n")
    print(
        f"{'B x T x H x D':>14}  {'fwd ms':>7} {'peer':>7} {'ratio':>6}  {'f+b ms':>7} {'peer':>7} {'ratio':>6}"
        f"  {'of rate':>7}  {'KDA fwd':>8} {'f+b':>6} {'x head':>11}"
    )
    rows = []
    for shape in SHAPES:
        row = compare(shape, rate, peer)
        rows.append(row)
        print(
            f"{row['shape']:>14}  {row['forward_ms']:7.1f} {row['transformers_forward_ms']:7.1f} {row['forward_speedup']:5.2f}x"
            f"  {row['forward_backward_ms']:7.1f} {row['transformers_forward_backward_ms']:7.1f}"
            f" {row['forward_backward_speedup']:5.2f}x  {row['fraction_of_matrix_rate']:7.0%}"
            f"  {row['kda_forward_ms']:8.1f} {row['kda_forward_backward_ms']:6.1f}"
            f" {row['kda_over_head_forward']:5.2f} {row['kda_over_head_forward_backward']:5.2f}"
        )
    step = decode_step()
    print(f"\none decode step: {step['step_us']:.0f} us, {step['beyond_us']:.0f} us beyond its arithmetic")
    probes = [memory(T) for T in (4096, 16384)]
    print(
        "extra memory, forward + backward: " + ", ".join(f"{p['shape'][7:]} {p['extra_mib']:.0f} MiB" for p in probes)
    )  # type: ignore[index]
    if arguments.write:
        print(timing.write_results("recurrence_cpu", [{"matrix_product_gflops": rate}, *rows, step, *probes]))


if __name__ == "__main__":
    main()
