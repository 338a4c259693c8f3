"""Mechanisms on a GPU beside their peers: `python benchmarks/mechanisms_gpu.py [--rows NAME ...] [--own SECONDS] [--ready SECONDS]`.

bfloat16, forward, and forward with backward: milliseconds between events with a cold L2 (medians), and the memory that a call takes
beyond its inputs. A row and a side are a process of its own: all compile (and peers tune) at once. After at most `--own` seconds those of
flashmix that are ready are timed, one after the other, alone on the card, all others stopped; then these go on, and those that are ready
`--ready` seconds after the start are timed in the same way. Each row is printed and written when it is measured; what was not ready or
failed is named.

Peers: fla-core, mlstm_kernels, accelerated-scan (its Triton scan: float32, channels before tokens), mamba_ssm's selective scan in CUDA
(channels before tokens) and its Triton kernels of Mamba-3, which load without the rest of that package.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Run = Callable[..., Any]
Made = Callable[[str], tuple[Inputs, Run]]
BF16, F32 = torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


def decay(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return (-0.1 * torch.rand(shape, device="cuda")).to(dtype)


def heads(B: int, T: int, H: int, K: int, V: int) -> Inputs:
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1).to(BF16) for _ in range(2))
    return {"q": q, "k": k, "v": normal(B, T, H, V)}


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def hgrn(side: str) -> tuple[Inputs, Run]:
    x = {"x": normal(8, 4096, 4096), "g": decay(8, 4096, 4096, dtype=BF16)}
    if side == "flashmix":
        from flashmix import hgrn

        return x, lambda x, g: hgrn(x, g)
    if side == "accelerated_scan":
        try:
            from accelerated_scan.scalar import scan  # 0.3
        except ImportError:
            from accelerated_scan.triton import scan

        x = {"gates": decay(8, 4096, 4096).exp_(), "tokens": normal(8, 4096, 4096, dtype=F32)}
        return x, lambda gates, tokens: scan(gates, tokens)
    from fla.ops.hgrn import chunk_hgrn

    return x, lambda x, g: chunk_hgrn(x, g)


def rwkv4(B: int, T: int, C: int) -> Made:
    def made(side: str) -> tuple[Inputs, Run]:
        x = {"k": normal(B, T, C), "v": normal(B, T, C), "w": -torch.rand(C, device="cuda"), "u": normal(C, dtype=F32)}
        if side == "flashmix":
            from flashmix import rwkv4

            return x, lambda k, v, w, u: rwkv4(k, v, w, u)
        from fla.ops.rwkv4 import fused_recurrent_rwkv4

        state = torch.zeros(B, 3, 1, C, device="cuda")
        return x, lambda k, v, w, u: fused_recurrent_rwkv4(w, u, k, v, state)

    return made


def based(side: str) -> tuple[Inputs, Run]:
    x = heads(8, 2048, 16, 16, 128)
    if side == "flashmix":
        from flashmix import based

        return x, lambda q, k, v: based(q, k, v)
    from fla.ops.based import fused_chunk_based, parallel_based

    return x, parallel_based if side == "fla parallel" else fused_chunk_based


def rebased(side: str) -> tuple[Inputs, Run]:
    x = heads(8, 2048, 16, 16, 128)
    if side == "flashmix":
        from flashmix import rebased

        return x, lambda q, k, v: rebased(q, k, v)
    from fla.ops.rebased import parallel_rebased

    return x, parallel_rebased


def lightnet(side: str) -> tuple[Inputs, Run]:
    x = heads(4, 2048, 16, 128, 128)
    if side == "flashmix":
        from flashmix import lightnet

        return x, lambda q, k, v: lightnet(q, k, v)
    from fla.ops.lightnet import chunk_lightnet

    return x, chunk_lightnet


def log_linear(side: str) -> tuple[Inputs, Run]:
    B, T, H, K, V = 4, 2048, 16, 128, 64
    x = {"q": normal(B, T, 1, K, scale=K**-0.5), "k": normal(B, T, 1, K), "v": normal(B, T, H, V), "g": decay(B, T, H)}
    x["levels"] = torch.rand(B, T, H, 12, device="cuda").to(F32 if side == "flashmix" else BF16)
    if side == "flashmix":
        from flashmix import log_linear

        return x, lambda q, k, v, g, levels: log_linear(q, k, v, g, levels)
    from fla.ops.log_linear_attn import chunk_log_linear_attn

    return x, chunk_log_linear_attn


def mesa_net(side: str) -> tuple[Inputs, Run]:
    x = heads(4, 2048, 16, 128, 128) | {"g": decay(4, 2048, 16), "beta": torch.rand(4, 2048, 16, device="cuda")}
    x["ridge"] = 0.25 + torch.rand(16, 128, device="cuda")
    if side == "flashmix":
        from flashmix import mesa_net

        return x, lambda q, k, v, g, beta, ridge: mesa_net(q, k, v, beta, g, ridge)
    from fla.ops.mesa_net import chunk_mesa_net

    return x, lambda q, k, v, g, beta, ridge: chunk_mesa_net(q, k, v, g, beta, ridge)


def mlstm(B: int, T: int) -> Callable[[str], tuple[Inputs, Run]]:
    def made(side: str) -> tuple[Inputs, Run]:
        x = {"q": normal(B, T, 8, 256), "k": normal(B, T, 8, 256), "v": normal(B, T, 8, 512)}
        x |= {"write": normal(B, T, 8, dtype=F32), "forget": decay(B, T, 8)}
        if side == "flashmix":
            from flashmix import mlstm

            return x, lambda q, k, v, write, forget: mlstm(q, k, v, write, forget)
        from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk

        chunk = int(side.split()[1])
        x = {name: t.transpose(1, 2).contiguous() for name, t in x.items()}  # [B, H, T, ...]
        return x, lambda *given: mlstm_chunkwise__xl_chunk(*given, chunk_size=chunk, autocast_kernel_dtype=BF16)

    return made


def mamba3(side: str) -> tuple[Inputs, Run]:
    B, T, H, N, P = 4, 4096, 32, 128, 64
    x = {"x": normal(B, T, H, P), "dt": torch.rand(B, T, H, device="cuda"), "g": decay(B, T, H)}
    x |= {"gate": torch.rand(B, T, H, device="cuda"), "B": normal(B, T, 1, N), "C": normal(B, T, 1, N)}
    x["angles"] = normal(B, T, H, N // 4, dtype=F32)
    if side == "flashmix":
        from flashmix import mamba3

        return x, lambda x, dt, g, gate, B, C, angles: mamba3(x, dt, g, gate, B, C, angles)
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    for name in ("dt", "g", "gate"):
        x[name] = x[name].transpose(1, 2).contiguous()
    x |= {"bias_q": torch.zeros(H, N, device="cuda"), "bias_k": torch.zeros(H, N, device="cuda")}

    def run(
        x: Tensor, dt: Tensor, g: Tensor, gate: Tensor, B: Tensor, C: Tensor, angles: Tensor, *biases: Tensor
    ) -> Any:
        return mamba3_siso_combined(C, B, x, g, dt, gate, *biases, angles)

    return x, run


def selective(side: str) -> tuple[Inputs, Run]:
    B, T, D, S = 8, 2048, 4096, 16
    x = {name: normal(B, T, D) for name in ("u", "dt", "z")} | {"B": normal(B, T, S), "C": normal(B, T, S)}
    x["A"] = -torch.arange(1.0, S + 1, device="cuda").expand(D, S).contiguous()
    x |= {"D": normal(D, dtype=F32), "dt_bias": normal(D, dtype=F32) - 4}
    if side == "mamba_ssm":
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        for name in ("u", "dt", "z", "B", "C"):
            x[name] = x[name].transpose(1, 2).contiguous()

        def run(
            u: Tensor, dt: Tensor, z: Tensor, B: Tensor, C: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor
        ) -> Tensor:
            return selective_scan_fn(u, dt, A, B, C, D, z, dt_bias, delta_softplus=True)

        return x, run
    from flashmix import selective_scan

    return x, lambda **x: selective_scan(**x, softplus=True, impl=side.removeprefix("flashmix "))


def scan(B: int, T: int, D: int) -> Callable[[str], tuple[Inputs, Run]]:
    def made(side: str) -> tuple[Inputs, Run]:
        from flashmix import scan

        return {"x": normal(B, T, D), "g": decay(B, T, D, dtype=BF16)}, lambda x, g: scan(x, g)

    return made


def slstm(T: int, H: int, D: int, dtype: torch.dtype) -> Callable[[str], tuple[Inputs, Run]]:
    def made(side: str) -> tuple[Inputs, Run]:
        from flashmix import slstm

        x = {name: normal(8, T, H, D, dtype=dtype) for name in ("write", "forget", "candidate", "output")}
        x["recurrent"] = normal(4, H, D, D, dtype=dtype, scale=D**-0.5)
        return x, lambda **x: slstm(**x)

    return made


ROWS: dict[str, tuple[Made, tuple[str, ...]]] = {
    "selective_scan 8x2048x4096": (selective, ("flashmix gluon", "flashmix triton", "mamba_ssm")),
    "scan 8x4096x4096": (scan(8, 4096, 4096), ("flashmix",)),
    "scan 1x131072x512": (scan(1, 131072, 512), ("flashmix",)),
    "slstm 8x1024x4x64 float32": (slstm(1024, 4, 64, F32), ("flashmix",)),
    "slstm 8x1024x4x128 bfloat16": (slstm(1024, 4, 128, BF16), ("flashmix",)),
    "slstm 8x1024x4x192 bfloat16": (slstm(1024, 4, 192, BF16), ("flashmix",)),
    "slstm 8x1024x4x256 bfloat16": (slstm(1024, 4, 256, BF16), ("flashmix",)),
    "hgrn 8x4096x4096": (hgrn, ("flashmix", "fla", "accelerated_scan")),
    "rwkv4 8x2048x2048": (rwkv4(8, 2048, 2048), ("flashmix", "fla")),
    "rwkv4 32x512x4096": (rwkv4(32, 512, 4096), ("flashmix",)),
    "rwkv4 1x16384x2048": (rwkv4(1, 16384, 2048), ("flashmix", "fla")),
    "rwkv4 1x131072x512": (rwkv4(1, 131072, 512), ("flashmix",)),
    "mlstm 8x2048x8 256/512": (mlstm(8, 2048), ("flashmix", "mlstm_kernels 128", "mlstm_kernels 256")),
    "mlstm 1x16384x8 256/512": (mlstm(1, 16384), ("flashmix", "mlstm_kernels 128", "mlstm_kernels 256")),
    "mamba3 4x4096x32 128/64": (mamba3, ("flashmix", "mamba_ssm")),
    "lightnet 4x2048x16 128/128": (lightnet, ("flashmix", "fla")),
    "based 8x2048x16 16/128": (based, ("flashmix", "fla", "fla parallel")),
    "rebased 8x2048x16 16/128": (rebased, ("flashmix", "fla")),
    "mesa_net 4x2048x16 128/128": (mesa_net, ("flashmix", "fla")),
    "log_linear 4x2048x16 128/64": (log_linear, ("flashmix", "fla")),
}


def worker(name: str, side: str, files: Path, repeats: int) -> None:
    """One row and side: warms up, waits for its turn, prints its times as JSON."""
    started = time.monotonic()
    torch.manual_seed(0)
    made, _ = ROWS[name]
    x, run = made(side)
    leaves = {key: t.requires_grad_() if t.is_floating_point() else t for key, t in x.items()}

    def call() -> Tensor:
        return first(run(**leaves) if side.startswith("flashmix") else run(*leaves.values()))

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    flow = torch.randn_like(forward())

    def both() -> None:
        y = call()
        torch.autograd.grad(y, [t for t in leaves.values() if t.requires_grad], flow.to(y.dtype), allow_unused=True)

    passes = {"forward": forward, "forward and backward": both}
    for each in (forward, both, both):
        each()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    first_call = time.monotonic() - started
    files.with_suffix(".ready").touch()
    while not files.with_suffix(".go").exists():
        time.sleep(0.02)
    for key, each in passes.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        each()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        ms = timing.cuda_medians({key: each}, repeats=repeats, warmup=2)[key]
        row = {"row": name, "run": side, "pass": key, "ms": ms, "peak_mib": peak, "first_s": first_call}
        print(json.dumps(row), flush=True)


class Side:
    """A row and a side of it: its process, and the files by which it is spoken to."""

    def __init__(self, name: str, side: str, files: Path, repeats: int) -> None:
        self.name, self.side, self.files = name, side, files
        command = [sys.executable, sys.argv[0], "--repeats", str(repeats), "--worker", name, side, str(files)]
        out, err = (files.with_suffix(end).open("w") for end in (".out", ".err"))
        self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def ready(self) -> bool:
        return self.files.with_suffix(".ready").exists() or self.process.poll() is not None

    def signal(self, which: int) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, which)

    def say(self, what: str) -> None:
        print(f"{self.name:30} {self.side:18} {what}", flush=True)

    def measured(self, seconds: float) -> list[dict[str, Any]]:
        """Its times, taken now; none if it failed, which is printed."""
        if not self.files.with_suffix(".ready").exists() and self.process.wait(seconds) < 0:
            self.say("was not ready")
        self.files.with_suffix(".go").touch()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.say(f"took more than {seconds:.0f} s")
            self.process.wait()
        text = self.files.with_suffix(".out").read_text()
        found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        if not found and self.process.returncode > 0:
            self.say("failed: " + (self.files.with_suffix(".err").read_text().strip().splitlines() or [""])[-1][:160])
        if found:
            times = " / ".join(f"{row['ms']:.3f}" for row in found)
            peaks = " / ".join(f"{row['peak_mib']:.0f}" for row in found)
            self.say(f"{times} ms, {peaks} MiB, first {found[0]['first_s']:.1f} s")
        return found


def wait_for(sides: list[Side], deadline: float) -> None:
    while time.monotonic() < deadline and not all(side.ready() for side in sides):
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--own", type=float, default=60.0)
    parser.add_argument("--ready", type=float, default=120.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=3)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], options.worker[1], Path(options.worker[2]), options.repeats)
        return
    folder = Path(tempfile.mkdtemp())
    started = time.monotonic()
    wanted = [(name, side) for name in ROWS for side in ROWS[name][1] if name.startswith(tuple(options.rows))]
    sides = [Side(*key, folder / f"side{i}", options.repeats) for i, key in enumerate(wanted)]
    own = [side for side in sides if side.side.startswith("flashmix")]
    rows: list[dict[str, Any]] = []

    def measure(some: list[Side]) -> None:
        print(f"--- {time.monotonic() - started:.0f} s", flush=True)
        for side in some:
            rows.extend(side.measured(20.0))
            if options.out is not None:
                timing.write_json(options.out, rows, {"gpu": torch.cuda.get_device_name()})

    wait_for(own, started + options.own)
    soon = [side for side in own if side.ready()]
    later = [side for side in sides if side not in soon]
    for side in later:
        side.signal(signal.SIGSTOP)
    measure(soon)
    for side in later:
        side.signal(signal.SIGCONT)
    wait_for(later, started + options.ready)
    for side in later:
        if not side.ready():
            side.process.kill()
    measure(later)


if __name__ == "__main__":
    main()
