"""The scan on a GPU: Triton kernels, segments where few channels are long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu.launch import bound
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.scan.call import ScanCall
from flashmix.ops.scan.triton_gpu.backward import scan_backward_kernel
from flashmix.ops.scan.triton_gpu.kernels import ScanInputs, ScanNumbers, ScanResults, scan_kernel
from flashmix.ops.scan.triton_gpu.plan import BY_CHANNEL, BY_HEAD, CONSTANT, ScanPlan, plan_of
from flashmix.ops.scan.triton_gpu.slots import slots_of

__all__ = ["backward", "forward"]

WARPS = 1  # no thread waits for another


def forward(call: ScanCall, save: bool) -> tuple[Outputs, Outputs]:
    h, state = outputs = call.results()
    start = None if call.initial_state is None else call.initial_state.contiguous()
    if not h.numel() or call.packing is not None:  # empty sequences keep their states
        state.zero_() if start is None else state.copy_(start)
    if not h.numel():
        return outputs, ()
    plan = plan_of(call)
    inputs = ScanInputs(words(call.x), _decays(call, plan), words(start), None, None, None, None, None)
    results = ScanResults(words(h), words(state), None, None, None, None)
    _launch(scan_kernel, call, plan, inputs, results)
    return outputs, ()


def backward(call: ScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]) -> Gradients:
    """`h` is in the place of `x`, which with a coupling is `source`."""
    h, plan = call.x, plan_of(call, backward=True)
    d_h, d_state = (None if t is None else t.contiguous() for t in grads)
    found = {"x": torch.empty(size=h.shape, dtype=h.dtype, device=h.device)}
    d_start = d_g = None
    if "initial_state" in wanted:
        d_start = torch.empty((call.sequences, *h.shape[2:]), dtype=call.state_dtype, device=h.device)
        if not h.numel() or call.packing is not None:
            d_start.zero_() if d_state is None else d_start.copy_(d_state)
        found["initial_state"] = d_start
    if "log_decay" in wanted:
        S = plan.spec
        shape = {BY_CHANNEL: h.shape, BY_HEAD: h.shape[:3], CONSTANT: (plan.slots, *h.shape[2:])}[S.DECAY]
        wide = S.DECAY == CONSTANT or (call.by_head and S.DECAY == BY_CHANNEL)
        dtype = call.log_decay.dtype
        if S.TURNING:
            dtype = torch.complex64
        elif wide:
            dtype = torch.float32
        d_g = torch.empty(shape, dtype=dtype, device=h.device)
    if h.numel():
        given = (
            words(call.source),
            _decays(call, plan),
            words(call.initial_state),
            words(h),
            words(d_h),
            words(d_state),
        )
        inputs = ScanInputs(*given, None, None)
        results = ScanResults(None, words(d_start), words(found["x"]), words(d_g), None, None)
        _launch(scan_backward_kernel, call, plan, inputs, results)
    elif d_g is not None:
        d_g.zero_()  # that of a decay that all tokens share
    if d_g is not None:
        found["log_decay"] = _as_decay(call, plan, d_g)
    return found


def _launch(kernel: Any, call: ScanCall, plan: ScanPlan, inputs: ScanInputs, results: ScanResults) -> None:
    """One launch, or two with segments."""
    S, grid = plan.spec, plan.slots * plan.blocks
    numbers = ScanNumbers(call.tokens, plan.each, plan.segment)
    slots = slots_of(call.packing, plan)
    run = bound(kernel, S, num_warps=WARPS)
    if S.SEGMENTS:
        totals, ends = (
            torch.empty((plan.slots, S.WIDTH), dtype=torch.int64 if wide else torch.float32, device=call.device)
            for wide in (S.TURNING, S.COMPLEX)
        )
        run(grid, inputs, ScanResults(None, None, None, None, totals, ends), slots, numbers)
        inputs = inputs._replace(totals=totals, ends=ends)
    run(grid, inputs, results, slots, numbers)


def _decays(call: ScanCall, plan: ScanPlan) -> Tensor:
    """The log decay as the kernels read it; of complex numbers a constant one as factors."""
    S, g = plan.spec, call.decay
    if S.DECAY == BY_HEAD:
        return call.log_decay.contiguous()
    if S.TURNING and S.DECAY == CONSTANT:  # an error of one factor would grow with the tokens
        wide = g.to(torch.complex128)
        size, angle = wide.real.exp(), wide.imag
        g = torch.complex(size * angle.cos(), size * angle.sin())
    if S.TURNING:
        g = g.to(torch.complex64)
    return words(g.expand(call.x.shape[2:] if S.DECAY == CONSTANT else call.x.shape))


def words(t: Tensor | None) -> Any:
    """A tensor contiguous; complex numbers as words of 64 bits, the same memory where they lie there."""
    if t is None or not t.is_complex():
        return None if t is None else t.contiguous()
    return t.resolve_conj().resolve_neg().contiguous().view(torch.int64)


def _as_decay(call: ScanCall, plan: ScanPlan, d_g: Tensor) -> Tensor:
    """The gradient of the log decay, from that of every channel or from sums of the slots."""
    if plan.spec.DECAY == CONSTANT:
        d_g = d_g.sum(0)
    if call.by_head and plan.spec.DECAY != BY_HEAD:
        d_g = d_g.sum(-1)
    return (d_g.real if d_g.is_complex() and not call.log_decay.is_complex() else d_g).to(call.log_decay.dtype)
