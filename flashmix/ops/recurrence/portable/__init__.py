"""The recurrence in plain PyTorch, on any device: chunks, batched matrix products, a hand-written backward of each phase.

Everything is computed in float32 (float64 for float64 inputs). A call goes slab by slab (see `layout`), so that besides its
inputs, outputs and kept tensors it holds only a few tiles of one slab. The phases: `decay` (with the scores), `transform`,
`state`; the output is the two lines that remain of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashmix.op.call import Gradients, Outputs
from flashmix.op.scratch import scratch
from flashmix.ops.recurrence.call import Decay, RecurrenceCall, Rule
from flashmix.ops.recurrence.portable.correlated import (
    long_logarithms,
    long_rows,
    long_rows_of_transform,
    rows_left_out,
)
from flashmix.ops.recurrence.portable.decay.base import NoDecay, SlabDecay, matmul
from flashmix.ops.recurrence.portable.decay.channel import ChannelDecay
from flashmix.ops.recurrence.portable.decay.token import TokenDecay, token_factors
from flashmix.ops.recurrence.portable.decay.value import ValueDecay
from flashmix.ops.recurrence.portable.layout import Layout, Slab, chunk_bound, chunk_size
from flashmix.ops.recurrence.portable.state import state_backward, state_forward
from flashmix.ops.recurrence.portable.tiles import SlabGradients, load_tiles, row_kinds
from flashmix.ops.recurrence.portable.transform import transform_forward
from flashmix.ops.recurrence.step.portable.token import step

__all__ = ["backward", "forward", "keeps"]


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, HV, V]` and final state `[N, HV, K, V]`; and with `save` what `keeps` says."""
    if call.is_step:
        return step(call, call.state_dtype), ()
    o, state, kept = _chunked_forward(call, Layout(call), save)
    return (o, state), kept


def keeps(call: RecurrenceCall) -> Outputs:
    """See `_kept_shapes`. A step keeps nothing: its backward computes these again."""
    if call.is_step:
        return ()
    shapes = _kept_shapes(call).values()
    return tuple([torch.empty(size=shape, dtype=call.state_dtype, device=call.device) for shape in shapes])


def _kept_shapes(call: RecurrenceCall) -> dict[str, tuple[int, ...]]:
    """The state each chunk starts from and the scores; of corrected rules `W` and `T`, without its long rows; with one decay per token
    its factors."""
    chunks, C, K, V = chunk_bound(call), chunk_size(call), call.K, call.V
    R, S = 2 if call.rule.corrected else 1, 2 if call.rule is Rule.DPLR else 1
    shapes: dict[str, tuple[int, ...]] = {"states": (chunks, K, V), "A": (chunks, R * C, S * C)}
    if call.rule.corrected:
        shapes |= {"W": (chunks, S * C, V), "T": (chunks, C, C)}
    if call.decay in (Decay.HEAD, Decay.TOKEN):
        shapes |= {"factors": (chunks, C + 1, C)}
    return shapes


def _chunked_forward(call: RecurrenceCall, layout: Layout, save: bool) -> tuple[Tensor, Tensor, Outputs]:
    o = torch.empty(size=call.v.shape, dtype=call.v.dtype, device=call.device)
    S = layout.first_state(call.initial_state, call.state_dtype)
    kept = {name: S.new_empty(shape) for name, shape in _kept_shapes(call).items()} if save else {}
    for slab in layout.slabs():
        _forward_slab(call, layout, slab, S, {name: t[slab.chunks] for name, t in kept.items()}, o)
    for t in kept.values():  # a packed batch may have fewer chunks than its sizes allow
        t[layout.chunks :] = 0
    return o, layout.last_state(S), tuple(kept.values())


def _forward_slab(
    call: RecurrenceCall, layout: Layout, slab: Slab, S: Tensor, kept: dict[str, Tensor], o: Tensor
) -> None:
    """Advances `S` over a slab and writes its part of `o` and of the kept tensors, if any."""
    C, V, rule = layout.C, call.V, call.rule
    scratch.restart()
    tiles = load_tiles(call, layout, slab, S)
    states = kept.get("states")
    if not kept:
        kept = {n: scratch.tile(S, slab.count, *shape[1:]) for n, shape in _kept_shapes(call).items() if n != "states"}
    A, T = kept["A"], kept.get("T")
    if "factors" in kept and tiles.g is not None:
        token_factors(tiles.g, kept["factors"])
    decay = _decay(call, tiles.g, kept)
    X, Y = tiles.X, tiles.Y
    decay.pairs(X, Y, A)
    long = None if T is None else long_rows(A[:, C:, -C:], X[:, -1], Y[:, -1])
    rows, columns = decay.rows(X, out=X).flatten(1, 2), decay.columns(Y, out=Y).flatten(1, 2)
    W = kept["W"] if "W" in kept else scratch.tile(S, slab.count, C, V)
    if rule.raw:
        layout.load(call.v, slab, W[:, :C])
    R = exact = None  # (4.1): the target, or with raw writes A_ak V
    if T is not None:
        transform_forward(A[:, C:, -C:], T)
        exact = long_rows_of_transform(call, layout, slab, T, long)
        R = matmul(A[:, C:, :C], W[:, :C]) if rule.raw else layout.load(call.v, slab, scratch.tile(S, slab.count, C, V))
    Z = state_forward(
        layout, slab, S, decay.total, rows, columns, T=T, long=exact, R=R, W=decay.written(W), states=states
    )
    layout.store(decay.output(Z[:, :C], A[:, :C], W, call.scale), slab, o)


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of the given tensors, of the log decay only if it is `wanted`, from those of the output and of the final state."""
    layout = Layout(call)
    if not kept:
        _, _, kept = _chunked_forward(call, layout, save=True)
    do, dstate = grads
    do = torch.zeros_like(call.v) if do is None else do
    dS = layout.first_state(dstate, call.state_dtype)
    found = SlabGradients(call, "log_decay" in wanted)
    for slab in reversed(layout.slabs()):
        its = {name: t[slab.chunks] for name, t in zip(_kept_shapes(call), kept, strict=True)}
        _backward_slab(call, layout, slab, do, dS, its, found)
    return found.finish(layout.last_state(dS))


def _backward_slab(
    call: RecurrenceCall,
    layout: Layout,
    slab: Slab,
    do: Tensor,
    dS: Tensor,
    kept: dict[str, Tensor],
    grads: SlabGradients,
) -> None:
    """Takes `dS` back over a slab and writes its part of the gradients."""
    C, rule = layout.C, call.rule
    scratch.restart()
    states, A, T = kept["states"], kept["A"], kept.get("T")
    tiles = load_tiles(call, layout, slab, dS, decay="factors" not in kept)
    decay = _decay(call, tiles.g, kept)
    rows, columns = decay.rows(tiles.X).flatten(1, 2), decay.columns(tiles.Y).flatten(1, 2)
    dZ = scratch.tile(A, slab.count, A.shape[1], call.V)  # (5.6)
    layout.load(do, slab, dZ[:, :C]).mul_(call.scale)
    W = kept["W"] if "W" in kept else layout.load(call.v, slab, scratch.tile(A, slab.count, C, call.V))
    dW = decay.within_backward(A[:, :C], W, dZ[:, :C])
    dread = decay.read_backward(dZ, rows, states)
    exact = None if T is None else long_rows_of_transform(call, layout, slab, T, rows_left_out(T))
    drows, dcolumns, of_columns = state_backward(
        layout, slab, dS, decay, rows, columns, T=T, long=exact, states=states, W=decay.written(W), dZ=dread, dW=dW
    )
    if exact is not None and of_columns is not None and "factors" in kept and grads.log_decay is not None:
        decay.long = long_logarithms(exact, rows[:, -C:], states, W[:, -C:], dZ[:, -C:], of_columns)
    X, Y = tiles.X, tiles.Y
    dX, dY = decay.keys_backward(rows.view_as(X), drows.view_as(X), columns.view_as(Y), dcolumns.view_as(Y))
    decay.pairs_backward(X, Y, A, decay.scores_backward(dZ, W), dX, dY)
    dv = dZ[:, -C:]  # (6.5): dR
    if rule.raw:  # (6.3)
        dv = decay.written_backward(W, dW)[:, :C]
        if rule.corrected:
            dv = dv + matmul(A[:, C:, :C].mT, dZ[:, C:])
    grads.store(layout, slab, tiles, dX, dY, dv, None if grads.log_decay is None else decay.finish())


def _decay(call: RecurrenceCall, g: Tensor | None, kept: dict[str, Tensor]) -> SlabDecay:
    """The decay of a slab, from its log decays or from what is kept of them."""
    rows = row_kinds(call)
    if "factors" in kept:
        return TokenDecay(kept["factors"], rows)
    if g is None:
        return NoDecay(rows)
    return ValueDecay(g, rows) if call.decay is Decay.VALUE else ChannelDecay(g, rows)
