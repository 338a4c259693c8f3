"""The recurrence in plain PyTorch, on any device: chunks, batched matrix products, a hand-written backward of each phase.

Everything is computed in float32 (float64 for float64 inputs). A call goes slab by slab (see `layout`), so that besides its
inputs, outputs and residuals it holds only a few tiles of one slab. The phases: `gate` (with the scores), `transform`,
`state`; the output is the two lines that remain of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.ops._scratch import scratch
from flashmix.ops.recurrence.portable.gate import ChannelDecay, NoDecay, TokenDecay, matmul
from flashmix.ops.recurrence.portable.layout import Layout, Slab, chunk_bound, chunk_size
from flashmix.ops.recurrence.portable.state import Decay, state_backward, state_forward
from flashmix.ops.recurrence.portable.step import step
from flashmix.ops.recurrence.portable.tiles import Gradients, Tiles, load_tiles, row_kinds
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
    return [(chunks, problem.K, problem.V), (chunks, 2 * C, S * C), (chunks, S * C, problem.V), (chunks, C, C)]


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
    C, V, rule = layout.C, problem.V, problem.rule
    scratch.restart()
    tiles = load_tiles(problem, layout, slab, x, S)
    states = kept[0] if kept else None
    A, *corrected = kept[1:] or [scratch.tile(S, slab.count, *shape[1:]) for shape in _kept_shapes(problem)[1:]]
    decay = _decay(problem, tiles)
    X, Y = tiles.X, tiles.Y
    decay.pairs(X, Y, A)
    rows, columns = decay.rows(X, out=X).flatten(1, 2), decay.columns(Y, out=Y).flatten(1, 2)
    W = corrected[0] if corrected else scratch.tile(S, slab.count, C, V)
    if rule.raw:
        layout.load(x.v, slab, W[:, :C])
    R = T = None
    if rule.corrected:
        T = transform_forward(A[:, C:, -C:], corrected[1])
        R = matmul(A[:, C:, :C], W[:, :C]) if rule.raw else layout.load(x.v, slab, scratch.tile(S, slab.count, C, V))
    Z = state_forward(layout, slab, S, decay.total, rows, columns, T, R, decay.written(W), states)
    layout.store(decay.output(Z[:, :C], A[:, :C], W, scale), slab, o)


def backward(
    do: Tensor | None, dstate: Tensor | None, x: Operands, residuals: list[Tensor], scale: float, read_before: bool,
    gate_gradient: bool = True,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the operands that are there, in their order, from those of the output and of the final state.

    The decay's is there only with `gate_gradient`.
    """
    problem = Problem.of(x, read_before)
    layout = Layout(problem, x.cu_seqlens)
    dtype = _dtype(problem)
    if not residuals:
        _, _, residuals = _chunked_forward(problem, layout, x, scale, save=True)
    do = torch.zeros_like(x.v) if do is None else do
    dS = layout.first_state(dstate, dtype)
    grads = Gradients(problem, x, gate_gradient)
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
    states, A, *corrected = kept
    tiles = load_tiles(problem, layout, slab, x, dS)
    decay = _decay(problem, tiles)
    rows, columns = decay.rows(tiles.X).flatten(1, 2), decay.columns(tiles.Y).flatten(1, 2)
    dZ = scratch.tile(A, slab.count, A.shape[1], problem.V)
    layout.load(do, slab, dZ[:, :C]).mul_(scale)
    T = None
    if corrected:
        W, T = corrected
    else:
        W = layout.load(x.v, slab, scratch.tile(A, slab.count, C, problem.V))
    dW = decay.within_backward(A[:, :C], W, dZ[:, :C])
    dread = decay.read_backward(dZ, rows, states)
    drows, dcolumns = state_backward(layout, slab, dS, decay, rows, columns, T, states, decay.written(W), dread, dW)
    X, Y = tiles.X, tiles.Y
    dX, dY = decay.keys_backward(rows.view_as(X), drows.view_as(X), columns.view_as(Y), dcolumns.view_as(Y))
    decay.pairs_backward(X, Y, A, decay.scores_backward(dZ, W), dX, dY)
    dv = dZ[:, -C:]
    if rule.raw:
        dv = decay.written_backward(W, dW)[:, :C]
        if rule.corrected:
            dv = dv + matmul(A[:, C:, :C].mT, dZ[:, C:])
    grads.store(layout, slab, tiles, dX, dY, dv, None if grads.g is None else decay.finish())


def _decay(problem: Problem, tiles: Tiles) -> Decay:
    """The decay of a slab."""
    rows = row_kinds(problem)
    if tiles.g is None:
        return NoDecay(rows)
    if problem.gate is Gate.VALUE:
        return ValueDecay(tiles.g, rows)
    return ChannelDecay(tiles.g, rows) if problem.gate is Gate.CHANNEL else TokenDecay(tiles.g, rows)
