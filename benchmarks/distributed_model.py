"""A hybrid decoder of about 1.3 billion parameters over several GPUs, for `distributed.py`: tokens a second and GPU, memory."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flashmix import Packing
from flashmix.models import Decoder, DecoderConfig, LayerConfig
from flashmix.train.ranks import shard_parameters

STEPS = 4  # the first two are not timed


def decoder(bench: Any, window: int | None) -> Decoder:
    """Three layers of gated delta rule to one of attention."""
    width, depth, heads, vocabulary = (2048, 24, 16, 32768) if bench.cuda else (32, 4, 2, 64)
    attention = {"heads": heads, **({} if window is None else {"window": window})}
    recurrent = LayerConfig("gated_deltanet", {"heads": heads})
    layers = [LayerConfig("attention", attention) if i % 4 == 3 else recurrent for i in range(depth)]
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=vocabulary, width=width, layers=layers)
    return Decoder(config, checkpoint_activations=True, device=bench.device)


def meshes(bench: Any, way: str) -> tuple[DeviceMesh, Any, int]:
    """The mesh of the parameters, the group of a sequence (or None), and how many ranks share the tokens of a step."""
    kind = "cuda" if bench.cuda else "cpu"
    if way == "one":
        groups = [dist.new_group([rank]) for rank in range(bench.ranks)]
        return DeviceMesh.from_group(groups[bench.rank], kind), None, 1
    mesh = init_device_mesh(kind, (bench.ranks,))
    return mesh, bench.group if way == "context" else None, bench.ranks


def trained(bench: Any, way: str, tokens: int, window: int | None, steps: int = STEPS) -> dict[str, Any]:
    """Steps of AdamW with `tokens` a GPU: on each GPU alone ("one"), as data parallel, or as one sequence ("context")."""
    mesh, context, ranks = meshes(bench, way)
    model = decoder(bench, window)
    size = sum(p.numel() for p in model.parameters())
    shard_parameters(model, mesh, bench.cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=bench.cuda)
    total = tokens * (ranks if context is not None else 1)
    packing: Any = None
    generator = torch.Generator(bench.device).manual_seed(bench.rank if way == "data" else 0)
    ids, targets = (
        torch.randint(64, (1, total), generator=generator, device=bench.device).clamp(0, 63) for _ in range(2)
    )
    if context is not None:
        order = "contiguous" if window else "zigzag"
        packing = Packing.from_lengths([total], device=bench.device).shard(context, order=order)
        ids, targets = packing.take(ids), packing.take(targets)
    spent, losses = [], []
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        dist.all_reduce(bench.token)
        finish(bench)
        start = time.perf_counter()
        loss = model(ids, cu_seqlens=packing, targets=targets, reduction="sum") / (tokens * ranks)
        (loss * ranks).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        finish(bench)
        spent.append(time.perf_counter() - start)
        losses.append(loss.detach())
        bench.deadline = time.monotonic() + bench.options.patience
    shown = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(shown)
    seconds = bench.slowest(min(spent[min(2, len(spent) - 1) :]))
    memory = torch.cuda.max_memory_allocated() / 2**30 if bench.cuda else 0.0
    return {
        "parameters": size,
        "seconds a step": round(seconds, 4),
        "tokens/s/GPU": round(tokens / seconds),
        "GiB": round(bench.slowest(memory), 2),
        "losses": [round(float(x), 5) for x in shown],
    }


def finish(bench: Any) -> None:
    if bench.cuda:
        torch.cuda.synchronize()


def model(bench: Any) -> None:
    """One GPU, data parallel, context parallel; windowed attention, then full attention in data and context parallel."""
    tokens = 65536 if bench.cuda else 128
    for way in ("one", "data", "context"):
        bench.row(f"model {way}, window", lambda way=way: trained(bench, way, tokens, 4096 if bench.cuda else 16))
    for way in ("one", "context"):
        bench.row(f"model {way}, full attention", lambda way=way: trained(bench, way, tokens // 2, None, 3))


def million(bench: Any) -> None:
    """One sequence of a million tokens on all GPUs: two steps."""
    tokens = 1_000_000 // bench.ranks if bench.cuda else 256
    bench.row("million tokens", lambda: trained(bench, "context", tokens, 4096 if bench.cuda else 16, 2))
