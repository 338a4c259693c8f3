"""The running softmax on a GPU: Triton kernels, one pass each way, two where few channels are cut into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.running_softmax.call import RunningSoftmaxCall
from flashmix.ops.running_softmax.triton_gpu.kernels import (
    SoftmaxFlows,
    SoftmaxGradients,
    SoftmaxInputs,
    SoftmaxResults,
    SoftmaxSpec,
    running_softmax_backward_kernel,
    running_softmax_kernel,
)
from flashmix.ops.scan.triton_gpu.kernels import ScanNumbers
from flashmix.ops.scan.triton_gpu.plan import segments_of
from flashmix.ops.scan.triton_gpu.slots import slots_of

__all__ = ["backward", "forward"]

BLOCK = 32  # channels of a program, which is a warp
GROUP, GROUP_BACKWARD, JOINED = 16, 8, 4  # tokens and segments that are loaded at a time


def forward(call: RunningSoftmaxCall, save: bool) -> tuple[Outputs, Outputs]:
    weight, decay, z = outputs = call.results()
    if not call.s.numel() or call.packing is not None:  # empty sequences keep their states
        z.copy_(call.z)
    if call.s.numel():
        inputs = SoftmaxInputs(call.s.contiguous(), call.z.contiguous(), None, None)
        plan = _plan(call, GROUP)
        if plan.spec.SEGMENTS:
            m, c = _parts(plan, call.device)
            _launch(running_softmax_kernel, call, plan, inputs, SoftmaxResults(None, None, None, m, c))
            inputs = inputs._replace(m=m, c=c)
        _launch(running_softmax_kernel, call, plan, inputs, SoftmaxResults(weight, decay, z, None, None))
    return outputs, ()


def backward(
    call: RunningSoftmaxCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    d_weight, d_decay, d_z = (None if d is None else d.contiguous() for d in grads)
    found = [torch.empty(size=t.shape, dtype=t.dtype, device=t.device) for t in (call.s, call.z)]
    d_s, d_start = found
    if not d_s.numel() or call.packing is not None:
        d_start.zero_() if d_z is None else d_start.copy_(d_z)
    if d_s.numel():
        flows, plan = SoftmaxFlows(kept[0], d_weight, d_decay, d_z, None, None), _plan(call, GROUP_BACKWARD)
        if plan.spec.SEGMENTS:
            totals, ends = _parts(plan, d_s.device)
            parts = SoftmaxGradients(None, None, totals, ends)
            _launch(running_softmax_backward_kernel, call, plan, flows, parts)
            flows = flows._replace(totals=totals, ends=ends)
        _launch(running_softmax_backward_kernel, call, plan, flows, SoftmaxGradients(d_s, d_start, None, None))
    return {"s": d_s, "z": d_start}


class SoftmaxPlan(NamedTuple):
    """The spec of a call, and how its slots lie."""

    spec: SoftmaxSpec
    slots: int
    each: int
    segment: int


def _plan(call: RunningSoftmaxCall, group: int) -> SoftmaxPlan:
    width, packed = call.z.shape[1:].numel(), call.packing is not None
    slots, each, segment, _ = segments_of(packed, call.sequences, call.tokens, cdiv(width, BLOCK))
    joined, precise = min(power_of_two(each), JOINED), call.s.dtype.itemsize == 4
    return SoftmaxPlan(SoftmaxSpec(width, BLOCK, group, joined, packed, each > 1, precise), slots, each, segment)


def _parts(plan: SoftmaxPlan, device: torch.device) -> list[Tensor]:
    """Two numbers of every channel of a segment."""
    return [torch.empty((plan.slots, plan.spec.WIDTH), dtype=torch.float32, device=device) for _ in range(2)]


def _launch(kernel: Any, call: RunningSoftmaxCall, plan: SoftmaxPlan, inputs: Any, results: Any) -> None:
    numbers = ScanNumbers(call.tokens, plan.each, plan.segment)
    grid = plan.slots * cdiv(plan.spec.WIDTH, BLOCK)
    bound(kernel, plan.spec, num_warps=1)(grid, inputs, results, slots_of(call.packing, plan), numbers)
