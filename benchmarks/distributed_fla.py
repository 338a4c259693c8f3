"""Recurrences over several GPUs beside flash-linear-attention's context parallelism, for `distributed.py`."""

from __future__ import annotations

from typing import Any

import torch
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
    for kind, heads in ROWS:
        bench.row(f"beside fla, {kind}, {heads} heads", lambda kind=kind, heads=heads: beside(bench, kind, heads))


def beside(bench: Any, kind: str, heads: int) -> dict[str, Any]:
    """Times of both on one row over the ranks, and how far their results lie apart, as a part of the largest entry."""
    from fla.ops.cp import build_cp_context

    T = bench.options.tokens
    whole = Packing.from_lengths([T], device=bench.device)
    shard = whole.shard(bench.group)
    ends = torch.tensor([0, T])
    context = build_cp_context(ends.to(bench.device), bench.group, cu_seqlens_cpu=ends)
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
