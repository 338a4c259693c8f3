"""The recurrence over a shard: maps of the pieces that are left by a sequence, their join, and the op itself on what the rank has.

The forward runs the pieces whose state leaves once more, from zero (`N`) and from the identity (`M`; without corrections it is diagonal and
follows from the decays); the backward runs twice, for the gradients of entering states and then with those of leaving ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.op import autograd
from flashmix.op.call import Outputs, plainly
from flashmix.op.choose import choose
from flashmix.op.packing import Packing
from flashmix.ops.recurrence import op
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.parallel.join import Maps, join, join_backward
from flashmix.parallel.shard import Link, Shard, ShardPiece


def run(call: RecurrenceCall, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`; a piece's final state is the state at its end."""
    shard: Any = call.packing
    local = call.but(packing=shard.local)
    if not shard.chains:
        o, state = op.RECURRENCE(local, impl, asked)
        return o, state
    chosen = choose(asked, op.RECURRENCE.implementations, local, impl).name
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors())
    with plainly(call.device):  # autocast would fold in 16 bits
        return Joined.apply(call, shard, impl, chosen, gradient, *call.tensors())


class Joined(torch.autograd.Function):
    """A call over a shard, with its gradients; `tensors` are those of the call."""

    @staticmethod
    def forward(
        ctx: Any, call: RecurrenceCall, shard: Shard, impl: str, chosen: str, gradient: bool, *tensors: Tensor
    ) -> Outputs:
        own, sizes = maps(call, shard, impl), shapes(call)
        starts = torch.zeros(shard.count, *sizes["N"], dtype=call.state_dtype, device=call.device)
        entered, M = join(shard, own, sizes, _dense if call.rule.corrected else torch.mul, gradient, starts)
        if call.initial_state is not None:
            starts = torch.where(shard.begins[:, None, None, None], call.initial_state, starts)
        for link, S in entered.items():
            starts[link.piece] = S
        local = call.but(packing=shard.local, initial_state=starts)
        outputs, kept = op.RECURRENCE.forward(local, gradient, chosen)
        if gradient:
            ctx.links, ctx.shard, ctx.shapes, ctx.kept = list(M), shard, sizes, len(kept)
            ctx.names = [name for name in call.names if getattr(call, name) is not None]
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
        """The gradients of the call's tensors, in two passes with the exchange between them."""
        shard = ctx.shard
        call = RecurrenceCall.make({**ctx.values, **dict(zip(ctx.given, saved, strict=False))})
        kept = saved[len(ctx.given) :][: ctx.kept]
        M = dict(zip(ctx.links, saved[len(ctx.given) + ctx.kept :], strict=True))
        ends = shard.ends[:, None, None, None]
        zeros = torch.zeros_like(call.initial_state)
        dstate = zeros.clone() if dstate is None else torch.where(ends, dstate, zeros)
        (D,) = _backward(call, kept, (do, dstate), ("initial_state",), ctx.impl)
        own: Maps = {link: D[link.piece] for chain in shard.chains for link in chain[1:] if link.owner == shard.rank}
        apply = _dense_transposed if call.rule.corrected else torch.mul
        found = join_backward(shard, own, M, ctx.shapes, apply, zeros)
        for link, E in found.items():
            dstate[link.piece] = E
        wanted = tuple(n for n, needs in zip(ctx.names, ctx.needs_input_grad[5:], strict=True) if needs)
        grads = dict(zip(wanted, _backward(call, kept, (do, dstate), wanted, ctx.impl), strict=True))
        if "initial_state" in grads:
            grads["initial_state"] = torch.where(shard.begins[:, None, None, None], grads["initial_state"], zeros)
        return None, None, None, None, None, *(grads.get(name) for name in ctx.names)


def _backward(call: RecurrenceCall, kept: Outputs, grads: Any, wanted: Sequence[str], impl: str) -> list[Tensor]:
    found = op.RECURRENCE.backward(call, kept, grads, wanted, impl)
    return [found[name] for name in wanted]


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


def maps(call: RecurrenceCall, shard: Shard, impl: str) -> dict[str, Maps]:
    """`N` of this rank's pieces whose state leaves, and `M` of those that it also enters."""
    left = [link for chain in shard.chains for link in chain[:-1] if link.owner == shard.rank]
    through = [link for chain in shard.chains for link in chain[1:-1] if link.owner == shard.rank]
    found: dict[str, Maps] = {"M": {}, "N": {}}
    if left:
        part = part_of(call, shard, left)
        start = None
        if call.initial_state is not None:
            index = torch.tensor([link.piece for link in left], device=call.device)
            begins = shard.begins[index][:, None, None, None]
            start = torch.where(begins, call.initial_state[index], torch.zeros_like(call.initial_state[index]))
        found["N"] = dict(zip(left, states(part, start, impl), strict=True))
    if through and not call.rule.corrected:
        found["M"] = {link: diagonal(call, shard.pieces[shard.rank][link.piece]) for link in through}
    elif through:
        part = part_of(call, shard, through)
        identity = torch.eye(call.K, dtype=call.state_dtype, device=call.device)
        start = identity.expand(len(through), call.value_heads, call.K, call.K)
        part = part.but(v=part.v.new_zeros(*part.v.shape[:3], call.K))
        found["M"] = dict(zip(through, states(part, start, impl), strict=True))
    return found


def states(part: RecurrenceCall, start: Tensor | None, impl: str) -> Tensor:
    """The final states of the sequences of `part`."""
    return op.RECURRENCE(part.but(initial_state=start), impl, "map of a shard")[1]


def part_of(call: RecurrenceCall, shard: Shard, links: Sequence[Link]) -> RecurrenceCall:
    """The tokens of some of this rank's pieces, as a call whose outputs nobody reads."""
    its = [shard.pieces[shard.rank][link.piece] for link in links]
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
