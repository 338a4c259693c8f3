"""Softmax attention over a shard: the keys and values that its queries see come from the ranks that have them.

A piece's queries are its newest keys, so the local call is the op's own with `cu_seqlens_k` of the keys that each piece sees. It runs by
groups of heads: while one computes, the keys and values of the next arrive. Nothing of other ranks is kept; the backward asks again.
Where that moves less, each rank computes the whole row of its share of the heads instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op.call import Outputs
from flashmix.op.choose import choose
from flashmix.op.dtypes import state_dtype
from flashmix.op.packing import Packing
from flashmix.op.run import plainly
from flashmix.ops.attention import op
from flashmix.ops.attention.call import AttentionCall
from flashmix.parallel.exchange import Moved, Wants, fetch, joined
from flashmix.parallel.heads import KeyRows, RowPlan, Transfer, groups, plan_of, to_heads, to_tokens
from flashmix.parallel.shard import Shard, ShardPiece

FORWARD, BACKWARD = (
    1,
    2,
)  # other ranks' keys and values of a group take at most this part of the bytes of the queries: 1 / 1, 1 / 2
BY_HEAD = ("sink", "alibi_slopes", "log_decay")  # operands that have query heads on their last axis


def run(call: AttentionCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packings are a `Shard`."""
    shard = check(call)
    if not shard.chains:
        return op.ATTENTION(call.but(packing=shard.local, packing_k=shard.local), impl, asked)
    gradient = call.gradient
    if by_heads(call, shard, gradient):
        return whole_rows(call, shard, impl, asked)
    seen = call.left, call.right == 0
    chosen = choose(asked, op.ATTENTION.implementations, call, impl).name
    plan = plan_of(shard, ("keys", *seen), lambda: wants(shard, *seen))
    if call.log_decay is not None:  # of all heads: little beside the keys
        (decay,) = fetch(shard, ("keys", *seen), lambda: wants(shard, *seen), call.log_decay[0])
        call = call.but(log_decay=decay.unsqueeze(0))
    packing_k: Packing | None = shard.made(("packing of keys", *seen), lambda: packing_of_keys(shard, *seen))
    if shard.count == 1 and shard.total:  # its keys end with its queries, as a dense call's do
        packing_k = None
    local = call.but(packing=None if packing_k is None else shard.local, packing_k=packing_k)
    return Attended.apply(local, shard, plan, chosen, gradient, *local.tensors())


def check(call: AttentionCall) -> Shard:
    """The shard of a call. Raises ValueError for what has no exchange."""
    shard, causal = call.packing, call.right == 0
    if not isinstance(shard, Shard) or call.packing_k is not shard:
        other = isinstance(shard, Shard) and isinstance(call.packing_k, Shard) and call.packing_k.group != shard.group
        of = "a Shard of another group" if other else "another packing"
        raise ValueError(f"cu_seqlens_k must be the Shard of cu_seqlens, or None, got {of}")
    if not causal and (call.left is not None or call.right is not None):
        raise ValueError(f"window must come with causal=True over a Shard, got {(call.left, call.right)}")
    if not causal and call.alibi_slopes is not None:
        raise ValueError("alibi_slopes must come with causal=True over a Shard, got causal=False")
    if call.dropout_p > 0:
        raise ValueError(f"dropout_p must be 0 over a Shard (what is dropped would depend on it), got {call.dropout_p}")
    return shard


def exchange(call: AttentionCall) -> Moved:
    """What the ranks exchange."""
    shard = check(call)
    if not shard.chains:
        return Moved("nothing, as no sequence is cut", 0, 0)
    if by_heads(call, shard, True):
        return Moved(f"all tokens of {call.heads_q // shard.ranks} heads", *bytes_by_heads(call, shard, shard.rank))
    count = len(groups_of(call, shard, FORWARD))
    kind = f"keys and values in {count} group{'s' * (count > 1)} of heads"
    return Moved(kind, *bytes_of_keys(call, shard, shard.rank))


class Group(NamedTuple):
    """Key heads that are computed together, and the query heads that read them."""

    keys: slice
    queries: slice


def groups_of(call: AttentionCall, shard: Shard, share: int) -> list[Group]:
    """Groups of heads, the same on every rank: keys and values of one take at most 1 / `share` of the bytes of the queries.

    Counted are those of other ranks, as a message, and all that the queries see beyond as many tokens as the rank has: a window is little.
    """
    most_rows = 0
    for rank, spans in enumerate(wants(shard, call.left, call.right == 0)):
        seen, own = sum(s.rows for s in spans), sum(s.rows for s in spans if s.owner == rank)
        most_rows = max(most_rows, seen - own + max(0, seen - shard.tokens_of(rank)))
    tokens = max(shard.tokens_of(rank) for rank in range(shard.ranks))
    size = most_rows * call.heads * (call.k.shape[3] + call.v.shape[3])
    most = tokens * call.heads_q * call.q.shape[3] // share
    n = call.group
    return [Group(s, slice(n * s.start, n * s.stop)) for s in groups(call.heads, size, most)]


def overlapped(rows: KeyRows, parts: Sequence[Group]) -> Iterator[tuple[Group, list[Tensor]]]:
    """Each group with its keys and values; those of the next are on their way meanwhile."""
    asked = [rows.ask(parts[0].keys)]
    for group, following in zip(parts, [*parts[1:], None], strict=True):
        own = [rows.own(group.keys)]  # while those of others are on their way
        if asked[0] is not None:
            asked[0].arrived()
        if following is not None:
            asked.append(rows.ask(following.keys))
        yield group, rows.wanted(asked.pop(0), own.pop(), group.keys)  # nothing of which stays here


def of_heads(x: Tensor, heads: slice, dim: int) -> Tensor:
    """Some heads of a tensor as one of its own; x itself if they are all."""
    size = heads.stop - heads.start
    return x if size == x.shape[dim] else x.narrow(dim, heads.start, size).clone(memory_format=torch.contiguous_format)


class Attended(torch.autograd.Function):
    """A call over a shard by groups of heads; `tensors` are those of the call, whose decay is that of the keys that are seen."""

    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, shard: Shard, plan: RowPlan, chosen: str, gradient: bool, *tensors: Tensor
    ) -> Outputs:
        rows, parts = KeyRows(shard, plan, call.k, call.v), groups_of(call, shard, FORWARD)
        by_rows = getattr(op.ATTENTION.module(chosen), "by_rows", None)  # where heads of what is kept do not lie apart
        made: list[Outputs] = []  # of each group lse and what is kept, with heads on the axis before the last
        o = call.results()[0] if len(parts) > 1 else None
        for group, (k, v) in overlapped(rows, parts):
            local = part_of(call, group, k, v)
            (its, *lse), kept = op.ATTENTION.forward(local, gradient, chosen)
            if kept and by_rows is not None:
                kept = by_rows(local, kept)
            del local
            if o is None:
                o = its
            else:
                o[:, :, group.queries].copy_(its)
            made.append((*lse, *kept))
        assert o is not None
        rest = [torch.cat(x, -2) if len(x) > 1 else x[0] for x in zip(*made, strict=True)]
        lse, statistics = rest[: call.return_lse], rest[call.return_lse :]
        outputs = o, *(x.view(x.shape[-2:]) for x in lse)  # [HQ, T], of a dense call [1, HQ, T]
        if gradient:
            ctx.names = [name for name in call.names if getattr(call, name) is not None]
            ctx.call, ctx.shard, ctx.plan, ctx.chosen = call.but(**dict.fromkeys(call.names)), shard, plan, chosen
            ctx.save_for_backward(*tensors, o, *statistics)
            ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call = ctx.call.but(**dict(zip(ctx.names, saved, strict=False)))
        with plainly(call.device):
            found = Attended.gradients(ctx, call, saved[len(ctx.names) :], d_o, d_lse)
        wanted = zip(ctx.names, ctx.needs_input_grad[5:], strict=True)
        return None, None, None, None, None, *(found[name] if needs else None for name, needs in wanted)

    @staticmethod
    def gradients(
        ctx: Any, call: AttentionCall, kept: Outputs, d_o: Tensor | None, d_lse: Tensor | None
    ) -> dict[str, Tensor]:
        """The gradients of the call's tensors; those of other ranks' keys go back while the next group computes."""
        rows, parts = KeyRows(ctx.shard, ctx.plan, call.k, call.v), groups_of(call, ctx.shard, BACKWARD)
        of_rows = getattr(op.ATTENTION.module(ctx.chosen), "of_rows", None)
        o, *statistics = kept
        if d_lse is not None and not call.packed:
            d_lse = d_lse.unsqueeze(0)
        flows = [(d_o, 2), (d_lse, 0 if call.packed else 1)][: 1 + call.return_lse]
        found: dict[str, Tensor] = {}
        on_the_way: tuple[Transfer | None, tuple[Tensor, Tensor], slice] | None = None
        for group, (k, v) in overlapped(rows, parts):
            heads = group.queries
            local, saved = part_of(call, group, k, v), tuple(of_heads(x, heads, 1) for x in statistics)
            if of_rows is not None:
                saved = of_rows(local, saved)
            saved = (of_heads(o, heads, 2), *saved)
            grads = [None if x is None else of_heads(x, heads, dim) for x, dim in flows]
            its = op.ATTENTION.backward(local, saved, grads, ctx.names, ctx.chosen)
            del k, v, local
            if not found and len(parts) > 1:  # not beside what the first group needs
                for name in ("k", "v", *(n for n in ("q", *BY_HEAD) if n in ctx.names)):
                    found[name] = torch.empty_like(getattr(call, name), memory_format=torch.contiguous_format)
            if on_the_way is not None:
                rows.add(*on_the_way, (found["k"], found["v"]))
            own = its.pop("k"), its.pop("v")
            on_the_way = rows.give_back(own, group.keys), own, group.keys
            if len(parts) == 1:
                found = its
                continue
            for name in ("q", *BY_HEAD):
                if name in its:
                    of = found[name][:, :, heads] if name in ("q", "log_decay") else found[name][heads]
                    of.copy_(its[name])
        assert on_the_way is not None
        if len(parts) == 1:
            found["k"], found["v"] = rows.alone(*on_the_way)
        else:
            rows.add(*on_the_way, (found["k"], found["v"]))
        return found


def part_of(call: AttentionCall, group: Group, k: Tensor, v: Tensor) -> AttentionCall:
    """The call of some heads, over the keys and values that its queries see."""
    features = {n: of_heads(x, group.queries, x.dim() - 1) for n in BY_HEAD if (x := getattr(call, n)) is not None}
    return call.but(q=call.q[:, :, group.queries], k=k, v=v, **features)


# ---- each rank the whole row of some heads ---------------------------------------------------------------------------------------


def by_heads(call: AttentionCall, shard: Shard, gradient: bool) -> bool:
    """Whether the busiest rank receives less as the whole row of its share of the heads."""
    if call.heads % shard.ranks:
        return False
    return shard.made(("attention by heads", *sizes(call), gradient), lambda: _is_less(call, shard, gradient))


def sizes(call: AttentionCall) -> tuple[Any, ...]:
    """All that the bytes of an exchange follow from, besides the shard."""
    decay = None if call.log_decay is None else call.log_decay.dtype
    return call.heads_q, call.heads, call.q.shape[3], call.v.shape[3], call.dtype, decay, call.left, call.right


def _is_less(call: AttentionCall, shard: Shard, gradient: bool) -> bool:
    def most(received: Any) -> int:
        return max(sum(received(call, shard, rank)[: 1 + gradient]) for rank in range(shard.ranks))

    return most(bytes_by_heads) < most(bytes_of_keys)


def bytes_by_heads(call: AttentionCall, shard: Shard, rank: int) -> tuple[int, int]:
    """The bytes that a rank receives forward and backward, where it computes the whole row of some heads."""
    own, b, P = shard.tokens_of(rank), call.dtype.itemsize, shard.ranks
    other, (K, V) = shard.row - own, (call.q.shape[3], call.v.shape[3])
    decay = 0 if call.log_decay is None else call.heads_q * call.log_decay.element_size()
    operands = b * (call.heads_q * K + call.heads * (K + V)) + decay  # of a token
    outputs = call.heads_q * (b * V + (call.return_lse * state_dtype(call.dtype).itemsize))
    return (other * operands + own * (P - 1) * outputs) // P, (other * outputs + own * (P - 1) * operands) // P


def bytes_of_keys(call: AttentionCall, shard: Shard, rank: int) -> tuple[int, int]:
    """The bytes that a rank receives forward and backward, where it fetches keys and values: in the backward again."""
    wanted = wants(shard, call.left, call.right == 0)
    b, wide = call.dtype.itemsize, state_dtype(call.dtype).itemsize
    key, decay, wide_decay = call.heads * (call.k.shape[3] + call.v.shape[3]), 0, 0
    if call.log_decay is not None:
        decay = call.heads_q * call.log_decay.element_size()
        wide_decay = call.heads_q * state_dtype(call.log_decay.dtype).itemsize
    received = asked_of(wanted, rank, rank)
    read = sum(asked_of(wanted, reader, rank, True) for reader in range(shard.ranks) if reader != rank)
    return received * (key * b + decay), received * key * b + read * (key * wide + wide_decay)


def asked_of(wanted: Wants, reader: int, rank: int, its: bool = False) -> int:
    """Rows that a reader receives: those that a rank has (`its`), or those that it has not."""
    owners = {span.owner for span in wanted[reader] if (span.owner == rank) == its}
    return sum(b - a for owner in owners for a, b in joined(s for s in wanted[reader] if s.owner == owner))


def whole_rows(call: AttentionCall, shard: Shard, impl: str, asked: str) -> Outputs:
    """The outputs, for which each rank computes the whole row of its share of the heads: bit for bit those of one rank."""
    packing = shard.made(
        "whole row", lambda: Packing(shard.tensor(shard.boundaries, shard.cu_seqlens.dtype), shard.row)
    )
    share = call.heads_q // shard.ranks
    heads = slice(shard.rank * share, (shard.rank + 1) * share)
    q, k, v = to_heads(shard, call.q, call.k, call.v)
    changes: dict[str, Any] = {"q": q, "k": k, "v": v, "packing": packing, "packing_k": packing}
    if call.log_decay is not None:
        (decay,) = to_heads(shard, call.log_decay.unsqueeze(3))
        changes["log_decay"] = decay.squeeze(3)
    for name in ("sink", "alibi_slopes"):
        feature = getattr(call, name)
        changes[name] = None if feature is None else feature[heads]
    o, *lse = op.ATTENTION(call.but(**changes), impl, asked)
    (o,) = to_tokens(shard, o)
    return (o, *(to_tokens(shard, x.mT[None, :, :, None])[0][0, :, :, 0].mT for x in lse))


# ---- which keys ------------------------------------------------------------------------------------------------------------------


def visible(shard: Shard, piece: ShardPiece, left: int | None, causal: bool) -> tuple[int, int]:
    """The tokens of the whole row that the queries of a piece see, `start` to `stop`."""
    begin, end = shard.boundaries[piece.sequence : piece.sequence + 2]
    if not causal:
        return begin, end if piece.start < piece.stop else begin
    return begin if left is None else max(begin, piece.start - left), piece.stop


def wants(shard: Shard, left: int | None, causal: bool) -> Wants:
    """The keys of every rank's pieces."""
    return shard.made(
        ("wanted keys", left, causal),
        lambda: [[s for p in own for s in shard.spans(*visible(shard, p, left, causal))] for own in shard.pieces],
    )


def packing_of_keys(shard: Shard, left: int | None, causal: bool) -> Packing:
    """Where the keys of each of this rank's pieces start and end."""
    spans = (visible(shard, p, left, causal) for p in shard.pieces[shard.rank])
    ends = [0, *accumulate(stop - start for start, stop in spans)]
    return Packing(shard.tensor(ends, shard.cu_seqlens.dtype), ends[-1])
