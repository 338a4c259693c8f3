"""Calls over a shard, the layouts and packings they run with, and the processes of test_shard.py that run them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flashmix
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.parallel.shard import Range, ShardPiece, by_order, merged, pieces_of, placed

H, HV, K, V, D = 1, 2, 4, 3, 5
PACKINGS: dict[str, list[int]] = {
    "one": [61],
    "mixed": [0, 27, 0, 0, 3, 1, 2, 40, 0, 15, 0],
    "short": [1, 2, 3, 3, 2, 1, 2, 2, 3, 1, 1, 3, 2],
    "long": [19, 70],
}
LAYOUTS = ("contiguous", "zigzag", "uneven", "arbitrary", "idle")
RANKS = (2, 3, 4)


def layout(name: str, total: int, ranks: int) -> list[Range]:
    """The ranges of a layout; "idle" leaves a rank without tokens, "arbitrary" has empty ranges too."""
    generator = random.Random(f"{name} {total} {ranks}")
    if name in ("contiguous", "zigzag"):
        return by_order(name, total, ranks)
    owners = list(range(ranks))
    if name == "idle":
        owners.pop(generator.randrange(ranks))
    cuts = 3 * ranks if name == "arbitrary" else len(owners)
    ends = [0, *sorted(generator.choices(range(total + 1), k=cuts - 1)), total]
    if name == "arbitrary":
        owners = [generator.randrange(ranks) for _ in range(cuts)]
    found = [Range(owner, a, b) for owner, a, b in zip(owners, ends, ends[1:], strict=False)]
    if name == "arbitrary":
        generator.shuffle(found)
    return found


@dataclass
class Input:
    """A tensor of a call: "tokens" on axis 1, "states" of the sequences on axis 0, or "shared" by all ranks."""

    tensor: Tensor
    kind: str = "tokens"


Inputs = dict[str, Input]
Outputs = list[tuple[Tensor, str]]  # with their kinds


@dataclass
class Case:
    """A call under a name: its inputs for a row of some tokens and sequences, and what it computes of them over a packing."""

    name: str
    inputs: Callable[[int, int], Inputs]
    run: Callable[[dict[str, Any], Packing], Outputs]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def decay_of(kind: str, T: int) -> Inputs:
    shape = {"head": (HV,), "token": (1, T, HV), "channel": (1, T, HV, K), "value": (1, T, HV, V)}.get(kind)
    if shape is None:
        return {}
    g = -0.2 * normal(*shape).abs()
    if kind != "head":
        g[torch.rand(g.shape) < 0.02] = -torch.inf
    return {"value_log_decay" if kind == "value" else "log_decay": Input(g, "shared" if kind == "head" else "tokens")}


def recurrence(rule: str, kind: str, *, states: bool, read_before: bool = False, impl: str = "auto") -> Case:
    """A rule of the recurrence with a decay, with states in and out or without."""

    def inputs(T: int, N: int) -> Inputs:
        found = {"q": Input(normal(1, T, H, K)), "k": Input(flashmix.l2_norm(normal(1, T, H, K)))}
        found["v"] = Input(normal(1, T, HV, V))
        if rule in ("tied", "untied"):
            found["beta"] = Input(torch.rand(1, T, HV, dtype=torch.float64))
        if rule == "untied":
            found |= {"erase": Input(0.5 * found["k"].tensor.clone()), "write": Input(0.4 * normal(1, T, HV, K))}
        if rule == "dplr":
            found |= {"a": Input(-0.5 * found["k"].tensor.clone()), "b": Input(0.3 * normal(1, T, HV, K))}
        if states:
            found["initial_state"] = Input(normal(N, HV, K, V), "states")
        return found | decay_of(kind, T)

    op = {"linear": flashmix.linear_attention, "dplr": flashmix.dplr}.get(rule, flashmix.delta_rule)
    before = {"read_before": True} if read_before else {}

    def run(given: dict[str, Any], packing: Packing) -> Outputs:
        o, state = op(**given, **before, return_state=states, cu_seqlens=packing, impl=impl)
        return [(o, "tokens")] + ([] if state is None else [(state, "states")])

    return Case(f"{rule} {kind}{' read before' * read_before}{' states' * states}", inputs, run)


def recurrences() -> list[Case]:
    found = []
    for states in (True, False):
        for rule, kind in product(("linear", "tied", "untied", "dplr"), ("none", "head", "token", "channel")):
            found.append(recurrence(rule, kind, states=states))
        found.append(recurrence("linear", "value", states=states))
        for rule in ("linear", "tied"):
            found.append(recurrence(rule, "channel", states=states, read_before=True))
    return found


def convolution(width: int, *, states: bool, parts: bool) -> Case:
    names = "qkv" if parts else "x"

    def inputs(T: int, N: int) -> Inputs:
        found = {name: Input(normal(1, T, D + i)) for i, name in enumerate(names)}
        channels = [x.tensor.shape[2] for x in found.values()]
        for name, size in zip(names, channels, strict=True):
            found[f"{name}_weight" if parts else "weight"] = Input(normal(size, width), "shared")
        if states:
            found["initial_state"] = Input(normal(N, width - 1, sum(channels)), "states")
        return found

    def run(given: dict[str, Any], packing: Packing) -> Outputs:
        op = flashmix.short_conv_qkv if parts else flashmix.short_conv
        *ys, state = op(**given, return_state=states, cu_seqlens=packing)
        return [(y, "tokens") for y in ys] + ([] if state is None else [(state, "states")])

    return Case(f"short_conv{'_qkv' * parts} {width}{' states' * states}", inputs, run)


def shift(states: bool) -> Case:
    def inputs(T: int, N: int) -> Inputs:
        return {"x": Input(normal(1, T, D))} | ({"initial_state": Input(normal(N, 1, D), "states")} if states else {})

    def run(given: dict[str, Any], packing: Packing) -> Outputs:
        y, state = flashmix.token_shift(**given, return_state=states, cu_seqlens=packing)
        return [(y, "tokens")] + ([] if state is None else [(state, "states")])

    return Case(f"token_shift{' states' * states}", inputs, run)


def attention(name: str, extra: str = "", **options: Any) -> Case:
    def inputs(T: int, N: int) -> Inputs:
        found = {n: Input(normal(1, T, heads, K)) for n, heads in (("q", 2), ("k", 1), ("v", 1))}
        if extra == "log_decay":
            found[extra] = Input(-0.2 * normal(1, T, 2).abs())
        elif extra:
            found[extra] = Input(normal(2).abs(), "shared")
        return found

    def run(given: dict[str, Any], packing: Packing) -> Outputs:
        o, lse = flashmix.softmax_attention(**given, return_lse=True, cu_seqlens=packing, **options)
        assert lse is not None
        return [(o, "tokens"), (lse, "tokens")]

    return Case(f"attention {name}", inputs, run)


def scan(coupling: str | None = None) -> Case:
    def inputs(T: int, N: int) -> Inputs:
        found = {"x": Input(normal(1, T, 2, D)), "log_decay": Input(-0.2 * normal(1, T, 2).abs())}
        found["log_decay"].tensor[:, ::13] = -torch.inf
        return found | {"initial_state": Input(normal(N, 2, D), "states")}

    def run(given: dict[str, Any], packing: Packing) -> Outputs:
        h, state = flashmix.scan(**given, return_state=True, read_before=True, coupling=coupling, cu_seqlens=packing)
        assert state is not None
        return [(h, "tokens"), (state, "states")]

    return Case("scan" if coupling is None else f"scan {coupling}", inputs, run)


def selective_scan() -> Case:
    def inputs(T: int, N: int) -> Inputs:
        found = {name: Input(normal(1, T, size)) for name, size in (("u", D), ("dt", D), ("B", V), ("C", V))}
        found["dt"].tensor.abs_()
        return found | {"A": Input(-normal(D, V).abs(), "shared"), "initial_state": Input(normal(N, D, V), "states")}

    def run(given: dict[str, Any], packing: Packing) -> Outputs:
        y, state = flashmix.selective_scan(**given, return_state=True, cu_seqlens=packing)
        assert state is not None
        return [(y, "tokens"), (state, "states")]

    return Case("selective_scan", inputs, run)


def others() -> list[Case]:
    """The ops without a state matrix."""
    found = [convolution(W, states=s, parts=p) for W in (1, 4, 9) for s in (True, False) for p in (True, False)]
    found += [shift(True), shift(False), attention("full"), attention("full sink", "sink")]
    found += [attention("causal", causal=True), attention("window", causal=True, window=(7, 0), softcap=3.0)]
    found += [attention("forget gate", "log_decay", causal=True), attention("ALiBi", "alibi_slopes", causal=True)]
    return [*found, scan(), scan("logit"), selective_scan()]


CASES = [*recurrences(), *others()]
Job = tuple[int, int, str, str, torch.dtype]
JOBS: list[Job] = [
    (case, ranks, order, packing, torch.float64)
    for case, ranks, order, packing in product(range(len(CASES)), RANKS, LAYOUTS, PACKINGS)
]
# Narrower dtypes, on as many ranks as there are: every second case.
NARROW: list[Job] = [
    (case, max(RANKS), order, "mixed", dtype)
    for case in range(0, len(CASES), 2)
    for order, dtype in (("zigzag", torch.float32), ("contiguous", torch.bfloat16))
]
# Each case once; numbers of ranks, layouts, packings and narrow dtypes in turn.
SAMPLE: list[Job] = [
    (
        case,
        RANKS[(case + case // len(RANKS)) % len(RANKS)],
        LAYOUTS[(case + case // len(LAYOUTS)) % len(LAYOUTS)],
        list(PACKINGS)[(case // 2) % len(PACKINGS)],
        torch.float64,
    )
    for case in range(len(CASES))
]
SAMPLE += [job for place, job in enumerate(NARROW) if place % 4 in (0, 3)]
JOBS += NARROW


def evaluate(
    case: Case,
    packing: Any,
    seed: int,
    pieces: list[ShardPiece] | None,
    dtype: torch.dtype = torch.float64,
    exact: bool = False,
) -> dict[str, tuple[Tensor, str]]:
    """Outputs and gradients of a case by name, with their kinds: of the whole row, or of a shard, whose `pieces` are given.

    Inputs are rounded to `dtype`, states that are no tokens to float32, and with `exact` computed with in float64.
    """
    torch.manual_seed(seed)
    T, N = (packing.total, packing.count) if pieces is None else (packing.row, len(packing.boundaries) - 1)

    def local(x: Tensor, kind: str) -> Tensor:
        if pieces is None or kind == "shared":
            return x
        return packing.take(x) if kind == "tokens" else x[[p.sequence for p in pieces]]

    inputs = case.inputs(T, N)
    leaves = {}
    for name, x in inputs.items():
        own = dtype if x.kind != "states" or case.name.startswith(("short_conv", "token_shift")) else state_dtype(dtype)
        rounded = local(x.tensor, x.kind).to(own)
        leaves[name] = (rounded.double() if exact else rounded.clone()).requires_grad_()
    outputs = case.run(leaves, packing)
    loss = torch.zeros((), dtype=torch.float64)
    for place, (out, kind) in enumerate(outputs):
        torch.manual_seed(seed + 1 + place)
        shape = (out.shape[0], T, *out.shape[2:]) if kind == "tokens" else (N, *out.shape[1:])
        flow = local(normal(*shape), kind).to(dtype).to(out.dtype)
        if kind == "states" and pieces is not None:
            flow = flow * packing.ends.view(-1, *[1] * (out.dim() - 1))
        loss = loss + (out * flow).sum()
    loss.backward()
    found = {f"output {place}": (out.detach(), kind) for place, (out, kind) in enumerate(outputs)}
    for name, leaf in leaves.items():
        if leaf.grad is not None or not (name == "k" and "erase" in leaves):  # which reads its own two keys
            assert leaf.grad is not None, name
            found[f"gradient of {name}"] = (leaf.grad, inputs[name].kind)
    return found


def together(parts: list[dict[str, tuple[Tensor, str]]], lengths: list[int], ranges: list[Range]) -> dict[str, Tensor]:
    """The results of all ranks as those of the whole row."""
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    own = placed(merged(ranges), len(parts))
    pieces = pieces_of(boundaries, own, len(parts))
    found = {}
    for name, (_, kind) in parts[0].items():
        its = [part[name][0] for part in parts]
        if kind == "shared":
            found[name] = torch.stack(its).sum(0)
        elif kind == "tokens":
            rows = sorted(own, key=lambda r: r.start)
            found[name] = torch.cat([its[r.owner][:, r.first : r.first + r.stop - r.start] for r in rows], 1)
        else:
            edge = "ends" if name.startswith("output") else "begins"
            rows = {
                p.sequence: its[r][i] for r, some in enumerate(pieces) for i, p in enumerate(some) if getattr(p, edge)
            }
            found[name] = torch.stack([rows[n] for n in range(len(lengths))])
    return found


def work(rank: int, folder: str, jobs: list[Job], whole: bool) -> None:
    """One process: every job of a group that it is in, and the checks of shard_extras.py, its results into a file."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=max(RANKS))
    groups: dict[int, Any] = {ranks: dist.new_group(list(range(ranks))) for ranks in RANKS}
    found: dict[Any, Any] = {}
    for job in jobs:
        case, ranks, order, packing, dtype = job
        if rank < ranks:
            whole = Packing.from_lengths(PACKINGS[packing])
            options: Any = {"order": order}
            if order not in ("contiguous", "zigzag"):
                options = {"ranges": [tuple(r[:3]) for r in layout(order, whole.total, ranks)]}
            shard = whole.shard(groups[ranks], **options)
            found[job] = evaluate(CASES[case], shard, case, shard.pieces[rank], dtype)
    import shard_extras

    found["extras"] = shard_extras.run(rank, groups, whole)
    torch.save(found, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
