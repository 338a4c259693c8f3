"""The recurrence in plain PyTorch, on any device: chunks, batched matrix products, a hand-written backward of each phase.

Everything is computed in float32 (float64 for float64 inputs). A call goes slab by slab (see `layout`), so that besides its
inputs, outputs and residuals it holds only a few tiles of one slab. The phases: `gate` (with the scores), `transform`,
`state`; the output is the two lines that remain of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Gate, Operands, Problem, Rule
from flashmix.ops.recurrence.portable.gate import ChannelDecay, NoDecay, matmul
from flashmix.ops.recurrence.portable.layout import Layout, Slab, chunk_bound, chunk_size
from flashmix.ops.recurrence.portable.state import Decay, state_backward, state_forward
from flashmix.ops.recurrence.portable.tiles import Gradients, load_tiles, row_kinds
from flashmix.ops.recurrence.portable.token_gate import TokenDecay, token_factors
from flashmix.ops.recurrence.portable.transform import transform_forward
from flashmix.ops.recurrence.portable.value_gate import ValueDecay
from flashmix.ops.recurrence.step.portable.token import step

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
    """What `forward` keeps for `backward`: see `_kept_shapes`. A step keeps nothing: its backward computes these again."""
    return [] if _is_step(problem) else [(shape, _dtype(problem)) for shape in _kept_shapes(problem).values()]


def _kept_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The state each chunk starts from and the scores; of corrected rules `W` and `T`; with one decay a token its factors."""
    chunks, C, K, V = chunk_bound(problem), chunk_size(problem), problem.K, problem.V
    R, S = 2 if problem.rule.corrected else 1, 2 if problem.rule is Rule.DPLR else 1
    shapes: dict[str, tuple[int, ...]] = {"states": (chunks, K, V), "A": (chunks, R * C, S * C)}
    if problem.rule.corrected:
        shapes |= {"W": (chunks, S * C, V), "T": (chunks, C, C)}
    if problem.gate in (Gate.HEAD, Gate.TOKEN):
        shapes |= {"factors": (chunks, C + 1, C)}
    return shapes


def _chunked_forward(
    problem: Problem, layout: Layout, x: Operands, scale: float, save: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    dtype = _dtype(problem)
    o = torch.empty(x.v.shape, dtype=x.v.dtype, device=x.v.device)
    S = layout.first_state(x.initial_state, dtype)
    kept = {name: S.new_empty(shape) for name, shape in _kept_shapes(problem).items()} if save else {}
    for slab in layout.slabs():
        _forward_slab(problem, layout, slab, x, scale, S, {name: t[slab.chunks] for name, t in kept.items()}, o)
    for residual in kept.values():  # a pack may have fewer chunks than its sizes allow
        residual[layout.chunks :] = 0
    return o, layout.last_state(S), list(kept.values())


def _forward_slab(
    problem: Problem, layout: Layout, slab: Slab, x: Operands, scale: float, S: Tensor, kept: dict[str, Tensor], o: Tensor
) -> None:  # fmt: skip
    """Advances `S` over a slab and writes its part of `o` and, unless there are none, of the residuals."""
    C, V, rule = layout.C, problem.V, problem.rule
    scratch.restart()
    tiles = load_tiles(problem, layout, slab, x, S)
    states = kept.get("states")
    if not kept:
        kept = {
            n: scratch.tile(S, slab.count, *shape[1:]) for n, shape in _kept_shapes(problem).items() if n != "states"
        }
    A, T = kept["A"], kept.get("T")
    if "factors" in kept and tiles.g is not None:
        token_factors(tiles.g, kept["factors"])
    decay = _decay(problem, tiles.g, kept)
    X, Y = tiles.X, tiles.Y
    decay.pairs(X, Y, A)
    rows, columns = decay.rows(X, out=X).flatten(1, 2), decay.columns(Y, out=Y).flatten(1, 2)
    W = kept["W"] if "W" in kept else scratch.tile(S, slab.count, C, V)
    if rule.raw:
        layout.load(x.v, slab, W[:, :C])
    R = None
    if T is not None:
        transform_forward(A[:, C:, -C:], T)
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
        kept = {name: residual[slab.chunks] for name, residual in zip(_kept_shapes(problem), residuals, strict=True)}
        _backward_slab(problem, layout, slab, x, scale, do, dS, kept, grads)
    return grads.finish(x, layout.last_state(dS))


def _backward_slab(
    problem: Problem, layout: Layout, slab: Slab, x: Operands, scale: float,
    do: Tensor, dS: Tensor, kept: dict[str, Tensor], grads: Gradients,
) -> None:  # fmt: skip
    """Takes `dS` back over a slab and writes its part of the gradients."""
    C, rule = layout.C, problem.rule
    scratch.restart()
    states, A, T = kept["states"], kept["A"], kept.get("T")
    tiles = load_tiles(problem, layout, slab, x, dS, gate="factors" not in kept)
    decay = _decay(problem, tiles.g, kept)
    rows, columns = decay.rows(tiles.X).flatten(1, 2), decay.columns(tiles.Y).flatten(1, 2)
    dZ = scratch.tile(A, slab.count, A.shape[1], problem.V)
    layout.load(do, slab, dZ[:, :C]).mul_(scale)
    W = kept["W"] if "W" in kept else layout.load(x.v, slab, scratch.tile(A, slab.count, C, problem.V))
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


def _decay(problem: Problem, g: Tensor | None, kept: dict[str, Tensor]) -> Decay:
    """The decay of a slab, from its log decays or from what is kept of them."""
    rows = row_kinds(problem)
    if "factors" in kept:
        return TokenDecay(kept["factors"], rows)
    if g is None:
        return NoDecay(rows)
    return ValueDecay(g, rows) if problem.gate is Gate.VALUE else ChannelDecay(g, rows)
