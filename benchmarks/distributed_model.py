"""Hybrid decoders over several GPUs, for `distributed.py`: tokens a second and GPU, memory, a million tokens, repeated bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashmix import Packing
from flashmix.models import Decoder, DecoderConfig, LayerConfig
from flashmix.modules.decay import ExactParameters
from flashmix.parallel.shard import Shard
from flashmix.train.ranks import order_of, shard_parameters

STEPS = 4  # the first two are not timed


@dataclass(frozen=True)
class Size:
    """A hybrid decoder: three layers of gated delta rule to one of attention with a window, or `full` ones (layers by index)."""

    width: int
    depth: int
    heads: int
    vocabulary: int
    window: int | None
    full: tuple[int, ...] = ()

    @property
    def config(self) -> DecoderConfig:
        recurrent, layers = LayerConfig("gated_deltanet", {"heads": self.heads}), []
        for i in range(self.depth):
            wide = self.window is None or i in self.full
            options = {"heads": self.heads, **({} if wide else {"window": self.window})}
            layers.append(LayerConfig("attention", options) if i % 4 == 3 else recurrent)
        return DecoderConfig(vocab_size=self.vocabulary, width=self.width, layers=layers)


TINY = Size(32, 4, 2, 64, 16)  # on a CPU
LARGE = Size(2048, 24, 16, 32768, 4096)  # 1.4 billion parameters
BITS = Size(512, 8, 4, 4096, 1024, full=(7,))


class Training:
    """Steps of AdamW on each GPU alone ("one"), as data parallel, or on one row over all ("context")."""

    def __init__(self, bench: Any, way: str, size: Size, recompute: bool = True) -> None:
        self.bench, self.way = bench, way
        kind = "cuda" if bench.cuda else "cpu"
        self.ranks = 1 if way == "one" else bench.ranks
        mesh = bench.alone if way == "one" else init_device_mesh(kind, (bench.ranks,))
        torch.manual_seed(0)
        self.model = Decoder(size.config, checkpoint_activations=recompute, device=bench.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.order = order_of(size.config)
        shard_parameters(self.model, mesh, bench.cuda)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=bench.cuda)

    def steps(
        self, ids: Tensor, targets: Tensor, packing: Packing | None, steps: int
    ) -> tuple[list[float], list[float]]:
        """Seconds and losses of some steps on a row; "context": the whole row, the same on all ranks."""
        bench, share = self.bench, targets.numel() * (self.ranks if self.way == "data" else 1)
        if self.way == "context":
            packing = (packing or Packing.from_lengths([ids.shape[1]], device=bench.device)).shard(
                bench.group, order=self.order
            )
            ids, targets = packing.take(ids), packing.take(targets)
        spent, losses = [], []
        for _ in range(steps):
            dist.all_reduce(bench.token)
            finish(bench)
            start = time.perf_counter()
            loss = self.model(ids, cu_seqlens=packing, targets=targets, reduction="sum") / share
            (loss * self.ranks).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            finish(bench)
            spent.append(time.perf_counter() - start)
            losses.append(loss.detach())
            bench.deadline = time.monotonic() + bench.options.patience
        shown = torch.stack(losses)
        if self.ranks > 1:
            dist.all_reduce(shown)
        return spent, shown.tolist()


def own_mesh(bench: Any) -> DeviceMesh:
    """The mesh of this rank alone."""
    groups = [dist.new_group([rank]) for rank in range(bench.ranks)]
    return DeviceMesh.from_group(groups[bench.rank], "cuda" if bench.cuda else "cpu")


def row_of(bench: Any, total: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a row."""
    generator = torch.Generator(bench.device).manual_seed(seed)
    both = [torch.randint(vocabulary, (1, total), generator=generator, device=bench.device) for _ in range(2)]
    return both[0], both[1]


def trained(bench: Any, way: str, tokens: int, size: Size, steps: int = STEPS) -> dict[str, Any]:
    """Steps with `tokens` a GPU: on each GPU alone ("one"), as data parallel, or as one sequence ("context")."""
    training = Training(bench, way, size)
    total = tokens * (bench.ranks if way == "context" else 1)
    ids, targets = row_of(bench, total, 64, bench.rank if way == "data" else 0)
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    spent, losses = training.steps(ids, targets, None, steps)
    seconds = bench.slowest(min(spent[min(2, steps - 1) :]))
    memory = torch.cuda.max_memory_allocated() / 2**30 if bench.cuda else 0.0
    lasting = torch.cuda.memory_allocated() / 2**30 if bench.cuda else 0.0  # parameters and moments
    return {
        "parameters": training.parameters,
        "tokens": total,
        "seconds a step": round(seconds, 4),
        "tokens/s/GPU": round(tokens / seconds),
        "GiB": round(bench.slowest(memory), 2),
        "GiB of a step": round(bench.slowest(memory - lasting), 2),
        "losses": [round(x, 5) for x in losses],
    }


def finish(bench: Any) -> None:
    if bench.cuda:
        torch.cuda.synchronize()


def model(bench: Any) -> None:
    """One GPU, data parallel, context parallel with as many tokens a GPU, and with one GPU's sequence: then memory of a step compares.

    With full attention the last alone: as many FLOPs as one GPU.
    """
    tokens = 65536 if bench.cuda else 128
    size = LARGE if bench.cuda else TINY
    full = Size(size.width, size.depth, size.heads, size.vocabulary, None)
    half = tokens // bench.ranks
    rows = [("one", tokens, size), ("data", tokens, size), ("context", tokens, size), ("context", half, size)]
    for way, each, its in (*rows, ("one", tokens, full), ("context", half, full)):
        name = f"model {way}, {'window' if its.window else 'full attention'}, {each} tokens a GPU"
        bench.row(name, lambda way=way, each=each, its=its: trained(bench, way, each, its, STEPS if its is size else 3))


def million(bench: Any) -> None:
    """One sequence of a million tokens on all GPUs: the second step is timed."""
    tokens = 1_000_000 // bench.ranks if bench.cuda else 256
    bench.row("million tokens", lambda: trained(bench, "context", tokens, LARGE if bench.cuda else TINY, 2))


def bits(bench: Any) -> None:
    bench.row("bits of 20 steps", lambda: repeated(bench))


def repeated(bench: Any, steps: int = 20) -> dict[str, Any]:
    """20 steps over the ranks, again, and without activation checkpointing; on one GPU, and there with the sequences in another order."""
    size, lengths = (BITS, [10000, 6000, 384]) if bench.cuda else (TINY, [90, 50, 20])
    ids, targets = row_of(bench, sum(lengths), size.vocabulary)
    packing = Packing.from_lengths(lengths, device=bench.device)
    turned = Packing.from_lengths(lengths[::-1], device=bench.device)
    flip = torch.cat(torch.arange(sum(lengths), device=bench.device).split(lengths)[::-1])

    def run(way: str, recompute: bool, again: bool = False) -> tuple[list[float], list[Tensor]]:
        training = Training(bench, way, size, recompute)
        row = (ids[:, flip], targets[:, flip], turned) if again else (ids, targets, packing)
        losses = training.steps(*row, steps)[1]
        weights: list[Any] = list(training.model.parameters())
        return losses, [p.to_local().detach().clone() for p in weights]

    first, second, kept = run("context", True), run("context", True), run("context", False)
    one, other = run("one", True)[0], run("one", True, again=True)[0]

    def same(a: Any, b: Any) -> bool:
        equal = a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
        return bench.slowest(float(not equal)) == 0

    def apart(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(a, b, strict=True))

    return {
        "same bits again": same(first, second),
        "same bits without activation checkpointing": same(first, kept),
        "largest difference of a loss to one GPU": apart(first[0], one),
        "of one GPU to itself, sequences in another order": apart(other, one),
        "losses": [round(x, 5) for x in (first[0][0], first[0][-1], one[-1])],
    }


def fill_cache(what: str, device: str, as_rank: Callable[[int], AbstractContextManager[Any]]) -> None:
    """The kernels of each of two ranks of `million` or `bits`; `as_rank(rank)` is a context in which this process is one of them."""
    cuda = device == "cuda"
    size = (LARGE if what == "million" else BITS) if cuda else TINY
    lengths = ([131072] if what == "million" else [10000, 6000, 384]) if cuda else [90, 50, 20]
    small = Size(
        size.width, min(size.depth, 8 if size.full else 4), size.heads, size.vocabulary, size.window, size.full
    )
    model = Decoder(small.config, checkpoint_activations=True, device=device)
    if cuda:
        model.bfloat16()
        for module in model.modules():
            if isinstance(module, ExactParameters):
                module.float()
    whole = Packing.from_lengths(lengths, device=device)
    ids = torch.zeros(1, sum(lengths), dtype=torch.int64, device=device)

    def run(packing: Packing) -> None:
        its = packing.take(ids) if isinstance(packing, Shard) else ids
        model(its, cu_seqlens=packing, targets=its, reduction="sum").backward()

    for rank in range(2):
        with as_rank(rank) as group:
            run(whole.shard(group, order=order_of(small.config)))
    if what == "bits":
        run(whole)
    elif cuda:
        half = ids[:, : sum(lengths) // 2]
        model(half, targets=half, reduction="sum").backward()
