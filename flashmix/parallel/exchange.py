"""Exchanges between the ranks of a shard: rows of other ranks (`fetch`), what precedes a piece (`halo`), and blocks of states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op.call import LIBRARY
from flashmix.op.dtypes import state_dtype
from flashmix.parallel.shard import Link, RowSpan, Shard

Wants = list[list[RowSpan]]  # the rows that each rank wants, in the order in which it wants them


class Route(NamedTuple):
    """A rank's part of an exchange of rows."""

    sent: list[list[tuple[int, int]]]  # own rows `(start, stop)` that each rank receives, itself none
    received: list[int]  # rows from each rank
    found: list[
        tuple[bool, int, int]
    ]  # the wanted rows: whether they are own ones, `(start, stop)` there or among the received
    silent: bool  # nobody receives anything


class Moved(NamedTuple):
    """What `explain` says of an exchange: its kind, and the bytes that this rank receives from others."""

    kind: str
    forward: int
    backward: int

    def __str__(self) -> str:
        return f"{self.kind}, {readable(self.forward)} in, {readable(self.backward)} in the backward"


def readable(size: int) -> str:
    """Bytes in the largest unit that they fill."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], shard: Shard) -> Tensor:
    """`received[r]` rows of each rank r, from `sent[r]` rows to each: the one collective of the library, as one operator."""
    GROUPS[shard.group.group_name] = shard.group
    return torch.ops.flashmix.all_to_all(rows.contiguous(), list(sent), list(received), shard.group.group_name)


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    import torch.distributed as dist

    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows, received, sent, group=GROUPS[group])
    return found


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """The fake version: what the shapes of an exchange come to."""
    return rows.new_empty(sum(received), *rows.shape[1:])


GROUPS: WeakValueDictionary[str, Any] = WeakValueDictionary()  # process groups by their names, which shards keep
LIBRARY.define("all_to_all(Tensor rows, SymInt[] sent, SymInt[] received, str group) -> Tensor")
LIBRARY.impl("all_to_all", _exchange, "CompositeExplicitAutograd")
torch.library.register_fake("flashmix::all_to_all", _exchanged, lib=LIBRARY)


class Keep:
    """One of the two contexts of activation checkpointing: the forward keeps the states received, and what runs again takes them."""

    here = threading.local()  # of each thread, `current`

    def __init__(self, found: list[Tensor], again: bool) -> None:
        self.found, self.again = found, again
        self.place, self.before = 0, None

    def __enter__(self) -> None:
        self.place, self.before = 0, getattr(Keep.here, "current", None)
        Keep.here.current = self

    def __exit__(self, *error: object) -> None:
        Keep.here.current = self.before

    def take(self, ask: Callable[[], Tensor]) -> Tensor:
        """The next tensor received, which is asked for the first time alone."""
        if not self.again:
            self.found.append(ask())
        self.place += 1
        return self.found[self.place - 1]


def keep_states() -> tuple[Keep, Keep]:
    """The contexts of activation checkpointing that keeps the states received, which are small beside what they cost to ask for again.

    Rows of other ranks (keys and values) are asked for again.
    """
    found: list[Tensor] = []
    return Keep(found, False), Keep(found, True)


def blocks(
    shard: Shard, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[torch.Size]], like: Tensor
) -> list[list[Tensor]]:
    """The blocks of each rank, of the shapes `incoming`, from those that go out to each; all in the dtype of `like`."""
    flat = together([block.reshape(-1) for row in outgoing for block in row], like.new_empty(0))
    sent = [sum(block.numel() for block in row) for row in outgoing]
    sizes = [[shape.numel() for shape in row] for row in incoming]
    received, keep = [sum(row) for row in sizes], getattr(Keep.here, "current", None)
    found = (
        all_to_all(flat, sent, received, shard)
        if keep is None
        else keep.take(lambda: all_to_all(flat, sent, received, shard))
    )
    rest = iter(found.split([n for row in sizes for n in row]))
    return [[next(rest).view(shape) for shape in row] for row in incoming]


def fetch(shard: Shard, key: Hashable, wants: Callable[[], Wants], *rows: Tensor) -> tuple[Tensor, ...]:
    """Of each tensor `[rows, D]` the rows that this rank wants, its own and others', by one uneven all-to-all of exactly those.

    `wants()` is the same on every rank and is asked once under this `key`. Differentiable: rows that several ranks wanted receive the
    sum of their gradients in the order of ranks, in float32 or float64.
    """
    return passed(shard, key, wants, *rows)[len(rows) :]


def passed(shard: Shard, key: Hashable, wants: Callable[[], Wants], *rows: Tensor) -> tuple[Tensor, ...]:
    """The tensors themselves, for the op on what the rank has, and then what `fetch` gives.

    They are `[rows, D]` or `[1, rows, D]`. The gradients of both meet here: the few that come back from other ranks are added in the
    place of the op's.
    """
    route = shard.made(("route", key), lambda: route_of(shard, wants()))
    return Fetch.apply(shard, route, *rows)


def route_of(shard: Shard, wants: Wants) -> Route:
    """The part of this rank in an exchange; a row that a rank wants twice is sent once."""
    me, ranks = shard.rank, range(shard.ranks)
    sent = [[] if r == me else joined(s for s in wants[r] if s.owner == me) for r in ranks]
    places: list[list[tuple[int, int, int]]] = [
        [] for _ in ranks
    ]  # of each source: own `(start, stop)`, and where they arrive
    received, reached = [], 0
    for source in ranks:
        before = reached
        if source != me:
            for start, stop in joined(s for s in wants[me] if s.owner == source):
                places[source].append((start, stop, reached))
                reached += stop - start
        received.append(reached - before)
    found: list[tuple[bool, int, int]] = []
    for span in wants[me]:
        own, start = span.owner == me, span.first
        if not own:
            start = next(at + start - a for a, b, at in places[span.owner] if a <= start < b)
        if found and found[-1][0] == own and found[-1][2] == start:
            found[-1] = (own, found[-1][1], start + span.rows)
        else:
            found.append((own, start, start + span.rows))
    silent = all(span.owner == r for r in ranks for span in wants[r])
    return Route(sent, received, found, silent)


def joined(spans: Any) -> list[tuple[int, int]]:
    """The rows of these spans as sorted intervals `(start, stop)` that do not touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((s.first, s.first + s.rows) for s in spans if s.rows):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def together(parts: Sequence[Tensor], like: Tensor, dim: int = 0) -> Tensor:
    """The parts end to end; one alone is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim) if parts else like[:0]


def as_bytes(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors side by side as one message."""
    return together([part.contiguous().view(torch.uint8) for part in parts], parts[0], 1)


def from_bytes(message: Tensor, likes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """The tensors of a message, from their channels and dtypes."""
    widths = [channels * dtype.itemsize for channels, dtype in likes]
    parts = message.split(widths, 1)
    return [part.contiguous().view(dtype) for part, (_, dtype) in zip(parts, likes, strict=True)]


def owned(gradient: Tensor) -> Tensor:
    """A gradient that may be added to: of an op alone, and not a part of what entered its backward."""
    return gradient.clone(memory_format=torch.contiguous_format) if gradient._is_view() else gradient.contiguous()


class Fetch(torch.autograd.Function):
    """See `passed`."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, route: Route, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.route, ctx.shapes = shard, route, [x.shape for x in given]
        rows = [x.flatten(0, -2) for x in given]
        ctx.likes = [(x.shape[1], x.dtype) for x in rows]
        ctx.rows, ctx.device = rows[0].shape[0], rows[0].device
        ctx.set_materialize_grads(False)
        arrived = [x[:0] for x in rows]
        if not route.silent:
            sent = [sum(b - a for a, b in spans) for spans in route.sent]
            parts = [together([x[a:b] for spans in route.sent for a, b in spans], x) for x in rows]
            arrived = from_bytes(all_to_all(as_bytes(parts), sent, route.received, shard), ctx.likes)
        pairs = zip(rows, arrived, strict=True)
        found = [together([(x if own else y)[a:b] for own, a, b in route.found], x) for x, y in pairs]
        found = [
            y.clone() if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else y
            for x, y in zip(rows, found, strict=True)
        ]
        return *(x.view_as(x) for x in given), *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        route, shard, count = ctx.route, ctx.shard, len(ctx.likes)
        wide = [(channels, state_dtype(dtype)) for channels, dtype in ctx.likes]
        own = [
            torch.zeros(ctx.rows, D, dtype=dtype, device=ctx.device) if grad is None else owned(grad).flatten(0, -2)
            for (D, dtype), grad in zip(wide, grads, strict=False)
        ]
        others = [torch.zeros(sum(route.received), D, dtype=dtype, device=ctx.device) for D, dtype in wide]
        for mine, theirs, grad in zip(own, others, grads[count:], strict=True):
            reached = 0
            for is_own, a, b in route.found:
                if grad is not None:
                    (mine if is_own else theirs)[a:b] += grad[reached : reached + b - a]
                reached += b - a
        if not route.silent:
            returned = [sum(b - a for a, b in spans) for spans in route.sent]
            back = from_bytes(all_to_all(as_bytes(others), route.received, returned, shard), wide)
            for mine, grad in zip(own, back, strict=True):
                reached = 0
                for spans in route.sent:  # in the order of ranks
                    for a, b in spans:
                        mine[a:b] += grad[reached : reached + b - a]
                        reached += b - a
        made = zip(own, ctx.likes, ctx.shapes, strict=True)
        return None, None, *(x.to(dtype).view(shape) for x, (_, dtype), shape in made)


def halo(
    shard: Shard, inputs: Sequence[Tensor], count: int, initial_state: Tensor | None
) -> tuple[Tensor | None, list[Tensor]]:
    """`[pieces, count, D]`: what precedes each piece, the caller's `initial_state` where a sequence begins, other ranks' tokens elsewhere;
    and the inputs for the op on what the rank has.

    `inputs` are `[1, T, D_i]`, side by side in the state.
    """
    if count == 0 or not shard.chains:
        return initial_state, list(inputs)
    given, start = initial_state is not None, initial_state
    if start is None:
        first, *_ = inputs
        start = first.new_zeros(shard.count, count, sum(x.shape[2] for x in inputs))
    key, own = ("halo", count, given), tuple(inputs)

    def wants() -> Wants:
        return halo_wants(shard, count, given)

    if given and shard.made(("short", count), lambda: reaches_before(shard, count)):
        states = start.flatten(0, 1).split([x.shape[2] for x in inputs], 1)
        found = fetch(shard, key, wants, *(torch.cat([x[0], state]) for x, state in zip(inputs, states, strict=True)))
    else:
        both = passed(shard, key, wants, *inputs)
        own, found = both[: len(inputs)], both[len(inputs) :]
    index = shard.made(
        ("halo places", count, given), lambda: shard.tensor(halo_places(shard, count, given), torch.int64)
    )
    state = start.flatten(0, 1).index_copy(0, index, together(found, start, 1)).view(start.shape)
    return state, list(own)


def halo_moved(
    shard: Shard, inputs: Sequence[Tensor], count: int, initial_state: Tensor | None, narrow: bool = False
) -> Moved:
    """What `halo` moves, with a gradient; `narrow` if that goes back in the dtype of the inputs."""
    wants = halo_wants(shard, count, initial_state is not None) if count and shard.chains else []
    forward, backward = rows_moved(shard, wants)
    row, wide = (sum(x.shape[2] * of(x.dtype).itemsize for x in inputs) for of in (lambda dtype: dtype, state_dtype))
    return Moved(f"{count} rows before each piece", forward * row, backward * (row if narrow else wide))


def rows_moved(shard: Shard, wants: Wants) -> tuple[int, int]:
    """The rows that this rank receives from others, and of its own those that others receive."""
    if not wants:
        return 0, 0
    route = route_of(shard, wants)
    return sum(route.received), sum(b - a for spans in route.sent for a, b in spans)


def reaches_before(shard: Shard, count: int) -> bool:
    """Whether the tokens before a piece begin in the initial state of its sequence, so near to its beginning is a cut."""
    pieces = (p for own in shard.pieces for p in own if not p.begins)
    return any(p.start - shard.boundaries[p.sequence] < count for p in pieces)


def halo_wants(shard: Shard, count: int, given: bool) -> Wants:
    """The `count` rows before each piece that continues a sequence; initial states lie behind the tokens of their rank."""
    heads = {link: chain[0] for chain in shard.chains for link in chain}
    wants: Wants = []
    for rank, own in enumerate(shard.pieces):
        spans: list[RowSpan] = []
        for index, p in enumerate(own):
            if p.begins:
                continue
            begin = shard.boundaries[p.sequence]
            missing = count - (p.start - begin)
            if missing > 0 and given:
                head = heads[Link(rank, index)]
                row = shard.tokens_of(head.owner) + head.piece * count + (p.start - begin)
                spans.append(RowSpan(head.owner, row, missing))
            spans += shard.spans(max(begin, p.start - count), p.start)
        wants.append(spans)
    return wants


def halo_places(shard: Shard, count: int, given: bool) -> list[int]:
    """The rows of the flattened state `[pieces * count, D]` that are fetched."""
    places: list[int] = []
    for index, p in enumerate(shard.pieces[shard.rank]):
        if not p.begins:
            known = count if given else min(count, p.start - shard.boundaries[p.sequence])
            places += range((index + 1) * count - known, (index + 1) * count)
    return places
