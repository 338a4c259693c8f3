"""A slab's operands as stacked tiles, and the gradients of stacked tiles back as operands. The only place that knows the rules.

    rule      row keys X        column keys Y   written W    target
    LINEAR    q                 k               v            -
    TIED      q, -beta k        k               nu           beta v
    UNTIED    q, a              b               nu           v
    DPLR      q, a              k, b            v, nu        0

The tied correction reads the decayed state: its row is inclusive. `a` reads the state before the decay: its row is exclusive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.ops._scratch import scratch
from flashmix.ops.recurrence.portable.gate import Row
from flashmix.ops.recurrence.portable.layout import Layout, Slab
from flashmix.ops.recurrence.problem import Gate, Operands, Problem, Rule


def row_kinds(problem: Problem) -> tuple[Row, ...]:
    """How each row key of the problem reads."""
    query = Row(exclusive=problem.read_before, diagonal=not problem.read_before)
    if problem.rule is Rule.LINEAR:
        return (query,)
    return query, Row(exclusive=problem.rule is not Rule.TIED, diagonal=False)


@dataclass
class Tiles:
    """The operands of a slab: `X` `[chunks, R, C, K]`, `Y` `[chunks, S, C, K]`, `W` `[chunks, S * C, V]` (its corrected
    part still empty)."""

    X: Tensor
    Y: Tensor
    W: Tensor
    v: Tensor  # the values as they came, [chunks, C, V]; a view of W where they are written raw
    beta: Tensor | None  # [chunks, C, 1]
    g: Tensor | None  # [chunks, C] or [chunks, C, K]


def load_tiles(problem: Problem, layout: Layout, slab: Slab, x: Operands, scale: float, like: Tensor) -> Tiles:
    """The tiles of a slab, in the dtype of `like`; the query is scaled."""
    rule, C, n = problem.rule, layout.C, slab.count

    def empty(*shape: int) -> Tensor:
        return scratch.tile(like, n, *shape)

    X = empty(2 if rule.corrected else 1, C, problem.K)
    Y = empty(2 if rule is Rule.DPLR else 1, C, problem.K)
    W = empty(Y.shape[1] * C, problem.V)
    layout.load(x.q, slab, X[:, 0]).mul_(scale)
    v = layout.load(x.v, slab, W[:, :C] if rule.raw else empty(C, problem.V))
    if x.k is not None:
        layout.load(x.k, slab, Y[:, 0])
    beta = None
    if x.beta is not None:
        beta = layout.load(x.beta, slab, empty(C)).unsqueeze(-1)
        torch.mul(Y[:, 0], -beta, out=X[:, 1])
    if x.a is not None and x.b is not None:
        layout.load(x.a, slab, X[:, 1])
        layout.load(x.b, slab, Y[:, -1])
    g = None
    if x.g is not None:
        per_token = x.g.expand(problem.batch, problem.tokens, -1) if problem.gate is Gate.HEAD else x.g
        g = layout.load(per_token, slab, empty(C, *per_token.shape[3:]))
    return Tiles(X, Y, W, v, beta, g)


def target(problem: Problem, tiles: Tiles) -> Tensor | None:
    """What the correction aims at, `[chunks, C, V]`; None where the rule has no correction or aims at 0."""
    if problem.rule is Rule.UNTIED:
        return tiles.v
    return None if tiles.beta is None else torch.mul(tiles.v, tiles.beta, out=scratch.tile(tiles.v, *tiles.v.shape))


class Gradients:
    """The gradients of the operands, filled slab by slab."""

    def __init__(self, problem: Problem, x: Operands) -> None:
        self.problem = problem
        self.q, self.k, self.v = torch.empty_like(x.q), _empty_like(x.k), torch.empty_like(x.v)
        self.beta, self.a, self.b = _empty_like(x.beta), _empty_like(x.a), _empty_like(x.b)
        self.g = _empty_like(x.g)
        if x.g is not None and problem.gate is Gate.HEAD:
            self.g = x.g.new_zeros(problem.batch, problem.tokens, problem.value_heads)

    def store(
        self, layout: Layout, slab: Slab, tiles: Tiles, dX: Tensor, dY: Tensor, dv: Tensor | None, dR: Tensor | None,
        dg: Tensor | None, scale: float,
    ) -> None:  # fmt: skip
        """Writes the gradients of a slab to their tokens; `dv` reaches raw values, `dR` `[chunks, C, V]` the target."""
        layout.store(dX[:, 0].mul_(scale), slab, self.q)
        if self.beta is not None and tiles.beta is not None and dR is not None:
            key = tiles.Y[:, 0]
            value, keyed = scratch.tile(dR, *dR.shape), scratch.tile(key, *key.shape)
            dbeta = torch.mul(dR, tiles.v, out=value).sum(-1) - torch.mul(dX[:, 1], key, out=keyed).sum(-1)
            layout.store(dbeta, slab, self.beta)
            dY[:, 0].addcmul_(dX[:, 1], tiles.beta, value=-1)
            dv = torch.mul(dR, tiles.beta, out=value)
        if self.k is not None:
            layout.store(dY[:, 0], slab, self.k)
        if self.a is not None and self.b is not None:
            layout.store(dX[:, 1], slab, self.a)
            layout.store(dY[:, -1], slab, self.b)
        written = dR if dv is None else dv
        assert written is not None
        layout.store(written, slab, self.v)
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
