"""Shards of a packed row: which tokens of which sequences a rank owns, known to every rank from the lengths alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashmix.op.checks import check_choice, check_tensor, contents_everywhere
from flashmix.op.packing import Packing, Table

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ORDERS = ("contiguous", "zigzag")


class Range(NamedTuple):
    """Tokens `start` to `stop` of the whole row, which `owner` has from its own row `first` on."""

    owner: int
    start: int
    stop: int
    first: int = 0


class ShardPiece(NamedTuple):
    """The tokens `start` to `stop` of the whole row that one range has of one sequence; `first` is the row of the first at its owner."""

    sequence: int
    start: int
    stop: int
    first: int
    begins: bool
    ends: bool


class Link(NamedTuple):
    """A piece of a sequence that is cut: the rank that owns it and its index there."""

    owner: int
    piece: int


class RowSpan(NamedTuple):
    """`rows` rows of a rank, from its row `first` on."""

    owner: int
    first: int
    rows: int


class Shard(Packing):
    """The tokens of a packed row that this rank owns, as a `Packing`: made by `Packing.shard`, passed to every op as `cu_seqlens`.

    Its sequences are the pieces of the row's sequences that lie in the rank's ranges: `cu_seqlens`, `lengths`, `count` and `total` count
    those, `positions` are places in the whole sequences. States are those of the pieces, `[count, ...]`: an initial state is read where
    `begins`, a final state is that of a whole sequence where `ends`; no gradient passes through the other rows.

    Args:
        boundaries: of the whole row, on the host.
        ranges: `(owner, start, stop)`, which cover the row; a rank's rows lie in their order.
        group: the process group.
        like: a tensor whose device and dtype `cu_seqlens` takes.
    """

    sharded = True

    def __init__(self, boundaries: Sequence[int], ranges: Sequence[Range], group: ProcessGroup, like: Tensor) -> None:
        import torch.distributed as dist

        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.boundaries, self._like = tuple(boundaries), like
        self.ranges = tuple(sorted(placed(merged(ranges), self.ranks), key=lambda r: r.start))
        self._starts = [r.start for r in self.ranges]
        self.pieces = pieces_of(self.boundaries, self.ranges, self.ranks)
        self.chains = chains_of(self.pieces)
        self.own = sorted((r for r in self.ranges if r.owner == self.rank), key=lambda r: r.first)
        own = self.pieces[self.rank]
        self.flags = tuple(p.begins for p in own), tuple(p.ends for p in own)
        ends = [0, *accumulate(p.stop - p.start for p in own)]
        cu_seqlens = self.tensor(ends, like.dtype)
        super().__init__(cu_seqlens, ends[-1])
        self.local = Packing(cu_seqlens, ends[-1])
        self._made: dict[Hashable, Any] = {}

    @property
    def row(self) -> int:
        """The tokens of the whole row."""
        return self.boundaries[-1]

    @property
    def positions(self) -> Tensor:
        """`[total]` int64: the place of each token in its whole sequence, from 0."""
        return self.made("positions", self._global_positions)

    def _global_positions(self) -> Tensor:
        skipped = [p.start - self.boundaries[p.sequence] for p in self.pieces[self.rank]]
        before = self.tensor(skipped, torch.int64)
        return self.local.positions + before.repeat_interleave(self.local.lengths, output_size=self.total)

    @property
    def reach(self) -> int:
        """The longest whole sequence: all `positions` lie below it."""
        return max([0, *[b - a for a, b in pairwise(self.boundaries)]])

    @property
    def elapsed(self) -> Tensor:
        """`[count]`: the tokens of each piece's sequence from its beginning to the end of the piece."""
        return self.made("elapsed", self._elapsed)

    def _elapsed(self) -> Tensor:
        own = self.pieces[self.rank]
        return self.tensor([p.stop - self.boundaries[p.sequence] for p in own], self._like.dtype)

    @property
    def begins(self) -> Tensor:
        """`[count]` bool: whether a piece is the first of its sequence, whose initial state is read."""
        return self.made("begins", lambda: self.tensor(self.flags[0], torch.bool))

    @property
    def ends(self) -> Tensor:
        """`[count]` bool: whether a piece is the last of its sequence, whose final state is that of the sequence."""
        return self.made("ends", lambda: self.tensor(self.flags[1], torch.bool))

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Numbers of the host on the device of the shard, which is not waited for."""
        found, device = torch.tensor(values, dtype=dtype, device="cpu"), self._like.device
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)

    def made(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """`make()`, made once a shard: it follows from the lengths and ranges, which do not change."""
        if key not in self._made:
            with torch.inference_mode(False):
                self._made[key] = make()
        return self._made[key]

    def spans(self, start: int, stop: int) -> list[RowSpan]:
        """Where the tokens `start` to `stop` of the whole row lie, in their order."""
        found = []
        place = bisect_right(self._starts, start) - 1
        while start < stop:
            r = self.ranges[place]
            until = min(stop, r.stop)
            found.append(RowSpan(r.owner, r.first + start - r.start, until - start))
            start, place = until, place + 1
        return found

    def tokens_of(self, rank: int) -> int:
        """The tokens that a rank owns."""
        return sum(r.stop - r.start for r in self.ranges if r.owner == rank)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of `x`, a tensor of the whole row that has its tokens on axis `dim`."""
        check_tokens(x, dim, self.row, "row's")
        return torch.cat([x.narrow(dim, 0, 0), *(x.narrow(dim, r.start, r.stop - r.start) for r in self.own)], dim)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tensor of the whole row on every rank, from each rank's own tokens on axis `dim`: the inverse of `take`.

        Differentiable: a rank's gradient is the sum of those of all ranks, as if their losses were added.
        """
        from flashmix.parallel.exchange import fetch

        check_tokens(x, dim, self.total, "shard's")
        rows = x.movedim(dim, 0)
        flat = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
        (found,) = fetch(self, "row", lambda: [self.spans(0, self.row)] * self.ranks, flat)
        return found.view(self.row, *rows.shape[1:]).movedim(0, dim)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, without a gradient: the number of counted targets, say."""
        import torch.distributed as dist

        check_tensor("x", x)
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def repeat(self, n: int) -> Shard:
        """The shard of the same row with `n` tokens in place of each."""
        ranges = [Range(r.owner, n * r.start, n * r.stop) for r in sorted(self.ranges, key=lambda r: r.first)]
        return self.made(("repeat", n), lambda: Shard([n * b for b in self.boundaries], ranges, self.group, self._like))

    def __repr__(self) -> str:
        return f"Shard(rank={self.rank} of {self.ranks}, sequences={self.count}, tokens={self.total} of {self.row})"


def check_tokens(x: Tensor, dim: int, tokens: int, whose: str) -> None:
    """Raises TypeError or ValueError unless `x` has so many tokens on axis `dim`."""
    check_tensor("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != tokens:
        raise ValueError(f"x must have the {whose} {tokens} tokens on axis {dim}, got {list(x.shape)}")


def shard_of(packing: Packing, group: Any, order: str, ranges: Sequence[tuple[int, int, int]] | None) -> Shard:
    """`packing.shard(group, order=order, ranges=ranges)`."""
    import torch.distributed as dist

    check_choice("order", order, *ORDERS)
    if packing.sharded:
        raise ValueError("shard must be of the Packing of the whole row, got a Shard of it")
    boundaries = packing.on_host()
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of one dimension, got {group.ndim}")
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must have this rank among its own, got a group of others")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    ranks, total = dist.get_world_size(group), boundaries[-1]
    layout = by_order(order, total, ranks) if ranges is None else checked(ranges, total, ranks)
    if contents_everywhere():
        check_agreement(group, (boundaries, layout))
    return Shard(boundaries, layout, group, packing.cu_seqlens)


def by_order(order: str, total: int, ranks: int) -> list[Range]:
    """The row cut as evenly as whole tokens allow: one range a rank, or two, the first with the last and so on."""
    cuts = ranks if order == "contiguous" else 2 * ranks
    return [Range(min(i, 2 * ranks - 1 - i), i * total // cuts, (i + 1) * total // cuts) for i in range(cuts)]


def checked(ranges: Sequence[tuple[int, int, int]], total: int, ranks: int) -> list[Range]:
    """The caller's ranges; raises ValueError unless they cover `total` tokens once and their owners are ranks of the group."""
    found = []
    if not isinstance(ranges, Sequence):
        raise TypeError(f"ranges must be a list of (owner, start, stop), got {type(ranges).__name__}")
    for entry in ranges:
        whole = isinstance(entry, Sequence) and all(isinstance(n, int) and not isinstance(n, bool) for n in entry)
        if not whole or len(entry) != 3:
            raise TypeError(f"ranges must hold (owner, start, stop) of integers, got {entry!r}")
        owner, start, stop = entry
        if not 0 <= owner < ranks:
            raise ValueError(f"ranges must name owners between 0 and {ranks - 1}, got {owner}")
        if not 0 <= start <= stop <= total:
            raise ValueError(f"ranges must lie within the row's {total} tokens, got {start} to {stop}")
        found.append(Range(owner, start, stop))
    reached = 0
    for r in sorted((r for r in found if r.start < r.stop), key=lambda r: r.start):
        if r.start != reached:
            kind = "an overlap" if r.start < reached else "a gap"
            raise ValueError(f"ranges must cover the row once, got {kind} between {reached} and {r.start}")
        reached = r.stop
    if reached != total:
        raise ValueError(f"ranges must cover the row's {total} tokens, got a gap from {reached} on")
    return found


def check_agreement(group: ProcessGroup, layout: object) -> None:
    """Raises ValueError, on every rank, unless all ranks have the same lengths and ranges."""
    import hashlib

    import torch.distributed as dist

    own, found = hashlib.sha256(repr(layout).encode()).hexdigest(), [""] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ValueError(f"lengths and ranges must be those of rank 0 on every rank, got others on rank {rank}")


def merged(ranges: Sequence[Range]) -> list[Range]:
    """The ranges without empty ones, and those as one that follow each other in the row and at their owner."""
    found: list[Range] = []
    latest: dict[int, int] = {}  # of each owner, the index in `found`
    for r in ranges:
        if r.start == r.stop:
            continue
        index = latest.get(r.owner)
        if index is not None and found[index].stop == r.start:
            found[index] = found[index]._replace(stop=r.stop)
        else:
            latest[r.owner] = len(found)
            found.append(r)
    return found


def placed(ranges: Sequence[Range], ranks: int) -> list[Range]:
    """The ranges with their first rows at their owners."""
    reached, found = [0] * ranks, []
    for r in ranges:
        found.append(r._replace(first=reached[r.owner]))
        reached[r.owner] += r.stop - r.start
    return found


def pieces_of(boundaries: Sequence[int], ranges: Sequence[Range], ranks: int) -> list[list[ShardPiece]]:
    """The pieces of each rank, in the order of its rows. An empty sequence is a piece of the range it lies in, or of the last."""
    pieces: list[list[ShardPiece]] = [[] for _ in range(ranks)]
    last = len(boundaries) - 1  # the number of sequences
    for r in sorted(ranges, key=lambda r: r.first):
        ends_row = r.stop == boundaries[-1]
        first = bisect_right(boundaries, r.start, hi=last) - 1
        while first > 0 and boundaries[first] == r.start and boundaries[first - 1] == r.start:
            first -= 1  # the empty sequences at the start of the range
        stop = last if ends_row else bisect_left(boundaries, r.stop, hi=last)
        for n in range(max(first, 0), stop):
            begin, end = boundaries[n], boundaries[n + 1]
            start, until = max(begin, r.start), min(end, r.stop)
            pieces[r.owner].append(ShardPiece(n, start, until, r.first + start - r.start, begin == start, end == until))
    if not ranges:
        pieces[0] = [ShardPiece(n, 0, 0, 0, True, True) for n in range(last)]
    return pieces


def chains_of(pieces: Sequence[Sequence[ShardPiece]]) -> list[tuple[Link, ...]]:
    """The sequences that are cut, each as its pieces in the order of their tokens."""
    links: dict[int, list[tuple[int, Link]]] = {}
    for owner, own in enumerate(pieces):
        for index, piece in enumerate(own):
            if not (piece.begins and piece.ends):
                links.setdefault(piece.sequence, []).append((piece.start, Link(owner, index)))
    return [tuple(link for _, link in sorted(links[n])) for n in sorted(links)]
