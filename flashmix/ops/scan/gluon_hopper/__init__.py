"""The scan on Hopper: kernels in Gluon for 16-bit numbers whose channels decay on their own; segments that are read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.call import ScanCall
from flashmix.ops.scan.gluon_hopper.backward import (
    HopperBackwardInputs,
    HopperBackwardResults,
    scan_backward_hopper_kernel,
)
from flashmix.ops.scan.gluon_hopper.forward import HopperScanInputs, HopperScanResults, scan_hopper_kernel
from flashmix.ops.scan.gluon_hopper.plan import HopperScanPlan, plan_of
from flashmix.ops.scan.gluon_hopper.tokens import HopperScanNumbers
from flashmix.ops.scan.triton_gpu.slots import slots_of

__all__ = ["backward", "forward"]


def forward(call: ScanCall, save: bool) -> tuple[Outputs, Outputs]:
    h, state = outputs = call.results()
    start = None if call.initial_state is None else call.initial_state.contiguous()
    _carried(call, start, state)
    if h.numel():
        plan = plan_of(call)
        inputs = HopperScanInputs(_aligned(call.x), _aligned(call.log_decay), start)
        _launch(scan_hopper_kernel, call, plan, inputs, HopperScanResults(h, state, _words(call, plan)))
    return outputs, ()


def backward(call: ScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """`h` is in the place of `x`, which with a coupling is `source`."""
    h, plan = call.x, plan_of(call, backward=True)
    d_h, d_state = grads
    d_h = torch.zeros_like(h) if d_h is None else d_h
    d_state = None if d_state is None else d_state.contiguous()
    start = None if call.initial_state is None else call.initial_state.contiguous()
    found = {"x": torch.empty(size=h.shape, dtype=h.dtype, device=h.device)}
    if "log_decay" in wanted:
        found["log_decay"] = torch.empty(size=h.shape, dtype=call.log_decay.dtype, device=h.device)
    if "initial_state" in wanted:
        found["initial_state"] = call.results()[1]
        _carried(call, d_state, found["initial_state"])
    if h.numel():
        inputs = HopperBackwardInputs(*(*map(_aligned, (d_h, call.log_decay, h, call.source)), d_state, start))
        given = (found["x"], found.get("log_decay"), found.get("initial_state"), _words(call, plan))
        _launch(scan_backward_hopper_kernel, call, plan, inputs, HopperBackwardResults(*given))
    return found


def _carried(call: ScanCall, start: Tensor | None, state: Tensor) -> None:
    """Empty sequences, which may have no program, keep their states."""
    if not call.x.numel() or call.packing is not None:
        state.zero_() if start is None else state.copy_(start)


def _words(call: ScanCall, plan: HopperScanPlan) -> Tensor | None:
    """The tickets and words of segments, nothing of which is there yet."""
    if not plan.spec.SEGMENTS:
        return None
    return torch.full((2 + plan.slots * plan.spec.WIDTH,), -1, dtype=torch.int64, device=call.device)


def _launch(kernel: Any, call: ScanCall, plan: HopperScanPlan, inputs: Any, results: Any) -> None:
    slots, numbers = slots_of(call.packing, plan), HopperScanNumbers(call.tokens, plan.slots, plan.each)
    bound(kernel, plan.spec, num_warps=1)(plan.programs, inputs, results, slots, numbers)


def _aligned(tensor: Tensor | None) -> Any:
    """The tensor contiguous, or a copy of it: `cp.async` wants 16 bytes."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
