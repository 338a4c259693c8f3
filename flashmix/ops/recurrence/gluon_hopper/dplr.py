"""DPLR (RWKV-7) with a per-channel decay: `decay`, `scores` and `transform` in Gluon; above 64 and up to 128 channels the state passes and
the backward of `output` too. The maps of segments and the pairs of rows out of range are made by Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from flashmix.gpu import device as gpu
from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import Kernel
from flashmix.gpu.tma import Tiles
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence import triton_gpu
from flashmix.ops.recurrence.call import RecurrenceCall
from flashmix.ops.recurrence.gluon_hopper import descriptors
from flashmix.ops.recurrence.gluon_hopper.channel import FAR_CHUNKS
from flashmix.ops.recurrence.gluon_hopper.channel_far_rows import channel_far_rows_kernel
from flashmix.ops.recurrence.gluon_hopper.channel_inverse import channel_inverse_kernel
from flashmix.ops.recurrence.gluon_hopper.dplr_output import dplr_output_kernel
from flashmix.ops.recurrence.gluon_hopper.dplr_scores import dplr_scores_kernel
from flashmix.ops.recurrence.gluon_hopper.dplr_state import dplr_state_forward_kernel
from flashmix.ops.recurrence.gluon_hopper.dplr_state_backward import dplr_state_backward_kernel
from flashmix.ops.recurrence.gluon_hopper.memory import aligned
from flashmix.ops.recurrence.gluon_hopper.structs import (
    ChannelMemory,
    ChannelOutputMemory,
    FarNumbers,
    HopperNumbers,
    HopperSpec,
    StateMemory,
)
from flashmix.ops.recurrence.triton_gpu.plan import Plan, column_keys, row_keys
from flashmix.ops.recurrence.triton_gpu.run import Run
from flashmix.ops.recurrence.triton_gpu.structs import (
    ChunkInputs,
    ChunkScores,
    ChunkValues,
    KeyGradients,
    StateGradientResults,
    StateGradients,
    StateResults,
)


class DplrPlan(NamedTuple):
    """The kernels of the phases before the state pass, of which `scores_save` writes the sums of the decay too, and behind it."""

    scores: Kernel
    scores_save: Kernel
    far_rows: Kernel
    inverse: Kernel
    state_output: Kernel
    state_save: Kernel
    state_backward: Kernel
    output: Kernel


class DplrScores(NamedTuple):
    """What the phases before the state pass make."""

    inputs: ChunkInputs
    scores: ChunkScores
    keys: Tensor  # decayed: those of `scores`, behind one another
    before: Tensor  # sums of the decay of the token before: the memory of `inputs.decay`, one token earlier
    far: Tensor


@lru_cache(maxsize=1024)
def dplr_plan(own: Plan, basic: HopperSpec, warpgroups: int) -> DplrPlan:
    pairs = own.scores.spec._replace(BK=own.tiles.decay.BK, ONE_PASS=own.scores.spec.LIMIT)
    state = basic._replace(HEADS=(), CHANNEL=True, WARPGROUPS=warpgroups, VALUES=2, PAIRS=2)
    states = partial(Kernel, num_warps=4, maxnreg=168)
    return DplrPlan(
        scores=Kernel(dplr_scores_kernel, basic, num_warps=4),
        scores_save=Kernel(dplr_scores_kernel, basic._replace(SAVE=True), num_warps=4),
        far_rows=Kernel(channel_far_rows_kernel, pairs, num_warps=8),
        inverse=Kernel(channel_inverse_kernel, HopperSpec(0, 0, 0, 0, TILES=4), num_warps=1),
        state_output=states(dplr_state_forward_kernel, state._replace(OUTPUT=True)),
        state_save=states(dplr_state_forward_kernel, state._replace(SAVE=True)),
        state_backward=states(dplr_state_backward_kernel, state._replace(SAVE=True, PAIRS=1)),
        output=Kernel(dplr_output_kernel, basic, num_warps=4, maxnreg=128),
    )


def has_tiles(call: RecurrenceCall) -> bool:
    """Whether the backward of `output` has tiles for the heads of a call; else it is Triton's, and so are the state passes."""
    return 64 < call.K and 64 < call.V <= 128 and call.V % 8 == 0


def has_states(call: RecurrenceCall) -> bool:
    """Whether the state passes of a call are made here; `False` here alone leaves them to Triton's kernels."""
    return has_tiles(call)


def plan_of(run: Run) -> DplrPlan:
    call = run.call
    heads = tuple([t.shape[2] for t in (*row_keys(call), *column_keys(call))])
    basic = HopperSpec(
        call.value_heads, 1, call.K, call.V, BK=64 if call.K <= 64 else 128, PACKED=call.packed, HEADS=heads
    )
    few = 2 * run.rows * run.plan.tiles.segments <= gpu.target(call.device).multiprocessors
    return dplr_plan(run.plan, basic, 1 if few else 2)


def numbers_of(run: Run) -> HopperNumbers:
    return HopperNumbers(run.n.scale, run.n.tokens, run.n.chunks, 1, run.chunk_programs, run.call.batch)


def made_scores(run: Run, save: bool) -> DplrScores:
    """What `triton_gpu.scores_of` makes; the sums of the decay with `save` alone, or as far as a row is out of range."""
    call = run.call
    rows, columns = row_keys(call), column_keys(call)
    tensors = [aligned(t) for t in (*rows, *columns)]
    plan = plan_of(run)
    keys = torch.empty(4, call.batch, call.tokens, call.value_heads, call.K, dtype=call.dtype, device=call.device)
    A = run.per_chunk(4, 64, 64, dtype=call.dtype)
    total, far = run.per_chunk(call.K), run.per_chunk(dtype=torch.int32)
    assert call.log_decay is not None
    shape = call.log_decay.shape
    sums = torch.empty(call.batch * call.tokens + 1, *shape[2:], dtype=torch.float32, device=call.device)
    G, before = sums[1:].view(shape), sums[:-1].view(shape)
    reach = run.per_chunk(cdiv(call.K, run.plan.tiles.decay.BK), 64, dtype=torch.int8)
    A_ab = A.view(torch.float16)
    x = ChannelMemory(run.where.spans, None, call.log_decay, total, G, reach, far, None, None)
    read = [descriptors.tokens(t, 64 if call.K <= 64 else 128, call.packed) for t in (*tensors, keys.flatten(0, 1))]
    n = numbers_of(run)
    kernel = plan.scores_save if save else plan.scores
    kernel(run.chunk_programs, *read, descriptors.pairs(A, 4), x, n)
    inputs = ChunkInputs(rows, columns, None, G, reach)
    numbers = FarNumbers(run.n.scale, run.n.tokens, run.n.chunks, run.chunk_programs)
    out = x._replace(spans=None, A=A, before=A_ab)
    plan.far_rows(cdiv(run.chunk_programs, FAR_CHUNKS), inputs, out, run.where, numbers)
    plan.inverse(run.chunk_programs, A_ab, descriptors.pairs(A, 1))
    q, a, k, b = keys.unbind(0)
    return DplrScores(inputs, ChunkScores((q, a), (k, b), A, None, total), keys, before, far)


def state_pass(
    run: Run,
    made: DplrScores,
    kernel: Kernel,
    values: Tensor,
    written: Sequence[Tiles | None],
    ends: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Launches a state pass, of V or dO; `ends` are the states of sequences and of segments that it begins with, and the result."""
    tokens = partial(descriptors.tokens, packed=run.call.packed)
    sequence_state, starts, result = ends
    x = StateMemory(run.where.cu_seqlens, run.where.offsets, sequence_state, starts, result, None)
    n = numbers_of(run)._replace(segments=1 if starts is None else run.plan.tiles.segments)
    programs = run.rows * n.segments * (2 // kernel.spec.WARPGROUPS)
    read = tokens(made.keys.flatten(0, 1), 128), tokens(aligned(values), 64)
    kernel(programs, *read, descriptors.pairs(made.scores.A, 2), descriptors.totals(made.scores.total), *written, x, n)


def written_tokens(run: Run, t: Tensor | None) -> Tiles | None:
    return None if t is None else descriptors.tokens(t, 64, run.call.packed)


def state_forward(run: Run, made: DplrScores, joined: Outputs, out: StateResults) -> None:
    """What `triton_gpu.state_forward` makes of the states: with the output if there is memory for it, else what the backward reads."""
    if not has_states(run.call):
        triton_gpu.state_forward(run, made.scores, joined, run.plan.state_save, out)
        return
    plan = plan_of(run)
    kernel = plan.state_save if out.o is None else plan.state_output
    states = None if out.states is None else descriptors.states(out.states, 64, 128)
    written = written_tokens(run, out.o), states, written_tokens(run, out.nu)
    ends = run.call.initial_state, joined[1] if joined else None, out.final_state
    state_pass(run, made, kernel, run.call.v, written, ends)


def state_backward(run: Run, made: DplrScores, x: StateGradients, out: StateGradientResults) -> None:
    """What `triton_gpu.state_backward` makes."""
    if not has_states(run.call):
        triton_gpu.state_backward(run, made.scores, x, out)
        return
    written = [descriptors.states(out.dstates, 64, 128), *[written_tokens(run, t) for t in (out.dr, out.dv)]]
    ends = x.final_state, x.starts, out.initial_state
    state_pass(run, made, plan_of(run).state_backward, x.do, written, ends)


def output_backward(run: Run, made: DplrScores, values: ChunkValues, decay: bool) -> Gradients:
    """What `triton_gpu.output_backward` makes."""
    call, inputs = run.call, made.inputs
    operands = {name: getattr(call, name) for name in ("q", "a", "k", "b")}
    keys = {name: run.gradient_like(call.K) for name in operands}
    assert call.log_decay is not None
    dtype = torch.float32 if call.log_decay.dtype == torch.float64 else call.log_decay.dtype  # TMA has no wider one
    make_like = torch.zeros_like if call.packed else torch.empty_like
    dg = make_like(call.log_decay, dtype=dtype)
    tokens = partial(descriptors.tokens, packed=call.packed)
    rows, columns = made.scores.rows, [aligned(t) for t in inputs.columns]
    read = [tokens(t, 128) for t in (*rows, *columns)] + [tokens(t, 64) for t in (inputs.decay, made.before)]
    read += [tokens(aligned(t), 128) for t in (*values.w, *values.dz)]
    read += [descriptors.states(t, 128, 64) for t in (values.states, values.dstates)]
    written = [tokens(t, 128) for t in keys.values()] + [tokens(dg, 64)]
    memory = ChannelOutputMemory(run.where.spans, None, None, made.far, inputs.reach)
    programs = min(run.chunk_programs, gpu.target(call.device).multiprocessors)
    plan_of(run).output(programs, *read, *written, memory, numbers_of(run))
    out = KeyGradients((keys["q"], keys["a"]), (keys["k"], keys["b"]), None, dg if decay else None, made.scores.A)
    run.plan.pairs(run.chunk_programs, inputs, values, out, run.where, run.n)
    found = {name: triton_gpu.for_heads(gradient, operands[name]) for name, gradient in keys.items()}
    return found | {"log_decay": dg.to(call.log_decay.dtype)} if decay else found


def forward(call: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output and final state; keeps the segments' maps and starts."""
    run = Run.of(call)
    made = made_scores(run, False)
    return outputs(run, made, triton_gpu.join_forward(run, triton_gpu.segment_maps(run, made.scores)), save)


def outputs(run: Run, made: DplrScores, joined: Outputs, save: bool) -> tuple[Outputs, Outputs]:
    """What `triton_gpu.outputs` makes."""
    if not has_states(run.call):
        return triton_gpu.outputs(run, made.scores, joined, save)
    o, state = run.gradient_like(run.call.V), run.states()
    state_forward(run, made, joined, StateResults(o, state, None, None, None))
    return (o, state), joined if save else ()


def phases_of(run: Run, made: DplrScores, decay: bool) -> triton_gpu.Phases | None:
    """The phases of the backward that are made here, if any are."""
    if not has_tiles(run.call):
        return None
    return triton_gpu.Phases(
        lambda joined, out: state_forward(run, made, joined, out),
        lambda x, out: state_backward(run, made, x, out),
        lambda values: output_backward(run, made, values, decay),
    )


def backward(call: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all given operands; that of the decay only if it is wanted."""
    do, dstate = triton_gpu.given_gradients(call, grads)
    run = Run.of(call)
    made, decay = made_scores(run, True), "log_decay" in wanted
    phases = phases_of(run, made, decay)
    return triton_gpu.gradients(run, (made.inputs, made.scores), kept, do, dstate, decay, phases)
