"""Calls of the Gluon kernels beside another process that works on the same card: every result must have the bits of the first call's.

A card that divides its time changes from one process to another in the middle of kernels, which no test of one process sees
(docs/lab_notes.md, "lost rows of `o`"). `python tests/rival.py [--calls 100] [--only NAME ...]` prints how many calls of each case were
wrong, alone and beside the other process.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import normalize

from flashmix import delta_rule, linear_attention
from flashmix.ops.attention import softmax_attention

BF16 = torch.bfloat16
PRODUCTS = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
x @ x
torch.cuda.synchronize()
print("ready", flush=True)
while True:
    for _ in range(8):
        x @ x
    torch.cuda.synchronize()
"""
Run = Callable[[], tuple[Tensor, ...]]


class Rival:
    """A process that multiplies matrices on the current card, while it is not held."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", PRODUCTS], stdout=subprocess.PIPE, text=True)

    def ready(self) -> Rival:
        """Waits until it works, and holds it."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the other process could not start"
        self.hold()
        return self

    def hold(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)  # what it has launched ends

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """It works in here."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        try:
            yield
            assert self.process.poll() is None, "the other process ended"
        finally:
            self.hold()


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def attention(
    dim: int, tokens: int, heads: int, dim_v: int = 0, window: int = 0, causal: bool = True, gate: bool = False
) -> tuple[Run, Run]:
    """Forward, and backward, of one sequence."""
    q, k, v = (made(1, tokens, heads, width).requires_grad_() for width in (dim, dim, dim_v or dim))
    log_decay = -torch.rand(1, tokens, heads, device="cuda") if gate else None
    options = {"causal": causal, "window": (window - 1, 0) if window else None, "log_decay": log_decay}

    def run() -> tuple[Tensor, ...]:
        o, lse = softmax_attention(q, k, v, **options, return_lse=True, impl="gluon")
        assert lse is not None
        return o, lse

    flow = made(1, tokens, heads, dim_v or dim)
    with torch.enable_grad():
        o = run()[0]
    return torch.no_grad()(run), lambda: torch.autograd.grad(o, (q, k, v), flow, retain_graph=True)


def recurrence(gate: str, corrected: bool) -> tuple[Run, Run]:
    """Forward, and forward with backward, of four sequences of 8192 tokens, 8 heads of 128 channels; `gate`: "token", "channel", ""."""
    shape = (4, 8192, 8)
    q, k = (normalize(made(*shape, 128).float(), dim=-1).to(BF16).requires_grad_() for _ in range(2))
    v, flow = made(*shape, 128).requires_grad_(), made(*shape, 128)
    leaves = [q, k, v]
    decays = {"token": shape, "channel": (*shape, 128)}
    if corrected:
        leaves.append(torch.rand(shape, device="cuda").requires_grad_())
    if gate:
        leaves.append((-0.1 * torch.rand(decays[gate], device="cuda")).requires_grad_())

    def run() -> Tensor:
        op = delta_rule if corrected else linear_attention
        return op(*leaves, impl="gluon")[0]

    def both() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(run(), leaves, flow)

    return torch.no_grad()(lambda: (run(),)), both


CASES: dict[str, Callable[[], tuple[Run, Run]]] = {
    "attention 128, 300000 tokens, window of 64": lambda: attention(128, 300_000, 16, window=64),
    "attention 128": lambda: attention(128, 16384, 8),
    "attention 128, full": lambda: attention(128, 8192, 16, causal=False),
    "attention 64, full": lambda: attention(64, 8192, 16, causal=False),
    "attention 96": lambda: attention(96, 16384, 8),
    "attention 192 and 128": lambda: attention(192, 8192, 16, dim_v=128),
    "attention 256": lambda: attention(256, 8192, 8),
    "attention 128, forget gate": lambda: attention(128, 8192, 16, gate=True),
    "delta rule, decay per token": lambda: recurrence("token", True),
    "delta rule, decay per channel": lambda: recurrence("channel", True),
    "linear attention, decay per token": lambda: recurrence("token", False),
    "linear attention, decay per channel": lambda: recurrence("channel", False),
}
PASSES = ("forward", "backward")


def wrong_calls(run: Run, wanted: tuple[Tensor, ...], calls: int) -> int:
    """How many of so many calls have other bits than `wanted`, which is finite."""
    return sum(not all(map(torch.equal, run(), wanted)) for _ in range(calls))


def known(run: Run) -> tuple[Tensor, ...]:
    """The results of a call, which are finite."""
    wanted = run()
    assert all(bool(x.isfinite().all()) for x in wanted), "the first call gave a number that is not finite"
    return wanted


def table(names: list[str], calls: int) -> None:
    """Prints a line a case and pass: calls, how many were wrong alone and beside the other process, milliseconds of a call."""
    rival = Rival()
    try:
        rival.ready()
        for name in names:
            for kind, run in zip(PASSES, CASES[name](), strict=True):
                wanted = known(run)
                found, times = [], []
                for beside in (False, True):
                    start = time.perf_counter()
                    if beside:
                        with rival.beside():
                            found.append(wrong_calls(run, wanted, calls))
                    else:
                        found.append(wrong_calls(run, wanted, calls))
                    times.append((time.perf_counter() - start) / calls * 1e3)
                print(
                    f"{name}, {kind}: {calls} calls, wrong {found[0]} alone, {found[1]} beside; {times[0]:.1f}, {times[1]:.1f} ms",
                    flush=True,
                )
                del wanted
            torch.cuda.empty_cache()
    finally:
        rival.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="names of cases")
    chosen = parser.parse_args()
    table(chosen.only, chosen.calls)


if __name__ == "__main__":
    main()
