"""Recurrences over several GPUs beside flash-linear-attention's context parallelism, for `distributed.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import Operands, operands_of, outputs, taken, with_gradients

from flashmix import Packing

ROWS = (("gated delta rule", 16), ("KDA", 16), ("gated delta rule", 64), ("KDA", 64))


def peer(kind: str, operands: Operands, context: Any) -> torch.Tensor:
    """The output of flash-linear-attention's op on this rank's tokens."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    run = chunk_kda if kind == "KDA" else chunk_gated_delta_rule
    names = {"log_decay": "g"}
    return run(**{names.get(name, name): x for name, x in operands.items()}, cp_context=context)[0]


def peer_with_gradients(kind: str, operands: Operands, context: Any, flow: torch.Tensor) -> list[torch.Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in operands.items()}
    o = peer(kind, leaves, context)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), flow)]


def fla(bench: Any) -> None:
    """Its kernels are chosen by trying, 25 ms each."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda self: partial(do_bench, warmup=5, rep=25))
    for kind, heads in ROWS:
        bench.row(f"beside fla, {kind}, {heads} heads", lambda kind=kind, heads=heads: beside(bench, kind, heads))


def beside(bench: Any, kind: str, heads: int) -> dict[str, Any]:
    """Times of both on one row over the ranks, and how far their results lie apart, as a part of the largest entry."""
    T = bench.options.tokens
    whole = Packing.from_lengths([T], device=bench.device)
    shard = whole.shard(bench.group)
    context = context_of(T, bench.group, bench.device)
    own = {
        n: x.clone()
        for n, x in taken(kind, operands_of(kind, T, heads, 128, bench.device, torch.bfloat16), shard).items()
    }
    flow = torch.randn_like(own["v"])
    ours, theirs = with_gradients(kind, own, shard, flow), peer_with_gradients(kind, own, context, flow)
    pairs = zip(ours, theirs, strict=True)
    found: dict[str, Any] = {"apart": bench.slowest(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))}
    del ours, theirs
    with torch.no_grad():
        found["forward"] = bench.milliseconds(lambda: outputs(kind, own, shard))
        found["fla forward"] = bench.milliseconds(lambda: peer(kind, own, context))
    found["both"] = bench.milliseconds(lambda: with_gradients(kind, own, shard, flow), repeats=5)
    found["fla both"] = bench.milliseconds(lambda: peer_with_gradients(kind, own, context, flow), repeats=5)
    for key in ("forward", "both"):
        found[f"fla / flashmix {key}"] = round(found[f"fla {key}"] / found[key], 2)
    return found


def fill_cache(kind: str, part: int, parts: int) -> None:
    """Compiles one of `parts` shares of the kernels among which flash-linear-attention chooses by trying, as rank `part % 2` of two."""
    from triton.runtime.autotuner import Autotuner

    tuner: Any = Autotuner
    tried: list[Any] = []
    plain = tuner._bench

    def share(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        tried.append(config)
        if len(tried) % parts != part:
            return [float("inf")] * 3
        return plain(self, *args, config=config, **meta)

    def once(call: Any, quantiles: Any) -> list[float]:
        call()
        return [0.0] * 3

    tuner._bench, tuner.do_bench = share, property(lambda self: once)
    tuner.check_disk_cache = lambda self, key, configs, bench: bench() or False  # what is chosen here must not be kept

    def gathered(output: Any, own: Any, **options: Any) -> None:
        output.view(2, -1).copy_(own.reshape(1, -1).expand(2, -1))

    dist.get_world_size = lambda group=None: 2
    dist.get_rank = lambda group=None: part % 2
    dist.all_gather_into_tensor = gathered
    T, heads = 65536, 16
    context = context_of(T, dist.group.WORLD, "cuda")
    operands = operands_of(kind, T // 2, heads, 128, "cuda", torch.bfloat16)
    peer_with_gradients(kind, operands, context, torch.randn_like(operands["v"]))


def context_of(tokens: int, group: Any, device: str) -> Any:
    from fla.ops.cp import build_cp_context

    ends = torch.tensor([0, tokens])
    return build_cp_context(ends.to(device), group, cu_seqlens_cpu=ends)
