"""The recurrence in Triton, on any recent GPU: the phases of docs/chunk_algorithm.md, each once forward and once backward.

Forward: `scores` (all chunks at once), `state` (chunk after chunk, with the output). Backward: `state` again for the state each
chunk starts from, which was not kept; `state` from the end; then `output`, all chunks at once.

A decay of the value axis is a per-channel decay of the transposed state (12.8): the state pass saves its states, and what makes the
gradient of a query makes the output; backward, what makes an output makes the gradient of the query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.op.call import Gradients, Outputs
from flashmix.op.dtypes import at_least_float32
from flashmix.ops.recurrence.call import Decay, RecurrenceCall
from flashmix.ops.recurrence.step.triton_gpu import step
from flashmix.ops.recurrence.triton_gpu.layout import count_chunks
from flashmix.ops.recurrence.triton_gpu.plan import InTurn, column_keys, has_long_rows, plan, row_keys
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import (
    ChunkInputs,
    ChunkScores,
    ChunkValues,
    DecayedKeys,
    KeyGradients,
    StateGradientResults,
    StateGradients,
    StateInputs,
    StateResults,
)
from flashmix.parallel.halves import Halves

__all__ = ["backward", "forward", "halves", "keeps"]


class Phases(NamedTuple):
    """What may stand in for phases of the backward: `state_forward`, given the segments and its results, `state_backward` and
    `output_backward`.
    """

    state: Callable[[Outputs, StateResults], None]
    state_backward: Callable[[StateGradients, StateGradientResults], None]
    output: Callable[[ChunkValues], Gradients]


def is_step(call: RecurrenceCall) -> bool:
    """One token of each sequence: no chunks, and its backward is that of a chunk of one token."""
    return call.tokens == 1 and not call.packed and call.batch > 0


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state; keeps the tiles of pairs and their factors, and the segments' maps and starts."""
    if is_step(call):
        return step(call), ()
    if call.decay is Decay.VALUE:
        return forward_of_values(call, save)
    run = Run.of(call)
    _, scores = scores_of(run)
    return outputs(run, scores, join_forward(run, segment_maps(run, scores)), save)


def outputs(run: Run, scores: ChunkScores, joined: Outputs, save: bool) -> tuple[Outputs, Outputs]:
    """Output, final state and what is kept, from the scores and the maps and starts of the segments."""
    o, state = run.tokens_like(run.call.V), run.states()
    state_forward(run, scores, joined, run.plan.state_output, StateResults(o, state, None, None, None))
    if run.rows == 0:
        o.zero_()
    if not save:
        return (o, state), ()
    pairs = () if scores.factors is None else (scores.A, scores.factors, scores.total)
    long = () if scores.factors is None or scores.low is None else (scores.low, scores.long)
    return (o, state), pairs + long + joined


def transposed(call: RecurrenceCall, do: Tensor) -> tuple[RecurrenceCall, Tensor]:
    """A call with a decay of the value axis as the call on S^T (12.8), and its dO, which is q. q and k get a head for each value head.

    Its decay is not of half precision: the order of its sums follows the tiles that loads make, so the same numbers would give other bits.
    """
    group = call.value_heads // call.heads
    assert call.k is not None and not call.rule.corrected and call.log_decay is not None
    q, k = (t if group == 1 else t.repeat_interleave(group, 2) for t in (call.q, call.k))
    own = RecurrenceCall(
        do,
        call.v,
        k,
        log_decay=at_least_float32(call.log_decay),
        initial_state=call.initial_state,
        packing=call.packing,
        scale=call.scale,
        read_before=call.read_before,
    )
    return own, q.contiguous()


def forward_of_values(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state of a decay of the value axis; keeps the segments' maps and starts."""
    own, q = transposed(call, call.v)  # of dO only the shape counts
    run = Run.of(own, True)
    k, v = run.call.v, run.call.k
    assert v is not None
    keys = DecayedKeys(v, run.tokens_like(own.K), run.per_chunk(own.K))
    G, reach = decay_sums(run, keys)
    scores = ChunkScores(None, (keys.decayed,), None, None, keys.total)
    joined = join_forward(run, segment_maps(run, scores))
    states, state = run.per_chunk(own.V, own.K, dtype=own.dtype), run.states()
    state_forward(run, scores, joined, run.plan.state_save, StateResults(None, state, None, states, None))
    o = run.gradient_like(own.K)
    inputs, values = ChunkInputs(None, (v,), None, G, reach), ChunkValues((q,), (k,), states, None)
    run.plan.values(run.chunk_programs, inputs, values, o, run.where, run.n)
    return (o, state), joined if save else ()


def halves(call: RecurrenceCall) -> Halves | None:
    """Both halves of a call over ranks, where there are such; not where the state is transposed."""
    if call.decay is Decay.VALUE:
        return None
    from flashmix.ops.recurrence.triton_gpu.ranks import HALVES

    return HALVES


def keeps(call: RecurrenceCall) -> Outputs:
    """Empty tensors like those that `forward` keeps; with a per-channel decay pairs and factors are made again."""
    if is_step(call):
        return ()
    if call.decay is Decay.VALUE:
        call, _ = transposed(call, call.v)
    own = plan(call)
    rows, columns = len(row_keys(call)), len(column_keys(call))
    C, chunks = own.tiles.C, (count_chunks(call, own.tiles.C), call.value_heads)
    pairs: Outputs = ()
    if call.decay is not Decay.CHANNEL:
        pairs = (
            torch.empty(*chunks, rows * columns, C, C, dtype=call.dtype, device=call.device),
            torch.empty(*chunks, rows + columns, C, dtype=torch.float32, device=call.device),
            torch.empty(chunks, dtype=torch.float32, device=call.device),
            *empty_long_rows(call, chunks, C),
        )
    return pairs + empty_maps(call, own.tiles.segments) if own.tiles.segments > 1 else pairs


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all given operands; that of the decay only if it is wanted."""
    do, dstate = given_gradients(call, grads)
    decay = "log_decay" in wanted
    if call.decay is not Decay.VALUE:
        run = Run.of(call)
        return gradients(run, scores_of(run, kept), kept, do, dstate, decay)
    own, q = transposed(call, do)
    run = Run.of(own, True)
    found = gradients(run, scores_of(run, kept), kept, q, dstate, decay)
    assert call.k is not None and call.log_decay is not None
    if decay:
        found["log_decay"] = found["log_decay"].to(call.log_decay.dtype)
    dq, dk = for_heads(found.pop("o"), call.q), for_heads(found["v"], call.k)
    return found | {"q": dq, "k": dk, "v": found["k"]}


def given_gradients(call: RecurrenceCall, grads: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The gradients of the output and of the final state as kernels read them."""
    do, dstate = grads
    do = torch.zeros_like(call.v) if do is None else do.to(call.dtype).contiguous()
    return do, None if dstate is None else dstate.contiguous()


def gradients(
    run: Run,
    made: tuple[ChunkInputs, ChunkScores],
    kept: Outputs,
    do: Tensor,
    dstate: Tensor | None,
    decay: bool,
    phases: Phases | None = None,
) -> Gradients:
    """The gradients of a run's operands from what `scores_of` returns; with a transposed state in place of that of q the output.

    Other `phases` may stand in for those of this module.
    """
    inputs, scores = made
    x, joined = StateGradients(do, dstate, None), kept[-2:] if run.plan.tiles.segments > 1 else ()
    ends = segment_ends(run, scores, joined, do)
    if ends is not None:
        starts = torch.empty_like(ends)
        run.plan.join_backward(run.join_programs(), joined[0], ends, dstate, starts, None, None, run.segmented)
        x = x._replace(starts=starts)
    return gradients_from(run, inputs, scores, joined, x, decay, phases)


def gradients_from(
    run: Run,
    inputs: ChunkInputs,
    scores: ChunkScores,
    joined: Outputs,
    x: StateGradients,
    decay: bool,
    phases: Phases | None = None,
) -> Gradients:
    """The same from the scores, the maps and starts of the segments, and the gradients that reach their ends."""
    call, do = run.call, x.do
    corrected, raw = len(row_keys(call)) == 2, call.rule.raw
    states, dstates = (run.per_chunk(call.V, call.K, dtype=call.dtype) for _ in range(2))
    nu = run.tokens_like(call.V) if corrected else None
    o = run.gradient_like(call.V) if run.transposed else None
    kernel = run.plan.state_save if o is None else run.plan.state_both
    saved = StateResults(o, None, nu, states, None)
    if phases is None:
        state_forward(run, scores, joined, kernel, saved)
    else:
        phases.state(joined, saved)
    dr = dv = None
    if corrected:
        dr = run.tokens_like(call.V) if raw else run.gradient_like(call.V)
    dv = run.gradient_like(call.V) if raw else dr
    dS0 = None if call.initial_state is None else run.states()
    results = StateGradientResults(dstates, dr, dv if raw else None, dS0, None)
    if phases is None:
        state_backward(run, scores, x, results)
    else:
        phases.state_backward(x, results)
    dz = (do,) if dr is None else (do, dr)
    w = ((call.v,) if raw else ()) + ((nu,) if corrected else ())
    values = ChunkValues(dz, w, states, dstates)
    found = output_backward(run, inputs, scores, values, decay) if phases is None else phases.output(values)
    assert dv is not None
    found["v"] = dv
    if o is not None:
        found["o"] = o
    if dS0 is not None:
        found["initial_state"] = dS0
    return found


def scores_of(run: Run, kept: Outputs = ()) -> tuple[ChunkInputs, ChunkScores]:
    """The inputs as kernels read them, and what the `scores` phase makes of them, or made and kept."""
    call, C = run.call, run.plan.tiles.C
    rows, columns = row_keys(call), column_keys(call)
    beta = call.beta
    made = () if kept and call.decay is not Decay.CHANNEL else empty_long_rows(call, (run.chunks, call.value_heads), C)
    if call.decay is Decay.CHANNEL:
        G, reach = decay_sums(run)
        inputs = ChunkInputs(rows, columns, beta, G, reach)
        keys = [run.tokens_like(call.K) for _ in rows + columns]
        A = run.per_chunk(len(rows) * len(columns), C, C, dtype=call.dtype)
        scores = ChunkScores(tuple(keys[: len(rows)]), tuple(keys[len(rows) :]), A, None, run.per_chunk(call.K), *made)
    else:
        inputs = ChunkInputs(rows, columns, beta, call.log_decay, None)
        if kept:
            return inputs, ChunkScores(rows, columns, *kept[: 5 if has_long_rows(call.rule, call.dtype) else 3])
        A = run.per_chunk(len(rows) * len(columns), C, C, dtype=call.dtype)
        factors = run.per_chunk(len(rows) + len(columns), C)
        scores = ChunkScores(rows, columns, A, factors, run.per_chunk(), *made)
    run.plan.scores(run.chunk_programs, inputs, scores, run.where, run.n)
    if made:
        run.plan.long_rows(run.chunk_programs, inputs, scores, run.where, run.n)
    return inputs, scores


def empty_long_rows(call: RecurrenceCall, chunks: tuple[int, int], C: int) -> Outputs:
    """Memory for what long rows of T are besides their tile of pairs, and for which rows these are."""
    if not has_long_rows(call.rule, call.dtype):
        return ()
    low = torch.empty(*chunks, C, C, dtype=torch.float32, device=call.device)
    return low, torch.empty(chunks, dtype=torch.int32, device=call.device)


def decay_sums(run: Run, keys: DecayedKeys | None = None) -> tuple[Tensor, Tensor]:
    """Sums of a per-channel decay, `[B, T, HV, K]`, and how far back its rows reach, `[chunks, HV, blocks of channels, C]`.

    Decays `keys` too, where they are given.
    """
    call, own = run.call, run.plan.tiles
    assert call.log_decay is not None
    dtype = torch.float64 if call.dtype == torch.float32 else torch.float32
    G = torch.empty(size=call.log_decay.shape, dtype=dtype, device=call.device)
    blocks = cdiv(call.K, own.decay.BK)
    reach = run.per_chunk(blocks, own.C, dtype=torch.int8)
    run.plan.decay(run.chunk_programs * blocks, call.log_decay, G, reach, keys, run.where, run.n)
    return G, reach


def empty_maps(call: RecurrenceCall, segments: int) -> Outputs:
    """Maps and starts of the segments; under N^T lies M^T, or its diagonal."""
    shape = call.sequences, call.value_heads, segments
    under = call.K if call.rule.corrected else 1
    maps = torch.empty(*shape, call.V + under, call.K, dtype=torch.float32, device=call.device)
    return maps, torch.empty(*shape, call.V, call.K, dtype=torch.float32, device=call.device)


def segment_maps(run: Run, scores: ChunkScores) -> Tensor | None:
    """Where the state pass is cut into segments, the map of each; else None."""
    own = run.plan.tiles
    return state_maps(run, scores, own.segments) if own.segments > 1 else None


def state_maps(run: Run, scores: ChunkScores, segments: int) -> Tensor:
    """The maps of the sequences, cut into so many segments, from nothing."""
    call, own = run.call, run.plan.tiles
    maps = empty_maps(call, segments)[0]
    blocks = cdiv(call.V, own.maps.BV)
    if call.rule.corrected:
        blocks += cdiv(call.K, own.maps.BV)
    x, out = StateInputs(call.v, None, None), StateResults(None, None, None, None, maps)
    n = run.n._replace(segments=segments)
    run.plan.state_maps(run.rows * segments * blocks, scores, x, out, run.where, n)
    return maps


def join_forward(run: Run, maps: Tensor | None) -> Outputs:
    """The maps of the segments and the state that each starts from; nothing where there are none."""
    if maps is None:
        return ()
    call = run.call
    starts = torch.empty(*maps.shape[:3], call.V, call.K, dtype=torch.float32, device=call.device)
    run.plan.join_forward(run.join_programs(), maps, call.initial_state, starts, None, None, run.segmented)
    return maps, starts


def state_forward(run: Run, scores: ChunkScores, joined: Outputs, kernel: InTurn, out: StateResults) -> None:
    """The state pass, in segments where they are joined: with the output, or saving what the backward needs."""
    call, own = run.call, run.plan.tiles
    n = run.segmented if joined else run.n
    grid = run.rows * n.segments * cdiv(call.V, own.state.BV)
    x = StateInputs(call.v, call.initial_state, joined[1] if joined else None)
    kernel(grid, scores, x, out, run.where, n)


def segment_ends(run: Run, scores: ChunkScores, joined: Outputs, do: Tensor) -> Tensor | None:
    """Where the state pass is cut into segments, what each sends back from nothing; else None."""
    if not joined:
        return None
    ends, n = torch.empty_like(joined[1]), run.segmented
    grid = run.rows * n.segments * cdiv(run.call.V, run.plan.tiles.state_backward.BV)
    sent = StateGradientResults(None, None, None, None, ends)
    run.plan.state_ends(grid, scores, StateGradients(do, None, None), sent, run.where, n)
    return ends


def state_backward(run: Run, scores: ChunkScores, x: StateGradients, out: StateGradientResults) -> None:
    """The state pass from the end, in segments where they are joined."""
    n = run.n if x.starts is None else run.segmented
    grid = run.rows * n.segments * cdiv(run.call.V, run.plan.tiles.state_backward.BV)
    run.plan.state_backward(grid, scores, x, out, run.where, n)


def output_backward(run: Run, inputs: ChunkInputs, scores: ChunkScores, values: ChunkValues, decay: bool) -> Gradients:
    """Gradients of keys, beta and, if asked for, of the decay; not of q of a transposed state, which would be the output again."""
    call, rows = run.call, len(inputs.rows)
    given = ("k",) if run.transposed else ("q", "k", "a", "b")
    keys = {name: run.gradient_like(call.K) for name in given if getattr(call, name) is not None}
    dbeta = None if call.beta is None else per_token(run, call.beta)
    dg = per_token(run, call.log_decay) if decay and call.log_decay is not None else None
    row_names, column_names = ("q", "a")[:rows], tuple(name for name in ("k", "b") if name in keys)
    own = tuple([keys.get(name) for name in row_names]), tuple([keys[name] for name in column_names])
    out = KeyGradients(*own, dbeta, dg, scores.A if call.decay is Decay.CHANNEL else torch.empty_like(scores.A))
    decayed = scores if call.decay is Decay.CHANNEL else None
    run.plan.output(run.chunk_programs, decayed, inputs, values, out, run.where, run.n)
    if call.decay is Decay.CHANNEL:
        run.plan.pairs(run.chunk_programs, inputs, values, out, run.where, run.n)
    found = {name: for_heads(gradient, getattr(call, name)) for name, gradient in keys.items()}
    if dbeta is not None:
        found["beta"] = dbeta
    if dg is not None and call.log_decay is not None:
        if call.decay is Decay.HEAD:
            dg = dg.sum((0, 1), dtype=torch.float64).to(call.log_decay.dtype)
        found["log_decay"] = dg
    return found


def per_token(run: Run, t: Tensor) -> Tensor:
    """Memory for the gradient of beta or of the decay; that of a decay per head is summed from one per token, in float32."""
    c = run.call
    shape = (c.batch, c.tokens, c.value_heads) if t.dim() == 1 else t.shape
    dtype = torch.float32 if t.dim() == 1 else t.dtype
    return (torch.zeros if c.packed else torch.empty)(shape, dtype=dtype, device=c.device)


def for_heads(gradient: Tensor, operand: Tensor) -> Tensor:
    """The gradient of an operand that several value heads share: their sum."""
    if gradient.shape[2] == operand.shape[2]:
        return gradient
    return gradient.unflatten(2, (operand.shape[2], -1)).sum(3)
