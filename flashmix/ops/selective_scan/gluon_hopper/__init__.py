"""The selective scan on Hopper: kernels in Gluon, one warp for 32 channels of a sequence, for 16-bit numbers and 16 states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashmix.gpu.blocks import cdiv
from flashmix.gpu.launch import bound
from flashmix.gpu.rows import contiguous, sum_columns
from flashmix.op.call import Gradients, Outputs
from flashmix.ops.selective_scan.call import SelectiveScanCall
from flashmix.ops.selective_scan.gluon_hopper.backward import HopperGradients, selective_backward_hopper_kernel
from flashmix.ops.selective_scan.gluon_hopper.forward import (
    HopperInputs,
    HopperStates,
    ScanHopperNumbers,
    ScanHopperSpec,
    selective_hopper_kernel,
)
from flashmix.ops.selective_scan.gluon_hopper.layouts import CHANNELS

__all__ = ["backward", "forward", "keeps"]

CHUNK = 16  # tokens from one kept state to the next
FORWARD_REGISTERS = 144  # a thread; ptxas would take 156, and its code for these is 3 % faster


def forward(call: SelectiveScanCall, save: bool) -> tuple[Outputs, Outputs]:
    y, state = outputs = call.results()
    kept = keeps(call) if save else ()
    states = HopperStates(contiguous(call.initial_state), state, kept[0] if kept else None)
    spec, numbers = _spec(call), _numbers(call)
    bound(selective_hopper_kernel, spec, num_warps=1, maxnreg=FORWARD_REGISTERS)(
        _programs(call, spec), _inputs(call), y, states, numbers
    )
    return outputs, kept


def keeps(call: SelectiveScanCall) -> Outputs:
    batch, tokens = call.u.shape[:2]
    chunks = batch * cdiv(tokens, CHUNK) if call.packing is None else tokens // CHUNK + call.packing.count
    return (_empty(call, chunks, *call.A.shape),)


def backward(
    call: SelectiveScanCall, kept: Outputs, grads: Sequence[Tensor | None], wanted: frozenset[str]
) -> Gradients:
    names = ("u", "dt") if call.z is None else ("u", "dt", "z")
    found = {
        name: torch.empty(getattr(call, name).shape, dtype=getattr(call, name).dtype, device=call.device)
        for name in names
    }
    d_y, d_last = grads
    d_y = torch.zeros_like(call.u) if d_y is None else d_y.contiguous()
    spec, d_y, inputs = _spec(call), _aligned(d_y), HopperInputs(*map(_aligned, _inputs(call)))
    shared = _empty(call, spec.BLOCKS, 2, *call.B.shape)
    channels, rates = _empty(call, call.sequences, 2, spec.WIDTH), _empty(call, call.sequences, *call.A.shape)
    start = _empty(call, call.sequences, *call.A.shape) if "initial_state" in wanted else None
    gradients = HopperGradients(
        d_y, found["u"], found["dt"], found.get("z"), shared, channels, rates, contiguous(d_last), start
    )
    run = bound(selective_backward_hopper_kernel, spec, num_warps=1)
    run(_programs(call, spec), inputs, gradients, kept[0], _numbers(call))
    both = torch.empty((2, *call.B.shape), dtype=call.B.dtype, device=call.device)
    sum_columns(shared, both)
    d_A, d_channels = _empty(call, *call.A.shape), _empty(call, 2, spec.WIDTH)
    sum_columns(rates, d_A)
    sum_columns(channels, d_channels)
    found |= {"B": both[0], "C": both[1]}
    for name, total in (("A", d_A), ("D", d_channels[0]), ("dt_bias", d_channels[1])):
        if name in wanted:
            found[name] = total.to(getattr(call, name).dtype)
    if start is not None:
        found["initial_state"] = start
    return found


def _aligned(tensor: Any) -> Any:
    """The tensor, or a copy of it: the backward copies rows with `cp.async`, which wants 16 bytes."""
    return tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone()


def _empty(call: SelectiveScanCall, *sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=call.device)


def _inputs(call: SelectiveScanCall) -> HopperInputs:
    tensors = (call.u, call.dt, call.A, call.B, call.C, call.D, call.z, call.dt_bias)
    cu_seqlens = None if call.packing is None else call.packing.cu_seqlens
    return HopperInputs(*map(contiguous, (*tensors, cu_seqlens)))


def _spec(call: SelectiveScanCall) -> ScanHopperSpec:
    width = call.u.shape[2]
    return ScanHopperSpec(width, call.groups, cdiv(width // call.groups, CHANNELS.value), call.softplus, CHUNK)


def _numbers(call: SelectiveScanCall) -> ScanHopperNumbers:
    batch, tokens = call.u.shape[:2]
    return ScanHopperNumbers(tokens, batch * tokens)


def _programs(call: SelectiveScanCall, spec: ScanHopperSpec) -> int:
    return call.sequences * spec.SHARES * spec.BLOCKS
