"""RWKV-4's averages on a GPU: Triton kernels, one pass forward and one backward, two where few channels are cut into segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv, power_of_two
from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.triton_gpu.plan import segments_of
from flashmix.ops.scan.triton_gpu.slots import slots_of
from flashmix.ops.wkv.call import WkvCall
from flashmix.ops.wkv.triton_gpu.kernels import (
    WkvGradients,
    WkvInputs,
    WkvNumbers,
    WkvResults,
    WkvSpec,
    wkv_backward_kernel,
    wkv_kernel,
)

__all__ = ["backward", "forward", "keeps"]

BLOCK = 32  # channels of a program, which is a warp
GROUP, KEEP = 16, 8  # tokens that the forward loads at a time; from one kept state to the next
JOINED = 4  # segments that are read at a time


def forward(call: WkvCall, save: bool) -> tuple[Outputs, Outputs]:
    outputs, kept = call.results(), keeps(call) if save else ()
    if call.a.numel():
        plan, inputs = _plan(call, GROUP), _inputs(call)
        if plan.spec.SEGMENTS:
            if plan.spec.PACKED:  # empty sequences keep their states
                for state, given in zip(outputs[1:], (call.a, call.b, call.m), strict=True):
                    state.copy_(given)
            parts = plan.parts(4, call.device)
            _launch(wkv_kernel, call, plan, inputs, WkvResults(None, None, None, None, None, parts))
            inputs = inputs._replace(parts=parts)
        _launch(wkv_kernel, call, plan, inputs, WkvResults(*(*outputs, kept[0] if kept else None, None)))
    return outputs, kept


def keeps(call: WkvCall) -> Outputs:
    """States before groups of tokens."""
    size = (3, _groups(call), *call.a.shape[1:])
    return (torch.empty(size=size, dtype=torch.float32, device=call.device),)


def backward(call: WkvCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """The gradients of all tensors; the sums of a state count `e^m` times, so that of `m` is theirs."""
    d_out, d_a, d_b, _ = (None if d is None else d.contiguous() for d in grads)
    plan, shape = _plan(call, KEEP), call.a.shape
    d_k, d_v = (torch.empty(size=call.k.shape, dtype=call.k.dtype, device=call.device) for _ in range(2))
    d_w, d_u = (torch.empty(size=(plan.slots, *shape[1:]), dtype=torch.float32, device=call.device) for _ in range(2))
    d_start_a, d_start_b = (torch.empty(size=shape, dtype=torch.float32, device=call.device) for _ in range(2))
    if call.a.numel():
        d_out = torch.zeros(call.k.shape, dtype=call.k.dtype, device=call.device) if d_out is None else d_out
        inputs = _inputs(call)._replace(d_out=d_out, d_a=d_a, d_b=d_b, kept=kept[0])
        if plan.spec.SEGMENTS:
            if plan.spec.PACKED:
                for start, flow in ((d_start_a, d_a), (d_start_b, d_b)):
                    start.zero_() if flow is None else start.copy_(flow)
            parts = plan.parts(3, call.device)
            _launch(wkv_backward_kernel, call, plan, inputs, WkvGradients(None, None, None, None, None, None, parts))
            inputs = inputs._replace(parts=parts)
        found = WkvGradients(d_k, d_v, d_w, d_u, d_start_a, d_start_b, None)
        _launch(wkv_backward_kernel, call, plan, inputs, found)
    d_m = d_start_a * call.a + d_start_b * call.b
    sums = {"log_decay": d_w.sum(0), "bonus": d_u.sum(0)}
    return {"k": d_k, "v": d_v, "a": d_start_a, "b": d_start_b, "m": d_m, **sums}


class WkvPlan(NamedTuple):
    """The spec of a call, and how its slots lie."""

    spec: WkvSpec
    slots: int
    each: int
    segment: int

    def parts(self, count: int, device: torch.device) -> Tensor:
        """So many numbers of every channel of a segment."""
        return torch.empty((count, self.slots, self.spec.WIDTH), dtype=torch.float32, device=device)


def _plan(call: WkvCall, group: int) -> WkvPlan:
    """Segments are full groups, of kept states too."""
    width, packed, precise = call.log_decay.numel(), call.packing is not None, call.k.dtype.itemsize == 4
    tokens = call.k.shape[1]
    slots, each, segment, _ = segments_of(packed, call.sequences, tokens, cdiv(width, BLOCK), GROUP)
    joined = min(power_of_two(each), JOINED)
    return WkvPlan(WkvSpec(width, BLOCK, group, KEEP, joined, packed, each > 1, precise), slots, each, segment)


def _launch(kernel: Any, call: WkvCall, plan: WkvPlan, inputs: WkvInputs, results: Any) -> None:
    tokens = call.k.shape[1]
    numbers = WkvNumbers(tokens, plan.each, plan.segment, plan.slots, cdiv(tokens, KEEP), _groups(call))
    grid = plan.slots * cdiv(plan.spec.WIDTH, BLOCK)
    bound(kernel, plan.spec, num_warps=1)(grid, inputs, results, slots_of(call.packing, plan), numbers)


def _inputs(call: WkvCall) -> WkvInputs:
    tensors = (call.k, call.v, call.log_decay, call.bonus, call.a, call.b, call.m)
    return WkvInputs(*(*(t.contiguous() for t in tensors), None, None, None, None, None))


def _groups(call: WkvCall) -> int:
    batch, tokens = call.k.shape[:2]
    return tokens // KEEP + call.sequences if call.packing is not None else batch * cdiv(tokens, KEEP)
