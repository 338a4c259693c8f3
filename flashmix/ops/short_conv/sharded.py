"""Convolutions over a shard: the inputs before each piece come from the ranks that have them.

Only the first `W - 1` outputs of a piece read them. All others are computed while they are on their way, and those few as soon as they
are there, beside the others; in the backward the gradients of those inputs are computed first and go back meanwhile.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashmix.gpu import device as gpu
from flashmix.op.call import Op, Outputs
from flashmix.op.choose import choose
from flashmix.op.run import plainly
from flashmix.ops.short_conv import op
from flashmix.ops.short_conv.call import Convolutions, ShortConvCall
from flashmix.parallel.exchange import Moved, halo, halo_moved, halo_wants, reaches_before, together
from flashmix.parallel.heads import KeyRows, RowPlan, Transfer, plan_of
from flashmix.parallel.shard import Shard

ALL = slice(0, 1)  # inputs are exchanged as rows of one head
EXCHANGE = 4  # multiprocessors that a collective of few rows takes


def exchange(call: Convolutions) -> Moved:
    """What the ranks exchange."""
    shard: Any = call.packing
    narrow = reads_few(shard, call.width - 1, call.initial_state is not None)
    return halo_moved(shard, call.inputs, call.width - 1, call.initial_state, narrow)


def run(call: Convolutions, impl: str, asked: str) -> Outputs:
    """The outputs of a call whose packing is a `Shard`."""
    shard: Any = call.packing
    its = op.SHORT_CONV if isinstance(call, ShortConvCall) else op.SHORT_CONV_QKV
    local = call.but(packing=None if shard.count == 1 and shard.total else shard.local)
    count, given = call.width - 1, call.initial_state is not None
    if shard.made(("meanwhile", count, given), lambda: reads_few(shard, count, given)):
        chosen = choose(asked, its.implementations, local, impl).name
        plan = plan_of(shard, ("rows before", count), lambda: halo_wants(shard, count, False))
        gradient = torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors())
        return Meanwhile.apply(local, its, shard, plan, chosen, gradient, *local.tensors())
    state, inputs = halo(shard, call.inputs, count, call.initial_state)
    own = {name: x for (name, *_), x in zip(call.NAMES, inputs, strict=True)}
    return its(local.but(initial_state=state, **own), impl, asked)


def reads_few(shard: Shard, count: int, given: bool) -> bool:
    """Whether every piece that goes on has the rows that the next one reads, none of which lie in an initial state."""
    if not count or not shard.chains or (given and reaches_before(shard, count)):
        return False
    return all(p.begins or p.stop - p.start >= count for own in shard.pieces for p in own)


class Continued(NamedTuple):
    """This rank's pieces that go on from another: their indices, the rows of their first tokens, and what is known before them.

    `skips` marks them among all pieces. `places`: the rows of `[pieces * count]` rows before them that lie in their sequences; None if all
    do.
    """

    pieces: Tensor
    skips: Tensor
    first: list[int]
    places: Tensor | None


def continued(shard: Shard, count: int) -> Continued:
    its = [(i, p) for i, p in enumerate(shard.pieces[shard.rank]) if not p.begins]
    known = [min(count, p.start - shard.boundaries[p.sequence]) for _, p in its]
    places = [row for j, n in enumerate(known) for row in range((j + 1) * count - n, (j + 1) * count)]
    whole = len(places) == count * len(its)
    indices = shard.tensor([i for i, _ in its], torch.int64)
    skips = shard.tensor([not p.begins for p in shard.pieces[shard.rank]], torch.bool)
    return Continued(indices, skips, [p.first for _, p in its], None if whole else shard.tensor(places, torch.int64))


class Meanwhile(torch.autograd.Function):
    """The convolutions of a rank's tokens while the rows before its pieces are on their way; `tensors` are those of the call."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Convolutions,
        its: Op,
        shard: Shard,
        plan: RowPlan,
        chosen: str,
        gradient: bool,
        *tensors: Tensor,
    ) -> Outputs:
        count = call.width - 1
        pieces = shard.made(("continued", count), lambda: continued(shard, count))
        rows = KeyRows(shard, plan, *(x.unsqueeze(2) for x in call.inputs))
        asked = rows.ask(ALL)
        outputs, _ = its.forward(call.but(skips=pieces.skips) if pieces.first else call, False, chosen)
        before = None
        if pieces.first:
            with nullcontext() if asked is None else asked.behind():
                before = Meanwhile.first_outputs(call, its, chosen, pieces, rows, asked, outputs)
            if before.is_cuda:
                before.record_stream(torch.cuda.current_stream(before.device))
        if asked is not None:
            asked.arrived()
        if gradient:
            kept = call.for_backward(outputs)
            ctx.names = [name for name in call.names if getattr(call, name) is not None]
            ctx.saved = [name for name in ctx.names if getattr(kept, name) is not None]
            ctx.call, ctx.its, ctx.chosen = kept.but(**dict.fromkeys(call.names)), its, chosen
            ctx.shard, ctx.plan = shard, plan
            ctx.pieces, ctx.continues = pieces, before is not None
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*(getattr(kept, n) for n in ctx.saved), *(() if before is None else (before,)))
        return outputs

    @staticmethod
    def first_outputs(
        call: Convolutions,
        its: Op,
        chosen: str,
        pieces: Continued,
        rows: KeyRows,
        asked: Transfer | None,
        outputs: Outputs,
    ) -> Tensor:
        """Writes the first outputs of the pieces that go on; returns the rows before these."""
        count = call.width - 1
        found = [x[0, :, 0] for x in rows.wanted(asked, rows.own(ALL), ALL)]
        before = state_of(pieces, count, together(found, found[0], 1))
        some, _ = its.forward(firsts(call, pieces, before), False, chosen)
        for y, few in zip(outputs[: len(call.NAMES)], some, strict=True):
            for j, first in enumerate(pieces.first):
                y[0, first : first + count].copy_(few[j])
        return before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call = ctx.call.but(**dict(zip(ctx.saved, saved, strict=False)))
        wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[6:], strict=True) if needs]
        with plainly(call.device):
            found = Meanwhile.gradients(ctx, call, saved[-1] if ctx.continues else None, grads, wanted)
        return None, None, None, None, None, None, *(found.get(n) if n in wanted else None for n in ctx.names)

    @staticmethod
    def gradients(
        ctx: Any, call: Convolutions, before: Tensor | None, grads: tuple[Tensor | None, ...], wanted: list[str]
    ) -> dict[str, Tensor | None]:
        """The gradients of the call's tensors, `before` the rows before the pieces that go on."""
        pieces, its, count, parts = ctx.pieces, ctx.its, call.width - 1, len(call.NAMES)
        rows = KeyRows(ctx.shard, ctx.plan, *(x.unsqueeze(2) for x in call.inputs))
        given, state = call.initial_state is not None, call.initial_state
        back: list[Tensor] = []
        if before is not None:
            few = [None if y is None else first_tokens(y, pieces, count) for y in grads[:parts]]
            if any(y is not None for y in few):
                some = firsts(call, pieces, before)
                of_rows = its.backward(some, (), few, ("initial_state",), ctx.chosen)["initial_state"].flatten(0, 1)
                of_rows = of_rows if pieces.places is None else of_rows[pieces.places]
                back = [part[None, :, None] for part in of_rows.split(call.channels, 1)]
            if state is None:
                whole = len(before) == ctx.shard.count
                state = before if whole else before.new_zeros(ctx.shard.count, *before.shape[1:])
            if state is not before:
                state = state.index_copy(0, pieces.pieces, before.to(state.dtype))
        back = back or [x.new_zeros(1, rows.rows, 1, x.shape[2]) for x in call.inputs]
        returned = rows.give_back(back, ALL, narrow=True)  # that no rank wants a row twice `reads_few` says
        asked = [name for name in wanted if name not in its.passes]
        found: dict[str, Tensor | None] = {}
        if any(y is not None for y in grads):
            with gpu.beside(EXCHANGE if returned is not None else 0):
                found |= its.backward(call.but(initial_state=state), (), grads, asked, ctx.chosen)
        own: list[Tensor] = []
        for x, (name, *_) in zip(call.inputs, call.NAMES, strict=True):
            dx = found.get(name)
            own.append(torch.zeros_like(x) if dx is None else dx)
        rows.add_to(returned, back, ALL, [dx.unsqueeze(2) for dx in own])
        found |= {name: dx for (name, *_), dx in zip(call.NAMES, own, strict=True)}
        if given and (d_state := found.get("initial_state")) is not None:
            found["initial_state"] = torch.where(ctx.shard.begins[:, None, None], d_state, 0.0)
        return found | {name: grads[index] for name, index in its.passes.items()}


def state_of(pieces: Continued, count: int, rows: Tensor) -> Tensor:
    """The rows before the pieces that go on, `[pieces, count, D]`, zeros before the beginning of a sequence."""
    if pieces.places is not None:
        rows = rows.new_zeros(count * len(pieces.first), rows.shape[1]).index_copy_(0, pieces.places, rows)
    return rows.view(len(pieces.first), count, rows.shape[1])


def firsts(call: Convolutions, pieces: Continued, before: Tensor) -> Convolutions:
    """The call of the first tokens of the pieces that go on, a batch of them."""
    names = [x for x, *_ in call.NAMES] + (["residual"] if call.added is not None else [])
    few = {n: first_tokens(getattr(call, n), pieces, call.width - 1) for n in names}
    return call.but(**few, initial_state=before, packing=None, return_state=False)


def first_tokens(x: Tensor, pieces: Continued, count: int) -> Tensor:
    """The first tokens of the pieces that go on, `[pieces, count, D]`; a view of one."""
    some = [x[:, first : first + count] for first in pieces.first]
    return together(some, x)
