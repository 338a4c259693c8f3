"""Rows exchanged some heads at a time: keys and values while other heads compute, and all tokens of a rank's heads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op.dtypes import state_dtype
from flashmix.parallel.exchange import Route, Wants, route_of
from flashmix.parallel.shard import Range, Shard

OWN = -1  # in place of a rank: this rank's own rows, or the gradients of what it wanted


class Source(NamedTuple):
    """Rows from `row` on of a rank's message."""

    rank: int
    row: int


class Interval(NamedTuple):
    """Rows `start` to `stop`, and where each of them comes from: one source of rows, any number of summands of a gradient."""

    start: int
    stop: int
    sources: list[Source]


class RowPlan(NamedTuple):
    """What a rank does with the rows of an exchange, both ways."""

    route: Route
    wanted: list[Interval]  # of the rows that it wants
    gradients: list[Interval]  # of its own rows
    returned: list[list[Interval]]  # of the rows received from each rank


def plan_of(shard: Shard, key: Hashable, wants: Callable[[], Wants]) -> RowPlan:
    """The plan of an exchange in which each rank wants the rows `wants()`, made once under its `key`."""
    return shard.made(("plan", key), lambda: _plan(shard, route_of(shard, wants())))


def _plan(shard: Shard, route: Route) -> RowPlan:
    wanted = _wanted(route)
    summands: list[list[tuple[int, int, Source]]] = [
        [] for _ in range(shard.ranks + 1)
    ]  # of each rank's rows, the last: own
    for start, stop, (source,) in wanted:
        summands[source.rank].append((source.row, source.row + stop - start, Source(OWN, start)))
    for rank, spans in enumerate(route.sent):  # their gradients come back, added in the order of ranks
        row = 0
        for start, stop in spans:
            summands[OWN].append((start, stop, Source(rank, row)))
            row += stop - start
    returned = [intervals(n, its) for n, its in zip(route.received, summands, strict=False)]
    return RowPlan(route, wanted, intervals(shard.total, summands[OWN]), returned)


def _wanted(route: Route) -> list[Interval]:
    """The wanted rows by the rank that has them."""
    edges, at, found = [0, *accumulate(route.received)], 0, []
    for own, start, stop in route.found:
        parts = [(OWN, start, stop)]
        if not own:
            parts = [
                (r, max(start, a), min(stop, b)) for r, (a, b) in enumerate(pairwise(edges)) if a < stop and start < b
            ]
        for rank, first, end in parts:
            found.append(Interval(at, at + end - first, [Source(rank, first - (0 if own else edges[rank]))]))
            at += end - first
    return found


def intervals(rows: int, summands: Sequence[tuple[int, int, Source]]) -> list[Interval]:
    """Rows 0 to `rows`, cut wherever one of the summands `(start, stop, source of the first)` begins or ends."""
    cuts = sorted({0, rows, *(n for start, stop, _ in summands for n in (start, stop))})
    return [
        Interval(a, b, [Source(rank, row + a - start) for start, stop, (rank, row) in summands if start <= a < stop])
        for a, b in pairwise(cuts)
    ]


@dataclass
class Transfer:
    """An all-to-all that may still be under way, which `arrived` waits for; until then it keeps the memory of both sides."""

    found: Tensor
    sent: Tensor
    end: torch.cuda.Event | None

    def arrived(self) -> Tensor:
        if self.end is not None:
            torch.cuda.current_stream(self.found.device).wait_event(self.end)
            self.end = None
        return self.found

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is launched within it follows the exchange on its stream, and `arrived` waits for that too."""
        if self.end is None:
            yield
            return
        beside = lane(self.found.device)
        with torch.cuda.stream(beside):
            try:
                yield
            finally:
                self.end = beside.record_event()

    def __del__(self) -> None:
        self.arrived()  # where an error came between


LANES: dict[torch.device, torch.cuda.Stream] = {}


def lane(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which exchanges run beside the kernels of the current one."""
    if device not in LANES:
        LANES[device] = torch.cuda.Stream(device, priority=-1)
    return LANES[device]


def begun(rows: Tensor, sent: Sequence[int], received: Sequence[int], shard: Shard) -> Transfer:
    """The exchange of a flat tensor, whose entries go to the ranks in turn; on a GPU beside what is launched after it.

    What is launched after it starts behind it: a collective needs a multiprocessor of its own, and behind kernels whose programs fill the
    card it would wait for their end.
    """
    import torch.distributed as dist

    size = rows.element_size()
    found = rows.new_empty(sum(received))
    both = found.view(torch.uint8), rows.view(torch.uint8)
    counts = [n * size for n in received], [n * size for n in sent]
    if not rows.is_cuda:
        dist.all_to_all_single(*both, *counts, group=shard.group)
        return Transfer(found, rows, None)
    own, beside = torch.cuda.current_stream(rows.device), lane(rows.device)
    beside.wait_stream(own)
    start = beside.record_event()
    with torch.cuda.stream(beside):
        dist.all_to_all_single(*both, *counts, group=shard.group)
    own.wait_event(start)
    return Transfer(found, rows, beside.record_event())


def messages(flat: Tensor, rows: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
    """Of each rank the rows `[rows, heads, channels]` of each tensor, one after the other, as views of a flat tensor."""
    sizes = [n * heads * channels for n in rows for heads, channels in shapes]
    parts = iter(flat.split(sizes))
    return [[next(parts).view(n, heads, channels) for heads, channels in shapes] for n in rows]


class KeyRows:
    """Tensors `[1, T, H, D]` of one dtype over a shard, some of whose heads are exchanged at a time."""

    def __init__(self, shard: Shard, plan: RowPlan, *tensors: Tensor) -> None:
        self.shard, self.plan, self.tensors = shard, plan, tensors
        self.like, *_ = tensors
        self.sent = [sum(b - a for a, b in spans) for spans in plan.route.sent]
        self.rows = max([0, *(i.stop for i in plan.wanted)])

    def shapes(self, heads: slice) -> list[tuple[int, int]]:
        return [(heads.stop - heads.start, x.shape[3]) for x in self.tensors]

    def ask(self, heads: slice) -> Transfer | None:
        """Sends other ranks the rows that they want of some heads, and receives theirs; None where nobody wants any."""
        if self.plan.route.silent:
            return None
        shapes = self.shapes(heads)
        width = sum(h * channels for h, channels in shapes)
        parts = [
            x[0, start:stop, heads] for spans in self.plan.route.sent for x in self.tensors for start, stop in spans
        ]
        if len(parts) == 1 and parts[0].is_contiguous():  # not copied
            flat = parts[0].view(-1)
        else:
            flat = self.like.new_empty(sum(self.sent) * width)
            for place, part in zip(flat.split([part.numel() for part in parts]), parts, strict=True):
                place.view(part.shape).copy_(part)
        return begun(flat, [n * width for n in self.sent], [n * width for n in self.plan.route.received], self.shard)

    def own(self, heads: slice) -> list[Tensor]:
        """Memory for the rows of some heads that this rank wants, `[1, rows, h, D]`, with its own; none where all are one rank's."""
        if len(self.plan.wanted) == 1:
            return []
        results = [x.new_empty(1, self.rows, heads.stop - heads.start, x.shape[3]) for x in self.tensors]
        for x, result in zip(self.tensors, results, strict=True):
            for start, stop, (source,) in self.plan.wanted:
                if source.rank == OWN:
                    result[0, start:stop].copy_(x[0, source.row : source.row + stop - start, heads])
        return results

    def wanted(self, asked: Transfer | None, own: list[Tensor], heads: slice) -> list[Tensor]:
        """The rows of some heads that this rank wants, `[1, rows, h, D]`: `own` with those of others, or views of one rank's."""
        wanted = self.plan.wanted
        found = []
        if not self.plan.route.silent:
            assert asked is not None
            found = messages(asked.arrived(), self.plan.route.received, self.shapes(heads))
        if len(wanted) == 1:  # not copied
            ((_, n, (source,)),) = wanted
            its = [x[0, :, heads] for x in self.tensors] if source.rank == OWN else found[source.rank]
            return [part[None, source.row : source.row + n] for part in its]
        for place, result in enumerate(own):
            for start, stop, (source,) in wanted:
                if source.rank != OWN:
                    result[0, start:stop].copy_(found[source.rank][place][source.row : source.row + stop - start])
        return own

    def give_back(self, grads: Sequence[Tensor], heads: slice, narrow: bool = False) -> Transfer | None:
        """Sends the gradients of other ranks' rows back, and receives those of this rank's: in float32 or float64, but `narrow`, where no
        rank wants a row twice, in their own dtype.
        """
        route = self.plan.route
        if route.silent:
            return None
        shapes, dtype = self.shapes(heads), grads[0].dtype
        width = sum(h * channels for h, channels in shapes)
        parts = [(grad[0], i) for its in self.plan.returned for grad in grads for i in its]
        if narrow and len(parts) == 1 and parts[0][0].is_contiguous():  # not copied
            ((grad, (start, stop, ((_, row),))),) = parts
            flat = grad[row : row + stop - start].view(-1)
        else:
            size = sum(route.received) * width
            flat = torch.empty(size, dtype=dtype if narrow else state_dtype(dtype), device=grads[0].device)
            for its, message in zip(self.plan.returned, messages(flat, route.received, shapes), strict=True):
                for part, grad in zip(message, grads, strict=True):
                    summed(part, its, grad[0])
        return begun(flat, [n * width for n in route.received], [n * width for n in self.sent], self.shard)

    def add(self, given: Transfer | None, grads: Sequence[Tensor], heads: slice, results: Sequence[Tensor]) -> None:
        """Writes the gradients of this rank's rows into some heads of the results `[1, T, H, D]`."""
        found: list[list[Tensor]] = []
        if given is not None:
            found = messages(given.arrived(), self.sent, self.shapes(heads))
        for place, (result, grad) in enumerate(zip(results, grads, strict=True)):
            summed(result[0, :, heads], self.plan.gradients, grad[0], [message[place] for message in found])

    def alone(self, given: Transfer | None, grads: Sequence[Tensor], heads: slice) -> list[Tensor]:
        """The gradients of this rank's rows `[1, T, h, D]`: parts of `grads` where its rows lie one after the other there."""
        its, total = self.plan.gradients, self.shard.total
        places = {row - i.start for i in its for rank, row in i.sources if rank == OWN}
        if len(places) != 1 or any(all(rank != OWN for rank, _ in i.sources) for i in its):
            results = [grad.new_empty(1, total, *grad.shape[2:]) for grad in grads]
            self.add(given, grads, heads, results)
            return results
        (first,) = places
        results = [grad[:, first : first + total] for grad in grads]
        found = [] if given is None else messages(given.arrived(), self.sent, self.shapes(heads))
        for place, (result, grad) in enumerate(zip(results, grads, strict=True)):
            summed(result[0], [i for i in its if len(i.sources) > 1], grad[0], [message[place] for message in found])
        return results

    def add_to(self, given: Transfer | None, grads: Sequence[Tensor], heads: slice, results: Sequence[Tensor]) -> None:
        """Adds the gradients of this rank's rows to some heads of the results, in the order of their sources."""
        found = [] if given is None else messages(given.arrived(), self.sent, self.shapes(heads))
        for place, (result, grad) in enumerate(zip(results, grads, strict=True)):
            for start, stop, sources in self.plan.gradients:
                for rank, row in sources:
                    part = grad[0] if rank == OWN else found[rank][place]
                    result[0, start:stop, heads] += part[row : row + stop - start]


def summed(result: Tensor, its: Sequence[Interval], own: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Writes the sums of the intervals, in the order of their sources, in float32 or float64 and rounded once."""
    for start, stop, sources in its:
        parts = [(own if rank == OWN else others[rank])[row : row + stop - start] for rank, row in sources]
        if len(parts) < 2:
            result[start:stop].copy_(parts[0]) if parts else result[start:stop].zero_()
            continue
        first, *rest = parts
        total = first.to(state_dtype(first.dtype), copy=True)
        for part in rest:
            total += part
        result[start:stop].copy_(total)


def groups(heads: int, size: int, most: int) -> list[slice]:
    """The heads in equal groups, as few as keep `size` bytes of all of them below `most` bytes a group, or each alone."""
    count = next(n for n in range(1, heads + 1) if heads % n == 0 and (size <= most * n or n == heads))
    return [slice(i, i + heads // count) for i in range(0, heads, heads // count)]


# ---- all tokens of some heads ----------------------------------------------------------------------------------------------------


def to_heads(shard: Shard, *tensors: Tensor) -> list[Tensor]:
    """Of tensors `[1, T, H, D]` of one dtype the whole row of this rank's share of the heads, `[1, row, H / ranks, D]`. Differentiable."""
    return list(Turned.apply(shard, True, *tensors))


def to_tokens(shard: Shard, *tensors: Tensor) -> list[Tensor]:
    """The inverse of `to_heads`. Differentiable."""
    return list(Turned.apply(shard, False, *tensors))


class Turned(torch.autograd.Function):
    """`to_heads` and `to_tokens`, each of which is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.heads = shard, heads
        return tuple((_to_heads if heads else _to_tokens)(shard, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_to_tokens if ctx.heads else _to_heads)(ctx.shard, grads)


def _ranges(shard: Shard) -> list[list[Range]]:
    """The ranges of each rank in the order of its rows."""
    by_owner = [[r for r in shard.ranges if r.owner == rank] for rank in range(shard.ranks)]
    return [sorted(its, key=lambda r: r.first) for its in by_owner]


def _to_heads(shard: Shard, tensors: Sequence[Tensor]) -> list[Tensor]:
    ranks, tokens = range(shard.ranks), [shard.tokens_of(rank) for rank in range(shard.ranks)]
    shapes = [(x.shape[2] // shard.ranks, x.shape[3]) for x in tensors]
    width = sum(h * channels for h, channels in shapes)
    like, *_ = tensors
    flat = like.new_empty(shard.ranks * shard.total * width)
    for rank, message in zip(ranks, messages(flat, [shard.total] * shard.ranks, shapes), strict=True):
        for x, part, (h, _) in zip(tensors, message, shapes, strict=True):
            part.copy_(x[0, :, rank * h : (rank + 1) * h])
    sent, received = [shard.total * width] * shard.ranks, [n * width for n in tokens]
    found = messages(begun(flat, sent, received, shard).arrived(), tokens, shapes)
    results = [x.new_empty(1, shard.row, *shape) for x, shape in zip(tensors, shapes, strict=True)]
    for its, message in zip(_ranges(shard), found, strict=True):
        for r in its:
            for result, part in zip(results, message, strict=True):
                result[0, r.start : r.stop].copy_(part[r.first : r.first + r.stop - r.start])
    return results


def _to_tokens(shard: Shard, tensors: Sequence[Tensor]) -> list[Tensor]:
    ranks, tokens = range(shard.ranks), [shard.tokens_of(rank) for rank in range(shard.ranks)]
    shapes = [(x.shape[2], x.shape[3]) for x in tensors]
    width = sum(h * channels for h, channels in shapes)
    like, *_ = tensors
    flat = like.new_empty(shard.row * width)
    for its, message in zip(_ranges(shard), messages(flat, tokens, shapes), strict=True):
        for r in its:
            for x, part in zip(tensors, message, strict=True):
                part[r.first : r.first + r.stop - r.start].copy_(x[0, r.start : r.stop])
    sent, received = [n * width for n in tokens], [shard.total * width] * shard.ranks
    found = messages(begun(flat, sent, received, shard).arrived(), [shard.total] * shard.ranks, shapes)
    results = [
        x.new_empty(1, shard.total, shard.ranks * h, channels) for x, (h, channels) in zip(tensors, shapes, strict=True)
    ]
    for rank, message in zip(ranks, found, strict=True):
        for result, part, (h, _) in zip(results, message, shapes, strict=True):
            result[0, :, rank * h : (rank + 1) * h].copy_(part)
    return results
