"""Recurrences over several GPUs beside flash-linear-attention's context parallelism, for `distributed.py`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import Operands, chosen, operands_of, outputs, taken, with_gradients

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
    for kind, heads in chosen(ROWS, bench.options):
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
    with torch.no_grad():
        ours, theirs = outputs(kind, own, shard), peer(kind, own, context)
        found: dict[str, Any] = {
            "apart forward": bench.slowest(float((ours - theirs).abs().max() / theirs.abs().max()))
        }
        found["forward"] = bench.milliseconds(lambda: outputs(kind, own, shard)).median
        found["fla forward"] = bench.milliseconds(lambda: peer(kind, own, context)).median
    found["both"] = bench.milliseconds(lambda: with_gradients(kind, own, shard, flow), repeats=5).median
    try:
        theirs = peer_with_gradients(kind, own, context, flow)
    except RuntimeError as error:  # raised alike on all ranks, as with a Triton that it does not trust
        return found | {"fla refuses both": str(error)[:200], **ratios(found, "forward")}
    pairs = zip(with_gradients(kind, own, shard, flow), theirs, strict=True)
    found["apart"] = bench.slowest(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    found["fla both"] = bench.milliseconds(lambda: peer_with_gradients(kind, own, context, flow), repeats=5).median
    return found | ratios(found, "forward", "both")


def ratios(found: dict[str, Any], *keys: str) -> dict[str, float]:
    return {f"fla / flashmix {key}": round(found[f"fla {key}"] / found[key], 2) for key in keys}


def fill_cache(kind: str, heads: int, part: int, parts: int) -> None:
    """Compiles one of `parts` shares of the kernels among which flash-linear-attention chooses by trying, as each of two ranks."""
    from triton.runtime.autotuner import Autotuner

    tuner: Any = Autotuner
    met: list[Any] = []

    def compile_share(self: Any, *args: Any, **options: Any) -> None:
        """In place of a launch."""
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(options):
            met.append(config)
            if len(met) % parts == part:
                self.fn.run(*args, **{**options, **config.all_kwargs(), "warmup": True})
        self.nargs = None

    tuner.run = compile_share
    dist.get_world_size = lambda group=None: 2
    dist.all_gather_into_tensor = lambda output, own, **options: None
    T = 65536
    operands = operands_of(kind, T // 2, heads, 128, "cuda", torch.bfloat16)
    flow = torch.randn_like(operands["v"])
    for rank in range(2):
        dist.get_rank = lambda group=None, rank=rank: rank
        context = context_of(T, dist.group.WORLD, "cuda")
        with suppress(RuntimeError):  # a backward that it refuses
            peer_with_gradients(kind, operands, context, flow)


def context_of(tokens: int, group: Any, device: str) -> Any:
    from fla.ops.cp import build_cp_context

    ends = torch.tensor([0, tokens])
    return build_cp_context(ends.to(device), group, cu_seqlens_cpu=ends)
