"""A slab's operands as stacked tiles, and the gradients of stacked tiles back as operands. The only place that knows the rules.

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

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Gate, Operands, Problem, Rule
from flashmix.ops.recurrence.portable.gate import Row
from flashmix.ops.recurrence.portable.layout import Layout, Slab


def row_kinds(problem: Problem) -> tuple[Row, ...]:
    """How each row key of the problem reads."""
    query = Row(exclusive=problem.read_before, diagonal=not problem.read_before)
    if problem.rule is Rule.LINEAR:
        return (query,)
    return query, Row(exclusive=problem.rule is not Rule.TIED, diagonal=False)


@dataclass
class Tiles:
    """The keys of a slab, `X` `[chunks, R, C, K]` and `Y` `[chunks, S, C, K]`, its write strengths (negated) and log decays."""

    X: Tensor
    Y: Tensor
    minus_beta: Tensor | None  # [chunks, C, 1]
    g: Tensor | None  # [chunks, C, 1 or K or V]


def load_tiles(
    problem: Problem, layout: Layout, slab: Slab, x: Operands, like: Tensor, gate: bool = True
) -> Tiles:  # fmt: skip
    """The tiles of a slab, in the dtype of `like`, the log decay's only with `gate`."""
    rule, C, n = problem.rule, layout.C, slab.count
    X = scratch.tile(like, n, 2 if rule.corrected else 1, C, problem.K)
    Y = scratch.tile(like, n, 2 if rule is Rule.DPLR else 1, C, problem.K)
    layout.load(x.q, slab, X[:, 0])
    if x.k is not None and x.beta is None:
        layout.load(x.k, slab, Y[:, 0])
    if x.a is not None and x.b is not None:
        layout.load(x.a, slab, X[:, 1])
        layout.load(x.b, slab, Y[:, -1])
    minus_beta = g = None
    if x.k is not None and x.beta is not None:
        minus_beta = layout.load(x.beta, slab, scratch.tile(like, n, C, 1), minus=True)
        torch.mul(layout.load(x.k, slab, X[:, 1], minus=True), minus_beta, out=Y[:, 0])
    if x.g is not None and gate:
        per_token = x.g.expand(problem.batch, problem.tokens, -1) if problem.gate is Gate.HEAD else x.g
        channels = per_token.shape[3] if per_token.dim() == 4 else 1
        g = layout.load(per_token, slab, scratch.tile(like, n, C, channels))
    return Tiles(X, Y, minus_beta, g)


class Gradients:
    """The gradients of the operands, filled slab by slab."""

    def __init__(self, problem: Problem, x: Operands, gate_gradient: bool) -> None:
        self.problem = problem
        self.q, self.k, self.v = torch.empty_like(x.q), _empty_like(x.k), torch.empty_like(x.v)
        self.beta, self.a, self.b = _empty_like(x.beta), _empty_like(x.a), _empty_like(x.b)
        self.g = _empty_like(x.g) if gate_gradient else None
        if self.g is not None and x.g is not None and problem.gate is Gate.HEAD:
            self.g = x.g.new_zeros(problem.batch, problem.tokens, problem.value_heads)

    def store(
        self, layout: Layout, slab: Slab, tiles: Tiles, dX: Tensor, dY: Tensor, dv: Tensor, dg: Tensor | None
    ) -> None:
        """Writes the gradients of a slab to their tokens; `dv` `[chunks, C, V]` is that of raw values or of the target."""
        layout.store(dX[:, 0], slab, self.q)
        layout.store(dv, slab, self.v)
        if self.k is not None and self.beta is not None and tiles.minus_beta is not None:
            # with a = -k and y = -beta a: dbeta = -dy . a, dk = -(da - beta dy)
            minus_dbeta = torch.mul(dY[:, 0], tiles.X[:, 1], out=tiles.Y[:, 0]).sum(-1, keepdim=True)
            layout.store(minus_dbeta, slab, self.beta, minus=True)
            layout.store(dX[:, 1].addcmul_(dY[:, 0], tiles.minus_beta), slab, self.k, minus=True)
        elif self.k is not None:
            layout.store(dY[:, 0], slab, self.k)
        if self.a is not None and self.b is not None:
            layout.store(dX[:, 1], slab, self.a)
            layout.store(dY[:, -1], slab, self.b)
        if self.g is not None and dg is not None:
            layout.store(dg, slab, self.g)

    def finish(self, x: Operands, dstate: Tensor) -> list[Tensor]:
        """Those of `q, k, v, beta, a, b, g, initial_state` that are there."""
        dg = self.g
        if dg is not None and self.problem.gate is Gate.HEAD:
            dg = dg.sum((0, 1), dtype=torch.float64).to(dg.dtype)
        found = [self.q, self.k, self.v, self.beta, self.a, self.b, dg, None if x.initial_state is None else dstate]
        return [t for t in found if t is not None]


def _empty_like(t: Tensor | None) -> Tensor | None:
    return None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device)
