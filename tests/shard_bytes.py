"""Checks of the processes of test_shard.py: the bytes that ranks receive, and the join by heads.

Each check returns its complaints, a list of strings that the test expects to be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from shard_cases import PACKINGS, evaluate, layout, normal, recurrences
from torch import Tensor

import flashmix
from flashmix.op.packing import Packing
from flashmix.parallel import join
from flashmix.parallel.exchange import Moved
from flashmix.parallel.shard import Shard

CLOSE = 1e-11
CHECKS: dict[str, Callable[[Any], list[str]]] = {}
PARTS = {"of": 4}  # of long checks one part in so many runs by default, all with `-m whole`


def check(function: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    CHECKS[function.__name__] = function
    return function


def tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return [t for r in results or () for t in tensors(r)] if isinstance(results, tuple) else []


def far(name: str, have: Tensor, want: Tensor) -> list[str]:
    if have.shape != want.shape:
        return [f"{name}: shape {list(have.shape)}, wanted {list(want.shape)}"]
    apart = torch.where(have == want, 0.0, have - want)  # both may be -inf
    error = float(apart.detach().abs().max()) if have.numel() else 0.0
    return (
        []
        if error <= CLOSE * max(1.0, float(want.detach().nan_to_num(neginf=0.0).abs().max()) if want.numel() else 0.0)
        else [f"{name}: {error}"]
    )


class Received(list[int]):
    """The bytes of collectives, and the dtypes of what they moved: rows of tokens are bytes, states are not."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []


@contextmanager
def counted() -> Iterator[Received]:
    """The bytes that each collective receives from other ranks."""
    import torch.distributed as dist

    found = Received()
    plain = dist.all_to_all_single

    def counting(output: Tensor, *args: Any, group: Any, **options: Any) -> Any:
        rows = args[1][:]
        rows[dist.get_rank(group)] = 0
        width = output[:1].numel() if output.shape[0] else 0
        found.append(sum(rows) * width * output.element_size())
        found.dtypes.append(output.dtype)
        return plain(output, *args, group=group, **options)

    dist.all_to_all_single = counting
    try:
        yield found
    finally:
        dist.all_to_all_single = plain


@check
def bytes_are_those_of_the_formulas(group: Any) -> list[str]:
    """Bytes that each rank receives, forward and backward, of one sequence over four ranks. docs/distributed.md has the formulas."""
    T, P, HV, K, V, W, D, b = 64, 4, 2, 4, 3, 4, 5, 8
    whole, found = Packing.from_lengths([T]), []

    def leaves(shard: Shard, *shapes: tuple[int, ...]) -> list[Tensor]:
        return [shard.take(torch.rand(1, T, *s, dtype=torch.float64)).requires_grad_() for s in shapes]

    def measure(name: str, op: Any, operands: list[Tensor], forward: int, backward: int, **options: Any) -> None:
        with counted() as sent:
            out = op(*operands, **options)
        with counted() as returned:
            tensors(out)[0].sum().backward()
        if (sum(sent), sum(returned)) != (forward, backward):
            found.append(f"{name}: {sum(sent)}, {sum(returned)} in place of {forward}, {backward}")
        said = flashmix.explain(op, *operands, **options).exchange
        if said is None or not said.endswith(str(Moved("", forward, backward))):
            found.append(f"{name}: explain says {said}")

    for order in ("contiguous", "zigzag"):
        shard = whole.shard(group, order=order)
        r, zigzag = shard.rank, order == "zigzag"
        # the places of this rank's ranges in the chain of P, or 2 P - 1 as the two in the middle are one
        count = 2 * P - 1 if zigzag else P
        places = sorted({r, count - 1 - r}) if zigzag else [r]
        through = count - 2 - len([p for p in places if 0 < p < count - 1])
        N, D_states = places[-1] - (len(places) - 1), count - 1 - places[0] - (len(places) - 1)
        heads, tails = len([p for p in places if p > 0]), len([p for p in places if p < count - 1])
        q, k, v, beta, g = leaves(shard, (HV, K), (HV, K), (HV, V), (HV,), (HV, K))
        (x,) = leaves(shard, (D,))
        state, M, diagonal, row, key = (b * n for n in (HV * K * V, HV * K * K, HV * K, D, HV * (K + V)))
        weight = torch.rand(D, W, dtype=torch.float64)
        halo = heads * (W - 1) * row, tails * (W - 1) * row
        back = D_states * state
        packed: dict[str, Any] = {"cu_seqlens": shard}
        attend: dict[str, Any] = {**packed, "causal": True}
        measure(f"{order} delta", flashmix.delta_rule, [q, k, v, beta, -g], N * state + through * M, back, **packed)
        linear = N * state + through * diagonal
        measure(f"{order} linear", flashmix.linear_attention, [q, k, v, -g], linear, back, **packed)
        (decay,) = leaves(shard, (D,))
        scans = (N + through) * D * b, D_states * D * b
        measure(f"{order} scan", flashmix.scan, [x, -decay], *scans, **packed)
        rates, weights = -torch.rand(D, K, dtype=torch.float64), leaves(shard, (K,), (K,))
        scans = (N + through) * D * K * b, D_states * D * K * b
        measure(f"{order} selective scan", flashmix.selective_scan, [x, decay, rates, *weights], *scans, **packed)
        measure(f"{order} conv", flashmix.short_conv, [x, weight], *halo, **packed)
        narrow = x.detach().bfloat16().requires_grad_()
        quarter = [n // 4 for n in halo]  # gradients go back in the dtype of the inputs too
        measure(f"{order} conv, bfloat16", flashmix.short_conv, [narrow, weight.bfloat16()], *quarter, **packed)
        measure(f"{order} shift", flashmix.token_shift, [x], heads * row, tails * row, **packed)
        window = heads * 5 * key, (heads + tails) * 5 * key
        measure(f"{order} window", flashmix.softmax_attention, [q, k, v], *window, **attend, window=(5, 0))
        sizes = [T // (2 * P) * (2 if p == P - 1 else 1) for p in range(count)] if zigzag else [T // P] * P
        before = sum(size for p, size in enumerate(sizes) if p < places[-1] and p not in places)
        last = [count - 1 - o if zigzag else o for o in range(P) if o != r]  # of each other rank, its last place
        read = sum(sizes[p] for p in places for other in last if other > p)
        measure(f"{order} causal", flashmix.softmax_attention, [q, k, v], before * key, (before + read) * key, **attend)
    aligned = Packing.from_lengths([T // P] * P).shard(group)
    q, k, v, beta = leaves(aligned, (HV, K), (HV, K), (HV, V), (HV,))
    with counted() as sent:
        flashmix.delta_rule(q, k, v, beta, cu_seqlens=aligned)[0].sum().backward()
        flashmix.softmax_attention(q, k, v, causal=True, cu_seqlens=aligned)
    return found if not sent else [*found, f"sequences that are not cut send {sent}"]


@check
def bytes_and_bits_of_attention_by_heads(group: Any) -> list[str]:
    """Where that moves less each rank computes all tokens of some heads: the bits of one process, but for sums over ranks."""
    P, H, K, T, found = 4, 4, 5, 32, []
    whole = Packing.from_lengths([20, 12])
    shard = whole.shard(group, order="zigzag")
    torch.manual_seed(0)
    row = [normal(1, T, H, K) for _ in "qkv"]
    gate, sink, flow = -normal(1, T, H).abs(), normal(H), normal(1, T, H, K)

    def results(packing: Packing, take: Any) -> tuple[list[Tensor], list[int]]:
        leaves = [take(x).requires_grad_() for x in (*row, gate)] + [sink.clone().requires_grad_()]
        names = ("q", "k", "v", "log_decay", "sink")
        call: Any = dict(zip(names, leaves, strict=True))
        with counted() as sent:
            o, lse = flashmix.softmax_attention(**call, causal=True, cu_seqlens=packing, return_lse=True)
            assert lse is not None
            ((o * take(flow)).sum() + lse.sum()).backward()
        return [o, lse.mT[None], *(x.grad for x in leaves if x.grad is not None)], sent

    (*have, shared), sent = results(shard, shard.take)
    (*want, expected), _ = results(whole, lambda x: x.clone())
    for place, (a, b) in enumerate(zip(have, want, strict=True)):
        found += [] if torch.equal(a, shard.take(b)) else [f"result {place} has other bits"]
    found += far("sink", shard.sum(shared), expected)
    token = H * (4 * K + 2) * 8  # q, k, v and gate; o and lse
    if sum(sent) != 2 * token * (T - T // P) // P:
        found.append(f"bytes {sent}")
    return found


@check
def attention_in_groups_of_heads(group: Any) -> list[str]:
    """Several key heads, of which some are fetched at a time: the results of one process."""
    found, lengths = [], [17, 0, 2, 30]
    whole = Packing.from_lengths(lengths)
    torch.manual_seed(0)
    call: dict[str, Any] = {n: normal(1, 49, heads, 4) for n, heads in (("q", 8), ("k", 4), ("v", 4))}
    call |= {"sink": normal(8), "log_decay": -normal(1, 49, 8).abs(), "alibi_slopes": normal(8).abs()}
    flow, level = normal(1, 49, 8, 4), normal(8, 49)

    def results(packing: Packing, take: Any) -> list[Tensor]:
        leaves = {n: (x.clone() if x.dim() == 1 else take(x)).requires_grad_() for n, x in call.items()}
        o, lse = flashmix.softmax_attention(**leaves, causal=True, cu_seqlens=packing, return_lse=True)
        assert lse is not None
        ((o * take(flow)).sum() + (lse * take(level[None], 2)[0]).sum()).backward()
        return [o.detach(), *(x.grad for x in leaves.values() if x.grad is not None)]

    want = results(whole, lambda x, dim=1: x.clone())
    for order in ("contiguous", "zigzag"):
        shard = whole.shard(group, order=order)
        with counted() as sent:
            have = results(shard, shard.take)
        for place, (a, b) in enumerate(zip(have, want, strict=True)):
            a, b = (shard.sum(a), b) if b.dim() == 1 else (a, shard.take(b))
            found += far(f"{order} result {place}", a, b)
        if len(sent) < 8:  # of each group keys and values, and with the gradient both ways
            found.append(f"{order}: {len(sent)} exchanges")
    q, k, v = (shard.take(call[name]).requires_grad_() for name in "qkv")
    with counted() as sent:
        flashmix.softmax_attention(q, k, v, causal=True, window=(1, 0), cu_seqlens=shard)[0].sum().backward()
    if len(sent) != 3:  # what a short window takes of other ranks is one group
        found.append(f"window: {len(sent)} exchanges")
    return found


@contextmanager
def joined_by_heads() -> Iterator[None]:
    """The join by heads, whatever the number of ranks."""
    plain = join.by_heads
    join.by_heads = lambda shard, shapes, gradient: True
    try:
        yield
    finally:
        join.by_heads = plain


@check
def bytes_of_the_join_by_heads(group: Any) -> list[str]:
    """By heads a rank receives its heads of every map and the state that enters it, and the gradients likewise."""
    P, HV, K, V, b, T = 4, 4, 4, 3, 8, 32
    shard = Packing.from_lengths([T]).shard(group)
    q, v, beta = (normal(1, shard.total, *s).requires_grad_() for s in ((HV, K), (HV, V), (HV,)))
    state, M, r = HV * K * V * b, HV * K * K * b, shard.rank
    maps = sum(state + (M if other > 0 else 0) for other in range(P - 1) if other != r)
    gradients = sum(state for other in range(1, P) if other != r)
    elsewhere = state * (P - 1) // P
    with joined_by_heads():
        with counted() as sent:
            o = flashmix.delta_rule(q, q, v, beta, cu_seqlens=shard)[0]
        with counted() as returned:
            o.sum().backward()
    want = [maps // P, elsewhere if r > 0 else 0], [gradients // P, elsewhere if r < P - 1 else 0]
    return [] if (sent, returned) == want else [f"{sent}, {returned} in place of {want}"]


@check
def joins_are_equal(group: Any) -> list[str]:
    """The join by heads gives what the direct one gives, and no gradient reaches the states of pieces that do not begin.

    By default half of the cases, in one of the two layouts each.
    """
    found = []
    for place, (layout_name, packing) in enumerate((("arbitrary", "mixed"), ("zigzag", "one"))):
        whole = Packing.from_lengths(PACKINGS[packing])
        ranges = [tuple(r[:3]) for r in layout(layout_name, whole.total, 3)]
        shard = whole.shard(group, ranges=ranges)  # type: ignore[arg-type]
        for case in recurrences()[place % PARTS["of"] :: PARTS["of"]]:
            direct = evaluate(case, shard, 0, shard.pieces[shard.rank])
            with joined_by_heads():
                other = evaluate(case, shard, 0, shard.pieces[shard.rank])
            for name, (t, kind) in direct.items():
                found += far(f"{case.name} {name}", other[name][0], t)
                if kind == "states" and name.startswith("gradient") and t[~shard.begins].any():
                    found.append(f"{case.name}: {name} of pieces that do not begin")
    return found
