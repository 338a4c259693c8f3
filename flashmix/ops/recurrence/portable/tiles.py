"""A slab's tensors as stacked tiles, and the gradients of stacked tiles as those of the tensors. The only place that knows the rules.

    rule      row keys X     column keys Y   written W    target R
    LINEAR    q              k               v            -
    TIED      q, -k          beta k          nu           v
    UNTIED    q, a           b               nu           v
    DPLR      q, a           k, b            v, nu        0

The tied correction reads the decayed state: its row is inclusive. `a` reads the state before the decay: its row is exclusive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.op.call import Gradients
from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule
from flashmix.ops.recurrence.portable.decay.base import Row
from flashmix.ops.recurrence.portable.layout import Layout, Slab


def row_kinds(call: RecurrenceCall) -> tuple[Row, ...]:
    """How each row key of the call reads."""
    query = Row(exclusive=call.read_before, diagonal=not call.read_before)
    if call.rule is Rule.LINEAR:
        return (query,)
    return query, Row(exclusive=call.rule is not Rule.TIED, diagonal=False)


@dataclass
class SlabTiles:
    """The keys of a slab, `X` `[chunks, R, C, K]` and `Y` `[chunks, S, C, K]`, its `beta` (negated) and log decays."""

    X: Tensor
    Y: Tensor
    minus_beta: Tensor | None  # [chunks, C, 1]
    g: Tensor | None  # [chunks, C, 1 or K or V]


def load_tiles(call: RecurrenceCall, layout: Layout, slab: Slab, like: Tensor, decay: bool = True) -> SlabTiles:
    """The tiles of a slab, in the dtype of `like`, the log decay's only with `decay`."""
    rule, C, n = call.rule, layout.C, slab.count
    X = scratch.tile(like, n, 2 if rule.corrected else 1, C, call.K)
    Y = scratch.tile(like, n, 2 if rule is Rule.DPLR else 1, C, call.K)
    layout.load(call.q, slab, X[:, 0])
    if call.k is not None and call.beta is None:
        layout.load(call.k, slab, Y[:, 0])
    if call.a is not None and call.b is not None:
        layout.load(call.a, slab, X[:, 1])
        layout.load(call.b, slab, Y[:, -1])
    minus_beta = g = None
    if call.k is not None and call.beta is not None:
        minus_beta = layout.load(call.beta, slab, scratch.tile(like, n, C, 1), minus=True)
        torch.mul(layout.load(call.k, slab, X[:, 1], minus=True), minus_beta, out=Y[:, 0])
    if call.log_decay is not None and decay:
        log_decay = call.log_decay
        per_token = log_decay.expand(call.batch, call.tokens, -1) if call.decay is Decay.HEAD else log_decay
        channels = per_token.shape[3] if per_token.dim() == 4 else 1
        g = layout.load(per_token, slab, scratch.tile(like, n, C, channels))
    return SlabTiles(X, Y, minus_beta, g)


class SlabGradients:
    """The gradients of a call's tensors, filled slab by slab."""

    def __init__(self, call: RecurrenceCall, decay: bool) -> None:
        """`decay`: whether the gradient of the log decay is wanted."""
        self.call = call
        self.q, self.v = _empty_like(call.q), _empty_like(call.v)
        self.k, self.a, self.b, self.beta, self.log_decay = (
            None if t is None else _empty_like(t)
            for t in (call.k, call.a, call.b, call.beta, call.log_decay if decay else None)
        )
        if self.log_decay is not None and call.decay is Decay.HEAD:
            self.log_decay = self.log_decay.new_zeros(call.batch, call.tokens, call.value_heads)

    def store(
        self, layout: Layout, slab: Slab, tiles: SlabTiles, dX: Tensor, dY: Tensor, dv: Tensor, dg: Tensor | None
    ) -> None:
        """Writes the gradients of a slab to their tokens; `dv` `[chunks, C, V]` is that of raw values or of the target."""
        layout.store(dX[:, 0], slab, self.q)
        layout.store(dv, slab, self.v)
        if self.k is not None and self.beta is not None and tiles.minus_beta is not None:
            # with a = -k and y = -beta a: dbeta = -dy . a, dk = -(da - beta dy)                                       (6.5)
            minus_dbeta = torch.mul(dY[:, 0], tiles.X[:, 1], out=tiles.Y[:, 0]).sum(-1, keepdim=True)
            layout.store(minus_dbeta, slab, self.beta, minus=True)
            layout.store(dX[:, 1].addcmul_(dY[:, 0], tiles.minus_beta), slab, self.k, minus=True)
        elif self.k is not None:
            layout.store(dY[:, 0], slab, self.k)
        if self.a is not None and self.b is not None:
            layout.store(dX[:, 1], slab, self.a)
            layout.store(dY[:, -1], slab, self.b)
        if self.log_decay is not None and dg is not None:
            layout.store(dg, slab, self.log_decay)

    def finish(self, dstate: Tensor) -> Gradients:
        """The gradients by field name."""
        d_log_decay = self.log_decay
        if d_log_decay is not None and self.call.decay is Decay.HEAD:
            d_log_decay = d_log_decay.sum((0, 1), dtype=torch.float64).to(d_log_decay.dtype)
        found = {name: getattr(self, name) for name in ("q", "k", "v", "a", "b", "beta")} | {
            "log_decay": d_log_decay,
            "initial_state": dstate,
        }
        return {name: t for name, t in found.items() if t is not None}


def _empty_like(t: Tensor) -> Tensor:
    return torch.empty(size=t.shape, dtype=t.dtype, device=t.device)
