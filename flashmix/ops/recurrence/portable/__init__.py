"""The recurrence in plain PyTorch, on any device: chunks, batched matrix products, a hand-written backward of each phase.

Everything is computed in float32 (float64 for float64 inputs). A call goes slab by slab (see `layout`), so that besides its
inputs, outputs and residuals it holds only a few tiles of one slab. The phases: `gate` (with the scores), `transform`,
`state`; the output is the two lines that remain of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops._scratch import scratch
from flashmix.ops.recurrence.portable.gate import make_decay, matmul
from flashmix.ops.recurrence.portable.layout import Layout, Slab, chunk_bound, chunk_size
from flashmix.ops.recurrence.portable.state import Decay, state_backward, state_forward
from flashmix.ops.recurrence.portable.step import step
from flashmix.ops.recurrence.portable.tiles import Gradients, Tiles, load_tiles, row_kinds, target
from flashmix.ops.recurrence.portable.transform import transform_forward
from flashmix.ops.recurrence.portable.value_gate import ValueDecay
from flashmix.ops.recurrence.problem import Gate, Operands, Problem, Rule

__all__ = ["backward", "forward", "residual_shapes"]


def forward(x: Operands, scale: float, read_before: bool, save: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output `[B, T, HV, V]`, final state `[N, HV, K, V]`, and with `save` the residuals of `residual_shapes`."""
    problem = Problem.of(x, read_before)
    if _is_step(problem):
        return (*step(x, scale, read_before, _dtype(problem)), [])
    return _chunked_forward(problem, Layout(problem, x.cu_seqlens), x, scale, save)


def _is_step(problem: Problem) -> bool:
    return problem.tokens == 1 and not problem.packed


def _dtype(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.dtype == torch.float64 else torch.float32


def residual_shapes(problem: Problem) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What `forward` keeps for `backward`: the state each chunk starts from, the scores and, of corrected rules, `nu` and `T`.

    A step keeps nothing: its backward computes these again.
    """
    return [] if _is_step(problem) else [(shape, _dtype(problem)) for shape in _kept_shapes(problem)]


def _kept_shapes(problem: Problem) -> list[tuple[int, ...]]:
    chunks, C = chunk_bound(problem), chunk_size(problem)
    if not problem.rule.corrected:
        return [(chunks, problem.K, problem.V), (chunks, C, C)]
    S = 2 if problem.rule is Rule.DPLR else 1
    return [(chunks, problem.K, problem.V), (chunks, 2 * C, S * C), (chunks, C, problem.V), (chunks, C, C)]


def _chunked_forward(
    problem: Problem, layout: Layout, x: Operands, scale: float, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    dtype = _dtype(problem)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    S = layout.first_state(x.initial_state, dtype)
    shapes = _kept_shapes(problem)
    kept = [S.new_empty(shape) for shape in shapes] if save else []
    for slab in layout.slabs():
        _forward_slab(problem, layout, slab, x, scale, S, [residual[slab.chunks] for residual in kept], o)
    for residual in kept:  # a pack may have fewer chunks than its sizes allow
        residual[layout.chunks :] = 0
    return o, layout.last_state(S), kept


def _forward_slab(
    problem: Problem, layout: Layout, slab: Slab, x: Operands, scale: float, S: Tensor, kept: list[Tensor], o: Tensor
) -> None:
    """Advances `S` over a slab and writes its part of `o` and, unless the list is empty, of the residuals."""
    C, rule = layout.C, problem.rule
    scratch.restart()
    tiles = load_tiles(problem, layout, slab, x, scale, S)
    decay = _decay(problem, tiles)
    A = decay.pairs(tiles.X, tiles.Y, kept[1] if kept else scratch.tile(S, slab.count, *_kept_shapes(problem)[1][1:]))
    T = None
    if rule.corrected:
        T = transform_forward(A[:, C:, -C:], kept[3] if kept else scratch.tile(A, slab.count, C, C))
    rows, columns = decay.rows(tiles.X).flatten(1, 2), decay.columns(tiles.Y).flatten(1, 2)
    within = decay.within(A[:, :, :C], tiles.v) if rule.raw else None
    states = kept[0] if kept else None
    Z = state_forward(layout, slab, S, decay, rows, columns, T, within, target(problem, tiles), tiles.W, states)
    o_tile = Z[:, :C]
    if T is not None:
        nu = tiles.W[:, -C:]
        o_tile = matmul(A[:, :C, -C:], nu).add_(o_tile)
        if kept:
            kept[2].copy_(nu)
    layout.store(o_tile, slab, o)


def backward(
    do: Tensor | None, dstate: Tensor | None, x: Operands, residuals: list[Tensor], scale: float, read_before: bool
) -> list[Tensor]:
    """Gradients of the operands that are there, in their order, from those of the output and of the final state."""
    problem = Problem.of(x, read_before)
    layout = Layout(problem, x.cu_seqlens)
    dtype = _dtype(problem)
    if not residuals:
        _, _, residuals = _chunked_forward(problem, layout, x, scale, save=True)
    do = torch.zeros_like(x.v) if do is None else do
    dS = layout.first_state(dstate, dtype)
    grads = Gradients(problem, x)
    for slab in reversed(layout.slabs()):
        kept = [residual[slab.chunks] for residual in residuals]
        _backward_slab(problem, layout, slab, x, scale, do, dS, kept, grads)
    return grads.finish(x, layout.last_state(dS))


def _backward_slab(
    problem: Problem, layout: Layout, slab: Slab, x: Operands, scale: float,
    do: Tensor, dS: Tensor, kept: list[Tensor], grads: Gradients,
) -> None:  # fmt: skip
    """Takes `dS` back over a slab and writes its part of the gradients."""
    C, rule = layout.C, problem.rule
    scratch.restart()
    tiles = load_tiles(problem, layout, slab, x, scale, dS)
    decay = _decay(problem, tiles)
    rows, columns = decay.rows(tiles.X), decay.columns(tiles.Y)
    states, A, *corrected = kept
    dZ = scratch.tile(A, slab.count, A.shape[1], problem.V)
    layout.load(do, slab, dZ[:, :C])
    T = None
    if corrected:
        tiles.W[:, -C:], T = corrected
    dW = decay.written_backward(A[:, :C], tiles.W, dZ[:, :C])
    drows, dcolumns = state_backward(
        layout, slab, dS, decay, rows.flatten(1, 2), columns.flatten(1, 2), T, states, tiles.W, dZ, dW
    )
    dX, dY = decay.keys_backward(rows, drows.view(rows.shape), columns, dcolumns.view(columns.shape))
    decay.pairs_backward(tiles.X, tiles.Y, A, decay.scores_backward(dZ, tiles.W), dX, dY)
    dR = dZ[:, -C:] if corrected else None
    dv = None
    if rule.raw:
        dv = dW[:, :C] if dR is None else dW[:, :C] + A[:, C:, :C].mT @ dR
    grads.store(layout, slab, tiles, dX, dY, dv, dR, decay.finish(), scale)


def _decay(problem: Problem, tiles: Tiles) -> Decay:
    """The decay of a slab."""
    if problem.gate is Gate.VALUE and tiles.g is not None:
        return ValueDecay(tiles.g.exp_(), row_kinds(problem))
    return make_decay(tiles.g, row_kinds(problem), tiles.Y.shape[1])
