"""The join of pieces that act on a state as `S_out = M S_in + N`: the states that enter them, and the gradients of those that leave.

A piece that begins its sequence has `M = 0`, so that `N` is the state it leaves. The maps go to the ranks that have pieces of the same
sequence and to no others, in one all-to-all; the backward sends the gradients of the entering states alone. Every rank folds for itself, in
the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flashmix.parallel.exchange import blocks
from flashmix.parallel.shard import Link, Shard

Maps = dict[Link, Tensor]
Apply = Callable[[Tensor, Tensor], Tensor]  # (M, S) -> M S
Cargo = list[list[list[tuple[str, Link]]]]  # [source][receiver]: the blocks that one rank sends to another


def needed(shard: Shard, gradient: bool) -> Cargo:
    """The maps of the forward: `N` goes to the owners of later pieces, `M` with a gradient to those of earlier ones too."""
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


def entering(shard: Shard, M: Maps, N: Maps, apply: Apply) -> Maps:
    """The state that enters each of this rank's pieces: `S <- M S + N` over the pieces before it, from 0."""
    found: Maps = {}
    for chain in shard.chains:
        last = max((i for i, link in enumerate(chain) if link.owner == shard.rank), default=0)
        S = None
        for place, link in enumerate(chain[: last + 1]):
            if S is not None and link.owner == shard.rank:
                found[link] = S
            if place < last:
                S = N[link] if S is None else apply(M[link], S) + N[link]
    return found


def leaving(shard: Shard, M: Maps, D: Maps, apply_transposed: Apply) -> Maps:
    """The gradient of the state that leaves each of this rank's pieces: `E <- D + M^T E` over the pieces after it, from 0."""
    found: Maps = {}
    for chain in shard.chains:
        first = min((i for i, link in enumerate(chain) if link.owner == shard.rank), default=len(chain))
        E = None
        for place in range(len(chain) - 1, first - 1, -1):
            link = chain[place]
            if E is not None and link.owner == shard.rank:
                found[link] = E
            if place > first:
                E = D[link] if E is None else D[link] + apply_transposed(M[link], E)
    return found
