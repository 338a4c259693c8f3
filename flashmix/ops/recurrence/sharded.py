"""The recurrence over a shard: the maps of a piece, whose `M` is a matrix for rules with corrections.

Without an implementation's own halves `M` is the op run from the identity; without corrections it is diagonal and follows from the decays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.op.call import Outputs
from flashmix.op.choose import choose
from flashmix.ops.recurrence import op
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.parallel import joined as states
from flashmix.parallel.exchange import Moved
from flashmix.parallel.joined import CallHalves, StateMap, joined, part_of
from flashmix.parallel.shard import Shard, ShardPiece


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
    o, state = joined(local, acts(call), shard, halves, impl, asked)
    return o.view(call.v.shape), state


def exchange(call: RecurrenceCall) -> Moved:
    """What the ranks exchange."""
    return states.exchange(call, acts(call))


def acts(call: RecurrenceCall) -> StateMap:
    """How its tokens act on the state."""
    return CORRECTED if call.rule.corrected else DIAGONAL


def dense(call: RecurrenceCall, shard: Shard) -> RecurrenceCall:
    """The call as a dense batch of this rank's pieces where they are equally long, so that kernels can cut them into segments."""
    lengths = {p.stop - p.start for p in shard.pieces[shard.rank]}
    if len(lengths) != 1 or min(lengths) < 2:
        return call
    rows = shard.count, min(lengths)
    names = [n for n in call.names if n != "initial_state" and (t := getattr(call, n)) is not None and t.dim() > 1]
    return call.but(**{n: (x := getattr(call, n)).reshape(*rows, *x.shape[2:]) for n in names}, packing=None)


def shapes(call: RecurrenceCall) -> dict[str, torch.Size]:
    """Of the maps of a piece: `N` `[HV, K, V]`, `M` `[HV, K, K]`, without corrections its diagonal on the axis of the decay."""
    HV, K, V, decay = call.value_heads, call.K, call.V, call.decay
    M = (
        (HV, K, K)
        if call.rule.corrected
        else (HV, K if decay is Decay.CHANNEL else 1, V if decay is Decay.VALUE else 1)
    )
    return {"N": torch.Size((HV, K, V)), "M": torch.Size(M)}


def from_identity(halves: CallHalves, pieces: Sequence[int]) -> Sequence[Tensor]:
    """`M` of pieces of a rule with corrections: the state after them from the identity, without values."""
    call: RecurrenceCall = halves.call
    part = part_of(call, halves.shard, pieces)
    identity = torch.eye(call.K, dtype=call.state_dtype, device=call.device)
    start = identity.expand(len(pieces), call.value_heads, call.K, call.K)
    return halves.states(part.but(v=part.v.new_zeros(*part.v.shape[:3], call.K)), start).unbind()


def diagonals(halves: CallHalves, pieces: Sequence[int]) -> Sequence[Tensor]:
    """`M` of pieces of a rule without corrections."""
    own = halves.shard.pieces[halves.shard.rank]
    return [diagonal(halves.call, own[i]) for i in pieces]


def diagonal(call: RecurrenceCall, piece: ShardPiece) -> Tensor:
    """`M` of a piece of a rule without corrections, the product of its decays, in the shape that `shapes` gives."""
    g, tokens, shape = call.log_decay, piece.stop - piece.start, shapes(call)["M"]
    if g is None:
        return torch.ones(shape, dtype=call.state_dtype, device=call.device)
    g = g.to(call.state_dtype)
    total = g * tokens if call.decay is Decay.HEAD else g[0, piece.first : piece.first + tokens].sum(0)
    return total.exp().view(shape)


CORRECTED = StateMap(op.RECURRENCE, shapes, lambda M, S, N: M @ S + N, lambda M, E: M.mT @ E, from_identity)
DIAGONAL = StateMap(op.RECURRENCE, shapes, lambda M, S, N: M * S + N, torch.mul, diagonals)
