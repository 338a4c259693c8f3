"""The recurrence in plain PyTorch, on any device: chunks, batched matrix products, a hand-written backward of each phase.

Everything is computed in float32 (float64 for float64 inputs). A call goes slab by slab (see `layout`), so that besides its
inputs, outputs and residuals it holds only a few tiles of one slab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashmix.ops.recurrence.portable.gate import make_decay
from flashmix.ops.recurrence.portable.layout import CHUNK, Layout, Slab
from flashmix.ops.recurrence.portable.output import output_backward, output_forward
from flashmix.ops.recurrence.portable.scores import Decay, Scores, Tiles, scores_backward, scores_forward
from flashmix.ops.recurrence.portable.state import state_backward, state_forward
from flashmix.ops.recurrence.portable.step import step
from flashmix.ops.recurrence.portable.transform import transform_forward
from flashmix.ops.recurrence.problem import Gate, Operands, Problem, Rule

__all__ = ["backward", "forward", "residual_shapes"]


def forward(x: Operands, scale: float, read_before: bool, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output `[B, T, HV, V]`, final state `[N, HV, K, V]`, and with `save` the residuals of `residual_shapes`."""
    problem = Problem.of(x, read_before)
    dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    if _is_step(problem):
        return (*step(x, scale, read_before, dtype), [])
    o, state, residuals = _chunked_forward(problem, Layout(problem, x.cu_seqlens), x, scale, dtype, save)
    return o, state, residuals


def _is_step(problem: Problem) -> bool:
    return problem.tokens == 1 and not problem.packed


def residual_shapes(problem: Problem) -> list[tuple[int, ...]]:
    """What `forward` keeps for `backward`: the state each chunk starts from and, of corrected rules, `nu` and `T`.

    A step keeps nothing: its backward computes these again.
    """
    if _is_step(problem):
        return []
    chunks = Layout.chunk_bound(problem) * problem.value_heads
    shapes: list[tuple[int, ...]] = [(chunks, problem.K, problem.V)]
    if problem.rule.corrected:
        shapes += [(chunks, CHUNK, problem.V), (chunks, CHUNK, CHUNK)]
    return shapes


def _chunked_forward(
    problem: Problem, layout: Layout, x: Operands, scale: float, dtype: torch.dtype, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    S = _first_state(problem, layout, x.initial_state, dtype)
    chunks = Layout.chunk_bound(problem) * problem.value_heads
    shapes = [(chunks, problem.K, problem.V), (chunks, CHUNK, problem.V), (chunks, CHUNK, CHUNK)]
    kept = [S.new_empty(shape) for shape in shapes[: 3 if problem.rule.corrected else 1]] if save else []
    for slab in layout.slabs():
        work = _Work.load(problem, layout, x, slab, scale, dtype)
        here = layout.chunks(slab)
        count = here.stop - here.start
        states = kept[0][here] if save else S.new_empty(count, *shapes[0][1:])
        nu = T = None
        if problem.rule.corrected:
            nu = kept[1][here] if save else S.new_empty(count, *shapes[1][1:])
            T = transform_forward(work.A.ab)
            if save:
                kept[2][here] = T
            work.target(nu)
        write = work.raw_columns.mT @ work.tiles.v if work.raw_columns is not None else None
        state_forward(layout, slab, S, work.decay.total, write, work.erase, T, work.columns, states, nu)
        layout.store(output_forward(work.tiles, work.rows, work.A, states, nu), slab, o)
    return o, layout.unsort_state(S), kept


def backward(
    do: Tensor | None, dstate: Tensor | None, x: Operands, residuals: list[Tensor], scale: float, read_before: bool
) -> list[Tensor]:
    """Gradients of the operands that are there, in their order, from those of the output and of the final state."""
    problem = Problem.of(x, read_before)
    dtype = torch.float64 if problem.dtype == torch.float64 else torch.float32
    layout = Layout(problem, x.cu_seqlens)
    if not residuals:
        _, _, residuals = _chunked_forward(problem, layout, x, scale, dtype, save=True)
    do = torch.zeros_like(x.v) if do is None else do
    dS = _first_state(problem, layout, dstate, dtype)
    grads = Gradients.like(x)
    for slab in reversed(layout.slabs()):
        work = _Work.load(problem, layout, x, slab, scale, dtype)
        tile_do = layout.load(do, slab, dtype)
        states, nu, T = (*(kept[layout.chunks(slab)] for kept in residuals), None, None)[:3]
        dstates = torch.empty_like(states)
        dR = work.A.qb.mT @ tile_do if work.A.qb is not None else None
        read = work.rows.mT @ tile_do
        state_backward(layout, slab, dS, work.decay.total, read, work.erase, T, work.columns, dstates, dR)
        grad, dA = output_backward(
            work.tiles, work.rows, work.erase, work.columns, work.raw_columns, work.A,
            states, dstates, nu, tile_do, dR, work.decay,
        )  # fmt: skip
        scores_backward(work.tiles, work.A, dA, work.decay, grad)
        grad.q.mul_(scale)
        grads.store(layout, slab, grad, work.decay.finish())
    return grads.finish(x, layout.unsort_state(dS))


def _first_state(problem: Problem, layout: Layout, state: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The state (or its gradient) that a pass over the chunks starts from, in the order of the chunks."""
    if state is None:
        shape = (problem.sequences * problem.value_heads, problem.K, problem.V)
        return torch.zeros(shape, dtype=dtype, device=problem.device)
    return layout.sort_state(state.to(dtype))


@dataclass
class _Work:
    """What both directions need of a slab: tiles, decay, scores, and the keys as the state sees them (~q, ~a, ^b, ^k)."""

    tiles: Tiles
    decay: Decay
    A: Scores
    rows: Tensor
    erase: Tensor | None
    columns: Tensor | None
    raw_columns: Tensor | None

    @staticmethod
    def load(problem: Problem, layout: Layout, x: Operands, slab: Slab, scale: float, dtype: torch.dtype) -> _Work:
        def tile(t: Tensor | None) -> Tensor | None:
            return None if t is None else layout.load(t, slab, dtype)

        q = layout.load(x.q, slab, dtype).mul_(scale)
        beta = tile(x.beta)
        tiles = Tiles(
            problem.rule, problem.read_before, q, tile(x.k), tile(x.v),
            None if beta is None else beta.unsqueeze(-1), tile(x.a), tile(x.b),
        )  # fmt: skip
        g = x.g.expand(problem.batch, problem.tokens, -1) if x.g is not None and problem.gate is Gate.HEAD else x.g
        decay = make_decay(tile(g), q)
        erase = columns = raw_columns = None
        if problem.rule is Rule.TIED:
            erase = -tiles.beta * decay.rows(tiles.k)
        elif problem.rule.corrected:
            erase = decay.rows(tiles.a, exclusive=True)
        if problem.rule.corrected:
            columns = decay.columns(tiles.write)
        if problem.rule.raw:
            raw_columns = decay.columns(tiles.k)
        rows = decay.rows(q, exclusive=problem.read_before)
        return _Work(tiles, decay, scores_forward(tiles, decay), rows, erase, columns, raw_columns)

    def target(self, out: Tensor) -> None:
        """`r` of the corrected value: what the state should hold, before the state is read."""
        if self.tiles.rule is Rule.TIED:
            torch.mul(self.tiles.v, self.tiles.beta, out=out)
        elif self.tiles.rule is Rule.DPLR:
            torch.bmm(self.A.ak, self.tiles.v, out=out)
        else:
            out.copy_(self.tiles.v)


@dataclass
class Gradients:
    """The gradients of the operands, filled slab by slab."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    g: Tensor | None

    @staticmethod
    def like(x: Operands) -> Gradients:
        B, T, HV, _ = x.v.shape
        empty = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x.q, x.k, x.v)]
        more = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x.beta, x.a, x.b)]
        g = x.g
        if g is not None:
            g = torch.empty((B, T, HV) if x.gate is Gate.HEAD else g.shape, dtype=g.dtype, device=g.device)
        return Gradients(*empty, *more, g)  # type: ignore[arg-type]

    def store(self, layout: Layout, slab: Slab, grad: Tiles, dg: Tensor | None) -> None:
        """Writes the tiles of a slab to their tokens."""
        dbeta = None if grad.beta is None else grad.beta.squeeze(-1)
        tiles = (grad.q, grad.k, grad.v, dbeta, grad.a, grad.b, dg)
        for tile, out in zip(tiles, (self.q, self.k, self.v, self.beta, self.a, self.b, self.g), strict=True):
            if tile is not None and out is not None:
                layout.store(tile, slab, out)

    def finish(self, x: Operands, dstate: Tensor) -> list[Tensor]:
        """Those of `q, k, v, beta, a, b, g, initial_state` that are there."""
        if self.g is not None and x.gate is Gate.HEAD:
            self.g = self.g.sum((0, 1))
        found = [self.q, self.k, self.v, self.beta, self.a, self.b, self.g]
        found.append(None if x.initial_state is None else dstate)
        return [t for t in found if t is not None]
