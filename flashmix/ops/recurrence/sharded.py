"""The recurrence over a shard: maps of the pieces that are left by a sequence, their join, and the op itself on what the rank has.

An implementation may have both halves of a call, before and after the exchange (`flashmix/parallel/halves.py`). For the others the
forward runs the pieces whose state leaves once more, from zero (`N`) and from the identity (`M`; without corrections it is diagonal and
follows from the decays), and the backward runs twice, for the gradients of entering states and then with those of leaving ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op import autograd
from flashmix.op.call import Gradients, Outputs, plainly
from flashmix.op.choose import choose
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import op
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.parallel.exchange import Moved
from flashmix.parallel.halves import Halves, Pieces, Shape
from flashmix.parallel.join import Maps, join, join_backward, moved
from flashmix.parallel.shard import Link, Shard, ShardPiece


def run(call: RecurrenceCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`; a piece's final state is the state at its end."""
    shard: Any = call.packing
    local = call.but(packing=shard.local)
    if not shard.chains:
        o, state = op.RECURRENCE(local, impl, asked)
        return o, state
    chosen = choose(asked, op.RECURRENCE.implementations, local, impl).name
    halves = getattr(op.RECURRENCE.module(chosen), "halves", lambda call: None)(call)
    if halves is not None:
        local = dense(local, shard)
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors())
    with plainly(call.device):  # autocast would fold in 16 bits
        o, state = Joined.apply(local, shard, halves, impl, chosen, gradient, *local.tensors())
        return o.view(call.v.shape), state


def exchange(call: RecurrenceCall) -> Moved:
    """What the ranks exchange."""
    shard: Any = call.packing
    return moved(shard, shapes(call), call.state_dtype.itemsize)


def dense(call: RecurrenceCall, shard: Shard) -> RecurrenceCall:
    """The call as a dense batch of this rank's pieces where they are equally long, so that kernels can cut them into segments."""
    lengths = {p.stop - p.start for p in shard.pieces[shard.rank]}
    if len(lengths) != 1 or min(lengths) < 2:
        return call
    rows = shard.count, min(lengths)
    names = [n for n in call.names if n != "initial_state" and (t := getattr(call, n)) is not None and t.dim() > 1]
    return call.but(**{n: (x := getattr(call, n)).reshape(*rows, *x.shape[2:]) for n in names}, packing=None)


class CallHalves:
    """The halves of a call as calls of the op itself, for implementations that have none of their own."""

    def __init__(self, call: RecurrenceCall, shard: Shard, impl: str, chosen: str) -> None:
        self.call, self.shard, self.impl, self.chosen = call, shard, impl, chosen

    def maps(self, pieces: Pieces, shape: Shape) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """`N` of this rank's pieces whose state leaves, and `M` of those that it also enters."""
        call, shard = self.call, self.shard
        N: dict[int, Tensor] = {}
        M: dict[int, Tensor] = {}
        left = sorted((*pieces.begun, *pieces.through))
        if left:
            start = None
            if call.initial_state is not None:
                index = torch.tensor(left, device=call.device)
                begins = shard.begins[index][:, None, None, None]
                start = torch.where(begins, call.initial_state[index], torch.zeros_like(call.initial_state[index]))
            N = dict(zip(left, self._states(part_of(call, shard, left), start), strict=True))
        if pieces.through and not call.rule.corrected:
            M = {i: diagonal(call, shard.pieces[shard.rank][i]) for i in pieces.through}
        elif pieces.through:
            part = part_of(call, shard, pieces.through)
            identity = torch.eye(call.K, dtype=call.state_dtype, device=call.device)
            start = identity.expand(len(pieces.through), call.value_heads, call.K, call.K)
            part = part.but(v=part.v.new_zeros(*part.v.shape[:3], call.K))
            M = dict(zip(pieces.through, self._states(part, start), strict=True))
        return N, M

    def _states(self, part: RecurrenceCall, start: Tensor | None) -> Tensor:
        """The final states of the sequences of `part`."""
        return op.RECURRENCE(part.but(initial_state=start), self.impl, "map of a shard")[1]

    def outputs(self, initial_state: Tensor, save: bool) -> tuple[Outputs, Outputs]:
        """Output, final state and what is kept."""
        return op.RECURRENCE.forward(self.call.but(initial_state=initial_state), save, self.chosen)


class CallBackward:
    """The backward of a call as backwards of the op itself."""

    def __init__(self, call: RecurrenceCall, kept: Outputs, do: Tensor | None, chosen: str) -> None:
        self.call, self.kept, self.do, self.chosen = call, kept, do, chosen

    def entering(self, dstate: Tensor, continued: Sequence[int]) -> dict[int, Tensor]:
        """The gradients of the states that enter some pieces, from their own outputs and final states."""
        names, grads = ("initial_state",), (self.do, dstate)
        D = op.RECURRENCE.backward(self.call, self.kept, grads, names, self.chosen)["initial_state"]
        return {i: D[i] for i in continued}

    def gradients(self, dstate: Tensor, wanted: frozenset[str]) -> Gradients:
        """The gradients of the call's tensors, with those of the states at the end of every piece."""
        return op.RECURRENCE.backward(self.call, self.kept, (self.do, dstate), tuple(wanted), self.chosen)


class Joined(torch.autograd.Function):
    """A call over a shard, with its gradients; `tensors` are those of the call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: RecurrenceCall,
        shard: Shard,
        halves: Halves | None,
        impl: str,
        chosen: str,
        gradient: bool,
        *tensors: Tensor,
    ) -> Outputs:
        sizes, rank = shapes(call), shard.rank
        run: Any = CallHalves(call, shard, impl, chosen) if halves is None else halves.forward(call)
        found = run.maps(pieces_of_states(shard), sizes)
        own = {name: {Link(rank, i): x for i, x in its.items()} for name, its in zip("NM", found, strict=True)}
        like = torch.empty(0, dtype=call.state_dtype, device=call.device)
        entered, M = join(shard, own, sizes, _dense if call.rule.corrected else torch.mul, gradient, like)
        starts = by_piece({link.piece: S for link, S in entered.items()}, shard.count)
        if starts is None:
            starts = torch.zeros(shard.count, *sizes["N"], dtype=call.state_dtype, device=call.device)
            if call.initial_state is not None:
                starts = torch.where(per_piece(shard.begins), call.initial_state, starts)
            for link, S in entered.items():
                starts[link.piece] = S
        outputs, kept = run.outputs(starts, gradient)
        if gradient:
            ctx.links, ctx.shard, ctx.shapes, ctx.kept, ctx.halves = list(M), shard, sizes, len(kept), halves
            ctx.names = [name for name in call.names if getattr(call, name) is not None]
            local = call.but(initial_state=starts)
            autograd.save(op.RECURRENCE, ctx, local, outputs, (*kept, *M.values()), chosen)
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
        shard, halves = ctx.shard, ctx.halves
        call = RecurrenceCall.make({**ctx.values, **dict(zip(ctx.given, saved, strict=False))})
        kept = saved[len(ctx.given) :][: ctx.kept]
        M = dict(zip(ctx.links, saved[len(ctx.given) + ctx.kept :], strict=True))
        run: Any = CallBackward(call, kept, do, ctx.impl) if halves is None else halves.backward(call, kept, do)
        start: Any = call.initial_state
        dstate = torch.zeros_like(start) if dstate is None else torch.where(per_piece(shard.ends), dstate, 0.0)
        D = run.entering(dstate, pieces_of_states(shard).continued)
        own: Maps = {Link(shard.rank, i): x for i, x in D.items()}
        apply = _dense_transposed if call.rule.corrected else torch.mul
        found = join_backward(shard, own, M, ctx.shapes, apply, start)
        left = by_piece({link.piece: E for link, E in found.items()}, shard.count)
        if left is None:
            for link, E in found.items():
                dstate[link.piece] = E
        wanted = [n for n, needs in zip(ctx.names, ctx.needs_input_grad[6:], strict=True) if needs]
        grads = {
            n: g for n, g in run.gradients(dstate if left is None else left, frozenset(wanted)).items() if n in wanted
        }
        if "initial_state" in grads:
            grads["initial_state"] = torch.where(per_piece(shard.begins), grads["initial_state"], 0.0)
        return None, None, None, None, None, None, *(grads.get(name) for name in ctx.names)


def per_piece(flags: Tensor) -> Tensor:
    """Flags of pieces beside states `[pieces, HV, K, V]`."""
    return flags[:, None, None, None]


def by_piece(states: dict[int, Tensor], count: int) -> Tensor | None:
    """`[pieces, HV, K, V]` of states of all pieces, not copied where there is one; None if some have none."""
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


def _dense(M: Tensor, S: Tensor) -> Tensor:
    return M @ S


def _dense_transposed(M: Tensor, E: Tensor) -> Tensor:
    return M.mT @ E


def shapes(call: RecurrenceCall) -> dict[str, torch.Size]:
    """Of the maps of a piece: `N` `[HV, K, V]`, `M` `[HV, K, K]`, without corrections its diagonal on the axis of the decay."""
    HV, K, V, decay = call.value_heads, call.K, call.V, call.decay
    M = (
        (HV, K, K)
        if call.rule.corrected
        else (HV, K if decay is Decay.CHANNEL else 1, V if decay is Decay.VALUE else 1)
    )
    return {"N": torch.Size((HV, K, V)), "M": torch.Size(M)}


def part_of(call: RecurrenceCall, shard: Shard, indices: Sequence[int]) -> RecurrenceCall:
    """The tokens of some of this rank's pieces, as a call whose outputs nobody reads."""
    its = [shard.pieces[shard.rank][i] for i in indices]
    changes: dict[str, Any] = {
        name: torch.cat([x[:, p.first : p.first + p.stop - p.start] for p in its], 1)
        for name in call.names
        if name != "initial_state" and (x := getattr(call, name)) is not None and x.dim() > 1
    }
    ends = [0, *accumulate(p.stop - p.start for p in its)]
    packing = Packing(torch.tensor(ends, device=call.device), ends[-1])
    return call.but(**changes, packing=packing, read_before=False)


def diagonal(call: RecurrenceCall, piece: ShardPiece) -> Tensor:
    """`M` of a piece of a rule without corrections, the product of its decays, in the shape that `shapes` gives."""
    g, tokens, shape = call.log_decay, piece.stop - piece.start, shapes(call)["M"]
    if g is None:
        return torch.ones(shape, dtype=call.state_dtype, device=call.device)
    g = g.to(call.state_dtype)
    total = g * tokens if call.decay is Decay.HEAD else g[0, piece.first : piece.first + tokens].sum(0)
    return total.exp().view(shape)
