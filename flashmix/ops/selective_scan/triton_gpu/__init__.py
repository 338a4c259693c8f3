"""The selective scan on a GPU: Triton kernels with step size, skip and gate in them, segments where few channels are long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu.launch import bound
from flashmix.gpu.rows import sum_columns
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.triton_gpu.kernels import ScanNumbers
from flashmix.ops.scan.triton_gpu.slots import slots_of
from flashmix.ops.selective_scan.call import CHUNK, SelectiveScanCall
from flashmix.ops.selective_scan.triton_gpu.backward import (
    BackwardNumbers,
    SelectiveGradients,
    SelectiveStateGradients,
    selective_backward_kernel,
)
from flashmix.ops.selective_scan.triton_gpu.forward import SelectiveInputs, SelectiveStates, selective_kernel
from flashmix.ops.selective_scan.triton_gpu.plan import LANES, RESIDENT, SelectivePlan, plan_of

__all__ = ["backward", "forward", "keeps"]


def forward(call: SelectiveScanCall, save: bool) -> tuple[Outputs, Outputs]:
    y, state = outputs = call.results()
    kept = call.kept_states() if save else None
    start = _by_state(call.initial_state)
    last = _states_before(call, start)
    if y.numel():
        plan = plan_of(call)
        inputs, slots = _inputs(call), slots_of(call.packing, plan)
        states = SelectiveStates(_by_state(call.A), start, last, kept, None, None)
        numbers = ScanNumbers(call.u.shape[1], plan.each, plan.segment)
        run, grid = bound(selective_kernel, plan.spec, num_warps=1), plan.slots * plan.blocks
        if plan.spec.SEGMENTS:
            totals, ends = _segment_ends(call, plan)
            alone = states._replace(start=None, last=None, kept=None, totals=totals, ends=ends)
            run(grid, inputs, None, alone, slots, numbers)
            states = states._replace(totals=totals, ends=ends)
        run(grid, inputs, y, states, slots, numbers)
    state.copy_(last.mT)
    return outputs, () if kept is None else (kept,)


def keeps(call: SelectiveScanCall) -> Outputs:
    return (call.kept_states(),)


def backward(
    call: SelectiveScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    names = ("u", "dt") if call.z is None else ("u", "dt", "z")
    found = {name: torch.empty_like(getattr(call, name), memory_format=torch.contiguous_format) for name in names}
    d_y, d_state = grads
    d_last = _by_state(d_state)
    d_start = _states_before(call, d_last) if "initial_state" in wanted else None
    if call.u.numel():
        d_y = torch.zeros_like(call.u) if d_y is None else d_y.contiguous()
        plan = plan_of(call, backward=True)
        states = SelectiveStateGradients(_by_state(call.A), d_start, d_last, kept[0], None, None, None, None)
        found |= _run_backward(call, plan, states, d_y, found, wanted)
    else:
        found = {name: torch.zeros_like(getattr(call, name)) for name in wanted if name != "initial_state"}
    if d_start is not None:
        found["initial_state"] = d_start.mT.contiguous()
    return found


def _run_backward(
    call: SelectiveScanCall,
    plan: SelectivePlan,
    states: SelectiveStateGradients,
    d_y: Tensor,
    found: Gradients,
    wanted: frozenset[str],
) -> Gradients:
    """Writes the gradients of `found`; returns those that are sums of programs."""
    S, rows, work = plan.spec, call.u.shape[0] * call.u.shape[1], plan.slots * plan.blocks
    programs = min(work, RESIDENT)
    inputs, slots = _inputs(call), slots_of(call.packing, plan)
    numbers = BackwardNumbers(call.u.shape[1], plan.each, plan.segment, work, programs, rows)
    run = bound(selective_backward_kernel, S, num_warps=1)
    if S.SEGMENTS:
        totals, ends = _segment_ends(call, plan)
        states = states._replace(totals=totals, ends=ends)
        alone = SelectiveGradients(d_y, None, None, None, None, None)
        run(work, inputs, alone, states, slots, numbers._replace(programs=work))
    shared = _empty(call, S.BLOCKS, 2, rows, S.SHARES, S.STATES)
    rates, channels = _empty(call, plan.slots, S.STATES, S.WIDTH), _empty(call, plan.slots, 2, S.WIDTH)
    gradients = SelectiveGradients(d_y, found["u"], found["dt"], found.get("z"), shared, channels)
    states = states._replace(rates=rates, scratch=_empty(call, programs, CHUNK // S.GROUP, S.TILE, LANES))
    run(programs, inputs, gradients, states, slots, numbers)
    both = torch.empty(size=(2, *call.B.shape), dtype=call.B.dtype, device=call.device)
    sum_columns(shared, both)
    d_A, d_channels = _empty(call, S.STATES, S.WIDTH), _empty(call, 2, S.WIDTH)
    sum_columns(rates, d_A)
    sum_columns(channels, d_channels)
    rest = {"A": d_A.mT, "D": d_channels[0], "dt_bias": d_channels[1]}
    sums = {name: t.to(getattr(call, name).dtype).contiguous() for name, t in rest.items() if name in wanted}
    return {"B": both[0], "C": both[1], **sums}


def _empty(call: SelectiveScanCall, *sizes: int) -> Tensor:
    return torch.empty(size=sizes, dtype=torch.float32, device=call.device)


def _by_state(states: Tensor | None) -> Tensor | None:
    """States `[..., D, S]` with channels side by side."""
    return None if states is None else states.mT.contiguous()


def _states_before(call: SelectiveScanCall, start: Tensor | None) -> Tensor:
    """Memory for states `[N, S, D]`, in which empty sequences have those that they start from."""
    last = _empty(call, call.sequences, *call.A.shape[::-1])
    if not call.u.numel() or call.packing is not None:
        last.zero_() if start is None else last.copy_(start)
    return last


def _inputs(call: SelectiveScanCall) -> SelectiveInputs:
    """The tensors of the call; B and C, which every warp reads, in float32: to convert them there is a quarter of its instructions."""
    names = {"u": "u", "dt": "dt", "B": "B", "C": "C", "D": "D", "z": "z", "bias": "dt_bias"}
    given: dict[str, Any] = {name: getattr(call, field) for name, field in names.items()}
    given |= {"B": call.B.float(), "C": call.C.float()}
    return SelectiveInputs(**{name: None if t is None else t.contiguous() for name, t in given.items()})


def _segment_ends(call: SelectiveScanCall, plan: SelectivePlan) -> tuple[Tensor, Tensor]:
    return _empty(call, plan.slots, plan.spec.WIDTH), _empty(call, plan.slots, plan.spec.STATES, plan.spec.WIDTH)
