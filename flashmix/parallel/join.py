"""The join of pieces that act on a state as `S_out = M S_in + N`: the states that enter them, and the gradients of those that leave.

A piece that begins its sequence has `M = 0`, so that `N` is the state it leaves. Folds go in the order of the tokens; the backward sends
the gradients of the entering states alone. Directly, the maps go to the ranks that have pieces of the same sequence and to no others, in
one all-to-all, and every rank folds for itself. By heads, each rank folds all pieces of its share of the heads, between two all-to-alls:
what a rank receives does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flashmix.parallel.exchange import Moved, blocks
from flashmix.parallel.shard import Link, Shard

Maps = dict[Link, Tensor]
Fold = Callable[[Tensor, Tensor, Tensor], Tensor]  # (M, S, N) -> M S + N
Apply = Callable[[Tensor, Tensor], Tensor]  # (M, E) -> M^T E
Chains = Sequence[Sequence[Link]]
Cargo = list[list[list[tuple[str, Link]]]]  # [source][receiver]: the blocks that one rank sends to another

DIRECT_RANKS = 4  # up to so many, one exchange is faster than two


def needed(shard: Shard, gradient: bool) -> Cargo:
    """The maps of the forward: `N` goes to the owners of later pieces, `M` with a gradient to those of earlier ones too."""
    return shard.made(("maps", gradient), lambda: _needed(shard, gradient))


def _needed(shard: Shard, gradient: bool) -> Cargo:
    cargo: Cargo = [[[] for _ in range(shard.ranks)] for _ in range(shard.ranks)]
    for chain in shard.chains:
        for place, link in enumerate(chain[:-1]):
            later = {other.owner for other in chain[place + 1 :]}
            all_of_them = {other.owner for other in chain}
            for rank in sorted(all_of_them - {link.owner}):
                if place > 0 and (gradient or rank in later):
                    cargo[link.owner][rank].append(("M", link))
                if rank in later:
                    cargo[link.owner][rank].append(("N", link))
    return cargo


def needed_backward(shard: Shard) -> Cargo:
    """The gradients of entering states, which go to the owners of earlier pieces."""
    return shard.made("gradients of states", lambda: _needed_backward(shard))


def _needed_backward(shard: Shard) -> Cargo:
    cargo: Cargo = [[[] for _ in range(shard.ranks)] for _ in range(shard.ranks)]
    for chain in shard.chains:
        for place, link in enumerate(chain):
            for rank in sorted({other.owner for other in chain[:place]} - {link.owner}):
                cargo[link.owner][rank].append(("D", link))
    return cargo


def shared(
    shard: Shard, cargo: Cargo, own: Mapping[str, Maps], shapes: Mapping[str, torch.Size], like: Tensor
) -> dict[str, Maps]:
    """This rank's blocks and those it receives, by kind and piece."""
    outgoing = [[own[kind][link] for kind, link in row] for row in cargo[shard.rank]]
    names = [row[shard.rank] for row in cargo]
    received = blocks(shard, outgoing, [[shapes[kind] for kind, _ in row] for row in names], like)
    found = {kind: dict(maps) for kind, maps in own.items()}
    for row, its in zip(names, received, strict=True):
        for (kind, link), block in zip(row, its, strict=True):
            found[kind][link] = block
    return found


def entering(chains: Chains, rank: int | None, M: Maps, N: Maps, fold: Fold) -> Maps:
    """The state that enters each piece of a rank, or of all: `S <- M S + N` over the pieces before it, from 0."""
    found: Maps = {}
    for chain in chains:
        last = max((i for i, link in enumerate(chain) if rank in (None, link.owner)), default=0)
        S = None
        for place, link in enumerate(chain[: last + 1]):
            if S is not None and rank in (None, link.owner):
                found[link] = S
            if place < last:
                S = N[link] if S is None else fold(M[link], S, N[link])
    return found


def leaving(chains: Chains, rank: int | None, M: Maps, D: Maps, apply_transposed: Apply) -> Maps:
    """The gradient of the state that leaves each piece of a rank, or of all: `E <- D + M^T E` over the pieces after it, from 0."""
    found: Maps = {}
    for chain in chains:
        first = min((i for i, link in enumerate(chain) if rank in (None, link.owner)), default=len(chain))
        E = None
        for place in range(len(chain) - 1, first - 1, -1):
            link = chain[place]
            if E is not None and rank in (None, link.owner):
                found[link] = E
            if place > first:
                E = D[link] if E is None else D[link] + apply_transposed(M[link], E)
    return found


# ---- the same by heads: every rank folds all pieces of some heads, and sends back what enters and leaves them --------------------------


def by_heads(shard: Shard, shapes: Mapping[str, torch.Size], gradient: bool) -> bool:
    """Whether the busiest rank receives less by heads, in two exchanges in place of one; up to four ranks never."""
    if shard.ranks <= DIRECT_RANKS:
        return False
    return shard.made(("by heads", *shapes.values(), gradient), lambda: _is_less(shard, shapes, gradient))


def _is_less(shard: Shard, shapes: Mapping[str, torch.Size], gradient: bool) -> bool:
    sizes = {kind: shape.numel() for kind, shape in shapes.items()} | {"D": shapes["N"].numel()}
    direct = [*zip(*needed(shard, gradient), strict=True)], [*zip(*needed_backward(shard), strict=True)]
    most = sum(
        max(sum(sizes[kind] for row in rows for kind, _ in row) for rows in cargo)
        for cargo in direct[: 2 if gradient else 1]
    )
    maps, pieces = left_maps(shard), continued(shard)
    share = -(-shapes["N"][0] // shard.ranks) / shapes["N"][0]  # of the heads, on the busiest rank
    state = sizes["N"]
    spread_out = share * sum(sizes[kind] for row in maps for kind, _ in row) + state * max(map(len, pieces))
    back = state * (share * sum(map(len, pieces)) + max(len([1 for kind, _ in row if kind == "N"]) for row in maps))
    return spread_out + (back if gradient else 0) < most


def left_maps(shard: Shard) -> list[list[tuple[str, Link]]]:
    """The maps of each rank's pieces whose state leaves."""
    found: list[list[tuple[str, Link]]] = [[] for _ in range(shard.ranks)]
    for chain in shard.chains:
        for place, link in enumerate(chain[:-1]):
            found[link.owner] += [("M", link), ("N", link)] if place else [("N", link)]
    return found


def continued(shard: Shard) -> list[list[Link]]:
    """Each rank's pieces that a state enters."""
    found: list[list[Link]] = [[] for _ in range(shard.ranks)]
    for chain in shard.chains:
        for link in chain[1:]:
            found[link.owner].append(link)
    return found


def heads_of(shard: Shard, rank: int, heads: int) -> slice:
    """The heads that a rank folds."""
    return slice(rank * heads // shard.ranks, (rank + 1) * heads // shard.ranks)


def spread(
    shard: Shard,
    cargo: Sequence[Sequence[tuple[str, Link]]],
    own: Mapping[str, Maps],
    shapes: Mapping[str, torch.Size],
    like: Tensor,
) -> dict[str, Maps]:
    """The blocks of all ranks of the heads that this rank folds; `cargo` are those that each rank has."""
    heads = next(iter(shapes.values()))[0]
    parts = [heads_of(shard, rank, heads) for rank in range(shard.ranks)]
    outgoing = [[own[kind][link][part] for kind, link in cargo[shard.rank]] for part in parts]
    here = parts[shard.rank].stop - parts[shard.rank].start
    incoming = [[torch.Size((here, *shapes[kind][1:])) for kind, _ in row] for row in cargo]
    found: dict[str, Maps] = {kind: {} for kind in shapes}
    for row, its in zip(cargo, blocks(shard, outgoing, incoming, like), strict=True):
        for (kind, link), block in zip(row, its, strict=True):
            found[kind][link] = block
    return found


def collected(shard: Shard, pieces: Sequence[Sequence[Link]], folded: Maps, shape: torch.Size, like: Tensor) -> Maps:
    """The blocks of this rank's pieces with all heads, from the ranks that folded them; `pieces` are those of each rank."""
    parts = [heads_of(shard, rank, shape[0]) for rank in range(shard.ranks)]
    incoming = [[torch.Size((part.stop - part.start, *shape[1:]))] * len(pieces[shard.rank]) for part in parts]
    received = blocks(shard, [[folded[link] for link in row] for row in pieces], incoming, like)
    return {link: torch.cat(some) for link, some in zip(pieces[shard.rank], zip(*received, strict=True), strict=True)}


def moved(shard: Shard, shapes: Mapping[str, torch.Size], size: int) -> Moved:
    """What `join` and `join_backward` move, with a gradient; numbers have `size` bytes."""
    numbers = {kind: shape.numel() * size for kind, shape in shapes.items()} | {"D": shapes["N"].numel() * size}
    rank, ways = shard.rank, (needed(shard, True), needed_backward(shard))
    if not by_heads(shard, shapes, True):
        forward, backward = (sum(numbers[kind] for row in cargo for kind, _ in row[rank]) for cargo in ways)
        return Moved("states, joined directly", forward, backward)
    heads, state = shapes["N"][0], numbers["N"]
    part = heads_of(shard, rank, heads)
    share, away = part.stop - part.start, heads - (part.stop - part.start)
    maps, pieces = left_maps(shard), continued(shard)
    entered = [[("D", link) for link in row] for row in pieces]
    left = [[link for kind, link in row if kind == "N"] for row in maps]
    both = []
    for spread_out, back in ((maps, pieces), (entered, left)):
        others = sum(numbers[kind] for r, row in enumerate(spread_out) if r != rank for kind, _ in row)
        both.append((share * others + away * state * len(back[rank])) // heads)
    return Moved(f"states, joined by heads over {shard.ranks} ranks", *both)


# ---- both ways -------------------------------------------------------------------------------------------------------------------


def join(
    shard: Shard, own: Mapping[str, Maps], shapes: Mapping[str, torch.Size], fold: Fold, gradient: bool, like: Tensor
) -> tuple[Maps, Maps]:
    """The states that enter this rank's pieces, from the maps of those that it leaves, and the `M` that `join_backward` needs."""
    if by_heads(shard, shapes, gradient):
        found = spread(shard, left_maps(shard), own, shapes, like)
        states = entering(shard.chains, None, found["M"], found["N"], fold)
        return collected(shard, continued(shard), states, shapes["N"], like), found["M"]
    found = shared(shard, needed(shard, gradient), own, shapes, like)
    return entering(shard.chains, shard.rank, found["M"], found["N"], fold), found["M"]


def join_backward(
    shard: Shard, D: Maps, M: Maps, shapes: Mapping[str, torch.Size], apply_transposed: Apply, like: Tensor
) -> Maps:
    """The gradients of the states that leave this rank's pieces, from those of the states that enter them."""
    shape = {"D": shapes["N"]}
    if by_heads(shard, shapes, True):
        pieces = [[("D", link) for link in row] for row in continued(shard)]
        gradients = spread(shard, pieces, {"D": D}, shape, like)["D"]
        found = leaving(shard.chains, None, M, gradients, apply_transposed)
        left = [[link for kind, link in row if kind == "N"] for row in left_maps(shard)]
        return collected(shard, left, found, shapes["N"], like)
    gradients = shared(shard, needed_backward(shard), {"D": D}, shape, like)["D"]
    return leaving(shard.chains, shard.rank, M, gradients, apply_transposed)
