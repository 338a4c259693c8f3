"""The short convolution and the losses over a large vocabulary on a GPU, beside flash-linear-attention's where installed.

    python benchmarks/convolution_and_losses.py [--without fla,compile] [--only short_conv,loss]

Convolutions as in rowwise.py: milliseconds forward and forward + backward, and their share of the copy bandwidth. Losses:
milliseconds forward + backward, what they allocate at the peak (gradients included, hidden states and weights not), and the
matrix products alone: logits, and the gradients of hidden states and weights, without a loss between.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import definitions
import torch
from rowwise import Row, copy_rate, line, measure, normal, plain
from timing import cuda_medians, write_results
from torch import Tensor

import flashmix


def conv_formula(x: Tensor, weight: Tensor) -> Tensor:
    """The definition without its loop over tokens."""
    width, tokens = weight.shape[1], x.shape[1]
    past = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
    return definitions.silu(sum(past[:, i : i + tokens] * weight[:, i] for i in range(width)))


def conv_rows(fla: bool) -> list[Row]:
    return [
        conv_row(fla, 4, 8192, 4096),
        conv_row(fla, 64, 512, 2048),
        conv_row(fla, 1024, 32, 4096),
        conv_row(fla, 1, 32768, 4096, sequences=32),
    ]


def conv_row(fla: bool, batch: int, tokens: int, channels: int, sequences: int = 0) -> Row:
    """A convolution of width 4; with `sequences`, of so many packed ones of equal lengths."""
    x, weight = normal(batch, tokens, channels), normal(channels, 4)
    starts, packing = None, None
    if sequences:
        starts = torch.arange(0, tokens + 1, tokens // sequences, device="cuda")
        packing = flashmix.Packing(starts, tokens)
    calls: dict[str, Callable[..., Any]] = {"flashmix": lambda x, w: flashmix.short_conv(x, w, cu_seqlens=packing)[0]}
    if fla:
        from fla.modules.causal_conv1d import causal_conv1d

        calls["fla"] = lambda x, w: causal_conv1d(x, w, activation="silu", cu_seqlens=starts)[0]
    if not sequences:
        calls["compile"] = plain(conv_formula)
    shape = f"{batch}x{tokens}x{channels}" + (f" in {sequences}" if sequences else "")
    return Row("short_conv", shape, [x, weight], 2 * x.nbytes, 3 * x.nbytes, calls)


def loss_calls(tokens: int, vocabulary: int, fla: bool) -> dict[str, Callable[..., Tensor]]:
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    calls: dict[str, Callable[..., Tensor]] = {
        "flashmix": lambda h, w: flashmix.linear_cross_entropy(h, w, target),
        "flashmix, frozen head": lambda h, w: flashmix.linear_cross_entropy(h, w.detach(), target),
    }
    if fla:
        from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss

        calls["fla"] = lambda h, w: fused_linear_cross_entropy_loss(h, target, w)
    return calls


def matrix_products(hidden: Tensor, weight: Tensor, rows: int) -> Callable[[], None]:
    """What any method must multiply, a chunk of tokens at a time."""
    logits = hidden.new_empty(rows, weight.shape[0]).normal_() / 100
    d_hidden, d_weight = torch.empty_like(hidden[:rows]), torch.empty_like(weight)

    def run() -> None:
        with torch.no_grad():
            for start in range(0, hidden.shape[0], rows):
                part = hidden[start : start + rows]
                torch.mm(part, weight.T, out=logits)
                torch.mm(logits, weight, out=d_hidden)
                torch.mm(logits.T, part, out=d_weight)

    return run


def measure_loss(tokens: int, width: int, vocabulary: int, fla: bool, repeats: int) -> dict[str, Any]:
    hidden, weight = (normal(tokens, width) / width**0.5).requires_grad_(), normal(vocabulary, width).requires_grad_()
    found: dict[str, Any] = {"op": "linear_cross_entropy", "shape": f"{tokens}x{width}x{vocabulary}"}

    def train(call: Callable[..., Tensor]) -> None:
        hidden.grad = weight.grad = None
        call(hidden, weight).backward()

    runs: dict[str, Callable[[], Any]] = {}
    for name, call in loss_calls(tokens, vocabulary, fla).items():
        start = time.perf_counter()
        train(call)
        torch.cuda.synchronize()
        found[f"{name}_first_s"] = round(time.perf_counter() - start, 2)
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(call)
        found[f"{name}_peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        runs[name] = lambda call=call: train(call)
    runs["matrix products"] = matrix_products(hidden, weight, 2048)
    found |= {f"{name}_ms": round(value, 3) for name, value in cuda_medians(runs, repeats).items()}
    return found


def measure_cross_entropy(tokens: int, vocabulary: int, rate: float, repeats: int) -> dict[str, Any]:
    logits = normal(tokens, vocabulary)
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    found: dict[str, Any] = {"op": "cross_entropy", "shape": f"{tokens}x{vocabulary}"}
    leaf = logits.clone().requires_grad_()

    def both(overwrite: bool) -> None:
        leaf.grad = None
        loss = flashmix.cross_entropy(leaf, target, overwrite_logits=overwrite)
        torch.autograd.grad(loss, leaf)

    for name, overwrite in (("new gradient", False), ("overwriting", True)):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both(overwrite)
        found[f"{name}_peak_GiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    runs = {
        "forward": lambda: flashmix.cross_entropy(logits, target),
        "new gradient": lambda: both(False),
        "overwriting": lambda: both(True),
    }
    for (name, milliseconds), passes in zip(cuda_medians(runs, repeats).items(), (1, 3, 3), strict=True):
        found[f"{name}_ms"] = round(milliseconds, 3)
        found[f"{name}_of_copy"] = round(passes * logits.nbytes / rate / milliseconds * 1e3, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", default="", help="of fla, compile; separated by commas")
    parser.add_argument("--only", default="short_conv,loss")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--name", default="convolution_and_losses_" + torch.cuda.get_device_name().split()[-1].lower())
    options = parser.parse_args()
    left_out, only = options.without.split(","), options.only.split(",")
    fla, rate = "fla" not in left_out, copy_rate()
    print(f"copy: {rate / 1e12:.2f} TB/s")
    found: list[dict[str, Any]] = [{"op": "copy", "TB_s": round(rate / 1e12, 3), "gpu": torch.cuda.get_device_name()}]
    if "short_conv" in only:
        for row in conv_rows(fla):
            for name in left_out:
                row.calls.pop(name, None)
            found.append(measure(row, rate, options.repeats))
            print(line(found[-1], row.calls), flush=True)
            write_results(options.name, found)  # after each row, should it be stopped
    if "loss" in only:
        few = max(5, options.repeats // 3)
        for run in (
            lambda: measure_cross_entropy(16384, 128256, rate, few),
            lambda: measure_loss(16384, 2048, 128256, fla, few),
        ):
            found.append(run())
            print(found[-1], flush=True)
            write_results(options.name, found)
    print(write_results(options.name, found))


if __name__ == "__main__":
    main()
