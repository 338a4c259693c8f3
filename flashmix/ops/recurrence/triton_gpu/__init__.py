"""The recurrence in Triton, on any recent GPU: the phases of docs/chunk_algorithm.md, each once forward and once backward.

Forward: `scores` (all chunks at once), `state` (chunk after chunk, with the output). Backward: `state` again for the state each
chunk starts from, which was not kept; `state` from the end; then `output`, all chunks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashmix.gpu.sizes import cdiv
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.recurrence.call import RecurrenceCall, Rule
from flashmix.ops.recurrence.step.triton_gpu import step
from flashmix.ops.recurrence.triton_gpu.adapter import Gate, Operands, Problem
from flashmix.ops.recurrence.triton_gpu.layout import Layout
from flashmix.ops.recurrence.triton_gpu.plan import SLOTS, Plan, plan
from flashmix.ops.recurrence.triton_gpu.table import tiles

__all__ = ["backward", "forward", "keeps"]


@dataclass
class Scored:
    """What the `scores` phase leaves: tiles of pairs, the factors or the decayed keys (with the sums of decays they are made
    of, and how far back the rows reach), and each chunk's whole decay.
    """

    A: Tensor
    factors: Tensor | None
    total: Tensor
    G: Tensor | None
    reach: Tensor | None
    keys: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # q, a, k, b as the state phase reads them

    @property
    def kept(self) -> list[Tensor]:
        return [] if self.factors is None else [self.A, self.factors, self.total]


@dataclass
class Call:
    """One call of the op: its tensors as the kernels want them, its sizes, its chunks and its plan."""

    problem: Problem
    x: Operands
    layout: Layout
    plan: Plan
    scale: float

    @staticmethod
    def of(call: RecurrenceCall) -> Call:
        problem, x = Problem.of(call), Operands.of(call)
        a, k, b = (1 if t is None else t.shape[2] for t in (x.a, x.k, x.b))
        its = plan(problem, (x.q.shape[2], a, k, b))
        own = {
            name: t.contiguous()
            for name in ("q", "k", "v", "beta", "a", "b", "g", "initial_state")
            if (t := getattr(x, name)) is not None
        }
        x = replace(x, **own)
        return Call(problem, x, Layout.of(problem, x.cu_seqlens, its.tiles.C), its, call.scale)

    @property
    def chunk_programs(self) -> int:
        return self.layout.chunks * self.problem.value_heads

    @property
    def rows(self) -> int:
        """Sequences times value heads: each has a state."""
        return self.problem.sequences * self.problem.value_heads

    def tokens_like(self, width: int) -> Tensor:
        """`[B, T, HV, width]` in the dtype of the call."""
        p = self.problem
        return torch.empty(p.batch, p.tokens, p.value_heads, width, dtype=p.dtype, device=p.device)

    def per_chunk(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        p = self.problem
        return torch.empty(self.layout.chunks, p.value_heads, *shape, dtype=dtype, device=p.device)

    def launch(self, name: str, grid: int, tensors: Sequence[Tensor | None], *numbers: int | float) -> None:
        if grid:
            self.plan.kernel(name)(grid, tensors, numbers)


def forward(given: RecurrenceCall, save: bool) -> tuple[Outputs, Outputs]:
    """Output `[B, T, HV, V]`, final state `[N, HV, K, V]`, and with `save` what the backward need not make again."""
    if _is_step(Problem.of(given)):
        return step(given), ()
    call = Call.of(given)
    o = call.tokens_like(call.problem.V)
    state = _state_like(call)
    scored = _scores(call)
    joined = _join_forward(call, scored)
    _state_forward(call, scored, joined, o=o, state=state)
    return (o, state), (*scored.kept, *joined) if save else ()


def keeps(call: RecurrenceCall) -> Outputs:
    shapes = residual_shapes(Problem.of(call))
    return tuple([torch.empty(shape, dtype=dtype, device=call.device) for shape, dtype in shapes])


def _is_step(problem: Problem) -> bool:
    return problem.tokens == 1 and not problem.packed and problem.batch > 0


def residual_shapes(problem: Problem) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The tiles of pairs and the factors (with a decay a channel they are made again), and the segments' maps and starts.

    A step keeps nothing: its backward is that of a chunk of one token.
    """
    if _is_step(problem):
        return []
    table = tiles(problem)
    rows = Layout.count(problem, table.C), problem.value_heads
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []
    if problem.gate is not Gate.CHANNEL:
        kept += [((*rows, SLOTS[problem.rule], table.C, table.C), problem.dtype)]
        kept += [((*rows, 4, table.C), torch.float32), (rows, torch.float32)]
    if table.segments > 1:
        kept += [(shape, torch.float32) for shape in _joined_shapes(problem, table.segments)]
    return kept


def backward(given: RecurrenceCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients by name, of the decay only if it is wanted."""
    call = Call.of(given)
    x, gate_gradient = call.x, given.log_decay is not None and "log_decay" in wanted
    do, dstate = grads
    p = call.problem
    do = torch.zeros_like(call.x.v) if do is None else do.to(p.dtype).contiguous()
    dstate = None if dstate is None else dstate.contiguous()
    scored = _scores(call, kept)
    joined = kept[-2:] if call.plan.tiles.segments > 1 else []
    states, dstates = (call.per_chunk(p.V, p.K, dtype=p.dtype) for _ in range(2))
    e, de = (call.tokens_like(p.V) if p.rule.corrected else None for _ in range(2))
    _state_forward(call, scored, joined, e=e, states=states)
    dv = _zeros_if_packed(call, p.V) if p.rule.raw else None
    if p.rule.corrected and not p.rule.raw:
        dv = de = _zeros_if_packed(call, p.V)
    dS0 = None if x.initial_state is None else _state_like(call)
    _state_backward(call, scored, joined, do, dstate, dstates, de, dv, dS0)
    found = _output_backward(call, scored, e, do, de, states, dstates, dv, dS0, gate_gradient)
    return x.named(found, gate_gradient)


def _state_like(call: Call) -> Tensor:
    p = call.problem
    return torch.empty(p.sequences, p.value_heads, p.K, p.V, dtype=torch.float32, device=p.device)


def _zeros_if_packed(call: Call, width: int) -> Tensor:
    """A tensor for gradients of tokens: tokens past the last sequence of a pack are in no chunk and stay 0."""
    return call.tokens_like(width).zero_() if call.problem.packed else call.tokens_like(width)


def _scores(call: Call, kept: Sequence[Tensor] = ()) -> Scored:
    """The `scores` phase, or its results as they were kept."""
    p, x, L = call.problem, call.x, call.layout
    numbers = call.scale, L.tokens, L.per_sequence
    slots = SLOTS[p.rule]
    if p.gate is Gate.CHANNEL:
        A = call.per_chunk(slots, L.C, L.C, dtype=p.dtype)
        G, reach = _gate(call)
        xq = call.tokens_like(p.K)
        xa, yb = (call.tokens_like(p.K) if p.rule.corrected else None for _ in range(2))
        yk = call.tokens_like(p.K) if p.rule.raw else None
        total = call.per_chunk(p.K)
        keys = (xq, xa, yk, yb)
        tensors = (x.q, x.k, x.a, x.b, G, reach, x.beta, L.table, A, *keys, total)
        call.launch("scores", call.chunk_programs, tensors, *numbers)
        return Scored(A, None, total, G, reach, keys)
    if kept:
        A, factors, total = kept[:3]
    else:
        A = call.per_chunk(slots, L.C, L.C, dtype=p.dtype)
        factors, total = call.per_chunk(4, L.C), call.per_chunk()
        given = (x.q, x.k, x.a, x.b, x.g, x.beta, L.table)
        call.launch("scores", call.chunk_programs, (*given, A, factors, total), *numbers)
    a, b = (x.k, x.k) if p.rule is Rule.TIED else (x.a, x.b)
    return Scored(A, factors, total, x.g, None, (x.q, a, x.k, b))


def _gate(call: Call) -> tuple[Tensor, Tensor]:
    """Sums of a decay a channel, `[B, T, HV, K]`, and how far back its rows reach, `[chunks, HV, blocks of channels, C]`."""
    p, L = call.problem, call.layout
    assert call.x.g is not None
    G = torch.empty(call.x.g.shape, dtype=torch.float64 if call.plan.exact else torch.float32, device=p.device)
    blocks = cdiv(p.K, call.plan.tiles.gate["BK"])
    reach = call.per_chunk(blocks, L.C, dtype=torch.int8)
    call.launch("gate", call.chunk_programs * blocks, (call.x.g, L.table, G, reach), L.tokens, L.per_sequence)
    return G, reach


def _joined_shapes(problem: Problem, segments: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Maps and starts of the segments."""
    rows = problem.sequences, problem.value_heads, segments
    under = problem.K if problem.rule.corrected else 1  # M, or its diagonal
    return (*rows, problem.V + under, problem.K), (*rows, problem.V, problem.K)


def _join_forward(call: Call, scored: Scored) -> list[Tensor]:
    """Where the state pass is cut into segments: the map of each and the state it starts from; else nothing."""
    p, table = call.problem, call.plan.tiles
    if table.segments == 1:
        return []
    shapes = _joined_shapes(p, table.segments)
    maps, starts = (torch.empty(shape, dtype=torch.float32, device=p.device) for shape in shapes)
    blocks = cdiv(p.V, table.maps["BV"])
    if p.rule.corrected:
        blocks += cdiv(p.K, table.maps["BV"])
    _launch_state(call, "state_maps", scored, blocks, table.segments, maps=maps)
    tensors = (maps, call.x.initial_state, starts)
    call.launch("join_forward", call.rows * cdiv(p.V, table.join["BV"]), tensors, table.segments)
    return [maps, starts]


def _launch_state(
    call: Call, name: str, scored: Scored, blocks: int, segments: int, o: Tensor | None = None,
    state: Tensor | None = None, e: Tensor | None = None, states: Tensor | None = None, starts: Tensor | None = None,
    maps: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of the forward state pass; see the kernel for what `starts` and `maps` make of it."""
    x, L = call.x, call.layout
    tensors = (
        *scored.keys, x.v, scored.A, scored.factors, scored.total, x.initial_state, L.cu_seqlens, L.offsets,
        o, e, states, state, starts, maps,
    )  # fmt: skip
    call.launch(name, call.rows * segments * blocks, tensors, L.tokens, L.per_sequence, segments)


def _state_forward(
    call: Call, scored: Scored, joined: Sequence[Tensor], o: Tensor | None = None, state: Tensor | None = None,
    e: Tensor | None = None, states: Tensor | None = None,
) -> None:  # fmt: skip
    """The state pass, in segments where they are `joined`: with the output, or saving what the backward needs."""
    table = call.plan.tiles
    name = "state_save" if o is None else "state_output"
    blocks = cdiv(call.problem.V, table.state["BV"])
    starts = joined[1] if joined else None
    _launch_state(call, name, scored, blocks, table.segments if joined else 1, o, state, e, states, starts)
    if o is not None and call.rows == 0:
        o.zero_()


def _state_backward(
    call: Call, scored: Scored, joined: Sequence[Tensor], do: Tensor, dstate: Tensor | None, dstates: Tensor,
    de: Tensor | None, dv: Tensor | None, dS0: Tensor | None,
) -> None:  # fmt: skip
    """The state pass from the end, in segments where they are `joined`."""
    L, table = call.layout, call.plan.tiles
    segments = table.segments if joined else 1
    programs = call.rows * segments * cdiv(call.problem.V, table.state_backward["BV"])
    inputs = (*scored.keys, scored.A, scored.factors, scored.total, do, dstate, L.cu_seqlens, L.offsets)
    numbers = L.tokens, L.per_sequence, segments
    starts = None
    if joined:
        ends, starts = (torch.empty_like(joined[1]) for _ in range(2))
        call.launch("state_ends", programs, (*inputs, None, None, None, None, None, ends), *numbers)
        grid = call.rows * cdiv(call.problem.V, table.join["BV"])
        call.launch("join_backward", grid, (joined[0], ends, dstate, starts), segments)
    call.launch("state_backward", programs, (*inputs, dstates, de, dv, dS0, starts, None), *numbers)


def _output_backward(
    call: Call, scored: Scored, e: Tensor | None, do: Tensor, de: Tensor | None, states: Tensor, dstates: Tensor,
    dv: Tensor | None, dS0: Tensor | None, gate_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    p, x, L = call.problem, call.x, call.layout
    dq = _zeros_if_packed(call, p.K)
    dk, da, db = (None if t is None else _zeros_if_packed(call, p.K) for t in (x.k, x.a, x.b))
    dg, dbeta = (_zeros_per_token(call, t) for t in (x.g if gate_gradient else None, x.beta))
    gradients = (dq, da, dk, db, dg, dbeta)
    values = (e, do, de, states, dstates, L.table)
    numbers = call.scale, L.tokens, L.per_sequence
    tensors: tuple[Tensor | None, ...]
    if p.gate is not Gate.CHANNEL:
        tensors = (x.q, x.k, x.a, x.b, x.v, scored.G, x.beta, *values, torch.empty_like(scored.A), *gradients)
        call.launch("output_backward", call.chunk_programs, tensors, *numbers)
    else:
        decays = (scored.G, scored.reach, x.beta)
        tensors = (*scored.keys[:2], x.k, x.b, *decays, x.v, *values, scored.A, *gradients)
        call.launch("output_backward", call.chunk_programs, tensors, *numbers)
        tensors = (x.q, x.k, x.a, x.b, *decays, x.v, e, do, de, L.table, *gradients)
        call.launch("pairs_backward", call.chunk_programs, tensors, *numbers)
    if p.gate is Gate.HEAD and dg is not None and x.g is not None:
        dg = dg.sum((0, 1), dtype=torch.float64).to(x.g.dtype)
    found = (
        _for_heads(dq, x.q), _for_heads(dk, x.k), dv, dbeta, _for_heads(da, x.a), _for_heads(db, x.b), dg, dS0,
    )  # fmt: skip
    return [gradient for gradient in found if gradient is not None]


def _zeros_per_token(call: Call, t: Tensor | None) -> Tensor | None:
    """Memory for the gradient of beta or of the decay; a decay a head is summed from one a token, in float32."""
    p = call.problem
    if t is None:
        return None
    shape = (p.batch, p.tokens, p.value_heads) if t.dim() == 1 else t.shape
    dtype = torch.float32 if t.dim() == 1 else t.dtype
    return (torch.zeros if p.packed else torch.empty)(shape, dtype=dtype, device=p.device)


def _for_heads(gradient: Tensor | None, operand: Tensor | None) -> Tensor | None:
    """The gradient of an operand that several value heads share: their sum."""
    if gradient is None or operand is None or gradient.shape[2] == operand.shape[2]:
        return gradient
    return gradient.unflatten(2, (operand.shape[2], -1)).sum(3)
