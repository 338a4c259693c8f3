"""Ops with a state over a shard: maps of the pieces that a state leaves, their join, and the op itself on what the rank has.

How the tokens of a piece act on the state of an op is a `StateMap`. An implementation may have both halves of a call, before and after
the exchange (`flashmix/parallel/halves.py`). For the others the forward runs the pieces whose state leaves once more, from nothing (`N`),
and the backward runs twice, for the gradients of entering states and then with those of leaving ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op import autograd
from flashmix.op.call import Gradients, Op, Outputs
from flashmix.op.choose import choose
from flashmix.op.packing import Packing
from flashmix.op.run import plainly
from flashmix.parallel.exchange import Moved
from flashmix.parallel.halves import Halves, Pieces, Shape
from flashmix.parallel.join import Apply, Fold, Maps, join, join_backward, moved
from flashmix.parallel.shard import Link, Shard, ShardPiece


class StateMap(NamedTuple):
    """How tokens act on the state of an op, whose outputs are a tensor of tokens and the states `[N, ...]` after the last ones.

    `shapes(call)`: of the maps `N` and `M` of one piece. `fold(M, S, N)`: the state after a piece that `S` enters; `transposed(M, E)`: the
    gradient that passes back through it. `through(halves, pieces)`: `M` of some pieces of this rank, by their indices. `nothing`: the state
    before the first token.
    """

    op: Op
    shapes: Callable[[Any], dict[str, torch.Size]]
    fold: Fold
    transposed: Apply
    through: Callable[[CallHalves, Sequence[int]], Sequence[Tensor]]
    nothing: float = 0.0


def run(call: Any, acts: StateMap, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`; a piece's final state is the state at its end."""
    shard: Any = call.packing
    local = call.but(packing=shard.local)
    return joined(local, acts, shard, None, impl, asked) if shard.chains else acts.op(local, impl, asked)


def joined(local: Any, acts: StateMap, shard: Shard, halves: Halves | None, impl: str, asked: str) -> Outputs:
    """The outputs of a call of this rank's tokens, whose states come from the other ranks."""
    chosen = choose(asked, acts.op.implementations, local, impl).name
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in local.tensors())
    with plainly(local.device):  # autocast would fold in 16 bits
        return Joined.apply(local, acts, shard, halves, impl, chosen, gradient, *local.tensors())


def exchange(call: Any, acts: StateMap) -> Moved:
    """What the ranks exchange."""
    shard: Any = call.packing
    return moved(shard, acts.shapes(call), call.state_dtype.itemsize)


class CallHalves:
    """The halves of a call as calls of the op itself, for implementations that have none of their own."""

    def __init__(self, call: Any, acts: StateMap, shard: Shard, impl: str, chosen: str) -> None:
        self.call, self.acts, self.shard, self.impl, self.chosen = call, acts, shard, impl, chosen

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of this rank's pieces whose state leaves, and `M` of those that it also enters."""
        call, shard, acts = self.call, self.shard, self.acts
        N: dict[int, Tensor] = {}
        left = sorted((*pieces.begun, *pieces.through))
        if left:
            start = None
            if call.initial_state is not None:
                index = torch.tensor(left, device=call.device)
                its = call.initial_state[index]
                start = torch.where(per_piece(shard.begins[index], its), its, torch.full_like(its, acts.nothing))
            N = dict(zip(left, self.states(part_of(call, shard, left), start), strict=True))
        return N, dict(zip(pieces.through, acts.through(self, pieces.through) if pieces.through else (), strict=True))

    def states(self, part: Any, start: Tensor | None) -> Tensor:
        """The final states of the sequences of `part`."""
        return self.acts.op(part.but(initial_state=start), self.impl, "map of a shard")[1]

    def outputs(self, initial_state: Tensor, save: bool) -> tuple[Outputs, Outputs]:
        """Output, final state and what is kept."""
        return self.acts.op.forward(self.call.but(initial_state=initial_state), save, self.chosen)


class CallBackward:
    """The backward of a call as backwards of the op itself."""

    def __init__(self, call: Any, op: Op, kept: Outputs, do: Tensor | None, chosen: str) -> None:
        self.call, self.op, self.kept, self.do, self.chosen = call, op, kept, do, chosen

    def entering(self, dstate: Tensor, pieces: Pieces) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        D = self.gradients(dstate, frozenset(("initial_state",)))["initial_state"]
        return {i: D[i] for i in pieces.continued}

    def gradients(self, dstate: Tensor, wanted: frozenset[str]) -> Gradients:
        """The gradients of the call's tensors, with those of the states at the end of every piece."""
        return self.op.backward(self.call, self.kept, (self.do, dstate), tuple(wanted), self.chosen)


class Joined(torch.autograd.Function):
    """A call over a shard, with its gradients; `tensors` are those of the call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Any,
        acts: StateMap,
        shard: Shard,
        halves: Halves | None,
        impl: str,
        chosen: str,
        gradient: bool,
        *tensors: Tensor,
    ) -> Outputs:
        sizes, rank = acts.shapes(call), shard.rank
        run: Any = CallHalves(call, acts, shard, impl, chosen) if halves is None else halves.forward(call)
        found = run.maps(pieces_of_states(shard), sizes)
        own = {name: {Link(rank, i): x for i, x in its.items()} for name, its in zip("NM", found, strict=True)}
        like = torch.empty(0, dtype=call.state_dtype, device=call.device)
        entered, M = join(shard, own, sizes, acts.fold, gradient, like)
        starts = by_piece({link.piece: S for link, S in entered.items()}, shard.count)
        if starts is None:
            shape = shard.count, *sizes["N"]
            starts = torch.full(shape, acts.nothing, dtype=call.state_dtype, device=call.device)
            if call.initial_state is not None:
                starts = torch.where(per_piece(shard.begins, starts), call.initial_state, starts)
            for link, S in entered.items():
                starts[link.piece] = S
        outputs, kept = run.outputs(starts, gradient)
        if gradient:
            ctx.links, ctx.shard, ctx.shapes, ctx.kept, ctx.halves = list(M), shard, sizes, len(kept), halves
            ctx.acts, ctx.names = acts, [name for name in call.names if getattr(call, name) is not None]
            local = call.but(initial_state=starts)
            autograd.save(acts.op, ctx, local, outputs, (*kept, *M.values()), chosen)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpoints make them again
        with plainly(saved[0].device):
            return Joined.gradients(ctx, saved, do, dstate)

    @staticmethod
    def gradients(ctx: Any, saved: Outputs, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the call's tensors, in two halves with the exchange between them."""
        shard, halves, acts = ctx.shard, ctx.halves, ctx.acts
        call = acts.op.call.make({**ctx.values, **dict(zip(ctx.given, saved, strict=False))})
        kept = saved[len(ctx.given) :][: ctx.kept]
        M = dict(zip(ctx.links, saved[len(ctx.given) + ctx.kept :], strict=True))
        run: Any = (
            CallBackward(call, acts.op, kept, do, ctx.impl) if halves is None else halves.backward(call, kept, do)
        )
        start: Any = call.initial_state
        dstate = torch.zeros_like(start) if dstate is None else torch.where(per_piece(shard.ends, start), dstate, 0.0)
        D = run.entering(dstate, pieces_of_states(shard))
        own: Maps = {Link(shard.rank, i): x for i, x in D.items()}
        found = join_backward(shard, own, M, ctx.shapes, acts.transposed, start)
        left = by_piece({link.piece: E for link, E in found.items()}, shard.count)
        if left is None:
            for link, E in found.items():
                dstate[link.piece] = E
        wanted = [n for n, needs in zip(ctx.names, ctx.needs_input_grad[7:], strict=True) if needs]
        grads = {
            n: g for n, g in run.gradients(dstate if left is None else left, frozenset(wanted)).items() if n in wanted
        }
        if "initial_state" in grads:
            grads["initial_state"] = torch.where(per_piece(shard.begins, start), grads["initial_state"], 0.0)
        return None, None, None, None, None, None, None, *(grads.get(name) for name in ctx.names)


def per_piece(flags: Tensor, like: Tensor) -> Tensor:
    """Flags of pieces beside their states `[pieces, ...]`."""
    return flags.view(-1, *(1,) * (like.dim() - 1))


def by_piece(states: dict[int, Tensor], count: int) -> Tensor | None:
    """`[pieces, ...]` of states of all pieces, not copied where there is one; None if some have none."""
    if not 0 < count == len(states):
        return None
    return states[0].unsqueeze(0) if count == 1 else torch.stack([states[i] for i in range(count)])


def pieces_of_states(shard: Shard) -> Pieces:
    """The pieces of this rank that states leave and enter."""
    return shard.made("pieces of states", lambda: _pieces_of_states(shard))


def _pieces_of_states(shard: Shard) -> Pieces:
    def own(place: slice) -> tuple[int, ...]:
        return tuple(sorted(link.piece for chain in shard.chains for link in chain[place] if link.owner == shard.rank))

    return Pieces(own(slice(0, 1)), own(slice(1, -1)), own(slice(1, None)))


def part_of(call: Any, shard: Shard, indices: Sequence[int]) -> Any:
    """The tokens of some of this rank's pieces, as a call whose outputs nobody reads. Tensors of tokens have three axes at least."""
    its = [shard.pieces[shard.rank][i] for i in indices]
    changes: dict[str, Any] = {
        name: torch.cat([x[:, p.first : p.first + p.stop - p.start] for p in its], 1)
        for name in call.names
        if name != "initial_state" and (x := getattr(call, name)) is not None and x.dim() > 2
    }
    ends = [0, *accumulate(p.stop - p.start for p in its)]
    if hasattr(call, "read_before"):
        changes["read_before"] = False
    return call.but(**changes, packing=Packing(torch.tensor(ends, device=call.device), ends[-1]))


def summed(x: Tensor, piece: ShardPiece) -> Tensor:
    """The sum over the tokens of a piece of `[1, T, ...]`, or of what is the same for all tokens, in float64."""
    tokens, wide = piece.stop - piece.start, torch.complex128 if x.is_complex() else torch.float64
    if x.dim() > 2:
        return x[0, piece.first : piece.first + tokens].sum(0, dtype=wide)
    return torch.view_as_complex(torch.view_as_real(x.to(wide)) * tokens) if x.is_complex() else x.to(wide) * tokens


def sums_before(shard: Any, values: Tensor) -> Tensor:
    """The sums of `values` `[pieces, H, ...]` over the pieces of its sequence before each one, without a gradient; exact of integers."""
    sizes = {"N": values.shape[1:], "M": torch.Size((values.shape[1], 0))}
    links = [Link(shard.rank, i) for i in range(shard.count)]
    nothing = values.new_empty(sizes["M"])
    own: dict[str, Maps] = {"N": dict(zip(links, values.detach(), strict=True)), "M": dict.fromkeys(links, nothing)}
    entered, _ = join(shard, own, sizes, lambda M, S, N: S + N, False, values.new_empty(0))
    found = torch.zeros_like(values)
    for link, S in entered.items():
        found[link.piece] = S
    return found


def of_sequences(shard: Any, values: Tensor) -> Tensor:
    """`values` `[pieces, H, ...]` of the piece that begins the sequence, for each of its pieces; without a gradient."""
    own = torch.where(per_piece(shard.begins, values), values, torch.zeros_like(values))
    return own + sums_before(shard, own)


sums_before._torchdynamo_disable = True  # type: ignore[attr-defined]
