"""The row-wise ops on a GPU beside flash-linear-attention's modules (where installed) and torch.compile of the plain form.

    python benchmarks/rowwise.py [--without fla,compile] [--only rms_norm]

A row has milliseconds forward and forward + backward, and how much of the copy bandwidth its necessary bytes come to: each
input read once, each output written once. The bandwidth is measured in the same run. `called`: milliseconds by the
method of `triton.testing.do_bench`, where the GPU may wait for the host. `first_s`: the first call, forward and backward, with
the compile cache as it was found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import definitions
import torch
from timing import cuda_medians, write_results
from torch import Tensor

import flashmix

BF16, WIDE = torch.bfloat16, torch.float32
Call = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """An op at one shape: its inputs, the bytes it must move forward and backward, and who computes it."""

    op: str
    shape: str
    inputs: list[Tensor]
    forward_bytes: int
    backward_bytes: int
    calls: dict[str, Call]


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def plain(formula: Call) -> Call:
    """The formula in float32, rounded at the end: what torch.compile is given."""

    def call(*inputs: Tensor) -> Any:
        got = formula(*(t.float() for t in inputs))
        return got.to(BF16) if isinstance(got, Tensor) else tuple(t.to(BF16) for t in got)

    return call


def norm_rows(fla: bool) -> list[Row]:
    x, weight = normal(32768, 4096), normal(4096)
    heads, gate, head_weight = normal(32768, 16, 128), normal(32768, 16, 128), normal(128)
    wide, narrow = x.nbytes, heads.nbytes
    theirs: dict[str, Call] = {}
    if fla:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.modules.norm.l2norm import l2_norm
        from fla.modules.norm.layernorm import layer_norm, rms_norm

        theirs = {
            "rms_norm": lambda x, w: rms_norm(x, w, None, eps=1e-6),
            "add": lambda x, w, r: rms_norm(x, w, None, residual=r, prenorm=True, eps=1e-6),
            "layer_norm": lambda x, w: layer_norm(x, w, w, eps=1e-5),
            "gated": lambda x, w, g: rms_norm_gated(x, g, w, None, activation="swish", eps=1e-6),
            "l2_norm": lambda x: l2_norm(x, 1e-6),
        }

    def row(
        op: str, shape: str, inputs: list[Tensor], sizes: tuple[int, int], ours: Call, formula: Call, key: str
    ) -> Row:
        calls = {"flashmix": ours} | ({"fla": theirs[key]} if fla else {}) | {"compile": plain(formula)}
        return Row(op, shape, inputs, *sizes, calls)

    return [
        row(
            "rms_norm",
            "32768x4096",
            [x, weight],
            (2 * wide, 3 * wide),
            flashmix.rms_norm,
            definitions.rms_norm,
            "rms_norm",
        ),
        row(
            "rms_norm of a sum",
            "32768x4096",
            [x, weight, normal(32768, 4096)],
            (4 * wide, 4 * wide),
            lambda x, w, r: flashmix.rms_norm(x, w, residual=r, return_residual=True),
            lambda x, w, r: (definitions.rms_norm(x + r, w), x + r),
            "add",
        ),
        row(
            "layer_norm",
            "32768x4096",
            [x, weight],
            (2 * wide, 3 * wide),
            lambda x, w: flashmix.layer_norm(x, w, w),
            lambda x, w: definitions.layer_norm(x, w, w),
            "layer_norm",
        ),
        row(
            "gated rms_norm",
            "32768x16x128",
            [heads, head_weight, gate],
            (3 * narrow, 5 * narrow),
            lambda x, w, g: flashmix.rms_norm(x, w, gate=g),
            definitions.rms_norm,
            "gated",
        ),
        row(
            "l2_norm",
            "32768x16x128",
            [heads],
            (2 * narrow, 3 * narrow),
            flashmix.l2_norm,
            definitions.l2_norm,
            "l2_norm",
        ),
    ]


def rotary_row(fla: bool) -> Row:
    q, k = normal(4, 8192, 32, 128), normal(4, 8192, 32, 128)
    cos, sin = flashmix.rotary_table(8192, 128, device="cuda")
    places = torch.arange(8192, device="cuda").expand(4, 8192)
    calls: dict[str, Call] = {"flashmix": lambda q, k: flashmix.rotary_qk(q, k, cos, sin)}
    if fla:
        from fla.modules.rotary import rotary_embedding

        low = cos.to(BF16), sin.to(BF16)
        calls["fla"] = lambda q, k: (rotary_embedding(q, *low), rotary_embedding(k, *low))
    calls["compile"] = plain(lambda q, k: tuple(definitions.rotary(t, cos, sin, places) for t in (q, k)))
    size = 4 * q.nbytes
    return Row("rotary q and k", "4x8192x32x128", [q, k], size, size, calls)


def swiglu_row(fla: bool) -> Row:
    gate, up = normal(32768, 11008), normal(32768, 11008)
    calls: dict[str, Call] = {"flashmix": flashmix.swiglu}
    if fla:
        from fla.modules.activations import swiglu

        calls["fla"] = swiglu
    calls["compile"] = plain(definitions.swiglu)
    return Row("swiglu", "32768x11008", [gate, up], 3 * gate.nbytes, 5 * gate.nbytes, calls)


def decay_row(fla: bool) -> Row:
    x, A_log, dt_bias = normal(4, 8192, 32, 128), normal(32, dtype=WIDE), normal(32, 128, dtype=WIDE)
    calls: dict[str, Call] = {"flashmix": flashmix.softplus_decay}
    if fla:
        from fla.ops.kda.gate import fused_kda_gate

        calls["fla"] = lambda x, a, b: fused_kda_gate(x, a, b.flatten())
    calls["compile"] = lambda x, a, b: definitions.softplus_decay(x.float(), a, b)
    return Row("softplus_decay", "4x8192x32x128", [x, A_log, dt_bias], 3 * x.nbytes, 4 * x.nbytes, calls)


def shift_row(fla: bool) -> Row:
    x = normal(4, 8192, 4096)
    calls: dict[str, Call] = {"flashmix": lambda x: flashmix.token_shift(x)[0]}
    if fla:
        from fla.modules.token_shift import token_shift

        calls["fla"] = token_shift  # the difference to the token itself: as many bytes
    calls["compile"] = lambda x: torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    return Row("token_shift", "4x8192x4096", [x], 2 * x.nbytes, 2 * x.nbytes, calls)


ROWS: dict[str, Callable[[bool], list[Row]]] = {
    "norms": norm_rows,
    "rotary": lambda fla: [rotary_row(fla)],
    "swiglu": lambda fla: [swiglu_row(fla)],
    "decay": lambda fla: [decay_row(fla)],
    "token_shift": lambda fla: [shift_row(fla)],
}


def measure(row: Row, rate: float, repeats: int) -> dict[str, Any]:
    """Milliseconds, shares of the copy bandwidth and seconds of the first call, of everyone who computes the row."""
    leaves = [t.detach().requires_grad_() for t in row.inputs]
    flows: list[Tensor] = []
    found: dict[str, Any] = {"op": row.op, "shape": row.shape, "bytes": [row.forward_bytes, row.backward_bytes]}
    forward, both = {}, {}

    def train(call: Call) -> None:
        got = call(*leaves)
        results = [got] if isinstance(got, Tensor) else list(got)
        if not flows:
            flows.extend(torch.randn_like(y) for y in results)
        torch.autograd.grad(results, leaves, flows)

    def infer(call: Call) -> None:
        with torch.no_grad():
            call(*leaves)

    for name, call in row.calls.items():
        torch._dynamo.reset()
        run = torch.compile(call, dynamic=False) if name == "compile" else call
        start = time.perf_counter()
        try:
            train(run)
            infer(run)
        except Exception as error:  # what a peer does not do is no reason to stop
            if name == "flashmix":
                raise
            found[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
            continue
        torch.cuda.synchronize()
        found[f"{name}_first_s"] = round(time.perf_counter() - start, 2)
        forward[name], both[name] = (lambda r=run: infer(r)), (lambda r=run: train(r))
    for kind, runs, size in (
        ("forward", forward, row.forward_bytes),
        ("both", both, row.forward_bytes + row.backward_bytes),
    ):
        for name, milliseconds in cuda_medians(runs, repeats).items():
            found[f"{name}_{kind}_ms"] = round(milliseconds, 4)
            found[f"{name}_{kind}_of_copy"] = round(size / rate / milliseconds * 1e3, 3)
        for name, milliseconds in cuda_medians(runs, repeats, ahead=False).items():
            found[f"{name}_{kind}_called_ms"] = round(milliseconds, 4)
    return found


def copy_rate() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / cuda_medians({"copy": lambda: target.copy_(source)})["copy"] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", default="", help="of fla, compile; separated by commas")
    parser.add_argument("--only", default="", help="groups of rows: " + ", ".join(ROWS))
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--name", default="rowwise_" + torch.cuda.get_device_name().split()[-1].lower())
    options = parser.parse_args()
    left_out = options.without.split(",")
    rate = copy_rate()
    print(f"copy: {rate / 1e12:.2f} TB/s")
    found = [{"op": "copy", "TB_s": round(rate / 1e12, 3), "gpu": torch.cuda.get_device_name()}]
    for group in options.only.split(",") if options.only else ROWS:
        for row in ROWS[group]("fla" not in left_out):
            calls = {name: call for name, call in row.calls.items() if name not in left_out}
            result = measure(
                Row(row.op, row.shape, row.inputs, row.forward_bytes, row.backward_bytes, calls), rate, options.repeats
            )
            found.append(result)
            print(line(result, calls), flush=True)
            path = write_results(options.name, found)  # after each row, should it be stopped
    print(path)


def line(result: dict[str, Any], names: dict[str, Call]) -> str:
    parts = [f"{result['op']:18} {result['shape']:14}"]
    for name in names:
        if f"{name}_error" in result:
            parts.append(f"{name}: {result[f'{name}_error']}")
            continue
        forward, both = result[f"{name}_forward_ms"], result[f"{name}_both_ms"]
        shares = f"{result[f'{name}_forward_of_copy']:.0%} / {result[f'{name}_both_of_copy']:.0%}"
        called = f"{result[f'{name}_forward_called_ms']:.3f} / {result[f'{name}_both_called_ms']:.3f}"
        parts.append(f"{name} {forward:.3f} / {both:.3f} ({shares}; called {called}; {result[f'{name}_first_s']} s)")
    return " | ".join(parts)


if __name__ == "__main__":
    main()
